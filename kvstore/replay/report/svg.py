"""Charts as SVG text. Colours come from the page's style sheet by class, so that they follow light and dark. Pure."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT = 560, 330
LEFT, RIGHT, TOP, BOTTOM = 46, 128, 14, 44
LABEL_GAP = 14.0

Format = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Series:
    """A line through points; ``kind`` is its class in the style sheet."""

    name: str
    kind: str
    points: Sequence[tuple[float, float]]
    is_labelled: bool = True


@dataclass(frozen=True, slots=True)
class Axis:
    """What values mean, where they lie, and which of them are named."""

    title: str
    low: float
    high: float
    ticks: Sequence[float]
    format: Format
    is_log: bool = False

    def place(self, value: float, begin: float, end: float) -> float:
        """Where ``value`` lies between two coordinates, or outside."""
        low, high, value = (math.log(v) if self.is_log else v for v in (self.low, self.high, value))
        share = 0.5 if high == low else (value - low) / (high - low)
        return begin + share * (end - begin)


@dataclass(slots=True)
class _Canvas:
    """Pieces of a drawing."""

    pieces: list[str] = field(default_factory=list)

    def text(self, x: float, y: float, content: str, kind: str, anchor: str = "start") -> None:
        self.pieces.append(
            f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(content)}</text>'
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str) -> None:
        self.pieces.append(f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>')

    def drawing(self, title: str, height: float) -> str:
        return (
            f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}">'
            f"{''.join(self.pieces)}</svg>"
        )


def line_chart(title: str, x: Axis, y: Axis, series: Sequence[Series]) -> str:
    """Lines over a grid, each named at its right end; the last series lies on top."""
    canvas = _Canvas()
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    _grid(canvas, x, y)
    # What leaves the plot is cut off; every chart of a page has the same plot, so that they may share the name.
    plot = f'x="{LEFT - 4}" y="{TOP - 4}" width="{right - LEFT + 8}" height="{bottom - TOP + 8}"'
    canvas.pieces.append(f'<clipPath id="plot"><rect {plot}/></clipPath>')
    ends: list[tuple[float, Series]] = []
    for one in series:
        places = [(x.place(a, LEFT, right), y.place(b, bottom, TOP)) for a, b in one.points]
        path = " ".join(f"{'L' if index else 'M'}{px:.1f} {py:.1f}" for index, (px, py) in enumerate(places))
        canvas.pieces.append(f'<g class="series {one.kind}" clip-path="url(#plot)">')
        canvas.pieces.append(f'<path d="{path}"><title>{escape(one.name)}</title></path>')
        for (px, py), (a, b) in zip(places, one.points, strict=True):
            told = escape(f"{one.name}, {x.format(a)}: {y.format(b)}")
            canvas.pieces.append(f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3"><title>{told}</title></circle>')
        canvas.pieces.append("</g>")
        if one.is_labelled and places:
            ends.append((min(bottom, max(TOP, places[-1][1])), one))
    for label_y, (end_y, one) in zip(_spread([end for end, _ in ends]), ends, strict=True):
        canvas.line(right + 2, end_y, right + 9, label_y, f"leader {one.kind}")
        canvas.text(right + 12, label_y + 4, one.name, f"label {one.kind}")
    return canvas.drawing(title, HEIGHT)


def stacked_bars(
    title: str, bars: Sequence[tuple[str, Sequence[tuple[str, str, float]]]], number_format: Format
) -> str:
    """A bar for each name, made of parts (name, kind, share of one), with a key of the parts below."""
    canvas = _Canvas()
    left, width, row = 130, WIDTH - 130 - 10, 34.0
    for index, (name, parts) in enumerate(bars):
        y, x = TOP + index * row, float(left)
        canvas.text(left - 10, y + 16, name, "bar-name", "end")
        for part, kind, share in parts:
            told = escape(f"{name}, {part}: {number_format(share)}")
            size = max(0.0, share) * width
            canvas.pieces.append(
                f'<g class="{kind}"><rect x="{x:.1f}" y="{y:.1f}" width="{size:.1f}" height="22">'
                f"<title>{told}</title></rect></g>"
            )
            if size > 44:
                canvas.text(x + size / 2, y + 15.5, number_format(share), f"bar-value on-{kind}", "middle")
            x += size
    y, x = TOP + len(bars) * row + 14, float(left)
    for part, kind, _ in bars[0][1] if bars else ():
        canvas.pieces.append(f'<g class="{kind}"><rect x="{x:.1f}" y="{y - 10:.1f}" width="12" height="12"/></g>')
        canvas.text(x + 17, y, part, "tick")
        x += 40 + 6.2 * len(part)
    return canvas.drawing(title, y + 14)


def _grid(canvas: _Canvas, x: Axis, y: Axis) -> None:
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    for tick in y.ticks:
        place = y.place(tick, bottom, TOP)
        canvas.line(LEFT, place, right, place, "zero" if tick == 0 and y.low < 0 else "grid")
        canvas.text(LEFT - 7, place + 4, y.format(tick), "tick", "end")
    taken = -math.inf
    for tick in x.ticks:
        place = x.place(tick, LEFT, right)
        canvas.line(place, bottom, place, bottom + 5, "axis")
        if place - taken >= 34:
            canvas.text(place, bottom + 18, x.format(tick), "tick", "middle")
            taken = place
    canvas.line(LEFT, bottom, right, bottom, "axis")
    canvas.text((LEFT + right) / 2, HEIGHT - 8, x.title, "axis-title", "middle")


def _spread(places: Sequence[float]) -> list[float]:
    """Places for labels, in the same order, as near to ``places`` as a line's height between them allows."""
    order = sorted(range(len(places)), key=lambda index: places[index])
    spread = [0.0] * len(places)
    lowest = TOP - LABEL_GAP / 2
    for index in order:
        spread[index] = lowest = max(places[index], lowest + LABEL_GAP)
    overflow = lowest - (HEIGHT - BOTTOM)
    highest = math.inf
    if overflow > 0:
        for index in reversed(order):
            spread[index] = min(spread[index], highest - LABEL_GAP, HEIGHT - BOTTOM)
            highest = spread[index]
    return spread


def nice_ticks(low: float, high: float, num: int = 5) -> list[float]:
    """Round numbers that cover ``low`` to ``high``."""
    span = max(high - low, 1e-9)
    step = 10 ** math.floor(math.log10(span / num))
    step *= next(factor for factor in (1, 2, 5, 10) if span / (step * factor) <= num)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 10) for index in range(first, last + 1)]
