"""Which blocks of a request to load, to store and to prefetch. Pure, and the same for every engine.

Rule 1: whole blocks only; nothing is rounded up into tokens that nobody has.
Rule 2: the engine computes at least one token of a request, whatever the store has.
Rule 3: what the engine has is not loaded; a block that it has in part is its own to finish.
Rule 4: a block is stored when all its tokens are computed for good, never on a guess; in order, with no gap, once.
Rule 5: from the first block on that failed to load, the request loads nothing any more: no retry can go on for ever.
Rule 6: asked again, a planner gives the same answer; told of a request that it does not know, it does nothing.
Rule 7: layers of a hybrid model lie in groups with blocks of their own; a hit is legal if each group has what it needs.

An engine that keeps count itself needs the functions alone; ``Planner`` keeps count for one that does not. Blocks are
numbered from the root of the request's chain; counts of tokens come from its whole list, prompt and output alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

NOTHING = range(0)
SERVED_ATTENTION = frozenset({"full", "mla", "sliding window"})
"""Kinds of attention whose KV of a prefix, or of its last tokens, is all that is needed to go on from it."""


class Draft(Enum):
    """What a speculating engine drafts with."""

    NONE = "none"  # or with n-grams, which have no KV
    IN_BLOCK = "in block"  # a model whose KV lies in the same pages, so that blocks have it
    ELSEWHERE = "elsewhere"  # a model whose KV the store does not see


@dataclass(frozen=True, slots=True)
class EngineTraits:
    """What of an engine decides whether, and how, it can be served."""

    tokens_per_page: int
    attention: frozenset[str] = frozenset({"full"})
    num_hosts: int = 1
    draft: Draft = Draft.NONE
    window_tokens: tuple[int | None, ...] = (None,)
    """Of each group of layers: tokens that one attends to, itself among them; None: all."""

    @property
    def num_redone_blocks(self) -> int:
        """Blocks at the end of a hit that are computed all the same: a draft model reads their hidden states."""
        return 1 if self.draft is Draft.IN_BLOCK else 0

    def window_blocks(self, tokens_per_block: int) -> tuple[int | None, ...]:
        """Blocks at the end of a hit that each group needs; None: all."""
        return tuple(
            None if window is None else -(-(window - 1) // tokens_per_block) + self.num_redone_blocks
            for window in self.window_tokens
        )

    def refusals(self, tokens_per_block: int) -> list[str]:
        """Why this engine cannot be served, to be said once, loudly; empty if it can."""
        reasons = [
            f"attention of kind {kind!r} needs more than the blocks of a prefix"
            for kind in sorted(self.attention - SERVED_ATTENTION)
        ]
        if tokens_per_block < 1 or tokens_per_block % self.tokens_per_page:
            reasons.append(f"a block of {tokens_per_block} tokens is not whole pages of {self.tokens_per_page}")
        if self.num_hosts > 1:
            reasons.append(f"the engine spans {self.num_hosts} hosts, and one table cannot see all of its pages")
        if self.draft is Draft.ELSEWHERE:
            reasons.append("the draft model's KV is not in the blocks, so that a hit would spoil its guesses")
        if any(window is not None and window < 2 for window in self.window_tokens):
            reasons.append("a sliding window of one token needs no blocks, so that there is nothing to serve")
        return reasons


@dataclass(frozen=True, slots=True)
class Load:
    """Blocks to bring into the engine's pages."""

    blocks: range = NOTHING
    gap_tokens: int = 0
    """Tokens to compute before the first of them; an engine that cannot leave them for later loads nothing."""


def usable_blocks(num_tokens: int, tokens_per_block: int) -> int:
    """Leading blocks of a request of ``num_tokens`` that may be served and leave a token to compute."""
    return max(0, num_tokens - 1) // tokens_per_block


def blocks_to_load(num_tokens: int, num_computed_tokens: int, num_ready_blocks: int, tokens_per_block: int) -> Load:
    """What to load of ``num_ready_blocks`` leading ones beyond the tokens the engine has."""
    start = -(-num_computed_tokens // tokens_per_block)
    stop = min(num_ready_blocks, usable_blocks(num_tokens, tokens_per_block))
    if start >= stop:
        return Load()
    return Load(range(start, stop), start * tokens_per_block - num_computed_tokens)


def blocks_to_store(num_verified_tokens: int, num_stored_blocks: int, tokens_per_block: int) -> range:
    """Blocks beyond the stored ones that are complete. Tokens that a draft guessed do not count until verified."""
    return range(num_stored_blocks, max(num_stored_blocks, num_verified_tokens // tokens_per_block))


def needed_blocks(num_blocks: int, window_blocks: int | None) -> range:
    """Blocks that a group must have for a hit of ``num_blocks``: all, or the last ``window_blocks``."""
    return range(0 if window_blocks is None else max(0, num_blocks - window_blocks), num_blocks)


class HitSearch:
    """The longest legal hit of a request, found by asking what each group has.

    ``num_blocks`` is the longest that the answers so far allow, and only falls. A block that is missing rules out every
    hit that ends after it and needs it: in a group that needs all, those beyond it; in one with a window as well, since
    none is searched whose window lies past it. It is settled, and legal, when nothing is ``open``.
    """

    def __init__(self, num_blocks: int, windows: Sequence[int | None]) -> None:
        """At most ``num_blocks``; ``windows`` are the groups', in blocks, see ``EngineTraits.window_blocks``."""
        self.num_blocks = num_blocks
        self._windows = windows
        self._known = [0] * len(windows)
        """The longest hit that each group is known to have what it needs for."""

    def open(self) -> dict[int, range]:
        """What is yet to be asked, by group; of those that need all first, since they bound what the others need."""
        whole, windows = dict[int, range](), dict[int, range]()
        for group, window in enumerate(self._windows):
            blocks = needed_blocks(self.num_blocks, window)
            if window is None and self._known[group] < self.num_blocks:
                whole[group] = blocks
            elif window is not None and self._known[group] != self.num_blocks and blocks:
                windows[group] = blocks
        return whole or windows

    def found(self, group: int, blocks: range, num_there: int) -> None:
        """Of the ``blocks`` asked of ``group``, the first ``num_there`` are there."""
        stop = blocks.start + min(num_there, len(blocks))
        if stop == blocks.stop or self._windows[group] is None:
            self._known[group] = stop
        self.num_blocks = min(self.num_blocks, stop)


@dataclass(slots=True)
class _Progress:
    """What was planned for one request."""

    num_stored_blocks: list[int]
    """By group."""
    load: Load | None = None
    give_up_s: float | None = None
    num_prefetched_blocks: int = 0
    max_ready_blocks: int | None = None
    """Where a load failed: blocks from there on count as missing."""

    def limited(self, num_blocks: int) -> int:
        """``num_blocks``, without those that failed to load."""
        return num_blocks if self.max_ready_blocks is None else min(num_blocks, self.max_ready_blocks)


class Planner:
    """Plans for the requests of one engine, from ``arrive`` to ``end``. Single-owner; the clock is the caller's."""

    def __init__(self, traits: EngineTraits, tokens_per_block: int, wait_s: float) -> None:
        """``wait_s`` is how long a request waits at most for a better answer. An engine with refusals gets no plans."""
        self.refusals = traits.refusals(tokens_per_block)
        self.windows = () if self.refusals else traits.window_blocks(tokens_per_block)
        """Of each group, see ``HitSearch``."""
        self._tokens_per_block = tokens_per_block
        self._num_redone_blocks = traits.num_redone_blocks
        self._wait_s = wait_s
        self._requests: dict[str, _Progress] = {}

    @property
    def num_requests(self) -> int:
        """Requests that something is remembered of."""
        return len(self._requests)

    # ---- before a request computes

    def arrive(self, request_id: str) -> None:
        """A request to plan for."""
        if not self.refusals:
            self._requests.setdefault(request_id, _Progress([0] * len(self.windows)))

    def prefetch(self, request_id: str, num_tokens: int, num_computed_tokens: int, num_ready_blocks: int) -> range:
        """Blocks to bring into RAM, of which no lower level needs to have any; each is named once in a life."""
        progress = self._requests.get(request_id)
        if progress is None:
            return NOTHING
        start = max(num_ready_blocks, num_computed_tokens // self._tokens_per_block, progress.num_prefetched_blocks)
        stop = progress.limited(usable_blocks(num_tokens, self._tokens_per_block))
        if start >= stop:
            return NOTHING
        progress.num_prefetched_blocks = stop
        return range(start, stop)

    def max_hit_blocks(self, request_id: str, num_tokens: int) -> int:
        """Leading blocks to look for: nothing that failed, and once a load is decided nothing beyond it."""
        progress = self._requests.get(request_id)
        if progress is None:
            return 0
        most = progress.limited(usable_blocks(num_tokens, self._tokens_per_block))
        return most if progress.load is None else min(most, progress.load.blocks.stop)

    def may_wait(self, request_id: str, now_s: float) -> bool:
        """Whether an answer that is still pending may be asked for again: not after ``wait_s``, nor after ``load``."""
        progress = self._requests.get(request_id)
        if progress is None:
            return False
        if progress.give_up_s is None:
            progress.give_up_s = now_s + self._wait_s
        return progress.load is None and now_s < progress.give_up_s

    def load(self, request_id: str, num_tokens: int, num_computed_tokens: int, num_ready_blocks: int) -> Load:
        """What to load of the ``num_ready_blocks`` that are pinned in RAM; decided once in a life of the request."""
        progress = self._requests.get(request_id)
        if progress is None:
            return Load()
        if progress.load is None:
            progress.num_stored_blocks = [num_ready_blocks] * len(self.windows)
            hit = min(progress.limited(num_ready_blocks), usable_blocks(num_tokens, self._tokens_per_block))
            served = hit - self._num_redone_blocks
            progress.load = blocks_to_load(num_tokens, num_computed_tokens, served, self._tokens_per_block)
        return progress.load

    def failed(self, request_id: str, block: int) -> Load:
        """``block`` was to be loaded and did not arrive: what is left of the load; the rest is computed, and stored."""
        progress = self._requests.get(request_id)
        if progress is None or progress.load is None:
            return Load()
        progress.max_ready_blocks = progress.limited(block)
        progress.num_stored_blocks = [min(stored, block) for stored in progress.num_stored_blocks]
        blocks = progress.load.blocks
        if block < blocks.stop:
            left = range(blocks.start, block)
            progress.load = Load(left, progress.load.gap_tokens) if left else Load()
        return progress.load

    # ---- while it computes

    def store(self, request_id: str, num_verified_tokens: int, group: int = 0) -> range:
        """Blocks to store now that so many tokens, from the first on, are computed for good. May be called any time."""
        progress = self._requests.get(request_id)
        if progress is None or progress.load is None:
            return NOTHING
        blocks = blocks_to_store(num_verified_tokens, progress.num_stored_blocks[group], self._tokens_per_block)
        progress.num_stored_blocks[group] = blocks.stop
        return blocks

    def not_stored(self, request_id: str, block: int, group: int = 0) -> None:
        """The store had no room for ``block`` and those after it: they are planned again, with no gap before them."""
        progress = self._requests.get(request_id)
        if progress is not None:
            progress.num_stored_blocks[group] = min(progress.num_stored_blocks[group], block)

    def restart(self, request_id: str) -> None:
        """The request was preempted and lost its pages: a new life, in which what failed to load stays failed."""
        progress = self._requests.get(request_id)
        if progress is not None:
            self._requests[request_id] = _Progress([0] * len(self.windows), max_ready_blocks=progress.max_ready_blocks)

    def end(self, request_id: str) -> None:
        """The request finished or was aborted, in whatever state."""
        self._requests.pop(request_id, None)
