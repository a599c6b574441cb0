"""A slot tier together with its pools: one pool per layout over one byte budget. Owner thread only, no I/O.

Extents go to the pool that needs slots while any are free. After that a pool may take one from the pool that holds
most beyond its share of recent demand, so that a model in use takes over the room of one that is not.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from kvstore.errors import LayoutError
from kvstore.extents import Extents
from kvstore.namespace import Namespace
from kvstore.policy.base import Policy
from kvstore.pool import BlockPool, SlotState
from kvstore.tiers.base import SlotTier, StoredBlock
from kvstore.types import BlockKey

PolicyFactory = Callable[[], Policy[BlockKey]]
OnEvict = Callable[[BlockKey, int], None]


@dataclass(slots=True)
class _Share:
    """What one layout has of the level."""

    pool: BlockPool
    slot_bytes: int
    slots_per_extent: int
    extents: list[int] = field(default_factory=list)
    demand_bytes: int = 0
    swept: int = 0
    """The slot at which the search for old blocks goes on."""


class SlotLevel:
    """Where blocks of every layout are in one slot tier."""

    def __init__(
        self,
        tier: SlotTier,
        policy: PolicyFactory,
        *,
        on_evict: OnEvict | None = None,
    ) -> None:
        """``on_evict(key, slot)`` is called as a victim leaves; see ``BlockPool``."""
        self.tier = tier
        self.name = tier.name
        self._extents = Extents(tier.capacity_bytes, tier.extent_bytes)
        self._policy = policy
        self._on_evict = on_evict
        self._shares: dict[bytes, _Share] = {}
        self._refused: list[int] = []

    # ---- pools

    def open_pool(self, fingerprint: bytes, block_bytes: int) -> BlockPool:
        """The pool of a layout, made at the first call. Raises ``LayoutError`` if a block does not fit an extent."""
        share = self._shares.get(fingerprint)
        if share is None:
            slot_bytes = self.tier.slot_bytes(block_bytes)
            slots_per_extent = self._extents.extent_bytes // slot_bytes
            if slots_per_extent == 0:
                raise LayoutError(
                    f"a block of {block_bytes} bytes takes {slot_bytes} bytes in tier {self.name}, more than its"
                    f" extents of {self._extents.extent_bytes}: raise the tier's capacity or lower tokens_per_block"
                )
            share = _Share(BlockPool(self._policy(), on_evict=self._on_evict), slot_bytes, slots_per_extent)
            self._shares[fingerprint] = share
        return share.pool

    def pool(self, fingerprint: bytes) -> BlockPool:
        """The pool of an opened layout."""
        return self._shares[fingerprint].pool

    def pools(self) -> Iterator[tuple[bytes, BlockPool]]:
        """Every layout's fingerprint and pool."""
        for fingerprint, share in self._shares.items():
            yield fingerprint, share.pool

    def offsets_bytes(self, fingerprint: bytes, slots: Sequence[int]) -> list[int]:
        """Where each slot starts in the tier's budget."""
        share, extent_bytes = self._shares[fingerprint], self._extents.extent_bytes
        per_extent, slot_bytes = share.slots_per_extent, share.slot_bytes
        return [slot // per_extent * extent_bytes + slot % per_extent * slot_bytes for slot in slots]

    @property
    def capacity_bytes(self) -> int:
        """The tier's whole budget."""
        return self._extents.capacity_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of slots that hold or are being filled with a block."""
        return sum(
            (share.pool.num_slots - share.pool.num(SlotState.FREE)) * share.slot_bytes
            for share in self._shares.values()
        )

    # ---- slots

    def reserve(self, fingerprint: bytes, num_blocks: int) -> list[int]:
        """Up to ``num_blocks`` FILLING slots: from free extents, from another pool's surplus, by eviction."""
        share = self._shares[fingerprint]
        self._note_demand(share, num_blocks)
        while share.pool.num(SlotState.FREE) < num_blocks and (self._take_free(share) or self._take_surplus(share)):
            pass
        return share.pool.reserve(num_blocks)

    def adopt(self, blocks: Iterable[StoredBlock]) -> int:
        """Enter what a scan found, given newest first; returns how many were taken. To be called once, at start."""
        by_extent: dict[int, bytes] = {}
        num_adopted = 0
        for block in reversed(list(blocks)):
            extent, within = divmod(block.offset_bytes, self._extents.extent_bytes)
            pool = self.open_pool(block.fingerprint, block.block_bytes)
            share = self._shares[block.fingerprint]
            slot = extent * share.slots_per_extent + within // share.slot_bytes
            if within % share.slot_bytes or by_extent.setdefault(extent, block.fingerprint) != block.fingerprint:
                continue  # a table that disagrees with itself: the slot is free
            if extent not in share.extents:
                self._extents.claim(extent)
                self._give(share, extent)
            num_adopted += pool.adopt(slot, block.key, block.parent, block.created_unix_s)
        for share in self._shares.values():
            share.pool.end_adoption()
        return num_adopted

    def sweep(self, ns: Namespace, oldest_unix_s: int, num_slots: int) -> list[BlockKey]:
        """Keys of ``ns`` computed before ``oldest_unix_s``, among the next ``num_slots`` slots: a bounded step."""
        share = self._shares[ns.fingerprint]
        keys, share.swept = share.pool.expired(ns.digest, oldest_unix_s, share.swept, num_slots)
        return keys

    # ---- the protocol of a level

    def covered(self, ns: Namespace, chain: Sequence[BlockKey], start: int, oldest_unix_s: int) -> int:
        """How many blocks of ``chain`` from ``start`` on are READY here, without a gap."""
        pool = self._shares[ns.fingerprint].pool
        return len(pool.prefix(chain[start:] if start else chain, oldest_unix_s))

    def missing(self, ns: Namespace, keys: Sequence[BlockKey]) -> list[int]:
        """Those that are not READY."""
        pool = self._shares[ns.fingerprint].pool
        return [index for index, key in enumerate(keys) if key not in pool]

    def begin_reads(self, ns: Namespace, keys: Sequence[BlockKey], oldest_unix_s: int) -> list[int]:
        """The slots of the READY prefix of ``keys``, pinned."""
        return self._shares[ns.fingerprint].pool.pin_prefix(keys, oldest_unix_s)

    def end_reads(self, ns: Namespace, slots: Sequence[int]) -> None:
        """Unpin."""
        self._shares[ns.fingerprint].pool.unpin_all(slots)

    def created_unix_s(self, ns: Namespace, slot: int) -> int:
        """When the block in ``slot`` was computed."""
        return self._shares[ns.fingerprint].pool.created_unix_s(slot)

    def forget(self, ns: Namespace, key: BlockKey) -> None:
        """``key`` is gone."""
        self._shares[ns.fingerprint].pool.remove(key)

    def begin_write(self, ns: Namespace, num_blocks: int) -> list[int]:
        """FILLING slots; see ``reserve``."""
        return self.reserve(ns.fingerprint, num_blocks)

    def commit_write(
        self, ns: Namespace, slot: int, key: BlockKey, parent: BlockKey | None, created_unix_s: int
    ) -> None:
        """READY."""
        self._shares[ns.fingerprint].pool.commit(slot, key, parent, created_unix_s)

    def abort_write(self, ns: Namespace, slot: int) -> None:
        """Free again."""
        self._shares[ns.fingerprint].pool.abort(slot)

    def refuse_write(self, ns: Namespace, slot: int) -> None:
        """Free again; an extent without a block is set aside until ``try_refused``, so that others are evicted."""
        share = self._shares[ns.fingerprint]
        share.pool.abort(slot)
        extent = slot // share.slots_per_extent
        if self._num_ready(share, extent) == 0 and self._empty(share, extent):
            self._refused.append(extent)

    def try_refused(self) -> None:
        """Let extents that had no room on the tier be tried again."""
        while self._refused:
            self._extents.release(self._refused.pop())

    def quarantine_write(self, ns: Namespace, slot: int) -> None:
        """QUARANTINED until ``reclaim_write``."""
        pool = self._shares[ns.fingerprint].pool
        pool.hold(slot)
        pool.abort(slot)

    def reclaim_write(self, ns: Namespace, slot: int) -> None:
        """Free again."""
        self._shares[ns.fingerprint].pool.unhold(slot)

    def begin_erase(self, ns: Namespace, key: BlockKey) -> int | None:
        """Gone; the slot is QUARANTINED until ``end_erase``."""
        pool = self._shares[ns.fingerprint].pool
        slot = pool.find(key)
        if slot is not None:
            pool.hold(slot)
            pool.remove(key)
        return slot

    def end_erase(self, ns: Namespace, slot: int) -> None:
        """Free again, unless a pin or another copy is still on it."""
        self._shares[ns.fingerprint].pool.unhold(slot)

    # ---- the inside

    def _note_demand(self, share: _Share, num_blocks: int) -> None:
        share.demand_bytes += num_blocks * share.slot_bytes
        if sum(other.demand_bytes for other in self._shares.values()) > 2 * self._extents.capacity_bytes:
            for other in self._shares.values():
                other.demand_bytes //= 2

    def _give(self, share: _Share, extent: int) -> None:
        share.extents.append(extent)
        share.pool.grow(extent * share.slots_per_extent, self._extents.size_bytes(extent) // share.slot_bytes)

    def _take_free(self, share: _Share) -> bool:
        extent = self._extents.acquire(share.slot_bytes)
        if extent is None:
            return False
        self._give(share, extent)
        return True

    def _take_surplus(self, share: _Share) -> bool:
        """Hand over the emptiest idle extent of the pool that holds most beyond its share of demand."""
        if len(self._shares) == 1:
            return False
        total_demand = sum(other.demand_bytes for other in self._shares.values())

        def surplus(other: _Share) -> float:
            return len(other.extents) - self._extents.num_extents * other.demand_bytes / total_demand

        donor = max((other for other in self._shares.values() if other is not share), key=surplus)
        # A whole extent each way, or two pools near balance would pass one to and fro; half of one to get a first.
        threshold = 1.0 if share.extents else 0.5
        if surplus(donor) < threshold or surplus(share) > -threshold:
            return False
        for extent in sorted(donor.extents, key=lambda extent: self._num_ready(donor, extent)):
            if self._extents.size_bytes(extent) < share.slot_bytes:
                continue
            if self._empty(donor, extent):
                self._give(share, extent)
                return True
        return False

    def _empty(self, share: _Share, extent: int) -> bool:
        """Take an idle extent from a pool, with the blocks in it."""
        num_slots = self._extents.size_bytes(extent) // share.slot_bytes
        if not share.pool.shrink(extent * share.slots_per_extent, num_slots):
            return False
        share.extents.remove(extent)
        return True

    def _num_ready(self, share: _Share, extent: int) -> int:
        return share.pool.num_ready_in(extent * share.slots_per_extent, share.slots_per_extent)

    def check(self) -> None:
        """Prove that pools and extents fit together; raises AssertionError. For tests."""
        owned = [extent for share in self._shares.values() for extent in share.extents]
        assert len(owned) == len(set(owned)), "an extent has two owners"
        num_known = len(owned) + len(self._refused) + self._extents.num_free
        assert num_known == self._extents.num_extents, "an extent is lost"
        for share in self._shares.values():
            share.pool.check()
