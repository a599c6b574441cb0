"""Workload aware: what is least likely to be used again in the time that a block usually stays.

Wang and others: "KVCache cache in the wild: characterizing and optimizing KVCache cache at a large cloud provider",
USENIX ATC 2025. Requests fall into categories of kind and turn; the time until a category's blocks are used again is
exponential, its mean learned from the past; among equals the deepest block leaves. Choices that the paper leaves open:
the share of blocks that are used again at all is learned too, a request's turn is one more than that of the request
that last used the deepest block it finds, and the past fades by half every 65536 blocks of a category.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvstore.policy.base import Refit
from kvstore.replay.baselines.leaves import RankedLeaves
from kvstore.types import Request

K = TypeVar("K", bound=Hashable)
Category = tuple[object, int]

MAX_TURN = 10
MEMORY_BLOCKS = 65536
LIFESPAN_DECAY = 0.999
FIRST_GUESS_S = 60.0


@dataclass(slots=True)
class _Habit:
    """What is known of a category."""

    num_uses: float = 1.0
    num_reuses: float = 0.5
    sum_s: float = FIRST_GUESS_S / 2

    def chance(self, age_s: float, lifespan_s: float) -> float:
        """Probability of a use between now and ``lifespan_s`` from now."""
        mean_s = max(1e-3, self.sum_s / self.num_reuses)
        return self.num_reuses / self.num_uses * math.exp(-age_s / mean_s) * -math.expm1(-lifespan_s / mean_s)

    def fade(self) -> None:
        """Half as sure."""
        self.num_uses, self.num_reuses, self.sum_s = self.num_uses / 2, self.num_reuses / 2, self.sum_s / 2


@dataclass(slots=True)
class _Use:
    """A block's last use."""

    category: Category
    at_s: float
    depth: int


class WorkloadAware(Generic[K]):
    """In each category the oldest use is the least likely to come back, so only the first of each are compared."""

    def __init__(self) -> None:
        self._leaves: RankedLeaves[K] = RankedLeaves()
        self._uses: dict[K, _Use] = {}
        self._habits: dict[Category, _Habit] = {}
        self._category: Category = (None, 1)
        self._now_s = 0.0
        self._lifespan_s = FIRST_GUESS_S

    def resize(self, capacity_blocks: int) -> None:
        """Nothing depends on it."""

    def arrive(self, request: Request, chain: Sequence[K]) -> int:
        """Learn from the blocks that were waiting for this, and let them wait for the next."""
        self._now_s = max(self._now_s, request.now_s)
        uses = [self._uses[key] for key in chain if key in self._uses]
        turn = min(MAX_TURN, uses[-1].category[1] + 1) if uses else 1
        self._category = (request.hints.get("kind"), turn)
        for key in chain:
            use = self._uses.get(key)
            if use is not None:
                habit = self._habits[use.category]
                habit.num_reuses += 1
                habit.sum_s += self._now_s - use.at_s
                self._leaves.rank(key, self._category, self._use(key, use.depth))
        return len(chain)

    def refit(self) -> Refit | None:
        """Nothing to learn in the background."""
        return None

    def finish(self, request: Request, output_tokens: int) -> None:
        """Nothing depends on it."""

    def insert(self, key: K, parent: K | None) -> None:
        """First use."""
        above = self._uses.get(parent) if parent is not None else None
        rank = self._use(key, above.depth + 1 if above else 0)
        self._leaves.insert(key, parent, self._category, rank)

    def remove(self, key: K) -> None:
        """It stayed so long after its last use."""
        self._leaves.remove(key)
        stayed_s = self._now_s - self._uses.pop(key).at_s
        self._lifespan_s += (1 - LIFESPAN_DECAY) * (stayed_s - self._lifespan_s)

    def victim(self, may_leave: Callable[[K], bool]) -> K | None:
        """The least likely of the first leaves of every category."""
        best: tuple[float, float, K] | None = None
        for category, habit in self._habits.items():
            first = self._leaves.first(category, may_leave)
            if first is None:
                continue
            (at_s, minus_depth), key = first
            chance = habit.chance(self._now_s - at_s, max(1e-3, self._lifespan_s))
            if best is None or (chance, minus_depth) < best[:2]:
                best = (chance, minus_depth, key)
        return best[2] if best else None

    def _use(self, key: K, depth: int) -> tuple[float, float]:
        habit = self._habits.setdefault(self._category, _Habit())
        habit.num_uses += 1
        if habit.num_uses > MEMORY_BLOCKS:
            habit.fade()
        self._uses[key] = _Use(self._category, self._now_s, depth)
        return self._now_s, -depth
