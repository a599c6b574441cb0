"""An engine without a model or a device, to find wrong bytes, hangs and leaks of a store: the simulator.

It drives any ``BlockStore`` as engines do: chunked prefill in steps with a budget of tokens, continuous batching, a
bounded number of pages, preemption, abort in every state, ranks that each copy their stripe of every block, groups of
layers that need all blocks or the trailing ones. Nothing in it is random and nothing moves by itself: ``step`` is the
scheduler's, ``copies`` has what the ranks have yet to copy, and a test draws whose turn it is. Every byte that was
loaded is compared with what the model would have computed, and the tokens follow from the bytes in the pages:

    engine = Engine(store, groups, num_pages=16)
    request = engine.add("r", prompt, num_output_tokens=4)
    engine.run(pause=lambda: store.wait(0.01))
    assert request.output == ...  # that of an engine whose store is None
    engine.check_idle()

A request is in one phase at a time:

    WAITING --> PREFETCHING --> PINNED --> LOADING --> PREFILLING --> DECODING --> FINISHED
      ^ `--------------- no hit ---------------------------^
      `-- preempted, from any of these; no hit and no room; a load that failed

and ABORTED from each of them. Its stores have lives of their own, which may be longer.
Invariant: a page is held by a request, or by copies that have not returned, or is free.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from kvstore.block_store import BlockStore
from kvstore.testing.engine_model import Group, next_token, states_after
from kvstore.testing.engine_pages import Pages, RankCopy
from kvstore.testing.engine_transfers import Chains, Load, Transfers


class Phase(Enum):
    """Where a request is in its life."""

    WAITING = "waiting"  # in line
    PREFETCHING = "prefetching"  # its blocks come up to RAM
    PINNED = "pinned"  # its hit is pinned, and it has no pages for it yet
    LOADING = "loading"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    FINISHED = "finished"
    ABORTED = "aborted"


@dataclass(eq=False, slots=True)
class EngineRequest:
    """One request, its tokens and its pages."""

    request_id: str
    tokens: list[int]
    """Prompt and output."""
    num_prompt_tokens: int
    num_output_tokens: int
    chains: Chains
    phase: Phase = Phase.WAITING
    pages: list[int] = field(default_factory=list)
    states: list[bytes] = field(default_factory=list)
    """Of every token that was computed or loaded."""
    load: Load | None = None
    num_loaded_blocks: int = 0
    """Blocks that were not computed, in all its lives."""
    num_preemptions: int = 0

    @property
    def output(self) -> list[int]:
        """What it has generated."""
        return self.tokens[self.num_prompt_tokens :]

    @property
    def has_ended(self) -> bool:
        """Whether it has finished or was aborted."""
        return self.phase in (Phase.FINISHED, Phase.ABORTED)


class Engine:
    """A scheduler, the pages of its ranks, and its side of a store."""

    def __init__(
        self,
        store: BlockStore | None,
        groups: Sequence[Group],
        *,
        num_pages: int,
        num_ranks: int = 1,
        max_step_tokens: int = 8,
        prefetch_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``groups`` have blocks of as many tokens; None for a store is an engine that has none.

        ``prefetch_s`` is how long a request waits for blocks from lower levels, on ``clock``, which is the store's.
        Raises ``LayoutError`` for layouts that are no whole stripes for every rank.
        """
        self.pages = Pages(groups, num_pages, num_ranks)
        self._transfers = Transfers(store, self.pages, prefetch_s=prefetch_s, clock=clock)
        self._max_step_tokens = max_step_tokens
        self._waiting: list[EngineRequest] = []
        self._loading: list[EngineRequest] = []
        self._running: list[EngineRequest] = []
        """In order of admission."""

    # ---- what there is to do

    @property
    def live(self) -> list[EngineRequest]:
        """Requests that have not ended, those that run first."""
        return [*self._running, *self._loading, *self._waiting]

    @property
    def copies(self) -> list[RankCopy]:
        """Copies of ranks that have not returned."""
        return self._transfers.copies

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to do."""
        return not (self.live or self._transfers.loads or self._transfers.storing)

    def is_storing(self, request: EngineRequest) -> bool:
        """Whether copies of its blocks are under way."""
        return any(storing.chains is request.chains for storing in self._transfers.storing)

    # ---- what a test does

    def add(self, request_id: str, prompt: Sequence[int], num_output_tokens: int) -> EngineRequest:
        """A request for at least one token arrives; its pages must be no more than there are."""
        assert num_output_tokens > 0
        assert -(-(len(prompt) + num_output_tokens) // self.pages.tokens_per_block) <= self.pages.num_pages
        tokens = list(prompt)
        chains = self._transfers.arrive(request_id, tokens)
        request = EngineRequest(request_id, tokens, len(prompt), num_output_tokens, chains)
        self._waiting.append(request)
        return request

    def step(self) -> None:
        """Apply what has returned, admit requests, and compute a step's tokens."""
        self._transfers.poll()
        for load, failed_block in self._transfers.end_loads():
            self._loaded(load, failed_block)
        for request in tuple(self._waiting):
            self._admit(request)
        self._compute()

    def preempt(self, request: EngineRequest) -> None:
        """A live request loses its pages and pins, and starts again, first in line; its tokens are kept."""
        self._take_back(request)
        request.phase = Phase.WAITING
        request.num_preemptions += 1
        self._waiting.insert(0, request)
        self._transfers.begin(request.chains)

    def abort(self, request: EngineRequest) -> None:
        """A live request is not wanted any more."""
        self._take_back(request)
        request.phase = Phase.ABORTED
        self._transfers.give_up(request.chains)
        self._transfers.finish(request.chains, len(request.output))

    def run(self, pause: Callable[[], object], *, max_steps: int = 2000) -> None:
        """Step, copy and ``pause``, which lets the store go on, until nothing is left to do.

        AssertionError if that is not so after ``max_steps``.
        """
        for _ in range(max_steps):
            if self.is_idle:
                return
            self.step()
            for copy in self.copies:
                copy.run()
            pause()
        raise AssertionError(f"it hangs: {[(request.request_id, request.phase.value) for request in self.live]}")

    # ---- promises

    def check_stored(self, request: EngineRequest) -> int:
        """AssertionError if RAM has wrong bytes of its blocks; returns how many it has, of all groups."""
        return self._transfers.check_stored(request.chains)

    def check_idle(self) -> None:
        """AssertionError if anything is left over in the engine; of the store, ask the store."""
        assert self.is_idle, "there is work left"
        assert self.pages.num_free == self.pages.num_pages, "a page has leaked"

    # ---- the inside

    def _take_back(self, request: EngineRequest) -> None:
        """Out of whatever line it is in, without pages and pins; a load under way keeps its own."""
        for line in (self._waiting, self._loading, self._running):
            if request in line:
                line.remove(request)
        self.pages.drop(request.pages)
        request.pages, request.states, request.load = [], [], None
        self._transfers.leave(request.chains)

    def _admit(self, request: EngineRequest) -> None:
        if not self._transfers.seek(request.chains):
            request.phase = Phase.PREFETCHING
            return
        hit = request.chains.hit
        if hit is None:
            request.phase = Phase.WAITING
            if self._num_missing(request, len(request.tokens)) <= self.pages.num_free:
                self._start(request)
            return
        request.phase = Phase.PINNED
        pages = self.pages.take(hit.num_blocks)
        if pages is not None:
            request.pages = pages
            request.load = self._transfers.load(request.chains, pages)
            request.phase = Phase.LOADING
            self._waiting.remove(request)
            self._loading.append(request)

    def _loaded(self, load: Load, failed_block: int | None) -> None:
        request = next((request for request in self._loading if request.load is load), None)
        if request is None:
            return
        if failed_block is None:
            self._loading.remove(request)
            num_blocks = load.hit.num_blocks
            request.load = None
            request.num_loaded_blocks += num_blocks
            request.states = states_after(b"", request.tokens[: num_blocks * self.pages.tokens_per_block])
            request.chains.num_stored = num_blocks
            self._start(request)
            return
        self._take_back(request)
        request.phase = Phase.WAITING
        request.chains.max_hit = failed_block
        self._waiting.insert(0, request)
        self._transfers.begin(request.chains)

    def _start(self, request: EngineRequest) -> None:
        if request in self._waiting:
            self._waiting.remove(request)
        request.phase = Phase.PREFILLING
        self._running.append(request)

    def _compute(self) -> None:
        budget = self._max_step_tokens
        for request in tuple(self._running):
            if request not in self._running:
                continue  # it was preempted for another
            num_tokens = min(len(request.tokens) - len(request.states), budget)
            if num_tokens > 0 and self._make_room(request, len(request.states) + num_tokens):
                self._forward(request, num_tokens)
                budget -= num_tokens

    def _make_room(self, request: EngineRequest, num_tokens: int) -> bool:
        """Pages for so many tokens, taken from those admitted later if need be; False if it must wait."""
        while (pages := self.pages.take(self._num_missing(request, num_tokens))) is None:
            if self._running[-1] is request:
                return False  # the rest is of those before it, or under copies, which return
            self.preempt(self._running[-1])
        request.pages += pages
        return True

    def _num_missing(self, request: EngineRequest, num_tokens: int) -> int:
        """How many pages it lacks for so many tokens."""
        return max(0, -(-num_tokens // self.pages.tokens_per_block) - len(request.pages))

    def _forward(self, request: EngineRequest, num_tokens: int) -> None:
        """Compute the KV of the next tokens and store what is complete; after the last of them there is a new one."""
        first = len(request.states)
        tokens = request.tokens[first : first + num_tokens]
        request.states += states_after(request.states[-1] if first else b"", tokens)
        for token in range(first, first + num_tokens):
            self.pages.write(request.pages, token, request.states[token])
        self._transfers.store(request.chains, request.pages, len(request.states))
        if len(request.states) < len(request.tokens):
            return
        request.phase = Phase.DECODING
        request.tokens.append(next_token(self.pages.read(request.pages, len(request.states) - 1)))
        if len(request.output) == request.num_output_tokens:
            self._take_back(request)
            request.phase = Phase.FINISHED
            self._transfers.finish(request.chains, len(request.output))
