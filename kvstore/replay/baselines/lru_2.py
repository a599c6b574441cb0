"""LRU-2: who leaves is whose last but one use is longest ago.

O'Neil, O'Neil, Weikum: "The LRU-K page replacement algorithm for database disk buffering", SIGMOD 1993. Choices that
the paper leaves open: the history of blocks that have left is kept for good, and there is no correlated reference
period. Blocks used once leave first, the least recently used of them before others.
"""

import heapq


class LRU2:
    """The last two uses of every block ever seen, and a heap whose outdated entries are passed over."""

    def __init__(self, capacity_blocks: int) -> None:
        self._capacity_blocks = capacity_blocks
        self._clock = 0
        self._uses: dict[int, tuple[int, int]] = {}  # the last but one, the last
        self._resident: set[int] = set()
        self._heap: list[tuple[tuple[int, int], int]] = []

    def __contains__(self, block: int) -> bool:
        """Whether it is here."""
        return block in self._resident

    def access(self, block: int) -> None:
        """The last use becomes the last but one."""
        self._clock += 1
        if block not in self._resident and len(self._resident) >= self._capacity_blocks:
            self._evict()
        self._resident.add(block)
        self._uses[block] = (self._uses.get(block, (0, 0))[1], self._clock)
        heapq.heappush(self._heap, (self._uses[block], block))

    def _evict(self) -> None:
        while True:
            uses, block = heapq.heappop(self._heap)
            if block in self._resident and self._uses[block] == uses:
                self._resident.discard(block)
                return
