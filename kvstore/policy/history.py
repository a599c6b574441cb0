"""Which requests had which blocks: how a request relates to those before it, resident or not. Pure, bounded.

Of each chain only markers are remembered: every block near the root, fewer the deeper they lie. Two chains that share a
prefix have the same markers in it, so the deepest marker known tells how far a request repeats another one.
"""

from collections import deque
from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import Generic, TypeVar

from kvstore.policy.life_table import Traits

K = TypeVar("K", bound=Hashable)

MAX_MARKERS = 131_072
MARKERS_PER_OCTAVE = 32


class Visit(Generic[K]):
    """One request: ``num_shared`` leading blocks are of other sessions too, ``own_depth`` is its deepest marker.

    The last block does not count for that, unless it is the only one: it may be partial.
    """

    __slots__ = ("app", "now_s", "num_blocks", "num_shared", "num_shared_uses", "own", "own_depth", "turn")

    def __init__(self, now_s: float, num_blocks: int, own_depth: int) -> None:
        self.now_s = now_s
        self.num_blocks = num_blocks
        self.own_depth = own_depth
        self.num_shared = 0
        self.num_shared_uses = 1
        self.turn = 1
        self.app = 0
        self.own: tuple[K, Traits] | None = None
        """The marker at which a use of the own part is noticed, and what is known of that part."""

    def is_continued_by(self, num_known: int) -> bool:
        """Whether a chain that repeats so many blocks of this one goes on where it ended."""
        return num_known > max(self.own_depth, self.num_shared)


class History(Generic[K]):
    """The last requests, by their markers."""

    def __init__(self, max_markers: int = MAX_MARKERS) -> None:
        self._max_markers = max_markers
        self._last: dict[K, Visit[K]] = {}
        self._visits: deque[tuple[Visit[K], list[K]]] = deque()
        self._num_markers = 0
        self._watched: dict[K, int] = {}

    def find(self, chain: Sequence[K], depths: Sequence[int]) -> tuple[Visit[K] | None, int]:
        """Who last had the deepest block of ``chain`` that is known, and how many blocks that makes."""
        for depth in reversed(depths):
            visit = self._last.get(chain[depth])
            if visit is not None:
                return visit, depth + 1
        return None, 0

    def last(self, marker: K) -> Visit[K] | None:
        """Who had ``marker`` last."""
        return self._last.get(marker)

    def watch(self, marker: K, observation: int) -> None:
        """The next request that has ``marker`` ends ``observation``."""
        self._watched[marker] = observation

    def unwatch(self, marker: K) -> int | None:
        """The observation at ``marker``, which is no longer watched."""
        return self._watched.pop(marker, None)

    def remember(self, visit: Visit[K], markers: list[K]) -> None:
        """``visit`` is the last to have had ``markers``; the oldest are forgotten."""
        self._last.update(dict.fromkeys(markers, visit))
        self._visits.append((visit, markers))
        self._num_markers += len(markers)
        while self._num_markers > self._max_markers and len(self._visits) > 1:
            old, known = self._visits.popleft()
            self._num_markers -= len(known)
            for marker in known:
                if self._last.get(marker) is old:
                    del self._last[marker]
                    self._watched.pop(marker, None)


@lru_cache(maxsize=4096)
def marker_depths(num_blocks: int) -> tuple[int, ...]:
    """At which depths a chain has markers: so many in each doubling of the depth."""
    depths, depth = [], 0
    while depth < num_blocks:
        depths.append(depth)
        step = 1 << max(0, (depth + 1).bit_length() - MARKERS_PER_OCTAVE.bit_length())
        depth = (depth // step + 1) * step
    return tuple(depths)
