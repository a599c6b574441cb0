"""Ours and its limit in turns, so that both meet the same machine, and what comes of it."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

Work = Callable[[], float | None]
"""One round; returns the seconds that count, or None where the whole call does."""

WARM_UP_ROUNDS = 2


@dataclass(frozen=True, slots=True)
class Row:
    """How fast a tier moves blocks, and how fast the same bytes move without us."""

    tier: str
    op: str
    block_bytes: int
    gbps: float
    limit_gbps: float
    ratio: float
    repeats: int
    limit: str
    """What the limit is: the fastest of those that were tried."""
    wanted: float | None
    """The ratio that is the goal; None where there is none."""


def in_turns(
    works: Mapping[str, Work], repeats: int, prepare: Mapping[str, Callable[[], None]] | None = None
) -> dict[str, float]:
    """Median seconds of each; every other round goes backwards, so that nobody always follows the same one.

    ``prepare`` has what to do before a work's turn, which does not count.
    """
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for round_number in range(WARM_UP_ROUNDS + repeats):
        names = list(works) if round_number % 2 else list(works)[::-1]
        for name in names:
            if prepare and name in prepare:
                prepare[name]()
            began_s = time.perf_counter()
            counted_s = works[name]()
            took_s = time.perf_counter() - began_s
            if round_number >= WARM_UP_ROUNDS:
                seconds[name].append(took_s if counted_s is None else counted_s)
    return {name: median(times) for name, times in seconds.items()}


def rows(
    tier: str,
    block_bytes: int,
    num_bytes: int,
    ours: Mapping[str, Work],
    limits: Mapping[str, Sequence[Mapping[str, Work]]],
    repeats: int,
    wanted: Mapping[str, float],
    prepare: Mapping[str, Callable[[], None]] | None = None,
) -> list[Row]:
    """A row for each op of ``ours``, which all move ``num_bytes``.

    ``limits`` has for each op the stages that its bytes must pass, and for each stage some ways to do it: the limit is
    the slowest stage, each at its fastest.
    """
    works = dict(ours)
    for stages in limits.values():
        for stage in stages:
            works.update(stage)
    gbps = {name: num_bytes / took_s / 1e9 for name, took_s in in_turns(works, repeats, prepare).items()}
    result = []
    for op in ours:
        limit = min((max(stage, key=lambda name: gbps[name]) for stage in limits[op]), key=lambda name: gbps[name])
        result.append(
            Row(
                tier=tier,
                op=op,
                block_bytes=block_bytes,
                gbps=round(gbps[op], 3),
                limit_gbps=round(gbps[limit], 3),
                ratio=round(gbps[op] / gbps[limit], 3),
                repeats=repeats,
                limit=limit,
                wanted=wanted.get(op),
            )
        )
    return result
