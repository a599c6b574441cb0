"""Clearing a namespace: forgotten in every level at once, its bytes erased however long that takes. Owner thread only.

Rule: until the shared tier has erased all of a namespace, its level answers and takes nothing of it. A try that fails,
finds no room in the lane, or runs beside writes of before, is followed by another one.
"""

import logging
from collections.abc import Sequence

from kvstore.copies import Copies
from kvstore.mover import Mover, Ticket
from kvstore.namespace import Namespace
from kvstore.shared_level import SharedLevel
from kvstore.slot_level import SlotLevel
from kvstore.types import Outcome

CLEAR_TIMEOUT_S = 600.0
"""Of one try. The tier gives up by itself, long before, on a server that does not answer."""

_log = logging.getLogger(__name__)


class Clearing:
    """Namespaces that are being cleared, and those to clear where a level joins late."""

    def __init__(self, copies: Copies, mover: Mover) -> None:
        self._copies = copies
        self._mover = mover
        self._shared: SharedLevel | None = None
        self._trying: set[bytes] = set()
        self._cleared: dict[bytes, Namespace] = {}

    @property
    def num_waiting(self) -> int:
        """Namespaces of which the shared tier may still have blocks."""
        return len(self._shared.clearing) if self._shared else 0

    def clear(self, ns: Namespace, slot_levels: Sequence[SlotLevel], shared: SharedLevel | None) -> int:
        """Start; returns how many blocks of ``slot_levels`` were forgotten."""
        self._cleared[ns.digest] = ns
        self._copies.disown(ns)
        num_forgotten = sum(self._forget(level, ns) for level in slot_levels)
        if shared is not None:
            self._shared = shared
            shared.begin_clear(ns.digest)
            self.retry()
        return num_forgotten

    def catch_up(self, level: SlotLevel) -> None:
        """``level`` has just joined, and was not there yet when namespaces were cleared."""
        for ns in self._cleared.values():
            self._forget(level, ns)

    def retry(self) -> None:
        """Try again what the shared tier has yet to erase; to be called about once a second."""
        shared = self._shared
        if shared is not None:
            for namespace in shared.clearing:
                if namespace not in self._trying:
                    self._try(shared, namespace)

    def warn(self) -> None:
        """The store is closed: say what it leaves behind."""
        if self.num_waiting:
            _log.warning(
                "%d namespaces were cleared, and the shared tier has yet to erase their blocks: clear them again when"
                " it answers, with `kvstore evict --namespace` for %s",
                self.num_waiting,
                ", ".join(namespace.hex() for namespace in self._shared.clearing) if self._shared else "",
            )
        if self._copies.num_erasures_waiting:
            _log.warning(
                "%d batches of blocks were forgotten and are still on file: a restart finds those of them that are"
                " not too old",
                self._copies.num_erasures_waiting,
            )

    def _forget(self, level: SlotLevel, ns: Namespace) -> int:
        keys = [key for key in level.pool(ns.fingerprint) if key.startswith(ns.digest)]
        return self._copies.erase(level, ns, keys)

    def _try(self, shared: SharedLevel, namespace: bytes) -> None:
        deadline_s = self._mover.clock() + CLEAR_TIMEOUT_S

        def work() -> list[Outcome]:
            return [Outcome.FAILED if shared.tier.clear(namespace, deadline_s) is None else Outcome.OK]

        def finish(outcomes: list[Outcome]) -> None:
            self._trying.discard(namespace)
            shared.end_clear(namespace, whole=outcomes == [Outcome.OK])

        ticket = Ticket(work, num_blocks=1, num_bytes=0, deadline_s=deadline_s, finish=finish, abandon=_nothing)
        if self._mover.submit(shared.name, ticket):
            self._trying.add(namespace)


def _nothing() -> None:
    """There is nothing to give up."""
