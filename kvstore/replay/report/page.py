"""The page: for each trace what matters in a sentence and a few numbers, charts, and every number in a table. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from statistics import median
from typing import TypeVar

from kvstore.quantity import format_size
from kvstore.replay.report.figures import (
    BEST_PUBLISHED,
    BOUNDS,
    MAX_NAMED,
    Curves,
    compute_chart,
    first_token_chart,
    gap_chart,
    miss_ratio_chart,
    percent,
    sources_chart,
    writes_chart,
)
from kvstore.replay.rows import Row, TieredRow, distribution
from kvstore.replay.trace import Trace, known_prefixes

R = TypeVar("R", Row, TieredRow)

REFERENCES = ("lru", "belady", "infinite")
"""What every curve is compared with."""


@dataclass(frozen=True, slots=True)
class Origin:
    """What the foot of the page says of its making."""

    version: str
    date: str
    command: str


def page(rows: Sequence[Row], tiered: Sequence[TieredRow], origin: Origin) -> str:
    """The whole file. ``rows`` have ``REFERENCES`` among their policies, at the same capacities for each trace."""
    sections = [_single(Curves.of(group)) for group in _by_trace(rows)]
    sections += [_tiers(group) for group in _by_trace(tiered)]
    traces = [row.trace for row in rows] + [row.trace for row in tiered]
    names = " and ".join(dict.fromkeys(_title(trace) for trace in traces))
    style = files(__package__).joinpath("style.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>KV cache hit rates: {escape(names)}</title><style>{style}</style></head><body><main>"
        "<header><h1>What a KV cache would have spared</h1>"
        f'<p class="soft">Traces of requests, replayed against eviction policies. {escape(origin.date)}.</p></header>'
        f"{''.join(sections)}{_foot(origin, bool(tiered))}</main></body></html>\n"
    )


def _by_trace(rows: Sequence[R]) -> list[list[R]]:
    groups: dict[str, list[R]] = {}
    for row in rows:
        groups.setdefault(row.trace.name, []).append(row)
    return list(groups.values())


def _single(curves: Curves) -> str:
    middle = len(curves.shares) // 2
    thin = "; thin lines are other published policies" if len(curves.published) > MAX_NAMED else ""
    figures = (
        _figure(
            "Miss ratio", f"prompt tokens that had to be computed; lower is better{thin}", miss_ratio_chart(curves)
        ),
        _figure("Gap closed", f"0 % is LRU, 100 % the clairvoyant bound{thin}", gap_chart(curves)),
        _figure("Compute spared", "prefill work; a token late in a prompt costs more", compute_chart(curves)),
        _figure("Blocks written", "for each block that requests refer to; flash wears by it", writes_chart(curves)),
    )
    chosen = figures if len(curves.shares) > 1 else ()
    return (
        f"<section>{_head(curves.trace)}<p>{_sentence(curves, middle)}</p>{_numbers(curves, middle)}"
        f'<div class="figures">{"".join(chosen)}</div>{_table(curves)}</section>'
    )


def _head(trace: Trace) -> str:
    tokens, first_s, last_s = 0, 0.0, 0.0
    for index, request in enumerate(trace.requests):
        tokens += request.input_tokens
        first_s, last_s = request.now_s if index == 0 else first_s, request.now_s
    known = [trace.hit_tokens(request, num_known) for request, num_known in known_prefixes(trace)] or [0]
    facts = [
        f"{len(trace.requests):,} requests in {(last_s - first_s) / 60:,.0f} minutes",
        f"{tokens / 1e6:,.1f} million tokens",
        f"{trace.num_unique_blocks:,} distinct blocks of {trace.tokens_per_block} tokens",
        f"{known.count(0) / len(known):.0%} of prompts begin like none before",
        f"the median prompt parts from earlier ones after {median(known):,.0f} tokens",
        *([trace.note] if trace.note else []),
    ]
    spans = "".join(f"<span>{escape(fact)}</span>" for fact in facts)
    return f'<h2>{escape(_title(trace))}</h2><p class="facts">{spans}</p>'


def _title(trace: Trace) -> str:
    """The file's name without what says how it is packed."""
    return trace.name.removesuffix(".gz").removesuffix(".jsonl").removesuffix(".csv").removesuffix(".json")


def _chief(curves: Curves) -> str:
    """The policy that the page is about: the store's own, else the one that is best on the whole."""
    if curves.own:
        return curves.own[-1]
    return max(["lru", *curves.published], key=lambda name: sum(curves.rates(name)))


def _sentence(curves: Curves, middle: int) -> str:
    chief = _chief(curves)
    share, rate = percent(curves.shares[middle]), curves.rates(chief)[middle]
    lru, bound = curves.rates("lru")[middle], curves.rates("belady")[middle]
    text = (
        f"With room for {share} of the trace's blocks, <b>{escape(chief)}</b> spares {percent(rate)} of all prompt"
        f" tokens. LRU spares {percent(lru)}, and no policy can spare more than {percent(bound)}."
    )
    gaps = [gap for gap in curves.gaps_closed(chief) if gap is not None]
    if chief != "lru" and gaps:
        text += f" Over all sizes it closes {percent(min(gaps))} to {percent(max(gaps))} of the gap between them."
    if chief in curves.own and curves.published:
        rates = zip(curves.rates(chief), curves.rates(BEST_PUBLISHED), strict=True)
        ahead = sum(own >= best for own, best in rates)
        text += (
            f" At {ahead} of {len(curves.shares)} sizes it is at or above the best of {len(curves.published) + 1}"
            " published policies, chosen for each size with hindsight."
        )
    return text


def _numbers(curves: Curves, middle: int) -> str:
    chief = _chief(curves)
    at = f"at {percent(curves.shares[middle])} of the blocks"
    cells = [
        ("own", percent(curves.rates(chief)[middle]), f"{chief}, {at}"),
        *([("", percent(curves.rates("lru")[middle]), f"lru, {at}")] if chief != "lru" else []),
        ("bound", percent(curves.rates("belady")[middle]), f"belady, {at}"),
        ("bound", percent(curves.rates("infinite")[0]), "a cache that never evicts"),
    ]
    divs = "".join(
        f'<div class="number {kind}"><b>{value}</b><span>{escape(label)}</span></div>' for kind, value, label in cells
    )
    return f'<div class="numbers">{divs}</div>'


def _figure(title: str, told: str, drawing: str) -> str:
    caption = f'<figcaption><h3>{escape(title)}</h3><span class="soft">{escape(told)}</span></figcaption>'
    return f"<figure>{caption}{drawing}</figure>"


def _table(curves: Curves) -> str:
    names = [*curves.own, "lru", *sorted(curves.published, key=lambda name: -sum(curves.rates(name))), *BOUNDS]
    online = [name for name in names if name not in BOUNDS]
    best = [max(rates) for rates in zip(*map(curves.rates, online), strict=True)]
    head = "".join(f"<th>{percent(share)}</th>" for share in curves.shares)
    lines = []
    for name in names:
        gaps = curves.gaps_closed(name) if name in online else [None] * len(best)
        cells = []
        for rate, gap, top in zip(curves.rates(name), gaps, best, strict=True):
            heat = "heat " if gap is not None and gap > 0 else ""
            weight = f' style="--w:{gap:.2f}"' if heat else ""
            place = "first" if name in online and rate == top else "rest"
            cells.append(f'<td class="{heat}{place}"{weight}>{100 * rate:.2f}</td>')
        mark = " <small>(default)</small>" if name == curves.default != "default" else ""
        kind = "bound" if name in BOUNDS else "own" if name in curves.own else ""
        lines.append(f'<tr class="{kind}"><th scope="row">{escape(name)}{mark}</th>{"".join(cells)}</tr>')
    return (
        '<div class="scroll"><table><caption>Token hit rate in %, by share of the trace\'s blocks that the cache holds.'
        " A dot marks the best policy of a size; the shade, how much of the gap between LRU and the bound is closed."
        f"</caption><thead><tr><th></th>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def _tiers(rows: Sequence[TieredRow]) -> str:
    fleet = rows[0].fleet
    engines = "one engine"
    if fleet.num_engines > 1:
        common = [name for name in fleet.common if name in rows[0].result.tiers]
        engines = (
            f"{fleet.num_engines} engines, {rows[0].routing} routing, {' and '.join(common) or 'nothing'} in common"
        )
    block_bytes = rows[0].trace.tokens_per_block * fleet.hardware.kv_bytes_per_token
    sizes = ", ".join(
        f"{name} {format_size(tier.capacity_blocks * block_bytes)}" for name, tier in rows[0].result.tiers.items()
    )
    figures = (
        _figure("Where prompt tokens came from", "the nearest tier that had them", sources_chart(rows)),
        _figure("Time to first token", "share of requests within a time", first_token_chart(rows)),
    )
    return (
        f"<section>{_head(rows[0].trace)}"
        f"<p>Tiers on {escape(fleet.hardware.name)}: {escape(engines)}. All together have {escape(sizes)}.</p>"
        f'<div class="figures">{"".join(figures)}</div>{_tier_table(rows)}</section>'
    )


def _tier_table(rows: Sequence[TieredRow]) -> str:
    tiers = list(rows[0].result.tiers)
    head = [
        "policy",
        "tokens hit",
        "compute spared",
        "found, faster computed",
        *[f"written to {name}" for name in tiers],
    ]
    head += ["TTFT p50", "p90", "p99", "engines busy"]
    lines = []
    for row in rows:
        result, total = row.result, row.result.total
        times = distribution(result.service_s)
        cells = [
            percent(total.token_hit_rate),
            percent(total.compute_weighted_hit_rate),
            percent(result.declined_tokens / max(1, total.input_tokens)),
            *[format_size(result.tiers[name].written_bytes) for name in tiers],
            *[f"{1000 * times.get(name, 0.0):,.0f} ms" for name in ("p50", "p90", "p99")],
            percent(result.busy_share),
        ]
        lines.append(f'<tr><th scope="row">{escape(row.policy)}</th>{_cells(cells)}</tr>')
    titles = "".join(f"<th>{escape(title)}</th>" for title in head)
    return (
        '<div class="scroll"><table><caption>A prefix is loaded as far as that is faster; what was found and faster to'
        " compute is no hit.</caption>"
        f"<thead><tr>{titles}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def _cells(values: Iterable[str]) -> str:
    return "".join(f"<td>{escape(value)}</td>" for value in values)


def _foot(origin: Origin, has_tiers: bool) -> str:
    terms = [
        ("hit", "The longest prefix of a request's blocks that is in the cache; cold start counts."),
        ("belady", "Keeps what is used next, and what is not used again not at all. It knows the future: a bound."),
        ("infinite", "A cache that never evicts."),
        ("default", "What the store runs unless it is told otherwise."),
        ("best published", "At each size the best of the published policies and LRU. Nobody knows which, beforehand."),
    ]
    if has_tiers:
        terms.append(("time to first token", "Loading and computing, without waiting for requests that came before."))
    items = "".join(f"<dt>{escape(term)}</dt><dd>{escape(meaning)}</dd>" for term, meaning in terms)
    return (
        f'<footer><dl>{items}</dl><p class="soft">Made by tiered-kvstore {escape(origin.version)} with'
        f" <code>{escape(origin.command)}</code></p></footer>"
    )
