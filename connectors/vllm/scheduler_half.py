"""The half of the connector that runs in vLLM's scheduler: what is offered, loaded and stored. It never waits.

A request is tracked from ``arrive`` to ``finish``. Its loads and stores have lives of their own, which may be longer.

Rule 1: a request has one pin at most, taken when it is first offered something; asked again, it gets the same answer.
Rule 2: a pin ends when its load has been reported, when nothing is to be loaded, when its request ends, or at a
deadline, and in no other way; a load that is under way keeps it whatever becomes of the request.
Rule 3: from the first block on that failed to load, a request is offered nothing any more (``connectors.plan``).
Rule 4: pages of a store job are held in vLLM's pool, and its slots are leased, until every rank has reported.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from connectors.plan import Planner, usable_blocks
from connectors.vllm.door import ArenaDoor
from connectors.vllm.messages import LoadJob, Slots, Step, StoreJob, StoreReport
from connectors.vllm.request import EngineRequest, Page, PagePool
from connectors.vllm.served import Served
from kvstore.block_store import BlockStore
from kvstore.lease import LeaseState, ReadLease, WriteLease
from kvstore.namespace import Namespace
from kvstore.promotion import Prefetch
from kvstore.types import BlockKey, Request

PIN_S = 10.0
"""How long a request that was offered blocks, but no pages to load them into, may keep them from eviction."""
COPY_DOWN_S = 10.0
"""How long an engine with nothing to compute steps on, so that what it stored comes down to lower tiers."""

_log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Tracked:
    """A request that has not ended."""

    request: EngineRequest
    ns: Namespace
    announced: Request
    keys: list[BlockKey]
    keep: int = 0
    """Leading blocks of the prompt that the store's policy wants."""
    is_stored: bool = True
    prefetch: Prefetch | None = None
    lease: ReadLease | None = None
    pinned_until_s: float = 0.0
    offered: int = 0
    """Leading blocks that were offered, the engine's own among them."""
    has_pages: bool = False

    def grow(self) -> list[BlockKey]:
        """Keys of every block whose tokens are known by now."""
        hashes = self.request.block_hashes
        self.keys += [self.ns.key(digest) for digest in hashes[len(self.keys) :]]
        return self.keys


@dataclass(eq=False, slots=True)
class _Load:
    """A load under way; ``lease`` is None once it was lost."""

    job: LoadJob
    lease: ReadLease | None
    start: int
    served: dict[str, int]


@dataclass(eq=False, slots=True)
class _Store:
    """A store job under way."""

    lease: WriteLease
    keys: list[BlockKey]
    parent: BlockKey | None
    pages: list[Page]
    num_ranks_done: int = 0
    failed: bool = False


@dataclass(slots=True)
class SchedulerHalf:
    """Everything that is known of requests, loads and stores. vLLM's scheduler thread only."""

    store: BlockStore
    planner: Planner
    tokens_per_block: int
    num_ranks: int
    prefetch_s: float
    namespace_for: Callable[[EngineRequest], Namespace | None]
    door: ArenaDoor = field(default_factory=ArenaDoor)
    pool: PagePool | None = None
    served: Served = field(default_factory=Served)
    _requests: dict[str, _Tracked] = field(default_factory=dict)
    _loads: dict[str, _Load] = field(default_factory=dict)
    _stores: dict[int, _Store] = field(default_factory=dict)
    _num_stores: int = 0
    _copied_down_s: float = 0.0
    _step: Step = field(default_factory=Step)

    # ---- before a request computes

    def arrive(self, request: EngineRequest, hints: Mapping[str, object]) -> None:
        """A request joins the line: tell the store's policies, and have it bring up what lies below its RAM."""
        ns = self.namespace_for(request)
        if ns is None or self.planner.refusals:
            return
        announced = Request(request.request_id, time.time(), ns.digest, request.num_prompt_tokens, hints)
        tracked = _Tracked(request, ns, announced, [], is_stored=hints.get("store") is not False)
        self._requests[request.request_id] = tracked
        self.planner.arrive(request.request_id)
        tracked.keep = self.store.arrive(announced, tracked.grow())
        self._prefetch(tracked)

    def offer(self, request: EngineRequest, num_computed_tokens: int) -> int | None:
        """Tokens to load beyond the engine's own; None: not known yet. May be asked any number of times."""
        tracked = self._requests.get(request.request_id)
        if tracked is None or request.skip_reading_prefix_cache:
            return 0
        if tracked.has_pages:  # it was preempted, or its load failed: a new life
            self.planner.restart(request.request_id)
            tracked.has_pages = False
            self._prefetch(tracked)
        if tracked.prefetch is not None and not tracked.prefetch.done:
            self.store.poll()
            if not tracked.prefetch.done and self.planner.may_wait(request.request_id, time.monotonic()):
                return None
        if tracked.lease is None:
            tracked.lease = self.store.pin(self._usable(tracked))
            tracked.pinned_until_s = time.monotonic() + PIN_S
        load = self.planner.load(request.request_id, request.num_tokens, num_computed_tokens, tracked.lease.num_blocks)
        tracked.offered = min(load.blocks.stop, tracked.lease.num_blocks)
        num_tokens = max(0, tracked.offered * self.tokens_per_block - num_computed_tokens)
        if num_tokens == 0:
            self._unpin(tracked)
        return num_tokens

    def take(self, request: EngineRequest, pages: Sequence[int], num_tokens: int) -> None:
        """The request is given pages, and vLLM has decided to load ``num_tokens`` of what was offered."""
        tracked = self._requests.get(request.request_id)
        if tracked is None or request.request_id in self._loads:
            return
        tracked.has_pages = True
        lease = tracked.lease
        if num_tokens == 0 or lease is None:
            self._unpin(tracked)
            return
        start = tracked.offered - num_tokens // self.tokens_per_block
        blocks = slice(start, tracked.offered)
        slots = self._slots(lease, blocks)
        job = LoadJob(request.request_id, slots, list(pages[blocks]))
        tracked.lease = None  # the load's from now on
        self._loads[request.request_id] = _Load(job, lease, start, self._from_tiers(tracked, start))
        self._step.loads.append(job)

    # ---- while it computes

    def build(self, scheduled: Mapping[str, Sequence[int]]) -> Step:
        """What the workers are to do with this step; ``scheduled``: the pages of each request that computes in it."""
        self.store.poll()
        now_s = time.monotonic()
        for tracked in self._requests.values():
            if tracked.lease is not None and now_s >= tracked.pinned_until_s:
                self._unpin(tracked)
        for request_id, pages in scheduled.items():
            tracked_or_none = self._requests.get(request_id)
            if tracked_or_none is not None:
                self._offload(tracked_or_none, pages)
        step, self._step = self._step, Step()
        return step

    def loaded(self, request_ids: set[str], failed_pages: set[int]) -> set[str]:
        """The workers report loads that are over; returns those of which vLLM must not hear yet.

        A lease may have been lost while its slots were read: then the workers are told to report the load as failed,
        which they do with the next step.
        """
        held_back = set()
        for request_id in request_ids & self._loads.keys():
            load = self._loads[request_id]
            if load.lease is not None and not load.lease.still_held():
                self.store.release(load.lease)
                load.lease = None
                self._step.lost.append(load.job)
                held_back.add(request_id)
                continue
            del self._loads[request_id]
            if load.lease is not None:
                self.store.release(load.lease)
            self._settle(request_id, load, failed_pages)
        return held_back

    def stored(self, report: StoreReport) -> None:
        """Workers report store jobs that are over, each for itself."""
        for number, num_ranks in report.num_ranks_done.items():
            job = self._stores.get(number)
            if job is None:
                continue
            job.num_ranks_done += num_ranks
            job.failed |= number in report.failed
            if job.num_ranks_done >= self.num_ranks:
                del self._stores[number]
                self._end(job)

    @property
    def has_work(self) -> bool:
        """Whether the engine must keep on stepping although no request computes."""
        if self._step.loads or self._step.stores or self._step.lost or self._loads or self._stores:
            return True
        return time.monotonic() < self._copied_down_s and not self.store.drain(0.0)

    # ---- its end

    def finish(self, request: EngineRequest, pages: Sequence[int], *, is_sound: bool) -> None:
        """The request has ended, in whatever state; ``is_sound`` unless its pages may hold anything."""
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            return
        if is_sound and request.request_id not in self._loads:
            self._offload(tracked, pages)
        self._unpin(tracked)
        del self._requests[request.request_id]
        self.planner.end(request.request_id)
        self.store.finish(tracked.announced, tracked.keys, request.num_output_tokens)

    def close(self) -> None:
        """Let go. Slots that a worker may still write to are left as they are."""
        for job in self._stores.values():
            if job.lease.state is LeaseState.HELD:
                self.store.quarantine(job.lease)
        for load in self._loads.values():
            if load.lease is not None:
                self.store.release(load.lease)
        for tracked in self._requests.values():
            self._unpin(tracked)
        self._stores.clear()
        self._loads.clear()
        self._requests.clear()
        self.door.close()

    # ---- the inside

    def _usable(self, tracked: _Tracked) -> list[BlockKey]:
        """Keys that may be served: whole blocks that leave a token to compute."""
        return tracked.grow()[: usable_blocks(tracked.request.num_tokens, self.tokens_per_block)]

    def _prefetch(self, tracked: _Tracked) -> None:
        tracked.prefetch = self.store.prefetch(self._usable(tracked), time.monotonic() + self.prefetch_s)

    def _unpin(self, tracked: _Tracked) -> None:
        lease, tracked.lease = tracked.lease, None
        if lease is not None:
            self.store.release(lease)

    def _slots(self, lease: ReadLease | WriteLease, blocks: slice) -> Slots:
        """A lost lease has no place: the workers will not find it, and the load fails."""
        location = self.store.locate(lease)
        if location is None or not location.descriptors:
            return Slots(self.door.address, 0, [0] * len(lease.slots[blocks]))
        return Slots(self.door.address, self.door.show(location), location.offsets_bytes[blocks])

    def _from_tiers(self, tracked: _Tracked, start: int) -> dict[str, int]:
        """Tokens to be loaded, by the tier they came from; what another request brought up counts as memory."""
        left, served = tracked.offered - start, dict[str, int]()
        for tier, num_blocks in tracked.prefetch.blocks_from.items() if tracked.prefetch else ():
            served[tier] = min(num_blocks, left)
            left -= served[tier]
        served["memory"] = left
        return {tier: blocks * self.tokens_per_block for tier, blocks in served.items() if blocks}

    def tokens_from(self, request: EngineRequest) -> dict[str, int]:
        """Tokens that are being loaded for a request, by tier."""
        load = self._loads.get(request.request_id)
        return {} if load is None else load.served

    def _settle(self, request_id: str, load: _Load, failed_pages: set[int]) -> None:
        bad = next((index for index, page in enumerate(load.job.pages) if page in failed_pages), None)
        if bad is None:
            self.served.add(load.served)
            tokens = ", ".join(f"{count} from {tier}" for tier, count in load.served.items())
            tracked = self._requests.get(request_id)
            of = tracked.request.num_tokens if tracked else "?"
            _log.info("request %s: of %s tokens the store gave %s", request_id, of, tokens)
        else:
            self.served.num_failed_loads += 1
            self.planner.failed(request_id, load.start + bad)
            _log.warning("request %s: block %d and those after it did not arrive", request_id, load.start + bad)

    def _offload(self, tracked: _Tracked, pages: Sequence[int]) -> None:
        """Begin to store what has become complete."""
        request = tracked.request
        if not tracked.is_stored or not pages:
            return
        # The KV of a token is final once the token after it is known: a guess may have been in its place.
        num_verified = min(request.num_computed_tokens, request.num_tokens - 1)
        num_blocks = min(num_verified // self.tokens_per_block, len(tracked.grow()), len(pages))
        num_prompt_blocks = request.num_prompt_tokens // self.tokens_per_block
        if tracked.keep < num_prompt_blocks:
            num_blocks = min(num_blocks, tracked.keep)
        blocks = self.planner.store(request.request_id, num_blocks * self.tokens_per_block)
        if not blocks:
            return
        lease = self.store.reserve(tracked.ns, len(blocks))
        num_given = lease.num_blocks
        if num_given < len(blocks):
            self.planner.not_stored(request.request_id, blocks.start + num_given)
            self.served.num_unstored_blocks += len(blocks) - num_given
        if num_given == 0:
            self.store.abort(lease)
            return
        taken = slice(blocks.start, blocks.start + num_given)
        held = [self._pages.blocks[page] for page in pages[taken]]
        self._pages.touch(held)
        parent = tracked.keys[taken.start - 1] if taken.start else None
        number = self._num_stores = self._num_stores + 1
        self._stores[number] = _Store(lease, tracked.keys[taken], parent, held)
        self._step.stores.append(StoreJob(number, self._slots(lease, slice(None)), list(pages[taken])))

    def _end(self, job: _Store) -> None:
        self._pages.free_blocks(job.pages)
        if job.failed:
            self.served.num_unstored_blocks += len(job.keys)
            self.store.abort(job.lease)
        else:
            self.served.num_stored_blocks += len(job.keys)
            self.store.commit(job.lease, job.keys, job.parent)
            self._copied_down_s = time.monotonic() + COPY_DOWN_S

    @property
    def _pages(self) -> PagePool:
        if self.pool is None:
            raise RuntimeError("vLLM has not shown its pool of pages; a bug")
        return self.pool
