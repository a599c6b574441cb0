"""The resident blocks, as segments: what one request used last, in the order of its chain. Pure.

Rule 1: a segment is a stretch of one chain without a gap. Rule 2: a request takes what it uses out of the segments that
had it, from their front. Rule 3: a segment loses blocks to eviction from its tail.
Rule 4: parts of requests that run rank above all others, and among themselves by what grew last.

Invariant: each resident key is in exactly one segment; a segment has a row in the tables while it has a key.
"""

from collections.abc import Callable, Hashable, Sequence, Set
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from kvstore.policy.life_table import SIZES, Codes, Traits, codes_of
from kvstore.policy.retention import NUM_AGES, Floats, age_bins

K = TypeVar("K", bound=Hashable)

ENDLESS = 1 << 62
MAX_REFRESHED = 64
MAX_RANKED = 8192
"""More segments than that are ranked a part at a time: a pause has a bound, and a part has nearly as bad a worst."""

NO_CURVES: Floats = np.zeros((0, NUM_AGES))
Indices = npt.NDArray[np.intp]


class Segment(Generic[K]):
    """Blocks from depth ``start`` of a chain on, meant to reach ``end`` at most; ``parts`` are those of its request."""

    __slots__ = ("end", "is_running", "keys", "observation", "parts", "row", "start", "traits", "used_s")

    def __init__(self, start: int, end: int, traits: Traits, used_s: float) -> None:
        self.start = start
        self.end = end
        self.traits = traits
        self.used_s = used_s
        self.keys: list[K] = []
        self.row = -1
        self.parts: list[Segment[K]] = [self]
        self.observation = -1
        self.is_running = False

    def part_at(self, depth: int) -> "Segment[K]":
        """The part of the same request that has the block at ``depth``."""
        return next((part for part in self.parts if part.start + len(part.keys) <= depth < part.end), self.parts[-1])


_COLUMNS: dict[str, tuple[type[np.generic], tuple[int, ...]]] = {
    "curve": (np.float32, (NUM_AGES,)),
    "traits": (np.int16, (len(SIZES),)),
    "used_s": (np.float64, ()),
    "length": (np.int64, ()),
    "version": (np.int64, ()),
    "is_stale": (np.bool_, ()),
    "is_running": (np.bool_, ()),
    "grown": (np.int64, ()),  # rises with every block that a segment is given: of equals, what grew last stays
}


def _columns(num_rows: int) -> dict[str, npt.NDArray[Any]]:
    """An array for each, since to rank all segments is to read few columns of every row."""
    return {name: np.zeros((num_rows, *shape), dtype) for name, (dtype, shape) in _COLUMNS.items()}


class Segments(Generic[K]):
    """All segments, and a table with a row for each."""

    def __init__(self, first_curve: Floats) -> None:
        """``first_curve`` is the index by age, ``[NUM_AGES]``, of a segment that ``refresh`` has not come to yet."""
        self._first_curve = first_curve
        self._of: dict[K, Segment[K]] = {}
        self._table = _columns(256)
        self._at: list[Segment[K] | None] = [None] * 256
        self._free = list(range(255, -1, -1))
        self._next_ranked = 0
        self._num_given = 0

    def __len__(self) -> int:
        """Resident blocks."""
        return len(self._of)

    def __contains__(self, key: K) -> bool:
        """Whether ``key`` is resident."""
        return key in self._of

    def of(self, key: K | None) -> Segment[K] | None:
        """The segment that has ``key``."""
        return None if key is None else self._of.get(key)

    # ---- blocks come and go

    def take(self, chain: Sequence[K]) -> tuple[int, list[Segment[K]]]:
        """Take the resident prefix of ``chain`` out of its segments; its length, and segments that it left part of."""
        position, left = 0, []
        while position < len(chain) and (segment := self._of.get(chain[position])) is not None:
            if segment.keys[0] != chain[position]:
                segment = self._split(segment, segment.keys.index(chain[position]))
            shared = _common(segment.keys, chain, position)
            if shared < len(segment.keys):
                left.append(segment)
            segment.keys = segment.keys[shared:]
            segment.start += shared
            self._note_length(segment)
            position += shared
        return position, left

    def give(self, segment: Segment[K], keys: Sequence[K]) -> None:
        """``keys``, which no segment has, lie behind those of ``segment``."""
        segment.keys += keys
        self._of.update(dict.fromkeys(keys, segment))
        self._note_growth(segment)

    def append(self, segment: Segment[K], key: K) -> None:
        """``give`` of one block."""
        segment.keys.append(key)
        self._of[key] = segment
        self._note_growth(segment)

    def remove(self, key: K) -> None:
        """``key`` is no longer resident. Its segment ends before it; what lay behind is a segment of its own."""
        segment = self._of[key]
        if segment.keys[-1] != key:
            self._split(segment, segment.keys.index(key) + 1)
        del self._of[key]
        segment.keys.pop()
        self._note_length(segment)

    def _split(self, segment: Segment[K], index: int) -> Segment[K]:
        """The blocks from ``index`` on become a segment like this one."""
        rest: Segment[K] = Segment(segment.start + index, segment.end, segment.traits, segment.used_s)
        keys, segment.keys = segment.keys[index:], segment.keys[:index]
        self._note_length(segment)
        self.give(rest, keys)
        return rest

    # ---- rows

    def describe(self, segment: Segment[K], traits: Traits, used_s: float) -> None:
        """Something new is known of ``segment``."""
        segment.traits, segment.used_s = traits, used_s
        if segment.row >= 0:
            self._fill(segment)

    def set_running(self, segment: Segment[K], is_running: bool) -> None:
        """Whether the request that ``segment`` is a part of has yet to end."""
        segment.is_running = is_running
        if segment.row >= 0:
            self._table["is_running"][segment.row] = is_running

    def rebase(self, now_s: float) -> None:
        """All were used at ``now_s``."""
        self._table["used_s"][:] = now_s
        for segment in filter(None, self._at):
            segment.used_s = now_s

    def rows(self) -> tuple[npt.NDArray[np.int64], Codes]:
        """A copy of version and traits of every row."""
        return self._table["version"].copy(), self._table["traits"].copy()

    def set_curves(self, versions: npt.NDArray[np.int64], curves: Floats) -> None:
        """New curves for the rows that are still as they were in ``rows``."""
        same = np.flatnonzero(self._table["version"][: len(versions)] == versions)
        self._table["curve"][same] = curves[same]
        self._table["is_stale"][same] = False

    def refresh(self, curves_of: Callable[[Codes], Floats], traits: Sequence[Traits] = ()) -> Floats:
        """Curves for some of the segments of which something new is known; returns those for ``traits``."""
        rows = self._table["is_stale"].nonzero()[0][:MAX_REFRESHED]
        if not (len(rows) or traits):
            return NO_CURVES
        curves = curves_of(np.concatenate([self._table["traits"][rows], codes_of(traits)]))
        self._table["curve"][rows] = curves[: len(rows)]
        self._table["is_stale"][rows] = False
        return curves[len(rows) :]

    def _note_growth(self, segment: Segment[K]) -> None:
        self._note_length(segment)
        self._num_given += 1
        self._table["grown"][segment.row] = self._num_given

    def _note_length(self, segment: Segment[K]) -> None:
        if segment.keys:
            if segment.row < 0:
                self._give_row(segment)
            self._table["length"][segment.row] = len(segment.keys)
        elif segment.row >= 0:
            self._table["length"][segment.row] = 0
            self._table["is_stale"][segment.row] = False
            self._at[segment.row] = None
            self._free.append(segment.row)
            segment.row = -1

    def _give_row(self, segment: Segment[K]) -> None:
        if not self._free:
            size = len(self._at)
            more = _columns(size)
            self._table = {name: np.concatenate([column, more[name]]) for name, column in self._table.items()}
            self._at += [None] * size
            self._free = list(range(2 * size - 1, size - 1, -1))
        segment.row = self._free.pop()
        self._at[segment.row] = segment
        self._table["curve"][segment.row] = self._first_curve
        self._fill(segment)

    def _fill(self, segment: Segment[K]) -> None:
        row = segment.row
        self._table["traits"][row] = segment.traits
        self._table["used_s"][row] = segment.used_s
        self._table["is_stale"][row] = True
        self._table["is_running"][row] = segment.is_running
        self._table["version"][row] += 1

    # ---- the order of leaving

    def ranked(
        self, now_s: float, num_lowest: int = MAX_RANKED
    ) -> tuple[list[Segment[K]], Floats, npt.NDArray[np.int64]]:
        """The lowest segments, lowest first, their indices and lengths; of very many, another part at each call."""
        rows = self._table["length"].nonzero()[0]
        if len(rows) > MAX_RANKED:
            rows = np.take(rows, np.arange(self._next_ranked, self._next_ranked + MAX_RANKED), mode="wrap")
            self._next_ranked = (self._next_ranked + MAX_RANKED) % len(rows)
        ages = age_bins(np.maximum(0.0, now_s - self._table["used_s"][rows]))
        indices = self._table["curve"][rows, ages].astype(np.float64)
        indices[self._table["is_running"][rows]] = np.inf
        if num_lowest < len(rows):
            # Those that are as low as the highest of the lowest, too, so that who comes first is as among all.
            lowest = (indices <= np.partition(indices, num_lowest - 1)[num_lowest - 1]).nonzero()[0]
            rows, indices = rows[lowest], indices[lowest]
        order = np.lexsort((self._table["grown"][rows], indices))
        rows = rows[order]
        segments = [segment for row in rows.tolist() if (segment := self._at[row]) is not None]
        return segments, indices[order], self._table["length"][rows]

    def check(self, resident: Set[K]) -> None:
        """Prove the invariant, and that exactly ``resident`` is here; raises AssertionError. For tests."""
        assert self._of.keys() == resident, "other keys are resident"
        held = [segment for segment in self._at if segment is not None]
        keys = [key for segment in held for key in segment.keys]
        assert len(keys) == len(set(keys)) == len(self._of), "a key is in two segments or in none"
        assert all(self._of[key] is segment for segment in held for key in segment.keys), "a key is in another segment"
        lengths = [0 if segment is None else len(segment.keys) for segment in self._at]
        assert lengths == self._table["length"].tolist(), "a row has another length than its segment"
        assert 0 not in [len(segment.keys) for segment in held], "an empty segment has a row"


def _common(keys: Sequence[K], chain: Sequence[K], start: int) -> int:
    """How many ``keys`` are those of ``chain`` from ``start`` on. The first is; equal keys have equal ones before."""
    low, high = 1, min(len(keys), len(chain) - start)
    if keys[high - 1] == chain[start + high - 1]:
        return high
    while low < high - 1:
        middle = (low + high) // 2
        if keys[middle - 1] == chain[start + middle - 1]:
            low = middle
        else:
            high = middle
    return low
