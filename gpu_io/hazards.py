"""Finds accesses to the same bytes that nothing orders, whether or not they came out right this time. Pure.

Rule 1: every stream, and the host, is an *actor* whose accesses happen one after another; each has a tick.
Rule 2: a clock holds, for each actor, the last tick that is known to have happened before. What an actor learns, by a
fence, by a submission, it knows from then on.
Rule 3: of two accesses to a byte by different actors, one a write, the earlier must be in the clock of the later.

Invariant: for each byte, actor and kind of access the last tick is known; it stands for all before it by Rule 1.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from gpu_io.ranges import Ranges

Clock = list[int]
"""The last known tick of each actor; actors that came later are not in it, and not known."""


class HazardError(AssertionError):
    """Nothing orders two accesses to the same bytes, or bytes were touched that are nobody's."""


@dataclass(slots=True)
class _Region:
    """Memory, and who touched each byte of it last: ticks by actor."""

    name: str
    start: int
    num_bytes: int
    reads: dict[int, NDArray[np.int32]] = field(default_factory=dict)
    writes: dict[int, NDArray[np.int32]] = field(default_factory=dict)


class Hazards:
    """The clocks of all actors and the last accesses to all memory."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._clocks: list[Clock] = []
        self._starts: list[int] = []
        self._regions: list[_Region] = []

    # ---- who and where

    def actor(self, name: str) -> int:
        """Another one whose accesses happen in order."""
        self._names.append(name)
        self._clocks.append([])
        return len(self._names) - 1

    def know(self, name: str, start: int, num_bytes: int) -> None:
        """Memory that may be touched from now on."""
        at = bisect_right(self._starts, start)
        self._starts.insert(at, start)
        self._regions.insert(at, _Region(name, start, num_bytes))

    def forget(self, start: int) -> None:
        """The memory that begins at ``start`` is nobody's from now on."""
        at = self._starts.index(start)
        del self._starts[at], self._regions[at]

    # ---- what is known

    def clock(self, actor: int) -> Clock:
        """What has happened before the next access of ``actor``, its own ones included."""
        return list(self._clocks[actor])

    def learn(self, actor: int, clock: Clock) -> None:
        """``actor`` goes on after all in ``clock`` has happened."""
        self._clocks[actor] = _joined(self._clocks[actor], clock)

    # ---- accesses

    def access(self, actor: int, reads: Iterable[Ranges], writes: Iterable[Ranges], what: str) -> None:
        """``actor`` touches bytes next. Raises ``HazardError`` if an earlier access may not have happened yet."""
        clock = self._clocks[actor]
        clock.extend([0] * (actor + 1 - len(clock)))
        clock[actor] += 1
        tick = clock[actor]
        for ranges in reads:
            for region, bytes_in in self._located(ranges, what):
                self._require_before(actor, region, region.writes, bytes_in, f"{what} reads")
                _ticks(region.reads, actor, region)[bytes_in] = tick
        for ranges in writes:
            for region, bytes_in in self._located(ranges, what):
                self._require_before(actor, region, region.writes, bytes_in, f"{what} writes")
                self._require_before(actor, region, region.reads, bytes_in, f"{what} writes")
                _ticks(region.writes, actor, region)[bytes_in] = tick

    def _require_before(
        self,
        actor: int,
        region: _Region,
        accesses: dict[int, NDArray[np.int32]],
        bytes_in: NDArray[np.int64] | slice,
        what: str,
    ) -> None:
        clock = self._clocks[actor]
        for other, ticks in accesses.items():
            known = clock[other] if other < len(clock) else 0
            if other != actor and ticks[bytes_in].max(initial=0) > known:
                verb = "read" if accesses is region.reads else "wrote"
                raise HazardError(
                    f"{what} {region.name} in {self._names[actor]}, and nothing says that it is after"
                    f" {self._names[other]} {verb} there"
                )

    def _located(self, ranges: Ranges, what: str) -> list[tuple[_Region, NDArray[np.int64] | slice]]:
        """Which bytes of which regions these are."""
        if not len(ranges.starts) or not ranges.num_bytes:
            return []
        if len(ranges.starts) == 1:
            region, offsets = self._region(ranges.starts, bisect_right(self._starts, ranges.starts[0]), ranges, what)
            return [(region, slice(int(offsets[0]), int(offsets[0]) + ranges.num_bytes))]
        found: list[tuple[_Region, NDArray[np.int64] | slice]] = []
        places = np.searchsorted(np.array(self._starts, dtype=np.int64), ranges.starts, side="right")
        for place in set(places.tolist()):
            region, offsets = self._region(ranges.starts[places == place], place, ranges, what)
            found.append((region, (offsets[:, None] + np.arange(ranges.num_bytes)).ravel()))
        return found

    def _region(
        self, starts: NDArray[np.int64], place: int, ranges: Ranges, what: str
    ) -> tuple[_Region, NDArray[np.int64]]:
        """The region that begins before ``place``, and where pieces at ``starts`` lie in it."""
        region = self._regions[place - 1] if place else None
        if region is None or starts.max() + ranges.num_bytes > region.start + region.num_bytes:
            raise HazardError(f"{what} touches memory that is nobody's, at {starts.max():#x}")
        return region, starts - region.start


def _ticks(accesses: dict[int, NDArray[np.int32]], actor: int, region: _Region) -> NDArray[np.int32]:
    if actor not in accesses:
        accesses[actor] = np.zeros(region.num_bytes, dtype=np.int32)
    return accesses[actor]


def _joined(one: Sequence[int], other: Sequence[int]) -> Clock:
    short, long = sorted((one, other), key=len)
    return [max(pair) for pair in zip(short, long, strict=False)] + list(long[len(short) :])
