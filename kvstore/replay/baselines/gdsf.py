"""GDSF with prefix awareness: uses times what a block costs to compute at its depth, above a floor that rises.

Jin and others: "RAGCache: efficient knowledge caching for retrieval-augmented generation", 2024, after Cherkasova's
GDSF. Leaves only leave; all blocks are of one size, so that the cost of one token of each counts.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

from kvstore.policy.base import Refit
from kvstore.replay.baselines.leaves import RankedLeaves
from kvstore.replay.prefill import ATTENTION_TOKENS
from kvstore.types import Request

K = TypeVar("K", bound=Hashable)


class GDSF(Generic[K]):
    """Rank = floor at the last use + uses * cost; who leaves sets the floor."""

    def __init__(self) -> None:
        self._leaves: RankedLeaves[K] = RankedLeaves()
        self._uses: dict[K, int] = {}
        self._depth: dict[K, int] = {}
        self._floor = 0.0
        self._tokens_per_block = 1.0

    def resize(self, capacity_blocks: int) -> None:
        """Nothing depends on it."""

    def arrive(self, request: Request, chain: Sequence[K]) -> int:
        """One use more of all that is resident."""
        self._tokens_per_block = request.input_tokens / max(1, len(chain))
        for key in chain:
            if key in self._leaves:
                self._uses[key] += 1
                self._leaves.rank(key, None, self._rank(key))
        return len(chain)

    def refit(self) -> Refit | None:
        """Nothing to learn in the background."""
        return None

    def finish(self, request: Request, output_tokens: int) -> None:
        """Nothing depends on it."""

    def insert(self, key: K, parent: K | None) -> None:
        """First use."""
        self._uses[key] = 1
        self._depth[key] = 0 if parent is None else self._depth.get(parent, 0) + 1
        self._leaves.insert(key, parent, None, self._rank(key))

    def remove(self, key: K) -> None:
        """Forgotten."""
        self._leaves.remove(key)
        del self._uses[key], self._depth[key]

    def victim(self, may_leave: Callable[[K], bool]) -> K | None:
        """The leaf of lowest rank; the floor rises to it."""
        first = self._leaves.first(None, may_leave)
        if first is None:
            return None
        (self._floor, *_), key = first
        return key

    def _rank(self, key: K) -> tuple[float, float]:
        depth = self._depth[key]
        cost = 1.0 + depth * self._tokens_per_block / ATTENTION_TOKENS
        return self._floor + self._uses[key] * cost, -depth
