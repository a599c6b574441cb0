"""What a store does beside requests: erase what is too old, renew on a shared tier. Owner thread only."""

from collections.abc import Iterable, Sequence

from kvstore.copies import Copies
from kvstore.mover import Mover, Ticket
from kvstore.namespace import Namespace
from kvstore.shared_level import SharedLevel
from kvstore.slot_level import SlotLevel
from kvstore.types import BlockKey, Outcome

SWEEP_SLOTS = 4096
RETRY_FULL_S = 30.0
"""How long a place on a tier that was full is left alone."""


class Upkeep:
    """Errands in the background; each may be dropped where a lane is busy, for it comes again."""

    def __init__(self, copies: Copies, mover: Mover) -> None:
        self._copies = copies
        self._mover = mover
        self._retry_full_at_s = 0.0

    def retry_full(self, levels: Sequence[SlotLevel]) -> None:
        """A disk that was full may have been freed."""
        if self._mover.clock() >= self._retry_full_at_s:
            self._retry_full_at_s = self._mover.clock() + RETRY_FULL_S
            for level in levels:
                level.try_refused()

    def sweep(self, namespaces: Iterable[Namespace], levels: Sequence[SlotLevel]) -> None:
        """Erase blocks past their age, a bounded step of each level; lookups refuse them before that.

        Those of namespaces that nobody has opened again too: prompt data does not outlive its time for that.
        """
        oldest_unix_s = {ns.digest: self._copies.oldest_unix_s(ns) for ns in namespaces if ns.max_age_s}
        for level in levels:
            for ns, keys in level.sweep(self._copies.now_unix_s(), oldest_unix_s, SWEEP_SLOTS):
                self._copies.erase(level, ns, keys)

    def renew(self, shared: SharedLevel, chain: Sequence[BlockKey], deadline_s: float) -> None:
        """A touch renews the time to live of the whole prefix, where a good part of it has gone."""
        keys = shared.due_for_renewal(chain)
        if not keys:
            return

        def work() -> list[Outcome]:
            return shared.tier.renew(keys, deadline_s)

        def finish(outcomes: list[Outcome]) -> None:
            shared.learn([key for key, outcome in zip(keys, outcomes, strict=True) if outcome is Outcome.OK])

        self._mover.submit(shared.name, Ticket(work, len(keys), 0, deadline_s, finish, abandon=_nothing))


def _nothing() -> None:
    """There is nothing to give up."""
