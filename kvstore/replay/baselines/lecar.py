"""LeCaR: LRU and LFU take turns; whose victims are asked for again loses weight.

Vietri and others: "Driving cache replacement with ML-based LeCaR", HotStorage 2018, with the paper's learning and
discount rates. One thing differs: instead of by chance, turns are dealt out in exact proportion to the weights.
"""

import heapq
import math
from collections import OrderedDict

LEARNING_RATE = 0.45
DISCOUNT_BASE = 0.005


class LeCaR:
    """One set of blocks in two orders, and for each expert the ghosts of its victims."""

    def __init__(self, capacity_blocks: int) -> None:
        self._capacity_blocks = capacity_blocks
        self._discount = DISCOUNT_BASE ** (1 / capacity_blocks)
        self._clock = 0
        self._recency: OrderedDict[int, tuple[int, int]] = OrderedDict()  # uses, the last of them; the oldest first
        self._frequency: list[tuple[tuple[int, int], int]] = []
        self._lru_ghosts: OrderedDict[int, tuple[int, int]] = OrderedDict()  # uses, when it left
        self._lfu_ghosts: OrderedDict[int, tuple[int, int]] = OrderedDict()
        self._lru_weight = 0.5
        self._lru_due = 0.0

    def __contains__(self, block: int) -> bool:
        """Whether it is here; a ghost is not."""
        return block in self._recency

    def access(self, block: int) -> None:
        """A ghost's return teaches which expert was wrong."""
        self._clock += 1
        uses, _ = self._recency.get(block, (0, 0))
        if block not in self._recency:
            uses = self._learn(block)
            if len(self._recency) >= self._capacity_blocks:
                self._evict()
        self._recency[block] = (uses + 1, self._clock)
        self._recency.move_to_end(block)
        heapq.heappush(self._frequency, (self._recency[block], block))

    def _learn(self, block: int) -> int:
        """Returns the uses that the block had when it left."""
        lru, lfu = self._lru_weight, 1.0 - self._lru_weight
        if block in self._lru_ghosts:
            uses, left_at = self._lru_ghosts.pop(block)
            lru *= math.exp(-LEARNING_RATE * self._discount ** (self._clock - left_at))
        elif block in self._lfu_ghosts:
            uses, left_at = self._lfu_ghosts.pop(block)
            lfu *= math.exp(-LEARNING_RATE * self._discount ** (self._clock - left_at))
        else:
            return 0
        self._lru_weight = lru / (lru + lfu)
        return uses

    def _evict(self) -> None:
        self._lru_due += self._lru_weight
        if self._lru_due >= 1.0:
            self._lru_due -= 1.0
            victim, ghosts = next(iter(self._recency)), self._lru_ghosts
        else:
            victim, ghosts = self._least_frequent(), self._lfu_ghosts
        uses, _ = self._recency.pop(victim)
        ghosts[victim] = (uses, self._clock)
        if len(ghosts) > self._capacity_blocks:
            ghosts.popitem(last=False)

    def _least_frequent(self) -> int:
        while True:
            rank, block = self._frequency[0]
            if self._recency.get(block) == rank:
                return block
            heapq.heappop(self._frequency)
