"""The half of the connector that runs in vLLM's scheduler: what is offered, loaded and stored. It never waits.

A request is tracked from ``arrive`` to ``finish``. Its loads and stores have lives of their own, which may be longer.

Rule 1: a request has one pin at most, taken when it is first offered something; asked again, it gets the same answer.
Rule 2: a pin ends when its load has been reported, when nothing is to be loaded, when its request ends, or at a
deadline, and in no other way; a load that is under way keeps it whatever becomes of the request.
Rule 3: from the first block on that failed to load, a request is offered nothing any more (``connectors.plan``).
Rule 4: pages of a store job are held in vLLM's pool, and its slots are leased, until every rank has reported.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from connectors.plan import Planner, usable_blocks
from connectors.vllm.door import ArenaDoor
from connectors.vllm.messages import LoadJob, Slots, Step, StoreJob, StoreReport
from connectors.vllm.request import EngineRequest, Page, PagePool
from connectors.vllm.served import Served
from connectors.vllm.upkeep import Upkeep
from connectors.vllm.versions import skips_reading
from kvstore.block_store import BlockStore
from kvstore.lease import LeaseState, ReadLease, WriteLease
from kvstore.namespace import Namespace
from kvstore.promotion import Prefetch
from kvstore.types import BlockKey, Request

PIN_S = 10.0
"""How long a request that was offered blocks, but no pages to load them into, may keep them from eviction."""
P = ParamSpec("P")
R = TypeVar("R")

_log = logging.getLogger(__name__)


def _owning(method: Callable[Concatenate["SchedulerHalf", P], R]) -> Callable[Concatenate["SchedulerHalf", P], R]:
    """A call from vLLM's scheduler, during which the store is that thread's."""

    @wraps(method)
    def call(half: "SchedulerHalf", /, *args: P.args, **kwargs: P.kwargs) -> R:
        with half.owning:
            return method(half, *args, **kwargs)

    return call


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
        """Keys of every block whose tokens are known by now. A session may have dropped tokens since the last time."""
        hashes = self.request.block_hashes
        del self.keys[len(hashes) :]
        while self.keys and self.keys[-1] != self.ns.key(hashes[len(self.keys) - 1]):
            self.keys.pop()
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
class _Run:
    """Blocks of one request that follow one another, and the pages they are in, which are held."""

    ns: Namespace
    request_id: str
    start: int
    keys: list[BlockKey]
    parent: BlockKey | None
    pages: list[Page]


@dataclass(eq=False, slots=True)
class _Store:
    """A store job under way."""

    lease: WriteLease
    runs: list[_Run]
    num_ranks_done: int = 0
    failed: bool = False


@dataclass(slots=True)
class SchedulerHalf:
    """Everything that is known of requests, loads and stores. VLLM's scheduler thread only, but for the upkeep's."""

    store: BlockStore
    planner: Planner
    tokens_per_block: int
    num_ranks: int
    prefetch_s: float
    namespace_for: Callable[[EngineRequest], Namespace | None]
    owning: threading.Lock = field(default_factory=threading.Lock)
    upkeep: Upkeep = field(init=False)
    door: ArenaDoor = field(default_factory=ArenaDoor)
    pool: PagePool | None = None
    served: Served = field(default_factory=Served)
    _requests: dict[str, _Tracked] = field(default_factory=dict)
    _loads: dict[str, _Load] = field(default_factory=dict)
    _stores: dict[int, _Store] = field(default_factory=dict)
    _complete: list[_Run] = field(default_factory=list)
    """To be stored with the next step."""
    _num_stores: int = 0
    _step: Step = field(default_factory=Step)

    def __post_init__(self) -> None:
        self.upkeep = Upkeep(self.store, self.owning)

    # ---- before a request computes

    @_owning
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

    @_owning
    def offer(self, request: EngineRequest, num_computed_tokens: int) -> int | None:
        """Tokens to load beyond the engine's own; None: not known yet. May be asked any number of times."""
        tracked = self._requests.get(request.request_id)
        if tracked is None or skips_reading(request):
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

    @_owning
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

    @_owning
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
        self._begin_stores()
        step, self._step = self._step, Step()
        return step

    @_owning
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

    @_owning
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
        return bool(self._step.loads or self._step.lost or self._complete or self._loads or self._stores)

    # ---- its end

    @_owning
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

    @_owning
    def clear(self, namespaces: Iterable[Namespace]) -> None:
        """Forget what is stored of them in every tier."""
        for ns in namespaces:
            self.store.clear(ns)

    def close(self) -> None:
        """Let go, of the store too. Slots that a worker may still write to are left as they are."""
        self.upkeep.close()
        with self.owning:
            self._let_go()
            self.store.close()

    def _let_go(self) -> None:
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
        """Have what has become complete stored with the next step."""
        request = tracked.request
        if not tracked.is_stored or not pages:
            return
        # The KV of a token is final once the token after it is known: a guess may have been in its place.
        num_verified = min(request.num_computed_tokens, request.num_tokens - 1)
        num_blocks = min(num_verified // self.tokens_per_block, len(tracked.grow()), len(pages))
        if tracked.keep < tracked.announced.input_tokens // self.tokens_per_block:
            num_blocks = min(num_blocks, tracked.keep)
        blocks = self.planner.store(request.request_id, num_blocks * self.tokens_per_block)
        if not blocks:
            return
        held = [self._pages.blocks[page] for page in pages[blocks.start : blocks.stop]]
        self._pages.touch(held)
        keys = tracked.keys[blocks.start : blocks.stop]
        parent = tracked.keys[blocks.start - 1] if blocks.start else None
        self._complete.append(_Run(tracked.ns, request.request_id, blocks.start, keys, parent, held))

    def _begin_stores(self) -> None:
        """One job for all that has become complete; to ask for room may take a millisecond, so it is done once."""
        complete, self._complete = self._complete, []
        while complete:
            ns = complete[0].ns
            runs = [run for run in complete if run.ns is ns]
            complete = [run for run in complete if run.ns is not ns]
            lease = self.store.reserve(ns, sum(len(run.keys) for run in runs))
            left = lease.num_blocks
            for run in runs:
                self._cut(run, left)
                left -= len(run.keys)
            runs = [run for run in runs if run.keys]
            if not runs:
                self.store.abort(lease)
                continue
            number = self._num_stores = self._num_stores + 1
            self._stores[number] = _Store(lease, runs)
            pages = [page.block_id for run in runs for page in run.pages]
            self._step.stores.append(StoreJob(number, self._slots(lease, slice(None)), pages))

    def _cut(self, run: _Run, num_blocks: int) -> None:
        """There is room for ``num_blocks`` of it."""
        if num_blocks >= len(run.keys):
            return
        self.planner.not_stored(run.request_id, run.start + num_blocks)
        self.served.num_unstored_blocks += len(run.keys) - num_blocks
        self._pages.free_blocks(run.pages[num_blocks:])
        del run.keys[num_blocks:], run.pages[num_blocks:]

    def _end(self, job: _Store) -> None:
        for run in job.runs:
            self._pages.free_blocks(run.pages)
        num_blocks = sum(len(run.keys) for run in job.runs)
        if job.failed:
            self.served.num_unstored_blocks += num_blocks
            self.store.abort(job.lease)
            return
        self.served.num_stored_blocks += num_blocks
        for run in job.runs:
            self.store.commit(job.lease, run.keys, run.parent)

    @property
    def _pages(self) -> PagePool:
        if self.pool is None:
            raise RuntimeError("vLLM has not shown its pool of pages; a bug")
        return self.pool
