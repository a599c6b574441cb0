"""What of the rows becomes which chart. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvstore.policy import POLICIES
from kvstore.replay.report.svg import Axis, Series, line_chart, nice_ticks, stacked_bars
from kvstore.replay.rows import Row, TieredRow
from kvstore.replay.simulator import Result
from kvstore.replay.trace import Trace

BOUNDS = ("belady", "infinite")
MAX_NAMED = 4
"""More published policies than so many are drawn thin, with the best of them at each size on top."""
BEST_PUBLISHED = "best published"


_SPACE = "\u202f"  # narrow, and no line breaks there
_MINUS = "\u2212"


def percent(value: float) -> str:
    """``12.3 %``."""
    return f"{100 * value:.1f}{_SPACE}%".replace("-", _MINUS)


def short_percent(value: float) -> str:
    """``12 %``, ``0.5 %``: two digits."""
    digits = f"{100 * value:.0f}" if abs(value) >= 0.1 else f"{100 * value:.2g}"
    return f"{digits}{_SPACE}%".replace("-", _MINUS)


@dataclass(frozen=True, slots=True)
class Curves:
    """The rows of one trace by policy, each from the smallest capacity to the largest."""

    trace: Trace
    rows: dict[str, list[Row]]
    default: str
    """Which of them is the store's own; empty if none is."""

    @classmethod
    def of(cls, rows: Sequence[Row]) -> "Curves":
        """All ``rows`` are of one trace. Where the store's own is there under its name too, that one is drawn."""
        by_policy: dict[str, list[Row]] = {}
        for row in sorted(rows, key=lambda row: row.capacity_blocks):
            by_policy.setdefault(row.policy, []).append(row)
        default = [row.result for row in by_policy.get("default", ())]
        for name, own in by_policy.items():
            if name != "default" and [row.result for row in own] == default:
                del by_policy["default"]
                return cls(rows[0].trace, by_policy, name)
        return cls(rows[0].trace, by_policy, "default" if default else "")

    @property
    def shares(self) -> list[float]:
        """Capacities as shares of the trace's distinct blocks; above 0, for they lie on a logarithmic axis."""
        return [max(row.capacity_share, 1e-6) for row in next(iter(self.rows.values()))]

    @property
    def own(self) -> list[str]:
        """Policies that the store offers, beside LRU; its default last."""
        names = [name for name in self.rows if (name in POLICIES or name == "default") and name != "lru"]
        return sorted(names, key=lambda name: name == self.default)

    @property
    def published(self) -> list[str]:
        """Policies that the store does not offer."""
        return [name for name in self.rows if name not in (*BOUNDS, *self.own, "lru")]

    def rates(self, policy: str) -> list[float]:
        """Token hit rates by capacity."""
        if policy == BEST_PUBLISHED:
            return [max(rates) for rates in zip(*map(self.rates, ["lru", *self.published]), strict=True)]
        return [row.result.token_hit_rate for row in self.rows[policy]]

    def gaps_closed(self, policy: str) -> list[float | None]:
        """(policy - LRU) / (Belady - LRU) by capacity; None where LRU is within a point of the bound."""
        return [
            (rate - lru) / (bound - lru) if bound - lru > 0.01 else None
            for rate, lru, bound in zip(self.rates(policy), self.rates("lru"), self.rates("belady"), strict=True)
        ]

    def drawn(self) -> list[tuple[str, str, bool]]:
        """(policy, kind of line, whether named), the last on top."""
        published = self.published
        if len(published) > MAX_NAMED:
            thin = [(name, "thin", False) for name in published]
            middle = [*thin, (BEST_PUBLISHED, "best", True)]
        else:
            middle = [(name, f"published-{index}", True) for index, name in enumerate(published)]
        own = [(name, f"own-{index}", True) for index, name in enumerate(self.own)]
        return [*middle, ("lru", "lru", True), ("belady", "belady", True), *own]


def miss_ratio_chart(curves: Curves) -> str:
    """Of each policy the tokens that are computed anew, over capacity."""
    floor = 1 - curves.rates("infinite")[0]
    series = [
        Series(name, kind, [(s, 1 - rate) for s, rate in zip(curves.shares, curves.rates(name), strict=True)], named)
        for name, kind, named in curves.drawn()
    ]
    series.insert(0, Series("infinite", "infinite", [(share, floor) for share in curves.shares]))
    ticks = nice_ticks(min(b for one in series for _, b in one.points), 1.0)
    y = Axis("", ticks[0], ticks[-1], ticks, short_percent)
    return line_chart(f"Miss ratio by cache size, {curves.trace.name}", _size_axis(curves), y, series)


def gap_chart(curves: Curves) -> str:
    """How far each policy gets from LRU to the clairvoyant bound, over capacity."""
    series = []
    for name, kind, named in curves.drawn():
        places = zip(curves.shares, curves.gaps_closed(name), strict=True)
        points = [(share, gap) for share, gap in places if gap is not None]
        if points and name != "belady":
            series.append(Series(name, kind, points, named))
    gaps_drawn = [gap for one in series for _, gap in one.points]
    # Some published policies fall so far behind that the others could not be told apart.
    ticks = nice_ticks(max(-0.25, min([0.0, *gaps_drawn])), max([0.25, *gaps_drawn]))
    y = Axis("", ticks[0], ticks[-1], ticks, short_percent)
    return line_chart(f"Gap closed by cache size, {curves.trace.name}", _size_axis(curves), y, series)


def compute_chart(curves: Curves) -> str:
    """Prefill work that each policy spares, over capacity."""
    series = _each(curves, lambda result: result.compute_weighted_hit_rate)
    ticks = nice_ticks(0.0, max(b for one in series for _, b in one.points))
    y = Axis("", ticks[0], ticks[-1], ticks, short_percent)
    return line_chart(f"Compute spared, {curves.trace.name}", _size_axis(curves), y, series)


def writes_chart(curves: Curves) -> str:
    """Blocks written for each block referred to, over capacity."""
    y = Axis("", 0.0, 1.0, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0], lambda value: f"{value:.1f}")
    series = _each(curves, lambda result: result.blocks_written_per_referenced)
    return line_chart(f"Blocks written, {curves.trace.name}", _size_axis(curves), y, series)


def _each(curves: Curves, measure: Callable[[Result], float]) -> list[Series]:
    return [
        Series(
            name, kind, list(zip(curves.shares, [measure(row.result) for row in curves.rows[name]], strict=True)), named
        )
        for name, kind, named in curves.drawn()
        if name != BEST_PUBLISHED
    ]


def _size_axis(curves: Curves) -> Axis:
    shares = curves.shares
    return Axis("cache size, share of the trace's blocks", shares[0], shares[-1], shares, short_percent, is_log=True)


def sources_chart(rows: Sequence[TieredRow]) -> str:
    """Where the tokens of all prompts came from."""
    bars = []
    for row in rows:
        total = max(1, row.result.total.input_tokens)
        parts = [(name, f"tier-{name}", tier.hit_tokens / total) for name, tier in row.result.tiers.items()]
        parts.append(("computed", "tier-computed", 1 - sum(share for _, _, share in parts)))
        bars.append((row.policy, parts))
    return stacked_bars(f"Where tokens came from, {rows[0].trace.name}", bars, percent)


def first_token_chart(rows: Sequence[TieredRow]) -> str:
    """Of each policy the share of requests whose first token came within a time."""
    shares = np.linspace(0.02, 0.99, 60)
    series = []
    for index, row in enumerate(rows):
        times_s = np.percentile(np.asarray(row.result.service_s), 100 * shares)
        points = [(max(1e-4, float(time_s)), float(share)) for time_s, share in zip(times_s, shares, strict=True)]
        series.append(Series(row.policy, f"smooth own-{index % 4}", points))
    times = [time_s for one in series for time_s, _ in one.points]
    low, high = min(times), max(times)
    ticks = [10.0**k * f for k in range(-4, 4) for f in (1, 2, 5) if low <= 10.0**k * f <= high]
    x = Axis("time to first token, without waiting", low, high, ticks, _milliseconds, is_log=True)
    y = Axis("", 0.0, 1.0, [0.0, 0.25, 0.5, 0.75, 1.0], short_percent)
    return line_chart(f"Time to first token, {rows[0].trace.name}", x, y, series)


def _milliseconds(value_s: float) -> str:
    return f"{1000 * value_s:g} ms" if value_s < 1 else f"{value_s:g} s"
