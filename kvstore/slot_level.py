"""A slot tier together with its pools: one pool per layout over one byte budget. Owner thread only, no I/O.

Extents go to the pool that needs slots while any are free. After that a pool may take one from the pool that holds
most beyond its share of recent demand, so that a model in use takes over the room of one that is not.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kvstore.errors import LayoutError
from kvstore.extents import Extents
from kvstore.hashing import Identity
from kvstore.journal import Journal
from kvstore.layout import FoundLayout
from kvstore.namespace import Namespace
from kvstore.policy.base import Policy
from kvstore.pool import BlockPool, SlotState
from kvstore.tiers.base import Preparing, SlotTier, StoredBlock
from kvstore.types import BlockKey

PolicyFactory = Callable[[bytes], Policy[BlockKey]]
"""The policy of a layout's pool, by its fingerprint."""
OnEvict = Callable[[BlockKey, int], None]

_ANYBODY = Identity("", b"")


@dataclass(frozen=True, eq=False, slots=True)
class Quota:
    """What the pools that have it may use of ``tier`` together."""

    tier: str
    max_bytes: int


@dataclass(eq=False, slots=True)
class _Share:
    """What one layout has of the level."""

    fingerprint: bytes
    block_bytes: int
    pool: BlockPool
    slot_bytes: int
    slots_per_extent: int
    base_bytes: int
    """Added to offsets; see ``tiers.base.Preparing``."""
    quotas: tuple[Quota, ...] = ()
    extents: list[int] = field(default_factory=list)
    demand_bytes: int = 0
    swept: int = 0
    """The slot at which the search for old blocks goes on."""

    @property
    def used_bytes(self) -> int:
        """Bytes of slots that hold or are being filled with a block."""
        return (self.pool.num_slots - self.pool.num(SlotState.FREE)) * self.slot_bytes


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
        self._journal: Journal | None = None
        self._preparing_tier = tier if isinstance(tier, Preparing) else None
        self._preparing: dict[int, _Share] = {}
        """Extents that are being made ready, and for whom."""

    # ---- pools

    def open_pool(self, fingerprint: bytes, block_bytes: int, quotas: Sequence[Quota] = ()) -> BlockPool:
        """The pool of a layout, made at the first call. Raises ``LayoutError`` if a block does not fit an extent.

        ``quotas``, as far as they are of this tier, replace those that it had.
        """
        share = self._shares.get(fingerprint)
        if share is None:
            slot_bytes = self.tier.slot_bytes(block_bytes)
            slots_per_extent = self._extents.extent_bytes // slot_bytes
            if slots_per_extent == 0:
                raise LayoutError(
                    f"a block of {block_bytes} bytes takes {slot_bytes} bytes in tier {self.name}, more than its"
                    f" extents of {self._extents.extent_bytes}: raise the tier's capacity or lower tokens_per_block"
                )
            base_bytes = self._preparing_tier.base_bytes(fingerprint) if self._preparing_tier else 0
            pool = BlockPool(self._policy(fingerprint), on_evict=self._on_evict)
            share = self._shares[fingerprint] = _Share(
                fingerprint, block_bytes, pool, slot_bytes, slots_per_extent, base_bytes
            )
            self._follow(pool)
        share.quotas = tuple(quota for quota in quotas if quota.tier == self.name)
        return share.pool

    def pool(self, fingerprint: bytes) -> BlockPool:
        """The pool of an opened layout."""
        return self._shares[fingerprint].pool

    def keep_journal(self, journal: Journal | None) -> None:
        """Note every change there from now on; None: nowhere."""
        self._journal = journal
        for share in self._shares.values():
            self._follow(share.pool)

    def _follow(self, pool: BlockPool) -> None:
        journal, tier = self._journal, self.name
        if journal is None:
            pool.on_change = None
        else:
            pool.on_change = lambda key, parent, is_here: journal.note(tier, key, parent, is_here=is_here)

    def pools(self) -> Iterator[tuple[bytes, BlockPool]]:
        """Every layout's fingerprint and pool."""
        for fingerprint, share in self._shares.items():
            yield fingerprint, share.pool

    def offsets_bytes(self, fingerprint: bytes, slots: Sequence[int]) -> list[int]:
        """Where each slot starts in the tier's budget."""
        share, extent_bytes = self._shares[fingerprint], self._extents.extent_bytes
        per_extent, slot_bytes = share.slots_per_extent, share.slot_bytes
        base_bytes = share.base_bytes
        return [base_bytes + slot // per_extent * extent_bytes + slot % per_extent * slot_bytes for slot in slots]

    @property
    def capacity_bytes(self) -> int:
        """The tier's whole budget."""
        return self._extents.capacity_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of slots that hold or are being filled with a block."""
        return sum(share.used_bytes for share in self._shares.values())

    # ---- slots

    def reserve(self, fingerprint: bytes, num_blocks: int) -> list[int]:
        """Up to ``num_blocks`` FILLING slots: from free extents, from another pool's surplus, by eviction."""
        self.poll()
        share = self._shares[fingerprint]
        self._note_demand(share, num_blocks)
        for quota in share.quotas:
            num_blocks = self._within(quota, share, num_blocks)
        self._take_extents(share, num_blocks)
        return share.pool.reserve(num_blocks)

    def poll(self) -> None:
        """Hand over the extents that have been made ready."""
        if self._preparing_tier is None or not self._preparing:
            return
        for offset_bytes in self._preparing_tier.prepared():
            extent = offset_bytes // self._extents.extent_bytes
            if extent in self._preparing:
                self._give(self._preparing.pop(extent), extent)

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
            num_adopted += pool.adopt(slot, block.key, block.parent, block.created_unix_s, block.expires_unix_s)
        for share in self._shares.values():
            share.pool.end_adoption()
        return num_adopted

    def sweep(
        self, now_unix_s: float, oldest_unix_s: Mapping[bytes, int], num_slots: int
    ) -> Iterator[tuple[Namespace, list[BlockKey]]]:
        """Keys past their age, of each layout, among its next ``num_slots`` slots: a bounded step.

        ``oldest_unix_s`` is of the namespaces that are open; the others' blocks know when they end. The namespace that
        comes with them stands for all of that layout.
        """
        for share in self._shares.values():
            keys, share.swept = share.pool.expired(now_unix_s, oldest_unix_s, share.swept, num_slots)
            if keys:
                yield Namespace(_ANYBODY, FoundLayout.of(share.block_bytes, share.fingerprint)), keys

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

    def _take_extents(self, share: _Share, num_blocks: int) -> None:
        """As many as it takes to have ``num_blocks`` free slots, of those that can be had."""
        while (
            share.pool.num(SlotState.FREE) < num_blocks
            and share not in self._preparing.values()
            and (self._take_free(share) or self._take_surplus(share))
        ):
            pass

    def _take_free(self, share: _Share) -> bool:
        extent = self._extents.acquire(share.slot_bytes)
        return extent is not None and self._hand_over(share, extent)

    def _take_surplus(self, share: _Share) -> bool:
        """Hand over the emptiest idle extent of the pool that holds most beyond its share of demand."""
        if len(self._shares) == 1:
            return False
        total_demand = sum(other.demand_bytes for other in self._shares.values())

        def surplus(other: _Share) -> float:
            return len(other.extents) - self._extents.num_extents * other.demand_bytes / total_demand

        donor = max((other for other in self._shares.values() if other is not share), key=surplus)
        # A whole extent each way, or two pools near balance would pass one to and fro; half of one to get a first,
        # which a pool gets at once where others have several.
        threshold = 1.0 if share.extents else 0.5
        is_owed = not share.extents and len(donor.extents) > 1
        if not is_owed and (surplus(donor) < threshold or surplus(share) > -threshold):
            return False
        # Of equals the last: a tier fills from the front, and blocks near roots are worth more than those behind them.
        for extent in sorted(donor.extents, key=lambda extent: (self._num_ready(donor, extent), -extent)):
            if self._extents.size_bytes(extent) < share.slot_bytes:
                continue
            if self._empty(donor, extent):
                return self._hand_over(share, extent)
        return False

    def _hand_over(self, share: _Share, extent: int) -> bool:
        """Give an extent to a pool, now if it is ready for it; whether it was."""
        offset_bytes, num_bytes = extent * self._extents.extent_bytes, self._extents.size_bytes(extent)
        tier = self._preparing_tier
        if tier is None or tier.prepare(offset_bytes, num_bytes, share.fingerprint):
            self._give(share, extent)
            return True
        self._preparing[extent] = share
        return False

    def _within(self, quota: Quota, share: _Share, num_blocks: int) -> int:
        """How many of ``num_blocks`` the quota lets ``share`` have, after others under it made room."""
        members = [other for other in self._shares.values() if quota in other.quotas]

        def room_bytes() -> int:
            return quota.max_bytes - sum(member.used_bytes for member in members)

        members.sort(key=lambda member: (member is not share, -member.used_bytes))
        for member in members:
            missing_bytes = num_blocks * share.slot_bytes - room_bytes()
            if missing_bytes > 0:
                member.pool.evict(-(-missing_bytes // member.slot_bytes))
        return max(0, min(num_blocks, room_bytes() // share.slot_bytes))

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
        num_known = len(owned) + len(self._refused) + len(self._preparing) + self._extents.num_free
        assert num_known == self._extents.num_extents, "an extent is lost"
        for share in self._shares.values():
            share.pool.check()
