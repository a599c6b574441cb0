"""LIRS: keeps what has the shortest distance between its last two uses, whatever its age.

Jiang, Zhang: "LIRS: an efficient low inter-reference recency set replacement policy", SIGMETRICS 2002. One block in a
hundred is for those of long distance, as in the paper; choice that it leaves open: at most twice the capacity's worth
of blocks that have left stay on the stack.
"""

from collections import OrderedDict

LONG_SHARE = 0.01
GHOSTS_PER_BLOCK = 2


class LIRS:
    """The stack orders blocks by recency, the oldest first; its bottom is always a block of short distance."""

    def __init__(self, capacity_blocks: int) -> None:
        self._capacity_blocks = capacity_blocks
        self._short_blocks = max(1, capacity_blocks - max(1, int(LONG_SHARE * capacity_blocks)))
        self._max_ghosts = GHOSTS_PER_BLOCK * capacity_blocks
        self._stack: OrderedDict[int, None] = OrderedDict()
        self._short: set[int] = set()
        self._queue: OrderedDict[int, None] = OrderedDict()
        """The resident blocks of long distance, the next to leave first."""
        self._ghosts: OrderedDict[int, None] = OrderedDict()
        """Those of the stack that have left."""

    def __contains__(self, block: int) -> bool:
        """Whether it is here; a ghost is not."""
        return block in self._short or block in self._queue

    def access(self, block: int) -> None:
        """A block that is still on the stack has come back soon: it trades places with the oldest short one."""
        if block in self._short:
            self._stack.move_to_end(block)
            self._prune()
            return
        was_on_stack = block in self._stack
        if block in self._queue:
            del self._queue[block]
        elif len(self._short) + len(self._queue) >= self._capacity_blocks:
            self._evict()
        self._ghosts.pop(block, None)
        self._stack[block] = None
        self._stack.move_to_end(block)
        if was_on_stack or len(self._short) < self._short_blocks:
            self._short.add(block)
            if len(self._short) > self._short_blocks:
                self._demote_oldest()
        else:
            self._queue[block] = None

    def _evict(self) -> None:
        if not self._queue:
            self._demote_oldest()
        block, _ = self._queue.popitem(last=False)
        if block in self._stack:
            self._ghosts[block] = None
            if len(self._ghosts) > self._max_ghosts:
                ghost, _ = self._ghosts.popitem(last=False)
                del self._stack[ghost]

    def _demote_oldest(self) -> None:
        block, _ = self._stack.popitem(last=False)
        self._short.discard(block)
        self._queue[block] = None
        self._prune()

    def _prune(self) -> None:
        """What is older than the oldest short block can not come back soon any more."""
        while self._stack:
            block = next(iter(self._stack))
            if block in self._short:
                return
            del self._stack[block]
            self._ghosts.pop(block, None)
