"""The half of the connector that runs in vLLM's scheduler: what is offered, loaded and stored. It never waits.

A request is tracked from ``arrive`` to ``finish`` or ``forget``. Its loads and stores have lives of their own, which
may be longer.

Rule 1: a request has one pin at most, of a slice in each group of layers, taken when it is first offered something;
asked again, it gets the same answer.
Rule 2: a pin ends when its load has been reported, when nothing is to be loaded, when its request ends, or at a
deadline, and in no other way; a load that is under way keeps it whatever becomes of the request.
Rule 3: from the first block on that failed to load, a request is offered nothing any more (``connectors.plan``).
Rule 4: pages of a store job are held in vLLM's pool, and its slots are leased, until every rank has reported.
Rule 5: what is offered is a legal hit: every group has what it needs. All of that arrives, or vLLM computes it anew;
but where one group needs the whole prefix and there is no other, what arrived before a gap is kept.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from itertools import groupby
from typing import Concatenate, ParamSpec, TypeVar

from connectors.plan import HitSearch, Planner
from connectors.vllm.door import ArenaDoor
from connectors.vllm.messages import LoadJob, Slots, Step, StoreJob, StoreReport
from connectors.vllm.request import EngineRequest, PagePool
from connectors.vllm.served import Served
from connectors.vllm.tracked import Chain, Loading, Pin, Run, Storing, Tracked
from connectors.vllm.upkeep import Upkeep
from connectors.vllm.versions import skips_reading
from kvstore.block_store import BlockStore
from kvstore.lease import LeaseState, ReadLease, WriteLease
from kvstore.namespace import Namespace
from kvstore.types import Request

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


@dataclass(slots=True)
class SchedulerHalf:
    """Everything that is known of requests, loads and stores. VLLM's scheduler thread only, but for the upkeep's."""

    store: BlockStore
    planner: Planner
    tokens_per_block: int
    num_ranks: int
    prefetch_s: float
    namespaces_for: Callable[[EngineRequest], Sequence[Namespace] | None]
    owning: threading.Lock = field(default_factory=threading.Lock)
    upkeep: Upkeep = field(init=False)
    door: ArenaDoor = field(default_factory=ArenaDoor)
    pool: PagePool | None = None
    served: Served = field(default_factory=Served)
    _requests: dict[str, Tracked] = field(default_factory=dict)
    _loads: dict[str, Loading] = field(default_factory=dict)
    _stores: dict[int, Storing] = field(default_factory=dict)
    _complete: list[Run] = field(default_factory=list)
    """To be stored with the next step."""
    _num_stores: int = 0
    _step: Step = field(default_factory=Step)

    def __post_init__(self) -> None:
        self.upkeep = Upkeep(self.store, self.owning)

    # ---- before a request computes

    @_owning
    def arrive(self, request: EngineRequest, hints: Mapping[str, object]) -> None:
        """A request joins the line: tell the store's policies, and have it bring up what lies below its RAM."""
        spaces = self.namespaces_for(request)
        if spaces is None or self.planner.refusals:
            return
        now_s = time.time()
        chains = [
            Chain(ns, Request(request.request_id, now_s, ns.digest, request.num_prompt_tokens, hints)) for ns in spaces
        ]
        tracked = Tracked(request, chains, is_stored=hints.get("store") is not False)
        self._requests[request.request_id] = tracked
        self.planner.arrive(request.request_id)
        tracked.grow()
        tracked.keep = min(self.store.arrive(chain.announced, chain.keys) for chain in chains)
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
        self._go_on(tracked)
        if tracked.is_waiting:
            self.store.poll()
            self._go_on(tracked)
            if tracked.is_waiting and self.planner.may_wait(request.request_id, time.monotonic()):
                return None
        if not tracked.pins:
            self._pin(tracked)
        load = self.planner.load(request.request_id, request.num_tokens, num_computed_tokens, tracked.hit)
        tracked.offered = min(load.blocks.stop, tracked.hit)
        num_tokens = max(0, tracked.offered * self.tokens_per_block - num_computed_tokens)
        if num_tokens == 0:
            self._unpin(tracked)
        return num_tokens

    @_owning
    def take(self, request: EngineRequest, pages: Sequence[Sequence[int]], num_tokens: int) -> None:
        """The request is given pages of each group, and vLLM has decided to load ``num_tokens`` of what was offered."""
        tracked = self._requests.get(request.request_id)
        if tracked is None or request.request_id in self._loads:
            return
        tracked.has_pages = True
        if num_tokens == 0 or not tracked.pins:
            self._unpin(tracked)
            return
        start = tracked.offered - num_tokens // self.tokens_per_block
        pins, tracked.pins = tracked.pins, {}  # the load's from now on
        jobs = [
            self._load_job(request.request_id, group, pin, pages[group], range(start, tracked.offered))
            for group, pin in pins.items()
        ]
        leases = [pin.lease for pin in pins.values()]
        self._loads[request.request_id] = Loading(jobs, leases, start, self._from_tiers(tracked, start))
        self._step.loads += jobs

    # ---- while it computes

    @_owning
    def build(self, scheduled: Mapping[str, tuple[Sequence[Sequence[int]], int]]) -> Step:
        """What the workers are to do with this step.

        ``scheduled``: of each request that computes in it, the pages by group, and how many tokens.
        """
        self.store.poll()
        now_s = time.monotonic()
        for tracked in self._requests.values():
            if tracked.pins and now_s >= tracked.pinned_until_s:
                self._unpin(tracked)
        for request_id, (pages, num_tokens) in scheduled.items():
            tracked_or_none = self._requests.get(request_id)
            if tracked_or_none is not None:
                self._offload(tracked_or_none, pages, num_tokens)
        self._begin_stores()
        step, self._step = self._step, Step()
        return step

    @_owning
    def loaded(self, request_ids: set[str], failed_ids: set[str], failed_pages: set[int]) -> set[str]:
        """The workers report loads that are over; returns those of which vLLM must not hear yet.

        A lease may have been lost while its slots were read: then the workers are told to report the load as failed,
        which they do with the next step.
        """
        held_back = set()
        for request_id in request_ids & self._loads.keys():
            load = self._loads[request_id]
            is_lost = load.is_outdated or not all(lease.still_held() for lease in load.leases)
            for lease in load.leases:
                self.store.release(lease)
            load.leases, load.is_outdated = [], False
            if is_lost:
                self._step.lost += load.jobs
                held_back.add(request_id)
                continue
            del self._loads[request_id]
            self._settle(request_id, load, self._first_missing(request_id, load, failed_ids, failed_pages))
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
    def finish(self, request: EngineRequest, pages: Sequence[Sequence[int]], *, is_sound: bool) -> None:
        """The request has ended, in whatever state; ``is_sound`` unless its pages may hold anything."""
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            return
        if is_sound and request.request_id not in self._loads:
            self._offload(tracked, pages, 0)
        self._untrack(tracked)

    @_owning
    def forget(self, namespaces: Iterable[Namespace]) -> None:
        """The weights may be others from now on: what is stored of ``namespaces`` is forgotten in every tier.

        Requests in line go on without the store, since their keys are those of before; loads under way fail.
        """
        for tracked in list(self._requests.values()):
            self._untrack(tracked)
        for load in self._loads.values():
            load.is_outdated = True
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
            for lease in load.leases:
                self.store.release(lease)
        for tracked in self._requests.values():
            self._unpin(tracked)
        self._stores.clear()
        self._loads.clear()
        self._requests.clear()
        self.door.close()

    # ---- the inside

    def _max_hit(self, tracked: Tracked) -> int:
        """Leading blocks that may be served: those whose keys are known, and that leave a token to compute."""
        return min(tracked.grow(), self.planner.max_hit_blocks(tracked.request.request_id, tracked.request.num_tokens))

    def _prefetch(self, tracked: Tracked) -> None:
        """Have what a hit needs brought up: of a window, where the others' end has been found."""
        tracked.search = HitSearch(self._max_hit(tracked), self.planner.windows)
        tracked.prefetches = {}
        tracked.prefetch_until_s = time.monotonic() + self.prefetch_s
        self._go_on(tracked)

    def _go_on(self, tracked: Tracked) -> None:
        """Ask on where all that was asked for has an answer."""
        while not tracked.is_waiting:
            for group, (blocks, prefetch) in tracked.prefetches.items():
                tracked.search.found(group, blocks, prefetch.ready)
            unknown = tracked.search.open()
            if not unknown:
                return
            for group, blocks in unknown.items():
                keys = tracked.chains[group].keys[blocks.start : blocks.stop]
                tracked.prefetches[group] = blocks, self.store.prefetch(keys, tracked.prefetch_until_s)

    def _pin(self, tracked: Tracked) -> None:
        """Pin the longest legal hit that is in RAM."""
        most = self._max_hit(tracked)
        if not self._is_prefix_enough:  # what a window needs is up where the search has come to
            most = min(most, tracked.search.num_blocks)
        search = HitSearch(most, self.planner.windows)
        while unknown := search.open():
            for group, blocks in unknown.items():
                if group in tracked.pins:
                    self.store.release(tracked.pins.pop(group).lease)
                lease = self.store.pin(tracked.chains[group].keys[blocks.start : blocks.stop])
                tracked.pins[group] = Pin(blocks.start, lease)
                search.found(group, blocks, lease.num_blocks)
        tracked.hit = search.num_blocks
        tracked.pinned_until_s = time.monotonic() + PIN_S

    def _untrack(self, tracked: Tracked) -> None:
        request = tracked.request
        self._unpin(tracked)
        del self._requests[request.request_id]
        self.planner.end(request.request_id)
        for chain in tracked.chains:
            self.store.finish(chain.announced, chain.keys, request.num_output_tokens)

    def _unpin(self, tracked: Tracked) -> None:
        pins, tracked.pins = tracked.pins, {}
        for pin in pins.values():
            self.store.release(pin.lease)

    def _load_job(self, request_id: str, group: int, pin: Pin, pages: Sequence[int], blocks: range) -> LoadJob:
        """Those of ``blocks`` that vLLM has given pages in this group: not those before its window."""
        null = self._pages.null_block.block_id
        wanted = [block for block in blocks if pages[block] != null]
        if wanted and wanted[0] >= pin.start:
            slots = self._slots(pin.lease, slice(wanted[0] - pin.start, blocks.stop - pin.start))
        else:  # not what this window is known to need: the load fails
            slots = Slots(self.door.address, 0, [0] * len(wanted))
        return LoadJob(request_id, group, slots, [pages[block] for block in wanted])

    @property
    def _is_prefix_enough(self) -> bool:
        return self.planner.windows == (None,)

    def _slots(self, lease: ReadLease | WriteLease, blocks: slice) -> Slots:
        """A lost lease has no place: the workers will not find it, and the load fails."""
        location = self.store.locate(lease)
        if location is None or not location.descriptors:
            return Slots(self.door.address, 0, [0] * len(lease.slots[blocks]))
        return Slots(self.door.address, self.door.show(location), location.offsets_bytes[blocks])

    def _from_tiers(self, tracked: Tracked, start: int) -> dict[str, int]:
        """Tokens to be loaded, by the tier they came from; what another request brought up counts as memory."""
        left, served = tracked.offered - start, dict[str, int]()
        widest = min(tracked.prefetches.values(), key=lambda asked: asked[0].start, default=None)
        for tier, num_blocks in widest[1].blocks_from.items() if widest else ():
            served[tier] = min(num_blocks, left)
            left -= served[tier]
        served["memory"] = left
        return {tier: blocks * self.tokens_per_block for tier, blocks in served.items() if blocks}

    def tokens_from(self, request: EngineRequest) -> dict[str, int]:
        """Tokens that are being loaded for a request, by tier."""
        load = self._loads.get(request.request_id)
        return {} if load is None else load.served

    @staticmethod
    def _first_missing(request_id: str, load: Loading, failed_ids: set[str], failed_pages: set[int]) -> int | None:
        """The first block that did not arrive. None: all have."""
        if request_id in failed_ids:
            return load.start
        pages = load.jobs[0].pages if failed_pages else []
        return next((load.start + index for index, page in enumerate(pages) if page in failed_pages), None)

    def _settle(self, request_id: str, load: Loading, missing: int | None) -> None:
        if missing is None:
            self.served.add(load.served)
            tokens = ", ".join(f"{count} from {tier}" for tier, count in load.served.items())
            tracked = self._requests.get(request_id)
            of = tracked.request.num_tokens if tracked else "?"
            _log.info("request %s: of %s tokens the store gave %s", request_id, of, tokens)
        else:
            self.served.num_failed_loads += 1
            self.planner.failed(request_id, missing)
            _log.warning("request %s: block %d and those after it did not arrive", request_id, missing)

    def _offload(self, tracked: Tracked, pages: Sequence[Sequence[int]], num_scheduled: int) -> None:
        """Have what has become complete stored with the next step; ``num_scheduled`` tokens are computed in that."""
        if not tracked.is_stored or not any(pages):
            return
        num_blocks = min(self._num_final(tracked.request, num_scheduled) // self.tokens_per_block, tracked.grow())
        if tracked.keep < tracked.chains[0].announced.input_tokens // self.tokens_per_block:
            num_blocks = min(num_blocks, tracked.keep)
        request_id = tracked.request.request_id
        for group, (chain, own) in enumerate(zip(tracked.chains, pages, strict=True)):
            num_tokens = min(num_blocks, len(own)) * self.tokens_per_block
            blocks = self.planner.store(request_id, num_tokens, group)
            for start, stop in self._held_runs(own, blocks):
                held = [self._pages.blocks[page] for page in own[start:stop]]
                self._pages.touch(held)
                parent = chain.keys[start - 1] if start else None
                self._complete.append(Run(chain.ns, request_id, group, start, chain.keys[start:stop], parent, held))

    def _num_final(self, request: EngineRequest, num_scheduled: int) -> int:
        """Tokens whose KV is what it will stay, when this step has computed."""
        # The KV of a token is final once the token after it is known: a guess may have been in its place.
        if self._is_prefix_enough:
            return min(request.num_computed_tokens, request.num_tokens - 1)
        # A page that leaves its window may be another's with the next step, so that this one must have it copied.
        # Nobody guesses tokens of a prompt.
        num_known = max(request.num_prompt_tokens, request.num_tokens - 1)
        return min(request.num_computed_tokens + num_scheduled, num_known)

    def _held_runs(self, pages: Sequence[int], blocks: range) -> Iterator[tuple[int, int]]:
        """Start and stop of the runs of ``blocks`` that a request still has pages of."""
        null = self._pages.null_block.block_id if blocks else 0
        for is_held, run in groupby(blocks, lambda block: pages[block] != null):
            if is_held:
                members = list(run)
                yield members[0], members[-1] + 1

    def _begin_stores(self) -> None:
        """One job for all that has become complete; to ask for room may take a millisecond, so it is done once."""
        complete, self._complete = self._complete, []
        while complete:
            ns, group = complete[0].ns, complete[0].group
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
            self._stores[number] = Storing(lease, runs)
            pages = [page.block_id for run in runs for page in run.pages]
            self._step.stores.append(StoreJob(number, group, self._slots(lease, slice(None)), pages))

    def _cut(self, run: Run, num_blocks: int) -> None:
        """There is room for ``num_blocks`` of it."""
        if num_blocks >= len(run.keys):
            return
        self.planner.not_stored(run.request_id, run.start + num_blocks, run.group)
        self.served.num_unstored_blocks += len(run.keys) - num_blocks
        self._pages.free_blocks(run.pages[num_blocks:])
        del run.keys[num_blocks:], run.pages[num_blocks:]

    def _end(self, job: Storing) -> None:
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
