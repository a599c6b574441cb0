"""What a store lends of RAM: slots to write to, and blocks to read. Owner thread only.

A reserve ends in commits or an abort, a pin in a release; what a copy may still touch goes through quarantine. Without
a memory tier every lease is empty.
"""

from collections.abc import Callable, Sequence

from kvstore.copies import Copies
from kvstore.copydown import CopyDown
from kvstore.lease import Committed, LeaseState, ReadLease, WriteLease, too_many_keys
from kvstore.memory_level import MemoryLevel
from kvstore.namespace import Namespace
from kvstore.pool import SlotState
from kvstore.stats import Stats
from kvstore.types import BlockKey


class Leases:
    """Makes leases, and ends them."""

    def __init__(
        self,
        memory: MemoryLevel | None,
        copydown: CopyDown | None,
        copies: Copies,
        stats: Stats,
        end_write: Callable[[WriteLease], None],
        end_read: Callable[[ReadLease], None],
    ) -> None:
        """``copydown`` is there where ``memory`` is. The two ends are what a lease calls as its scope ends."""
        self._memory = memory
        self._copydown = copydown
        self._copies = copies
        self._stats = stats
        self._end_write = end_write
        self._end_read = end_read

    def pin(self, ns: Namespace, chain: Sequence[BlockKey]) -> ReadLease:
        """The longest READY prefix of ``chain``, pinned."""
        if self._memory is None or self._copydown is None or not chain:
            return ReadLease(ns, (), [], self._views, self._end_read)
        slots = self._memory.pool(ns.fingerprint).pin_prefix(chain, self._copies.oldest_unix_s(ns))
        self._copydown.offer(ns, slots, "touch")
        self._stats.inc("kvstore_loaded_blocks_total", len(slots), "memory")
        self._stats.inc("kvstore_loaded_bytes_total", len(slots) * ns.layout.block_bytes, "memory")
        return ReadLease(ns, chain[: len(slots)], slots, self._views, self._end_read)

    def release(self, lease: ReadLease) -> None:
        """Unpin. Raises ``LeaseError`` the second time."""
        lease.require(LeaseState.HELD, "release")
        lease.state = LeaseState.ENDED
        if self._memory is not None and lease.slots:
            self._memory.pool(lease.ns.fingerprint).unpin_all(lease.slots)

    def reserve(self, ns: Namespace, num_blocks: int) -> WriteLease:
        """Up to ``num_blocks`` slots."""
        if self._memory is None or self._copydown is None:
            return WriteLease(ns, [], self._views, self._end_write)
        slots = self._memory.reserve(ns.fingerprint, num_blocks)
        if self._copydown.copies_victims:
            # What leaves must be copied first, so let as many go now as the next call may want.
            pool = self._memory.pool(ns.fingerprint)
            pool.evict(num_blocks - pool.num(SlotState.FREE) - pool.num(SlotState.QUARANTINED))
        return WriteLease(ns, slots, self._views, self._end_write)

    def commit(self, lease: WriteLease, keys: Sequence[BlockKey], parent: BlockKey | None) -> Committed:
        """Name the next slots. Raises ``LeaseError`` past the lease's end or for more keys than slots."""
        lease.require(LeaseState.HELD, "commit")
        if len(keys) > len(lease.unnamed):
            raise too_many_keys(len(keys), lease)
        if not keys or self._memory is None or self._copydown is None:
            return Committed([], frozenset())
        pool = self._memory.pool(lease.ns.fingerprint)
        now_unix_s = int(self._copies.now_unix_s())
        slots: list[int] = []
        for slot, key, above in zip(lease.unnamed, keys, [parent, *keys[:-1]], strict=False):
            slots.append(pool.commit(slot, key, above, now_unix_s))
        lease.num_named += len(keys)
        if not lease.unnamed:
            lease.state = LeaseState.ENDED
        accepted = self._copydown.offer(lease.ns, slots, "commit")
        self._stats.inc("kvstore_stored_blocks_total", len(keys))
        self._stats.inc("kvstore_stored_bytes_total", len(keys) * lease.ns.layout.block_bytes)
        return Committed(slots, frozenset(accepted))

    def abort(self, lease: WriteLease) -> None:
        """Free the unnamed slots."""
        lease.require(LeaseState.HELD, "abort")
        lease.state = LeaseState.ENDED
        if self._memory is not None:
            for slot in lease.unnamed:
                self._memory.abort_write(lease.ns, slot)

    def quarantine(self, lease: WriteLease) -> None:
        """Set the unnamed slots aside."""
        lease.require(LeaseState.HELD, "quarantine")
        lease.state = LeaseState.QUARANTINED
        if self._memory is not None:
            for slot in lease.unnamed:
                self._memory.quarantine_write(lease.ns, slot)

    def reclaim(self, lease: WriteLease) -> None:
        """Free what was set aside."""
        lease.require(LeaseState.QUARANTINED, "reclaim")
        lease.state = LeaseState.ENDED
        if self._memory is not None:
            for slot in lease.unnamed:
                self._memory.reclaim_write(lease.ns, slot)

    def _views(self, ns: Namespace, slots: Sequence[int]) -> list[memoryview]:
        return self._memory.views(ns, slots) if self._memory and slots else []
