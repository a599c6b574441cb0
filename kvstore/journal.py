"""The latest changes of what is where, numbered, for those who follow them. Pure; owner thread only.

Rule 1: every way in and every way out of a pool is noted, once, in the order in which it happened.
Rule 2: numbers have no gaps. Who asks for a number that is no longer there is told so, and has to begin anew.
"""

from collections import deque
from itertools import islice
from typing import NamedTuple

from kvstore.types import BlockKey

MAX_CHANGES = 1 << 17


class Change(NamedTuple):
    """A block came to a tier, or left it."""

    tier: str
    key: BlockKey
    parent: BlockKey | None
    is_here: bool


class Journal:
    """A bounded number of changes."""

    def __init__(self, max_changes: int = MAX_CHANGES) -> None:
        self._changes: deque[Change] = deque(maxlen=max_changes)
        self.next = 1
        """The number that the next change gets."""

    def note(self, tier: str, key: BlockKey, parent: BlockKey | None, *, is_here: bool) -> None:
        """Something has happened."""
        self._changes.append(Change(tier, key, parent, is_here))
        self.next += 1

    def skip(self) -> None:
        """Something has happened that was not noted: nobody can follow from before it."""
        self._changes.clear()
        self.next += 1

    def since(self, number: int, max_changes: int) -> list[Change] | None:
        """Up to ``max_changes`` from that number on; None if some of them are not there any more."""
        skipped = number - (self.next - len(self._changes))
        if skipped < 0 or number > self.next:
            return None
        return list(islice(self._changes, skipped, skipped + max_changes))
