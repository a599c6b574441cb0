"""The store: find, lend, accept, promote and copy down across levels.

One thread owns a store. Nothing in it waits but ``drain``, ``wait`` and ``close``; copies run in the mover's threads
and their results are applied by ``poll``. Deadlines are absolute, on the store's clock (``time.monotonic``).
"""

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from kvstore.arrivals import count_hits, count_request
from kvstore.breaker import BreakerState
from kvstore.clearing import Clearing
from kvstore.config import Config
from kvstore.copies import Copies
from kvstore.copydown import CopyDown
from kvstore.deadline import bounded
from kvstore.discovery import Discoveries, found_in
from kvstore.errors import ClosedError, ConfigError, LayoutError
from kvstore.gauges import set_gauges
from kvstore.hashing import Identity
from kvstore.journal import Journal
from kvstore.layout import Layout
from kvstore.lease import Committed, Location, Lookup, ReadLease, WriteLease
from kvstore.leases import Leases
from kvstore.lending import Lending, LentBuffer, Transfer, readable_bytes, writable_bytes
from kvstore.level import Level
from kvstore.memory_level import MemoryLevel
from kvstore.mover import LANE_SHAPES, Executor, Lane, Mover, ThreadExecutor
from kvstore.namespace import Namespace
from kvstore.notebook import Notebook
from kvstore.policy import POLICIES
from kvstore.pool import BlockPool
from kvstore.promotion import Prefetch, Promotions
from kvstore.recording import Recording
from kvstore.refits import Refits
from kvstore.shared_level import SharedLevel, SharedTier
from kvstore.slot_level import Quota, SlotLevel
from kvstore.stats import Stats
from kvstore.tiers.base import NoteKeeper, SlotTier, Tier
from kvstore.tiers.memory import MemoryTier, Region
from kvstore.types import NAMESPACE_DIGEST_BYTES, BlockKey, Request
from kvstore.upkeep import Upkeep

SWEEP_INTERVAL_S = 1.0
CLOSE_TIMEOUT_S = 10.0
CLOSE_PATIENCE_S = 2.0
"""How long ``close`` waits for a copy to return while none does: what hangs is left behind."""


class Store:
    """Blocks of any number of namespaces across RAM, files and a shared server."""

    def __init__(
        self,
        *,
        memory: MemoryTier | None,
        file: SlotTier | None = None,
        shared: SharedTier | None = None,
        config: Config,
        notes: NoteKeeper | None = None,
        recording: Recording | None = None,
        executor: Callable[[str, int], Executor] = ThreadExecutor,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """A store over open tiers, see ``kvstore.opening``; ``notes`` keeps what policies learn over a restart."""
        if memory is None and file is None and shared is None:
            raise ConfigError("no tier is configured: set memory.capacity, file.directories or redis.url")
        self.stats = Stats()
        self._config = config
        self._recording = recording
        self._clock = clock
        self._wall = wall
        self._mover = Mover(clock)
        self._copies = Copies(self._mover, self.stats, wall)
        self._upkeep = Upkeep(self._copies, self._mover)
        self._clearing = Clearing(self._copies, self._mover)
        self._refits = Refits(learning := executor("policy", 1))
        self._notebook = Notebook(POLICIES[config.policy], notes, learning)
        self._namespaces: dict[bytes, Namespace] = {}
        self._quotas: dict[bytes, tuple[Quota, ...]] = {}
        self._closed = False
        self._next_sweep_s = 0.0
        self._journal: Journal | None = None
        self._arena_tier = memory
        self._executor = executor
        self._memory: MemoryLevel | None = None
        self._file: SlotLevel | None = None
        self._shared: SharedLevel | None = None
        self._lower: list[Level] = []
        self._admissions: list[tuple[Level, str]] = []
        if memory is not None:
            copies_victims = any(tier and tier.admission == "on_evict" for tier in (config.file, config.redis))
            on_evict = self._on_memory_evict if copies_victims else None
            self._memory = MemoryLevel(memory, self._notebook.policy, on_evict=on_evict)
            self._add_lane(memory)
        if shared is not None:
            self._shared = SharedLevel(shared, config.redis.ttl_s if config.redis else 0, clock, wall)
            self._add_lane(shared)
            self._lower.append(self._shared)
            self._admissions.append((self._shared, config.redis.admission if config.redis else "always"))
        self._levels: list[Level] = [*([self._memory] if self._memory else []), *self._lower]
        self._prefetches: Promotions | Discoveries = Discoveries(self._levels, self._copies)
        self._lending = Lending(self._levels, self._copies, self._mover, self._on_stored)
        if self._memory is not None:
            self._promotions = Promotions(self._memory, self._lower, self._copies, self._mover, self.stats)
            self._prefetches = self._promotions
            self._copydown = CopyDown(self._memory, self._admissions, self._copies, self._mover, self.stats)
        copydown = None if self._memory is None else self._copydown
        self._leases = Leases(self._memory, copydown, self._copies, self.stats, self.abort, self.release)
        if file is not None:
            self.join_file(self.scanned(file))

    def scanned(self, file: SlotTier) -> SlotLevel:
        """The level of a file tier, with what a scan of it finds: takes its time and may be called in any thread."""
        level = SlotLevel(file, self._notebook.policy)
        level.adopt(file.scan())
        return level

    def join_file(self, level: SlotLevel) -> None:
        """The file level, ``scanned``, is below RAM from now on. Raises ``LayoutError`` if an open layout does not fit.

        The tier is the store's to close.
        """
        for ns in self._namespaces.values():
            level.open_pool(ns.fingerprint, ns.layout.block_bytes, self._quotas[ns.fingerprint])
        self._add_lane(level.tier)
        self._file = level
        if self._journal is not None:
            self._journal.skip()
            level.keep_journal(self._journal)
        self._lower.insert(0, level)
        self._levels.insert(len(self._levels) - len(self._lower) + 1, level)
        self._admissions.insert(0, (level, self._config.file.admission if self._config.file else "always"))
        self._clearing.catch_up(level)

    # ---- namespaces

    def open_namespace(
        self,
        identity: Identity,
        layout: Layout,
        *,
        max_age_s: int | None = None,
        prefill_tokens_per_s: int = 0,
        quotas: Sequence[Quota] = (),
    ) -> Namespace:
        """Whose blocks the following calls are about; the same arguments give the same namespace.

        ``prefill_tokens_per_s`` is the engine's rate; 0: as was said before, or configured. ``quotas`` bound what all
        namespaces of this layout use of RAM and of files. Raises ``LayoutError`` if a block does not fit a tier.
        """
        self._require_open()
        ns = Namespace(identity, layout, self._config.max_age_s if max_age_s is None else max_age_s)
        said = self._namespaces.get(ns.digest, self._config).prefill_tokens_per_s
        ns = replace(ns, prefill_tokens_per_s=prefill_tokens_per_s or said)
        for level in self.slot_levels:
            level.open_pool(ns.fingerprint, layout.block_bytes, quotas)
        self._quotas[ns.fingerprint] = tuple(quotas)
        self._namespaces[ns.digest] = ns
        return ns

    # ---- requests

    def arrive(self, request: Request, chain: Sequence[BlockKey]) -> int:
        """A request refers to ``chain``, root first: every level touches it. Returns how many blocks are worth keeping.

        That is as many as some level wants; a shared tier, which evicts by itself and serves other hosts, wants all.
        To be called once per request, before its blocks are reserved.
        """
        self._require_open()
        ns = self._namespace_of(chain)
        count_request(self.stats, request)
        if ns is None:
            return 0
        count_hits(self.stats, self._levels, ns, chain, self._copies.oldest_unix_s(ns))
        if self._recording is not None:
            self._recording.arrive(request, chain, ns.layout.tokens_per_block)
        worth = [level.pool(ns.fingerprint).arrive(request, chain) for level in self.slot_levels]
        if self._shared is None:
            return max(worth)  # what only a file keeps passes through RAM
        self._upkeep.renew(self._shared, chain, self._clock() + self._config.prefetch_deadline_ms / 1000)
        return len(chain)

    def finish(self, request: Request, chain: Sequence[BlockKey], output_tokens: int) -> None:
        """The request ended."""
        ns = self._namespace_of(chain)
        if ns is not None:
            for level in self.slot_levels:
                level.pool(ns.fingerprint).finish(request, output_tokens)
        if self._recording is not None:
            self._recording.finish(request, output_tokens)

    def lookup(self, chain: Sequence[BlockKey]) -> Lookup:
        """How much of ``chain`` is here. Reads tables only."""
        self._require_open()
        self.stats.inc("kvstore_lookups_total", 1)
        ns = self._namespace_of(chain)
        if ns is None:
            return Lookup(0, 0, pending=False)
        oldest_unix_s = self._copies.oldest_unix_s(ns)
        ready = self._memory.covered(ns, chain, 0, oldest_unix_s) if self._memory else 0
        found = found_in(self._levels, ns, chain, ready, oldest_unix_s)
        pending = bool(self._memory) and ready < len(chain) and self._promotions.is_arriving(chain[ready])
        return Lookup(ready, found, pending)

    def prefetch(self, chain: Sequence[BlockKey], deadline_s: float) -> Prefetch:
        """Bring as much of ``chain`` into RAM as lower levels have, by ``deadline_s``. Idempotent; joins others.

        Without RAM it only asks the shared tier, so that ``lookup`` and ``load_into`` know what that has.
        """
        self._require_open()
        self.stats.inc("kvstore_prefetches_total", 1)
        ns = self._namespace_of(chain)
        if ns is None:
            return Prefetch(_NOWHERE, chain, deadline_s, done=True)
        return self._prefetches.start(ns, chain, bounded(deadline_s, self._clock()))

    def pin(self, chain: Sequence[BlockKey]) -> ReadLease:
        """Pin the longest READY prefix of ``chain`` in RAM; it may be empty. Copied down where a touch admits it."""
        self._require_open()
        ns = self._namespace_of(chain)
        return self._leases.pin(ns or _NOWHERE, chain if ns else ())

    def release(self, lease: ReadLease) -> None:
        """End a pin. Raises ``LeaseError`` the second time."""
        self._leases.release(lease)

    # ---- writing

    def reserve(self, ns: Namespace, num_blocks: int) -> WriteLease:
        """Up to ``num_blocks`` slots in RAM to write to; fewer, down to none, when the rest is in use."""
        self._require_open()
        self._require_ours(ns)
        return self._leases.reserve(ns, num_blocks)

    def commit(self, lease: WriteLease, keys: Sequence[BlockKey], parent: BlockKey | None) -> Committed:
        """Name the next ``len(keys)`` slots of ``lease``, root first: they can be found from now on.

        ``parent`` is the key of the block before ``keys[0]``; None for a root. A key that is READY already keeps its
        slot and the new one is given back. Raises ``LeaseError`` past the lease's end or for more keys than slots.
        """
        self._require_open()
        self._require_ours(lease.ns)
        self._require_keys(lease.ns, keys)
        return self._leases.commit(lease, keys, parent)

    def abort(self, lease: WriteLease) -> None:
        """Give the unnamed slots back; nothing may touch them any more. Raises ``LeaseError`` the second time."""
        self._leases.abort(lease)

    def quarantine(self, lease: WriteLease) -> None:
        """Give the unnamed slots up while a copy may still write to them; ``reclaim`` when it has returned."""
        self._leases.quarantine(lease)

    def reclaim(self, lease: WriteLease) -> None:
        """The copy into a quarantined lease has returned: its slots are free."""
        self._leases.reclaim(lease)

    # ---- lent buffers

    def store_from(
        self,
        ns: Namespace,
        keys: Sequence[BlockKey],
        parent: BlockKey | None,
        buffers: Sequence[LentBuffer],
        deadline_s: float,
    ) -> Transfer:
        """Store blocks from the caller's buffers, ``block_bytes`` each, into RAM, or below where there is no RAM tier.

        The buffers are the caller's again when the transfer is no longer ``busy``. Raises ``LayoutError`` for buffers
        that cannot hold blocks, ``DeadlineError`` for a deadline that is no moment.
        """
        self._require_open()
        self._require_ours(ns)
        self._require_keys(ns, keys)
        views, deadline_s = readable_bytes(ns, keys, buffers), bounded(deadline_s, self._clock())
        levels: Sequence[Level] = [self._memory] if self._memory else self._lower
        return self._lending.store_from(ns, keys, parent, views, deadline_s, levels)

    def load_into(
        self, ns: Namespace, chain: Sequence[BlockKey], buffers: Sequence[LentBuffer], deadline_s: float
    ) -> Transfer:
        """Load the longest prefix of ``chain`` that any level has into the caller's buffers, ``block_bytes`` each.

        A shared tier is asked what it has of the rest.
        """
        self._require_open()
        self._require_ours(ns)
        views, deadline_s = writable_bytes(ns, chain, buffers), bounded(deadline_s, self._clock())
        return self._lending.load_into(ns, chain, views, deadline_s)

    # ---- time passes

    def poll(self) -> int:
        """Apply finished copies, give up on overdue ones, and do a little housekeeping; returns how many there were."""
        self._require_open()
        return self._poll()

    def wait(self, timeout_s: float) -> None:
        """Sleep until a copy returns, at most ``timeout_s``; ``poll`` then. For callers with nothing else to do."""
        self._mover.wait(timeout_s)

    def notify(self, on_return: Callable[[], object]) -> None:
        """Have ``on_return`` called, in some thread of the store, whenever a copy returns: it is time to ``poll``."""
        self._mover.on_return = on_return

    def keep_journal(self, journal: Journal | None) -> None:
        """Note every change of RAM and files there from now on; None: nowhere."""
        self._journal = journal
        for level in self.slot_levels:
            level.keep_journal(journal)

    def drain(self, timeout_s: float) -> bool:
        """Poll until nothing is in flight or waits to be erased, at most ``timeout_s``; whether that was reached."""
        return self._drain(timeout_s, patience_s=timeout_s)

    def evict(self, num_blocks: int, among: Collection[bytes] | None = None) -> int:
        """Forget up to ``num_blocks`` blocks in RAM, in the policy's order; returns how many left.

        ``among`` has the fingerprints of the layouts that it is about; None: all.
        """
        self._require_open()
        if self._memory is None:
            return 0
        num_evicted = 0
        for fingerprint, pool in self._memory.pools():
            if among is not None and fingerprint not in among:
                continue
            num_evicted += pool.evict(num_blocks - num_evicted)
        return num_evicted

    def clear(self, ns: Namespace) -> int:
        """Forget a namespace in every level at once, erase its bytes in the background; returns blocks forgotten.

        Copies of it that are in flight count for nothing when they return. Until a shared tier has erased it, that
        level answers nothing of it; a server that is down is tried again every second.
        """
        self._require_open()
        self._require_ours(ns)
        return self._clearing.clear(ns, self.slot_levels, self._shared)

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Finish what is in flight for up to ``timeout_s``, then let go. Idempotent.

        As soon as nothing has returned for two seconds some tier hangs, and is not waited for.
        """
        if self._closed:
            return
        self._prefetches.close()
        self._drain(timeout_s, patience_s=CLOSE_PATIENCE_S)
        self._clearing.warn()
        self._closed = True
        self._notebook.close(self._pools())
        self._mover.close()
        self._refits.close()
        for lane in self._mover.lanes:
            lane.tier.close()
        if self._recording is not None:
            self._recording.close()

    # ---- questions

    def health(self) -> dict[str, BreakerState]:
        """The state of each tier's breaker, as its answers so far show it."""
        return {lane.name: lane.breaker.state for lane in self._mover.lanes}

    def snapshot(self) -> Mapping[str, Mapping[tuple[str, ...], float]]:
        """Counters, and gauges of this moment, by metric and labels."""
        if self._recording is not None:
            self.stats.set("kvstore_unrecorded_requests_total", self._recording.num_left_out)
        set_gauges(self.stats, self.slot_levels, self._mover.lanes)
        return self.stats.snapshot()

    def offsets_bytes(self, ns: Namespace, slots: Sequence[int]) -> list[int]:
        """Where each slot of RAM starts in the arena."""
        return self._memory.offsets_bytes(ns.fingerprint, slots) if self._memory else []

    def locate(self, lease: ReadLease | WriteLease) -> Location | None:
        """Where the slots of a held lease lie, for other processes of the engine."""
        tier = self._arena_tier
        if tier is None:
            return None
        return Location(tier.descriptors, self.offsets_bytes(lease.ns, lease.slots), tier.arena.pages_stay)

    def fixed_memory(self) -> memoryview | None:
        """All RAM that slots lie in, if its pages stay the same: a device may be given it to reach."""
        arena = self.arena
        return arena.view(0, arena.capacity_bytes) if arena is not None and arena.pages_stay else None

    def check(self) -> None:
        """Prove the invariants of every level; raises AssertionError. For tests and operators."""
        for level in self.slot_levels:
            level.check()

    @property
    def slot_levels(self) -> list[SlotLevel]:
        """RAM and files, as far as there are any."""
        return [level for level in (self._memory, self._file) if level is not None]

    @property
    def namespaces(self) -> list[Namespace]:
        """Those that were opened."""
        return list(self._namespaces.values())

    @property
    def memory_tier(self) -> MemoryTier | None:
        """The tier of RAM."""
        return self._arena_tier

    @property
    def arena(self) -> Region | None:
        """The RAM that blocks lie in, for those who map or register it."""
        return self._arena_tier.arena if self._arena_tier else None

    # ---- the inside

    def _add_lane(self, tier: Tier) -> None:
        shape = LANE_SHAPES[tier.name]
        if self._arena_tier is not None and tier is not self._arena_tier:
            shape = shape.beside(self._arena_tier.capacity_bytes)
        self._mover.add_lane(Lane(tier, self._executor(tier.name, shape.num_threads), shape))

    def _namespace_of(self, chain: Sequence[BlockKey]) -> Namespace | None:
        return self._namespaces.get(chain[0][:NAMESPACE_DIGEST_BYTES]) if chain else None

    def _on_memory_evict(self, key: BlockKey, slot: int) -> None:
        ns = self._namespaces.get(key[:NAMESPACE_DIGEST_BYTES])
        if ns is not None:
            self._copydown.offer_victim(ns, slot)

    def _on_stored(self, ns: Namespace, keys: Sequence[BlockKey]) -> None:
        """Lent blocks are in RAM: they are copied down like any other."""
        if self._memory is not None:
            find = self._memory.pool(ns.fingerprint).find
            self._copydown.offer(ns, [slot for key in keys if (slot := find(key)) is not None], "commit")

    def _drain(self, timeout_s: float, patience_s: float) -> bool:
        """Poll until nothing is under way, as long as that becomes less every ``patience_s``."""
        now_s = self._clock()
        deadline_s, give_up_at_s, least = now_s + timeout_s, now_s + patience_s, self._num_under_way
        while self._num_under_way:
            now_s = self._clock()
            if self._num_under_way < least:
                least, give_up_at_s = self._num_under_way, now_s + patience_s
            if now_s >= min(deadline_s, give_up_at_s):
                return False
            self._mover.wait(0.05)
            self._poll()
        self._poll()
        return True

    @property
    def _num_under_way(self) -> int:
        return self._mover.num_in_flight + self._copies.num_erasures_waiting + self._clearing.num_waiting

    def _poll(self) -> int:
        num_applied = self._mover.poll()
        for level in self.slot_levels:
            level.poll()
        self._refits.poll(pool for _, pool in self._pools())
        self._copies.retry_erasures()
        if self._memory is not None:
            self._promotions.poll()
        now_s = self._clock()
        if now_s >= self._next_sweep_s:
            self._next_sweep_s = now_s + SWEEP_INTERVAL_S
            self._upkeep.sweep(self._namespaces.values(), self.slot_levels)
            self._upkeep.retry_full(self.slot_levels)
            self._clearing.retry()
            self._notebook.poll(self._pools(), now_s)
        return num_applied

    def _pools(self) -> Iterator[tuple[bytes, BlockPool]]:
        return (found for level in self.slot_levels for found in level.pools())

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("the store is closed; open another one")

    def _require_ours(self, ns: Namespace) -> None:
        if ns.digest not in self._namespaces:
            raise LayoutError(
                f"namespace of model {ns.identity.model!r} was not opened here; call open_namespace first"
            )

    def _require_keys(self, ns: Namespace, keys: Sequence[BlockKey]) -> None:
        if any(not key.startswith(ns.digest) for key in keys):
            raise LayoutError(f"a key is of another namespace than that of model {ns.identity.model!r}; a caller's bug")


_NOWHERE = Namespace(Identity("", b""), Layout("uint8", 1, 1, (1,), 1))
"""Of a chain whose namespace nobody opened here: nothing is found."""
