"""FIFO: the first in is the first out."""

from collections import OrderedDict


class FIFO:
    """A queue."""

    def __init__(self, capacity_blocks: int) -> None:
        self._capacity_blocks = capacity_blocks
        self._queue: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: int) -> bool:
        """Whether it is here."""
        return block in self._queue

    def access(self, block: int) -> None:
        """A hit changes nothing."""
        if block in self._queue:
            return
        if len(self._queue) >= self._capacity_blocks:
            self._queue.popitem(last=False)
        self._queue[block] = None
