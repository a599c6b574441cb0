"""ARC: one list for what was used once, one for the rest; ghosts say which of the two is too short.

Megiddo, Modha: "ARC: a self-tuning, low overhead replacement cache", FAST 2003. Choices that the paper leaves open: the
target is a real number, compared by its whole part, and each list has as many ghosts as fill it up to the capacity; the
paper lets the second list have those that the first does not use.
"""

from collections import OrderedDict


class ARC:
    """Each list holds its least recently used first."""

    def __init__(self, capacity_blocks: int) -> None:
        self._capacity_blocks = capacity_blocks
        self._once: OrderedDict[int, None] = OrderedDict()
        self._often: OrderedDict[int, None] = OrderedDict()
        self._once_ghosts: OrderedDict[int, None] = OrderedDict()
        self._often_ghosts: OrderedDict[int, None] = OrderedDict()
        self._target = 0.0
        """How long the list of what was used once should be."""

    def __contains__(self, block: int) -> bool:
        """Whether it is in one of the two lists; a ghost is not here."""
        return block in self._once or block in self._often

    def access(self, block: int) -> None:
        """A hit, also of a ghost, makes a block one that was used often."""
        if block in self:
            self._once.pop(block, None)
            self._often[block] = None
            self._often.move_to_end(block)
        elif block in self._once_ghosts:
            step = max(1.0, len(self._often_ghosts) / len(self._once_ghosts))
            self._target = min(float(self._capacity_blocks), self._target + step)
            self._make_room(for_often_ghost=False)
            del self._once_ghosts[block]
            self._often[block] = None
        elif block in self._often_ghosts:
            step = max(1.0, len(self._once_ghosts) / len(self._often_ghosts))
            self._target = max(0.0, self._target - step)
            self._make_room(for_often_ghost=True)
            del self._often_ghosts[block]
            self._often[block] = None
        else:
            self._make_room(for_often_ghost=False)
            while self._once_ghosts and len(self._once) + len(self._once_ghosts) >= self._capacity_blocks:
                self._once_ghosts.popitem(last=False)
            while self._often_ghosts and len(self._often) + len(self._often_ghosts) > self._capacity_blocks:
                self._often_ghosts.popitem(last=False)
            self._once[block] = None

    def _make_room(self, *, for_often_ghost: bool) -> None:
        if len(self._once) + len(self._often) < self._capacity_blocks:
            return
        num_once, target = len(self._once), int(self._target)
        if self._once and (num_once > target or (for_often_ghost and num_once == target) or not self._often):
            block, _ = self._once.popitem(last=False)
            self._once_ghosts[block] = None
        else:
            block, _ = self._often.popitem(last=False)
            self._often_ghosts[block] = None
