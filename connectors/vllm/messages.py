"""What the scheduler half tells every worker with a step, and what a worker tells it back. Plain data, pickled."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Slots:
    """Places in an arena: whoever has the arena, by its number at ``door``, finds them at ``offsets_bytes``."""

    door: str
    arena: int
    offsets_bytes: list[int]


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Slots to copy into pages of a group; reported by the request's id, with the request's other loads of a step."""

    request_id: str
    group: int
    slots: Slots
    pages: list[int]


@dataclass(frozen=True, slots=True)
class StoreJob:
    """Pages of a group to copy into slots; reported by number."""

    number: int
    group: int
    slots: Slots
    pages: list[int]


@dataclass(slots=True)
class Step:
    """What is to be done with one step of the engine."""

    loads: list[LoadJob] = field(default_factory=list)
    stores: list[StoreJob] = field(default_factory=list)
    lost: list[LoadJob] = field(default_factory=list)
    """Loads that are over and whose slots were given to somebody else meanwhile: to be reported as failed."""


@dataclass(slots=True)
class StoreReport:
    """Store jobs that are over, as one worker or several say; ``aggregate`` is what vLLM joins the ranks' with."""

    num_ranks_done: Counter[int] = field(default_factory=Counter)
    failed: set[int] = field(default_factory=set)

    def aggregate(self, other: "StoreReport") -> "StoreReport":
        """Both together."""
        return StoreReport(self.num_ranks_done + other.num_ranks_done, self.failed | other.failed)
