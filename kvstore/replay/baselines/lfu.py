"""LFU: the least frequently used leaves, among equals the least recently used; who has left is forgotten."""

import heapq


class LFU:
    """Uses since it came in, and a heap whose outdated entries are passed over."""

    def __init__(self, capacity_blocks: int) -> None:
        self._capacity_blocks = capacity_blocks
        self._clock = 0
        self._rank: dict[int, tuple[int, int]] = {}
        self._heap: list[tuple[tuple[int, int], int]] = []

    def __contains__(self, block: int) -> bool:
        """Whether it is here."""
        return block in self._rank

    def access(self, block: int) -> None:
        """One use more."""
        self._clock += 1
        if block not in self._rank and len(self._rank) >= self._capacity_blocks:
            self._evict()
        uses, _ = self._rank.get(block, (0, 0))
        self._rank[block] = (uses + 1, self._clock)
        heapq.heappush(self._heap, (self._rank[block], block))

    def _evict(self) -> None:
        while True:
            rank, block = heapq.heappop(self._heap)
            if self._rank.get(block) == rank:
                del self._rank[block]
                return
