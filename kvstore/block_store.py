"""What a store offers, embedded or behind a wire. Whoever uses a store asks for this, and cannot tell which it has."""

from collections.abc import Sequence
from typing import Protocol

from kvstore.hashing import Identity
from kvstore.layout import Layout
from kvstore.lease import Committed, Location, Lookup, ReadLease, WriteLease
from kvstore.lending import LentBuffer, Transfer
from kvstore.namespace import Namespace
from kvstore.promotion import Prefetch
from kvstore.types import BlockKey, Request


class BlockStore(Protocol):
    """One owner thread; nothing waits but ``wait``, ``drain`` and ``close``. Deadlines are on ``time.monotonic``.

    The contract is ``kvstore.testing.store_contract``; what each call means is said at ``kvstore.store.Store``.
    """

    def open_namespace(self, identity: Identity, layout: Layout, *, max_age_s: int | None = None) -> Namespace:
        """Whose blocks the following calls are about. Raises ``LayoutError`` if a block does not fit."""

    def arrive(self, request: Request, chain: Sequence[BlockKey]) -> int:
        """A request refers to ``chain``; returns how many leading blocks are worth keeping."""

    def finish(self, request: Request, chain: Sequence[BlockKey], output_tokens: int) -> None:
        """The request ended."""

    def lookup(self, chain: Sequence[BlockKey]) -> Lookup:
        """How much of ``chain`` is here; pending: ask again after a ``poll``."""

    def prefetch(self, chain: Sequence[BlockKey], deadline_s: float) -> Prefetch:
        """Bring as much of ``chain`` into RAM as lower levels have; ``done`` turns true in some ``poll``."""

    def pin(self, chain: Sequence[BlockKey]) -> ReadLease:
        """Pin the longest READY prefix in RAM; ask the lease whether it is ``still_held`` after the last copy."""

    def release(self, lease: ReadLease) -> None:
        """End a pin."""

    def reserve(self, ns: Namespace, num_blocks: int) -> WriteLease:
        """Up to ``num_blocks`` slots to write to."""

    def commit(self, lease: WriteLease, keys: Sequence[BlockKey], parent: BlockKey | None) -> Committed:
        """Name the next slots of ``lease``; none if it was lost meanwhile."""

    def abort(self, lease: WriteLease) -> None:
        """Give the unnamed slots back; nothing may touch them any more."""

    def quarantine(self, lease: WriteLease) -> None:
        """Give the unnamed slots up while a copy may still write to them."""

    def reclaim(self, lease: WriteLease) -> None:
        """That copy has returned."""

    def locate(self, lease: ReadLease | WriteLease) -> Location | None:
        """Where the slots of a held lease lie, for other processes of the engine; None if it was lost."""

    def fixed_memory(self) -> memoryview | None:
        """All RAM that slots lie in, if its pages stay the same for as long as it is mapped; it may be another later.

        Only then may a device be given it to reach: it goes on with old pages where others have taken their place.
        """

    def store_from(
        self,
        ns: Namespace,
        keys: Sequence[BlockKey],
        parent: BlockKey | None,
        buffers: Sequence[LentBuffer],
        deadline_s: float,
    ) -> Transfer:
        """Store blocks from the caller's buffers."""

    def load_into(
        self, ns: Namespace, chain: Sequence[BlockKey], buffers: Sequence[LentBuffer], deadline_s: float
    ) -> Transfer:
        """Load the longest prefix that any level has into the caller's buffers."""

    def poll(self) -> int:
        """Apply what has come in; returns how much that was."""

    def wait(self, timeout_s: float) -> None:
        """Sleep until there is something to ``poll``, at most ``timeout_s``."""

    def drain(self, timeout_s: float) -> bool:
        """Poll until nothing is in flight; whether that was reached."""

    def evict(self, num_blocks: int) -> int:
        """Forget up to ``num_blocks`` blocks in RAM; returns how many left."""

    def clear(self, ns: Namespace) -> int:
        """Forget a namespace in every level; returns how many blocks."""

    def close(self) -> None:
        """Finish what is in flight and let go. Idempotent."""
