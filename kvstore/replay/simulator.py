"""One trace against one policy and capacity. Pure.

A request is a chain of block ids; its hit is the longest resident prefix. The policy is told of the whole chain, and
what is missing of what it wants to keep is inserted, root first; victims are leaves that are not of this very request.
This is what a pool of the store does while the request is pinned, and for LRU it leaves what presenting the blocks tail
first leaves: the capacity's worth of blocks used last.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.policy.base import Policy
from kvstore.replay.baselines.base import BlockCache
from kvstore.replay.prefill import ATTENTION_TOKENS, prefill_cost
from kvstore.replay.trace import Trace, TraceRequest
from kvstore.types import Request


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a replay."""

    hit_tokens: int
    input_tokens: int
    hit_cost: float
    input_cost: float
    blocks_referenced: int
    blocks_written: int

    @property
    def token_hit_rate(self) -> float:
        """Tokens served over input tokens, cold start included."""
        return self.hit_tokens / self.input_tokens if self.input_tokens else 0.0

    @property
    def compute_weighted_hit_rate(self) -> float:
        """Prefill work spared over prefill work: a token costs a constant and, for attention, its position."""
        return self.hit_cost / self.input_cost if self.input_cost else 0.0

    @property
    def blocks_written_per_referenced(self) -> float:
        """Insertions over references: what a tier that wears out would have written."""
        return self.blocks_written / self.blocks_referenced if self.blocks_referenced else 0.0


class Tally:
    """Adds up a replay."""

    def __init__(self, trace: Trace, attention_tokens: float = ATTENTION_TOKENS) -> None:
        self._trace = trace
        self._attention_tokens = attention_tokens
        self._hit_tokens = self._input_tokens = 0
        self._hit_cost = self._input_cost = 0.0
        self._referenced = 0
        self._written = 0

    def count(self, request: TraceRequest, num_hit_blocks: int, num_written_blocks: int) -> None:
        """A request found so many leading blocks, and so many became resident for it."""
        self.count_tokens(request, self._trace.hit_tokens(request, num_hit_blocks), num_written_blocks)

    def count_tokens(self, request: TraceRequest, hit_tokens: int, num_written_blocks: int) -> None:
        """The same, in tokens."""
        self._hit_tokens += hit_tokens
        self._input_tokens += request.input_tokens
        self._hit_cost += prefill_cost(hit_tokens, self._attention_tokens)
        self._input_cost += prefill_cost(request.input_tokens, self._attention_tokens)
        self._referenced += len(request.chain)
        self._written += num_written_blocks

    def result(self) -> Result:
        """The sum."""
        return Result(
            self._hit_tokens,
            self._input_tokens,
            self._hit_cost,
            self._input_cost,
            self._referenced,
            self._written,
        )


class Cache:
    """Resident blocks under a policy: a pool without slots."""

    def __init__(self, policy: Policy[int], capacity_blocks: int) -> None:
        self._policy = policy
        self._capacity_blocks = capacity_blocks
        self._parent: dict[int, int | None] = {}
        self._num_children: dict[int, int] = {}
        self._in_use: set[int] = set()
        policy.resize(capacity_blocks)

    def hit_blocks(self, chain: Sequence[int]) -> int:
        """The longest resident prefix."""
        for index, block in enumerate(chain):
            if block not in self._parent:
                return index
        return len(chain)

    def serve(self, request: Request, chain: Sequence[int], output_tokens: int) -> int:
        """Tell the policy of a request, insert what it wants, let it learn; returns how many blocks were inserted."""
        keep = self._policy.arrive(request, chain)
        self._in_use = set(chain)
        num_inserted = 0
        for index in range(keep):
            block = chain[index]
            if block in self._parent:
                continue
            if len(self._parent) >= self._capacity_blocks and not self._evict():
                break
            self._insert(block, chain[index - 1] if index else None)
            num_inserted += 1
        self._policy.finish(request, output_tokens)
        refit = self._policy.refit()
        if refit is not None:
            refit()()
        return num_inserted

    def _insert(self, block: int, parent: int | None) -> None:
        self._parent[block] = parent
        self._num_children[block] = 0
        if parent is not None:
            self._num_children[parent] += 1
        self._policy.insert(block, parent)

    def _evict(self) -> bool:
        victim = self._policy.victim(self._may_leave)
        if victim is None:
            return False
        parent = self._parent.pop(victim)
        del self._num_children[victim]
        if parent is not None:
            self._num_children[parent] -= 1
        self._policy.remove(victim)
        return True

    def _may_leave(self, block: int) -> bool:
        return not self._num_children[block] and block not in self._in_use


def replay(trace: Trace, policy: Policy[int], capacity_blocks: int) -> Result:
    """Every request of ``trace`` in order against ``policy`` with room for ``capacity_blocks``."""
    cache = Cache(policy, capacity_blocks)
    tally = Tally(trace)
    for number, request in enumerate(trace.requests):
        num_hit = cache.hit_blocks(request.chain)
        num_written = cache.serve(request.announced(number), request.chain, request.output_tokens)
        tally.count(request, num_hit, num_written)
    return tally.result()


def replay_blocks(trace: Trace, cache: BlockCache | None) -> Result:
    """Every block of every request of ``trace``, tail first, presented to ``cache``; None: there is no room at all."""
    tally = Tally(trace)
    for request in trace.requests:
        if cache is None:
            tally.count(request, 0, 0)
            continue
        chain = request.chain
        num_hit = next((index for index, block in enumerate(chain) if block not in cache), len(chain))
        num_written = 0
        for block in reversed(chain):
            num_written += block not in cache
            cache.access(block)
        tally.count(request, num_hit, num_written)
    return tally.result()
