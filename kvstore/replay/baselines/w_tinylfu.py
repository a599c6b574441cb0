"""W-TinyLFU: a small window for the new; from there only who is asked for more than the next victim gets on.

Einziger, Friedman, Manes: "TinyLFU: a highly efficient cache admission policy", ACM TOS 2017. The window is a hundredth
and four fifths of the rest are protected, as in the paper. One thing differs: frequencies are counted exactly, not in a
sketch, up to 15, and halved after ten references per block of the cache.
"""

from collections import OrderedDict

WINDOW_SHARE = 0.01
PROTECTED_SHARE = 0.8
MAX_FREQUENCY = 15
SAMPLE_PER_BLOCK = 10


class WTinyLFU:
    """Each list holds its least recently used first."""

    def __init__(self, capacity_blocks: int) -> None:
        self._window_blocks = max(1, int(WINDOW_SHARE * capacity_blocks))
        self._main_blocks = capacity_blocks - self._window_blocks
        self._protected_blocks = int(PROTECTED_SHARE * self._main_blocks)
        self._window: OrderedDict[int, None] = OrderedDict()
        self._probation: OrderedDict[int, None] = OrderedDict()
        self._protected: OrderedDict[int, None] = OrderedDict()
        self._frequency: dict[int, int] = {}
        self._sample = SAMPLE_PER_BLOCK * capacity_blocks
        self._num_counted = 0

    def __contains__(self, block: int) -> bool:
        """Whether it is in one of the lists."""
        return block in self._window or block in self._probation or block in self._protected

    def access(self, block: int) -> None:
        """Count it; a hit on probation is protected from now on."""
        self._count(block)
        if block in self._window:
            self._window.move_to_end(block)
        elif block in self._protected:
            self._protected.move_to_end(block)
        elif block in self._probation:
            del self._probation[block]
            self._protected[block] = None
            if len(self._protected) > self._protected_blocks:
                demoted, _ = self._protected.popitem(last=False)
                self._probation[demoted] = None
        else:
            self._window[block] = None
            if len(self._window) > self._window_blocks:
                candidate, _ = self._window.popitem(last=False)
                self._admit(candidate)

    def _admit(self, candidate: int) -> None:
        if len(self._probation) + len(self._protected) < self._main_blocks:
            self._probation[candidate] = None
            return
        mains = self._probation or self._protected
        victim = next(iter(mains), None)
        if victim is not None and self._frequency.get(candidate, 0) > self._frequency.get(victim, 0):
            del mains[victim]
            self._probation[candidate] = None

    def _count(self, block: int) -> None:
        self._frequency[block] = min(MAX_FREQUENCY, self._frequency.get(block, 0) + 1)
        self._num_counted += 1
        if self._num_counted >= self._sample:
            self._frequency = {block: count // 2 for block, count in self._frequency.items() if count > 1}
            self._num_counted //= 2
