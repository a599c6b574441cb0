"""S3-FIFO: a small queue for the new, a main queue for the used, a ghost list of those who left unused.

Yang, Zhang, Qiu, Yue, Rashmi: "FIFO queues are all you need for cache eviction", SOSP 2023. Choices that the paper
leaves open: a block moves to main after two reuses, and the ghost list is as long as main.
"""

from collections import OrderedDict

SMALL_SHARE = 0.1
MAX_FREQUENCY = 3
PROMOTION_FREQUENCY = 2


class S3FIFO:
    """Both queues hold block -> frequency in order of entry, the oldest first."""

    def __init__(self, capacity_blocks: int) -> None:
        self._capacity_blocks = capacity_blocks
        self._small_blocks = max(1, int(SMALL_SHARE * capacity_blocks))
        self._main_blocks = capacity_blocks - self._small_blocks
        self._small: OrderedDict[int, int] = OrderedDict()
        self._main: OrderedDict[int, int] = OrderedDict()
        self._ghost: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: int) -> bool:
        """Whether it is in one of the queues."""
        return block in self._small or block in self._main

    def access(self, block: int) -> None:
        """A hit moves nothing. A block that left a while ago comes in to main, any other to the small queue."""
        queue = self._small if block in self._small else self._main
        if block in queue:
            queue[block] = min(MAX_FREQUENCY, queue[block] + 1)
            return
        while len(self._small) + len(self._main) >= self._capacity_blocks:
            self._evict()
        if block in self._ghost:
            del self._ghost[block]
            self._main[block] = 0
        else:
            self._small[block] = 0

    def _evict(self) -> None:
        """The oldest of the small queue goes to main, or to the ghosts and out."""
        while self._small and (len(self._small) >= self._small_blocks or not self._main):
            block, frequency = self._small.popitem(last=False)
            if frequency < PROMOTION_FREQUENCY:
                self._ghost[block] = None
                if len(self._ghost) > self._main_blocks:
                    self._ghost.popitem(last=False)
                return
            self._main[block] = 0
            if len(self._main) > self._main_blocks:
                break
        self._evict_from_main()

    def _evict_from_main(self) -> None:
        while True:
            block, frequency = self._main.popitem(last=False)
            if frequency == 0:
                return
            self._main[block] = frequency - 1
