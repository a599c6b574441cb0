"""The engine's KV pages: the top tier. ``BlockPool`` knows what is in them; ``Transfers`` brings and takes the rest.

A page is FILLING while its request computes it, then READY under its block key and pinned by every request that reads
it. Pages under a copy are held: their request may end in any state, and they are handed out again when it returned.
"""

import time
from collections.abc import Callable, Sequence

from torch import Tensor

from connectors.plan import usable_blocks
from connectors.torch_engine.request import EngineRequest
from connectors.torch_engine.scheduler import Admission
from connectors.torch_engine.transfers import Transfers
from kvstore.namespace import Namespace
from kvstore.pool import BlockPool, SlotState
from kvstore.types import BlockKey


class PagedCache:
    """Pages of all requests; ``transfers`` is None for an engine without a store."""

    def __init__(self, kv: Tensor, namespace: Namespace, pool: BlockPool, transfers: Transfers | None) -> None:
        """``pool`` accounts for the pages of ``kv`` [pages, layers, 2, tokens, heads, dim] and is empty."""
        self.kv = kv
        self.namespace = namespace
        self.pool = pool
        self._transfers = transfers
        self._tokens_per_block = namespace.layout.tokens_per_block

    @property
    def num_pages(self) -> int:
        """Pages in all."""
        return self.pool.num_slots

    # ---- the life of a request

    def arrive(self, request: EngineRequest) -> None:
        """Hash the prompt, tell the policies, and ask the store for what the pages lack."""
        request.keys = self.namespace.keys(request.tokens)
        self.pool.arrive(request.announced, request.keys)
        if self._transfers is not None:
            self._transfers.arrive(request, self._usable(request))

    def attach(self, request: EngineRequest) -> Admission:
        """Pin the resident prefix and start to load what the store's RAM has beyond it."""
        if self._transfers is not None and self._transfers.is_prefetching(request):
            return Admission.NOT_YET
        usable = self._usable(request)
        resident = self._resident(usable)
        for page in resident:
            self.pool.pin(page)
        missing = self._pages_for(len(request.tokens) + 1) - len(resident)
        if missing > self._num_obtainable:
            for page in resident:
                self.pool.unpin(page)
            return Admission.NO_ROOM
        request.pages = resident
        request.num_committed = len(resident)
        request.num_computed = len(resident) * self._tokens_per_block
        request.count_served("hbm", request.num_computed)
        if self._transfers is not None:
            self._transfers.load(request, usable, self._reserve)
        return Admission.ADMITTED

    def grow(self, request: EngineRequest, num_tokens: int) -> bool:
        """Give pages to the next ``num_tokens``; False, and nothing changes, where there are too few."""
        missing = self._pages_for(request.num_computed + num_tokens) - len(request.pages)
        if missing <= 0:
            return True
        pages = self._reserve(missing)
        if len(pages) < missing:
            for page in pages:
                self.pool.abort(page)
            return False
        # What a mask hides is multiplied by 0, and 0 times a leftover NaN is NaN.
        self.kv[pages[-1]].zero_()
        request.pages += pages
        return True

    def settle(self, request: EngineRequest, num_tokens: int) -> bool:
        """``num_tokens`` more are computed: name the pages that are full.

        False if the prefix they were computed from did not arrive: the request is back where its own pages end.
        """
        if request.load is not None and self._transfers is not None and not self._transfers.settle(request):
            for page in request.pages[request.num_committed :]:
                self.pool.abort(page)
            del request.pages[request.num_committed :]
            request.num_computed = request.num_committed * self._tokens_per_block
            return False
        request.num_computed += num_tokens
        num_full = request.num_computed // self._tokens_per_block
        self._extend_keys(request, num_full)
        for index in range(request.num_committed, num_full):
            parent = request.keys[index - 1] if index else None
            page = self.pool.commit(request.pages[index], request.keys[index], parent, int(time.time()))
            self.pool.pin(page)
            request.pages[index] = page
        request.num_committed = num_full
        if self._transfers is not None:
            self._transfers.offload(request)
        return True

    def release(self, request: EngineRequest) -> None:
        """Take all pages back; what is named stays findable until it is evicted."""
        if self._transfers is not None:
            self._transfers.abandon(request)
        for index, page in enumerate(request.pages):
            if index < request.num_committed:
                self.pool.unpin(page)
            else:
                self.pool.abort(page)
        request.pages = []
        request.num_computed = request.num_committed = 0

    def finish(self, request: EngineRequest) -> None:
        """The request has ended and given its pages back."""
        self.pool.finish(request.announced, len(request.output))
        if self._transfers is not None:
            self._transfers.finish(request)

    # ---- the loop

    def poll(self) -> None:
        """Apply the copies that have returned."""
        if self._transfers is not None:
            self._transfers.poll()

    def wait(self, timeout_s: float) -> None:
        """Sleep until a copy may have returned. Only for a caller with nothing to compute."""
        if self._transfers is not None:
            self._transfers.wait(timeout_s)

    def layer_wait(self, requests: Sequence[EngineRequest]) -> Callable[[int], None]:
        """What the model calls before a layer reads the pages of ``requests``."""
        loads = [request.load for request in requests if request.load is not None]

        def wait(layer: int) -> None:
            for load in loads:
                load.ticket.wait_layer(layer)

        return wait

    def close(self) -> None:
        """See the copies through."""
        if self._transfers is not None:
            self._transfers.close()

    # ---- the inside

    @property
    def _num_obtainable(self) -> int:
        """Pages that are free or may be evicted; pinned ones are READY or, after a removal, neither."""
        return self.pool.num(SlotState.FREE) + self.pool.num(SlotState.READY) - self.pool.num_pinned

    def _reserve(self, num_pages: int) -> list[int]:
        """Up to ``num_pages`` pages, evicting others; what leaves is taken to the store first."""
        pages = self.pool.reserve(num_pages)
        if self._transfers is not None:
            self._transfers.offload_victims()
        return pages

    def _usable(self, request: EngineRequest) -> list[BlockKey]:
        """Keys that may be served: whole blocks that leave a token to compute."""
        return request.keys[: usable_blocks(len(request.tokens), self._tokens_per_block)]

    def _resident(self, chain: Sequence[BlockKey]) -> list[int]:
        return self.pool.prefix(chain, self.namespace.oldest_unix_s(time.time()))

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._tokens_per_block)

    def _extend_keys(self, request: EngineRequest, num_blocks: int) -> None:
        """Keys of blocks that were filled by generated tokens."""
        start, end = (n * self._tokens_per_block for n in (len(request.keys), num_blocks))
        if end > start:
            parent = request.keys[-1] if request.keys else None
            request.keys += self.namespace.keys(request.tokens[start:end], parent=parent)
