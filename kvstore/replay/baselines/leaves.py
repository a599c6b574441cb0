"""Resident blocks as a tree, and the leaves of it in order of rank, in groups."""

import heapq
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
Rank = tuple[float, ...]


class RankedLeaves(Generic[K]):
    """Ranks may change at any time; a group's heap may hold outdated ones, which are passed over."""

    def __init__(self) -> None:
        self._parent: dict[K, K | None] = {}
        self._num_children: dict[K, int] = {}
        self._ranks: dict[K, tuple[Hashable, Rank]] = {}
        self._heaps: dict[Hashable, list[tuple[Rank, int, K]]] = {}
        self._serial = 0  # among equals the first ranked leaves first, and keys are not compared

    def __contains__(self, key: K) -> bool:
        """Whether it is resident."""
        return key in self._parent

    def insert(self, key: K, parent: K | None, group: Hashable, rank: Rank) -> None:
        """A leaf joins."""
        known = parent if parent in self._parent else None
        self._parent[key] = known
        self._num_children[key] = 0
        if known is not None:
            self._num_children[known] += 1
        self.rank(key, group, rank)

    def rank(self, key: K, group: Hashable, rank: Rank) -> None:
        """The lowest rank leaves first."""
        self._ranks[key] = (group, rank)
        if not self._num_children[key]:
            self._push(key)

    def remove(self, key: K) -> None:
        """It leaves; its parent may be a leaf now."""
        parent = self._parent.pop(key)
        del self._num_children[key], self._ranks[key]
        if parent is not None and parent in self._parent:
            self._num_children[parent] -= 1
            if not self._num_children[parent]:
                self._push(parent)

    def groups(self) -> list[Hashable]:
        """Those that may have leaves."""
        return [group for group, heap in self._heaps.items() if heap]

    def first(self, group: Hashable, may_leave: Callable[[K], bool]) -> tuple[Rank, K] | None:
        """The leaf of lowest rank in ``group`` that ``may_leave``."""
        heap = self._heaps.get(group, [])
        in_use = []
        found = None
        while heap and found is None:
            entry = heap[0]
            rank, _, key = entry
            if self._ranks.get(key) != (group, rank) or self._num_children[key]:
                heapq.heappop(heap)
            elif may_leave(key):
                found = (rank, key)
            else:
                in_use.append(heapq.heappop(heap))
        for entry in in_use:
            heapq.heappush(heap, entry)
        return found

    def _push(self, key: K) -> None:
        group, rank = self._ranks[key]
        self._serial += 1
        heapq.heappush(self._heaps.setdefault(group, []), (rank, self._serial, key))
