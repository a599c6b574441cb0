"""2Q: a queue for the new, an LRU list for those who came back after they left it.

Johnson, Shasha: "2Q: a low overhead high performance buffer management replacement algorithm", VLDB 1994. The full
version with the paper's settings: a quarter for the queue, and as many ghosts as half of the cache.
"""

from collections import OrderedDict

IN_SHARE = 0.25
OUT_SHARE = 0.5


class TwoQ:
    """Each list holds its oldest first."""

    def __init__(self, capacity_blocks: int) -> None:
        self._capacity_blocks = capacity_blocks
        self._in_blocks = max(1, int(IN_SHARE * capacity_blocks))
        self._out_blocks = max(1, int(OUT_SHARE * capacity_blocks))
        self._in: OrderedDict[int, None] = OrderedDict()
        self._main: OrderedDict[int, None] = OrderedDict()
        self._out: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: int) -> bool:
        """Whether it is here; a ghost is not."""
        return block in self._in or block in self._main

    def access(self, block: int) -> None:
        """Only a hit in the main list moves a block, only a ghost's return brings one there."""
        if block in self._main:
            self._main.move_to_end(block)
            return
        if block in self._in:
            return
        if len(self._in) + len(self._main) >= self._capacity_blocks:
            self._evict()
        if block in self._out:
            del self._out[block]
            self._main[block] = None
        else:
            self._in[block] = None

    def _evict(self) -> None:
        if len(self._in) > self._in_blocks or not self._main:
            block, _ = self._in.popitem(last=False)
            self._out[block] = None
            if len(self._out) > self._out_blocks:
                self._out.popitem(last=False)
        else:
            self._main.popitem(last=False)
