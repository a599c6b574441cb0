"""Finding out what a shared tier has, where there is no RAM to bring it to. Owner thread only.

A prefetch without RAM moves no bytes: it is done when ``lookup`` and ``load_into`` know of what lies in the shared
tier, or at its deadline.
"""

from collections.abc import Sequence

from kvstore.copies import PROBE_BLOCKS, Copies
from kvstore.level import Level
from kvstore.namespace import Namespace
from kvstore.promotion import Prefetch
from kvstore.shared_level import SharedLevel
from kvstore.types import BlockKey


class Discoveries:
    """Every prefetch that is under way in a store without RAM."""

    def __init__(self, levels: Sequence[Level], copies: Copies) -> None:
        """``levels``: all of them, the fastest first. A level may be added later."""
        self._levels = levels
        self._copies = copies
        self._open: set[Prefetch] = set()

    def start(self, ns: Namespace, chain: Sequence[BlockKey], deadline_s: float) -> Prefetch:
        """Begin; done at once where the tables know it all, or nobody can be asked."""
        prefetch = Prefetch(ns, chain, deadline_s)
        found = found_in(self._levels, ns, chain, 0, self._copies.oldest_unix_s(ns))
        shared = next((level for level in self._levels if isinstance(level, SharedLevel)), None)
        unknown = chain[found : found + PROBE_BLOCKS]

        def end() -> None:
            prefetch.done = True
            self._open.discard(prefetch)

        if shared is None or not unknown or not self._copies.probe(shared, unknown, deadline_s, end):
            prefetch.done = True
        else:
            self._open.add(prefetch)
        return prefetch

    def close(self) -> None:
        """End every prefetch with what is known."""
        for prefetch in self._open:
            prefetch.done = True
        self._open.clear()


def found_in(levels: Sequence[Level], ns: Namespace, chain: Sequence[BlockKey], start: int, oldest_unix_s: int) -> int:
    """How many leading blocks of ``chain`` are in one level or another, given that the first ``start`` are."""
    return start + sum(found_by_level(levels, ns, chain, start, oldest_unix_s))


def found_by_level(
    levels: Sequence[Level], ns: Namespace, chain: Sequence[BlockKey], start: int, oldest_unix_s: int
) -> list[int]:
    """The same, past ``start``, for each level: a block counts for the first that has it."""
    counts = [0] * len(levels)
    found, before = start, -1
    while found < len(chain) and found != before:
        before = found
        for index, level in enumerate(levels):
            covered = level.covered(ns, chain, found, oldest_unix_s)
            counts[index] += covered
            found += covered
    return counts
