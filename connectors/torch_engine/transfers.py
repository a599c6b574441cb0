"""Copies between the engine's pages and the store's RAM: what a request loads, what it leaves behind, what is evicted.

Nothing here fails a request. A busy copier, a full store and a load that did not arrive are all the same: compute it.

Rule 1: a page that a copy may touch is held in the pool until the copy has returned, whatever became of its request.
Rule 2: a lease ends when its copy has returned. Rule 3: blocks are offered to the store once, when their page is full.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from connectors.plan import blocks_to_load, blocks_to_store
from connectors.torch_engine.request import EngineRequest
from gpu_io.copier import Copier, Ticket
from kvstore.block_store import BlockStore
from kvstore.lease import ReadLease, WriteLease
from kvstore.namespace import Namespace
from kvstore.pool import BlockPool
from kvstore.promotion import Prefetch
from kvstore.types import BlockKey

COPY_POLL_S = 0.001


@dataclass(eq=False, slots=True)
class Load:
    """Pages being filled from pinned blocks."""

    ticket: Ticket
    lease: ReadLease
    keys: Sequence[BlockKey]
    """Of the blocks that go into ``pages``; more may be pinned."""
    pages: list[int]
    served: dict[str, int]
    """Tokens, by the tier that had them."""


@dataclass(eq=False, slots=True)
class Offload:
    """Blocks being copied into reserved slots."""

    ticket: Ticket
    lease: WriteLease
    pages: list[int]
    """Those that are held; none any more when the copy has left them."""
    keys: list[BlockKey]
    parents: list[BlockKey | None]


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request asked of the store when it arrived."""

    prefetch: Prefetch
    ready: int
    """Leading blocks that were in RAM already."""
    keep: int
    """Leading blocks of the prompt that the store's policy wants to keep."""


class Transfers:
    """The engine's side of the store. Owner thread only."""

    def __init__(
        self, store: BlockStore, namespace: Namespace, pool: BlockPool, copier: Copier, prefetch_timeout_s: float
    ) -> None:
        """``pool`` accounts for the pages that ``copier`` moves; ``on_evict`` is to be its hook."""
        self._store = store
        self._ns = namespace
        self._pool = pool
        self._copier = copier
        self._prefetch_timeout_s = prefetch_timeout_s
        self._tokens_per_block = namespace.layout.tokens_per_block
        self._asked: dict[str, Asked] = {}
        self._num_offered: dict[str, int] = {}
        self._offloads: list[Offload] = []
        self._abandoned: list[Load] = []
        self._victims: list[tuple[int, BlockKey, BlockKey | None]] = []
        self._given: set[BlockKey] = set()
        """Blocks in pages that came from the store or were stored: to ask it at each eviction would take too long."""

    # ---- the life of a request

    def arrive(self, request: EngineRequest, chain: Sequence[BlockKey]) -> None:
        """Tell the store's policies, and have it bring up what lies below its RAM."""
        keep = self._store.arrive(request.announced, request.keys)
        ready = self._store.lookup(chain).ready
        prefetch = self._store.prefetch(chain, time.monotonic() + self._prefetch_timeout_s)
        self._asked[request.request_id] = Asked(prefetch, ready, keep)

    def is_prefetching(self, request: EngineRequest) -> bool:
        """Whether the answer is still out; the prefetch's deadline ends it."""
        asked = self._asked.get(request.request_id)
        return asked is not None and not asked.prefetch.done

    def load(self, request: EngineRequest, chain: Sequence[BlockKey], reserve: Callable[[int], list[int]]) -> None:
        """Start to fill pages for what RAM has of ``chain`` beyond the request's pages."""
        start = len(request.pages)
        if start == len(chain):
            return
        lease = self._store.pin(chain)
        plan = blocks_to_load(len(request.tokens), request.num_computed, lease.num_blocks, self._tokens_per_block)
        pages = reserve(len(plan.blocks))
        ticket = self._copier.onboard(lease.views[start : start + len(pages)], pages) if pages else None
        if ticket is None:
            for page in pages:
                self._pool.abort(page)
            self._store.release(lease)
            return
        request.pages += pages
        request.num_computed += len(pages) * self._tokens_per_block
        keys = lease.keys[start : start + len(pages)]
        request.load = Load(ticket, lease, keys, pages, self._served(request, start, len(pages)))

    def settle(self, request: EngineRequest) -> bool:
        """End the request's load, which its last layer has waited for; False if it did not arrive."""
        load = request.load
        assert load is not None
        load.ticket.wait()
        if load.ticket.failed or not load.lease.still_held():
            self.abandon(request)
            return False
        request.load = None
        self._given.update(load.keys)
        self._store.release(load.lease)
        for tier, num_tokens in load.served.items():
            request.count_served(tier, num_tokens)
        request.metrics.bytes_onboarded += len(load.pages) * self._ns.layout.block_bytes
        return True

    def abandon(self, request: EngineRequest) -> None:
        """The request gives its pages back while they may still be written to."""
        load = request.load
        if load is None:
            return
        request.load = None
        for page in load.pages:
            self._pool.hold(page)
        self._abandoned.append(load)

    def offload(self, request: EngineRequest) -> None:
        """Offer the request's newly full blocks to the store, in order; those it has no room for, again next time."""
        offered = self._num_offered.get(request.request_id)
        if offered is None:
            offered = self._store.lookup(request.keys[: request.num_committed]).found
        blocks = blocks_to_store(self._num_kept(request) * self._tokens_per_block, offered, self._tokens_per_block)
        keys = request.keys[blocks.start : blocks.stop]
        parents = [request.keys[index - 1] if index else None for index in blocks]
        num_started = self._start(request.pages[blocks.start : blocks.stop], keys, parents)
        self._num_offered[request.request_id] = offered + num_started
        self._given.update(keys[:num_started])
        request.metrics.bytes_offloaded += num_started * self._ns.layout.block_bytes

    def finish(self, request: EngineRequest) -> None:
        """The request has ended."""
        self._asked.pop(request.request_id, None)
        self._num_offered.pop(request.request_id, None)
        self._store.finish(request.announced, request.keys, len(request.output))

    # ---- eviction

    def on_evict(self, key: BlockKey, page: int) -> None:
        """The pool is evicting a block: keep its page from reuse if the store was not given the block yet."""
        if key in self._given:
            self._given.remove(key)
            return
        self._victims.append((page, key, self._pool.parent_of(page)))
        self._pool.hold(page)

    def offload_victims(self) -> None:
        """Start to copy what ``on_evict`` has kept."""
        victims, self._victims = self._victims, []
        if not victims:
            return
        pages, keys, parents = (list(column) for column in zip(*victims, strict=True))
        self._start(pages, keys, parents)
        for page in pages:
            self._pool.unhold(page)  # the copy, where one was started, holds it now

    # ---- the loop

    def poll(self) -> None:
        """Apply the copies that have returned."""
        self._store.poll()
        self._copier.reach(self._store.fixed_memory())
        for load in [load for load in self._abandoned if load.ticket.done()]:
            self._abandoned.remove(load)
            for page in load.pages:
                self._pool.unhold(page)
            self._store.release(load.lease)
        for offload in tuple(self._offloads):
            if offload.ticket.pages_free():
                self._leave_pages(offload)
            if offload.ticket.done():
                self._offloads.remove(offload)
                self._end(offload)

    def wait(self, timeout_s: float) -> None:
        """Sleep until a copy may have returned."""
        self._store.wait(COPY_POLL_S if self._offloads or self._abandoned else timeout_s)

    def close(self) -> None:
        """See every copy through."""
        self._copier.close()
        self.poll()

    # ---- the inside

    def _start(self, pages: Sequence[int], keys: list[BlockKey], parents: list[BlockKey | None]) -> int:
        """Start to copy pages into as many slots as the store gives; returns how many blocks that is."""
        if not pages:
            return 0
        lease = self._store.reserve(self._ns, len(pages))
        pages = list(pages[: lease.num_blocks])
        ticket = self._copier.offload(pages, lease.views) if pages else None
        if ticket is None:
            self._store.abort(lease)
            return 0
        for page in pages:
            self._pool.hold(page)
        self._offloads.append(Offload(ticket, lease, pages, keys[: len(pages)], parents[: len(pages)]))
        return len(pages)

    def _leave_pages(self, offload: Offload) -> None:
        for page in offload.pages:
            self._pool.unhold(page)
        offload.pages.clear()

    def _end(self, offload: Offload) -> None:
        self._leave_pages(offload)
        if offload.ticket.failed:
            self._given.difference_update(offload.keys)
            self._store.abort(offload.lease)
            return
        start = 0
        for end in range(1, len(offload.keys) + 1):  # a commit for each run of blocks that follow one another
            if end == len(offload.keys) or offload.parents[end] != offload.keys[end - 1]:
                self._store.commit(offload.lease, offload.keys[start:end], offload.parents[start])
                start = end

    def _num_kept(self, request: EngineRequest) -> int:
        """Leading blocks that are full and that the store's policy wants; of generated ones it was not asked."""
        asked = self._asked.get(request.request_id)
        num_prompt_blocks = request.num_prompt_tokens // self._tokens_per_block
        if asked is None or asked.keep >= num_prompt_blocks:
            return request.num_committed
        return min(request.num_committed, asked.keep)

    def _served(self, request: EngineRequest, start: int, num_blocks: int) -> dict[str, int]:
        """Tokens of blocks ``start`` and following, by the tier they were in when the request arrived."""
        asked = self._asked.get(request.request_id)
        ready = start + num_blocks if asked is None else asked.ready
        from_memory = max(0, min(start + num_blocks, ready) - start)
        served = {"memory": from_memory}
        left = num_blocks - from_memory
        for tier, promoted in asked.prefetch.blocks_from.items() if asked else ():
            served[tier] = min(promoted, left)
            left -= served[tier]
        served["memory"] += left  # another request has brought them up meanwhile
        return {tier: blocks * self._tokens_per_block for tier, blocks in served.items() if blocks}
