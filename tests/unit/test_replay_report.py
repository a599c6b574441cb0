"""The report: a page that needs nothing else, charts that say what the rows say, and a table of all of them."""

import itertools
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.replay.fleet import COMMON
from kvstore.replay.hardware import HARDWARE
from kvstore.replay.report.figures import BEST_PUBLISHED, Curves, gap_chart, miss_ratio_chart, percent, short_percent
from kvstore.replay.report.page import REFERENCES, Origin, page
from kvstore.replay.report.svg import BOTTOM, HEIGHT, LABEL_GAP, Axis, Series, line_chart, nice_ticks, stacked_bars
from kvstore.replay.routing import RoundRobin
from kvstore.replay.rows import Row, TieredRow
from kvstore.replay.runs import policy_of, run_of
from kvstore.replay.simulator import Result
from kvstore.replay.tiered import Fleet, replay_tiered
from kvstore.replay.trace import Trace
from kvstore.testing.traces import made_up_trace
from tests.unit.test_replay import trace_of

ORIGIN = Origin("1.2.3", "1 May 2031", "kvstore replay a <b>")
PUBLISHED = ("arc", "fifo", "lfu", "lirs", "sieve")


def rows_of(trace: Trace, policies: Sequence[str], capacities: Sequence[int] = (8, 40, 200)) -> list[Row]:
    return [
        Row(trace, policy, capacity, run_of(policy, "gdsf")(trace, capacity), 0.1)
        for policy in policies
        for capacity in capacities
    ]


def named(name: str) -> Trace:
    made_up = made_up_trace(150)
    return Trace(name, made_up.tokens_per_block, made_up.requests, made_up.num_unique_blocks, 1000, "a note")


class Elements(HTMLParser):
    """Fails where an element is closed that is not open; collects texts by element."""

    EMPTY = frozenset({"meta"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: dict[str, list[str]] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.setdefault(self.open[-1] if self.open else "", []).append(data)


def parsed(text: str) -> Elements:
    elements = Elements()
    elements.feed(text)
    assert elements.open == []
    return elements


def drawing(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg)


def labels(svg: str) -> dict[str, float]:
    return {
        element.text or "": float(element.attrib["y"])
        for element in drawing(svg).iter("text")
        if element.attrib["class"].startswith("label ")
    }


def test_a_page_needs_nothing_else_and_names_what_it_shows() -> None:
    rows = rows_of(named("one.jsonl.gz"), ["default", *PUBLISHED, *REFERENCES])
    rows += rows_of(named("other<script>"), ["gdsf", *REFERENCES])
    text = page(rows, [], ORIGIN)
    elements = parsed(text)
    assert elements.texts["h2"] == ["one", "other<script>"]
    assert "<script" not in text
    assert not re.search(r"(src|href|@import|url\()(?!#plot)", text)
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text
    assert "kvstore replay a <b>" in elements.texts["code"]
    assert "a note" in elements.texts["span"]
    assert text.count("<figure>") == 8


def test_the_page_says_where_prompts_part() -> None:
    """BN-010: a template that changes the head of every prompt is seen, and not taken for a policy that fails."""
    parts = {
        "abc abd abc": ("33%", 20),
        "xbc ybc zbc": ("100%", 0),
    }
    for chains, (share, num_tokens) in parts.items():
        rows = rows_of(trace_of(*chains.split()), list(REFERENCES))
        facts = parsed(page(rows, [], ORIGIN)).texts["span"]
        assert f"{share} of prompts begin like none before" in facts
        assert f"the median prompt parts from earlier ones after {num_tokens} tokens" in facts


def test_the_table_has_every_rate_and_marks_the_best() -> None:
    rows = rows_of(named("t"), ["default", *PUBLISHED, *REFERENCES])
    text = page(rows, [], ORIGIN)
    cells = re.findall(r'<td class="[a-z ]*(first|rest)"[^>]*>([\d.]+)</td>', text)
    assert sorted(value for _, value in cells) == sorted(f"{100 * row.result.token_hit_rate:.2f}" for row in rows)
    for capacity in (8, 40, 200):
        best = max(
            row.result.token_hit_rate
            for row in rows
            if row.capacity_blocks == capacity and row.policy not in ("belady", "infinite")
        )
        assert ("first", f"{100 * best:.2f}") in cells
    assert len([place for place, _ in cells if place == "first"]) >= 3


def test_one_size_is_a_table_and_no_curve() -> None:
    text = page(rows_of(named("t"), ["default", *REFERENCES], [40]), [], ORIGIN)
    assert "<figure>" not in text
    assert text.count("<td") == 4


def row(trace: Trace, policy: str, capacity: int, hit_tokens: int) -> Row:
    return Row(trace, policy, capacity, Result(hit_tokens, 100, hit_tokens, 100, 100, 50), 0.1)


def test_the_gap_is_that_between_lru_and_the_bound() -> None:
    trace = made_up_trace(5)
    rates = {"lru": (10, 50), "belady": (30, 50), "infinite": (60, 60), "arc": (15, 50), "fifo": (5, 40)}
    curves = Curves.of([row(trace, name, size, hits[size - 1]) for name, hits in rates.items() for size in (2, 1)])
    assert curves.gaps_closed("arc") == [pytest.approx(0.25), None]  # within a point there is no gap to close
    assert curves.gaps_closed("fifo") == [pytest.approx(-0.25), None]
    assert curves.rates(BEST_PUBLISHED) == [0.15, 0.5]
    assert curves.published == ["arc", "fifo"]
    svg = miss_ratio_chart(curves)
    titles = {title.text for title in drawing(svg).iter("title")}
    assert any(title and title.startswith("arc, ") and title.endswith(": 85\u202f%") for title in titles)


def test_the_default_is_drawn_under_its_own_name_where_that_is_there_too() -> None:
    trace = named("t")
    curves = Curves.of(rows_of(trace, ["default", "gdsf", *REFERENCES]))
    assert curves.default == "gdsf"
    assert "default" not in curves.rows
    alone = Curves.of(rows_of(trace, ["default", *REFERENCES]))
    assert (alone.default, alone.own) == ("default", ["default"])
    assert Curves.of(rows_of(trace, REFERENCES)).default == ""


def test_many_published_policies_are_thin_lines_under_the_best_of_them() -> None:
    trace = named("t")
    many = gap_chart(Curves.of(rows_of(trace, ["default", *PUBLISHED, *REFERENCES])))
    assert set(labels(many)) == {"default", "lru", BEST_PUBLISHED}
    assert many.count('class="series thin"') == len(PUBLISHED)
    few = gap_chart(Curves.of(rows_of(trace, ["default", "arc", *REFERENCES])))
    assert set(labels(few)) == {"default", "lru", "arc"}


axis = Axis("x", 0.0, 1.0, [0.0, 1.0], percent)


@given(st.lists(st.integers(0, 100).map(lambda percents: percents / 100), min_size=1, max_size=12, unique=True))
def test_labels_do_not_overlap_and_stay_in_order(ends: list[float]) -> None:
    series = [Series(f"s{index}", "k", [(0.0, 0.5), (1.0, end)]) for index, end in enumerate(ends)]
    places = labels(line_chart("t", axis, axis, series))
    in_order = sorted(places.values())
    assert all(below - above >= LABEL_GAP - 0.2 for above, below in itertools.pairwise(in_order))
    assert in_order[0] > 0
    assert in_order[-1] <= HEIGHT - BOTTOM + 4
    heights = sorted(range(len(ends)), key=lambda index: -ends[index])
    assert [places[f"s{index}"] for index in heights] == in_order


def test_lines_lie_where_their_values_are() -> None:
    svg = drawing(line_chart("a & b", axis, axis, [Series("s", "k", [(0.0, 0.0), (0.5, 1.0), (1.0, 0.5)])]))
    [path] = svg.iter("path")
    points = [tuple(map(float, point.split())) for point in re.split("[ML]", path.attrib["d"])[1:]]
    (x0, y0), (x1, y1), (x2, y2) = points
    assert x1 == pytest.approx((x0 + x2) / 2, abs=0.1)
    assert y2 == pytest.approx((y0 + y1) / 2, abs=0.1)
    assert y1 < y0
    assert svg.attrib["aria-label"] == "a & b"


def test_bars_are_as_long_as_their_shares() -> None:
    svg = stacked_bars("t", [("p", [("hbm", "tier-hbm", 0.25), ("computed", "tier-computed", 0.75)])], percent)
    widths = [float(rect.attrib["width"]) for rect in drawing(svg).iter("rect")][:2]
    assert widths[1] == pytest.approx(3 * widths[0], abs=0.2)


def test_tiers_have_a_section_of_their_own() -> None:
    trace = named("t")
    fleet = Fleet({"hbm": 5, "memory": 20, "shared": 100}, 3, COMMON["remote"], RoundRobin, HARDWARE["h100-8b"])
    rows = []
    for policy in ("lru", "gdsf"):
        result = replay_tiered(trace, policy_of(policy, "lru"), fleet)
        rows.append(TieredRow(trace, policy, fleet, "round-robin", result, 0.1))
    text = page([], rows, ORIGIN)
    parsed(text)
    assert "3 engines, round-robin routing, shared in common" in text
    assert percent(rows[0].result.total.token_hit_rate) in text
    for name in ("hbm", "memory", "shared", "computed"):
        assert f'class="tier-{name}"' in text
    assert text.count("<figure>") == 2


@given(st.floats(-1, 1), st.floats(0.001, 2))
def test_ticks_are_round_few_and_cover_all(low: float, span: float) -> None:
    ticks = nice_ticks(low, low + span)
    assert 2 <= len(ticks) <= 8
    assert ticks[0] <= low + 1e-6
    assert ticks[-1] >= low + span - 1e-6
    steps = {round(after - before, 8) for before, after in itertools.pairwise(ticks)}
    assert len(steps) == 1


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.00499, "0.5"), (0.00999, "1"), (0.05, "5"), (0.0999, "10"), (0.2, "20"), (1.0, "100"), (-0.25, "\u221225")],
)
def test_shares_have_two_digits(value: float, text: str) -> None:
    assert short_percent(value) == f"{text}\u202f%"
