"""The half of the connector that runs beside the model: it copies between pages and slots, and says what became of it.

Rule 1: a request's load is reported once, when its copies touch nothing any more; one that cannot be begun failed.
Rule 2: a store job is begun after the step's compute was submitted, and reported once.
Rule 3: an arena stays mapped while a job has slots in it, and while it is the last that was seen.
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from connectors.vllm.door import ArenaView
from connectors.vllm.messages import LoadJob, Step, StoreJob, StoreReport
from connectors.vllm.pages import PageFormat, paged, stripe
from gpu_io.copier import Copier, Ticket
from gpu_io.device import copier_for

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that share their pages' numbers."""

    layers: Mapping[str, Tensor]
    window_tokens: int | None


@dataclass(eq=False, slots=True)
class _Copy:
    """A job under way."""

    ticket: Ticket
    job: LoadJob | StoreJob


class WorkerHalf:
    """One rank's pages. The worker's own thread only."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        """``rank`` of ``num_ranks`` that have a part of every block."""
        self._rank = rank
        self._num_ranks = num_ranks
        self._copiers: list[Copier] = []
        self.forms: tuple[PageFormat, ...] = ()
        """By group; none before ``register``."""
        self._arenas: dict[int, ArenaView] = {}
        self._waiting: list[LoadJob | StoreJob] = []
        self._copies: list[_Copy] = []
        self._num_left: Counter[str] = Counter()
        """Loads of each request that are not over."""
        self._loaded: set[str] = set()
        self._failed_loads: set[str] = set()
        self._failed_pages: set[int] = set()
        self._report = StoreReport()

    def register(self, groups: Sequence[LayerGroup], num_pages: int, tokens_per_page: int) -> None:
        """The pages, once. Raises ``LayoutError`` for some that cannot be stored."""
        paged_groups = [paged(group.layers, num_pages, tokens_per_page, group.window_tokens) for group in groups]
        copiers: dict[tuple[object, ...], Copier] = {}
        for kv, _ in paged_groups:
            # Groups whose pages lie in the same memory have one copier, and its buffers, in common.
            place = tuple((layer.data_ptr(), layer.shape, layer.stride(), layer.dtype) for layer in kv.layers)
            if place not in copiers:
                copiers[place] = copier_for(kv)
            self._copiers.append(copiers[place])
        self.forms = tuple(form for _, form in paged_groups)

    def begin(self, step: Step) -> None:
        """Begin what the step asks for, after its compute was submitted."""
        self._num_left.update(load.request_id for load in [*step.lost, *step.loads])
        for load in step.lost:
            self._end(load, failed=True)
        waiting, self._waiting = [*self._waiting, *step.loads, *step.stores], []
        for job in waiting:
            self._begin(job)

    def take_loaded(self) -> tuple[set[str], set[str]]:
        """Requests whose loads are over, whatever came of them; and those of them of which nothing can be used.

        Where pages of a prefix are all that a request needs, it can use those before the first of the failed pages.
        """
        self._poll()
        loaded, self._loaded = self._loaded, set()
        failed = self._failed_loads & loaded
        self._failed_loads -= failed
        return loaded, set() if self._is_prefix_enough else failed

    def take_failed_pages(self) -> set[int]:
        """Pages that do not hold what they should; of loads that ``take_loaded`` has named or will."""
        failed, self._failed_pages = self._failed_pages, set()
        return failed if self._is_prefix_enough else set()

    @property
    def _is_prefix_enough(self) -> bool:
        return len(self.forms) == 1 and self.forms[0].window_tokens is None

    def take_report(self) -> StoreReport | None:
        """Store jobs that are over since the last time."""
        report, self._report = self._report, StoreReport()
        return report if report.num_ranks_done else None

    def close(self) -> None:
        """See the copies through and let go."""
        for copier in self._copiers:
            copier.close()
        self._poll()
        if not self._copies:
            for arena in self._arenas.values():
                arena.close()
            self._arenas.clear()

    # ---- the inside

    def _begin(self, job: LoadJob | StoreJob) -> None:
        slots = job.slots
        try:
            views, copier = self._views(job), self._copiers[job.group]
            copier.reach(self._arenas[slots.arena].fixed_memory)
            ticket = copier.onboard(views, job.pages) if isinstance(job, LoadJob) else copier.offload(job.pages, views)
        except Exception:  # noqa: BLE001 - the edge: a bug or a lost arena costs a miss, not the engine
            _log.exception("a copy between pages and slots could not be begun; its blocks count as missing")
            self._end(job, failed=True)
            return
        if ticket is None:
            self._waiting.append(job)
        else:
            self._copies.append(_Copy(ticket, job))

    def _views(self, job: LoadJob | StoreJob) -> list[memoryview]:
        if not self.forms:
            raise RuntimeError("a step came before the KV tensors were registered; a bug")
        slots = job.slots
        arena = self._arenas.get(slots.arena)
        if arena is None:
            arena = ArenaView(slots.door, slots.arena)
            self._forget_arenas()
            self._arenas[slots.arena] = arena
        stripe_bytes = self.forms[job.group].stripe_bytes
        return stripe(arena.views(slots.offsets_bytes, stripe_bytes * self._num_ranks), stripe_bytes, self._rank)

    def _forget_arenas(self) -> None:
        """Of a store that has gone: another has taken its place."""
        in_use = {copy.job.slots.arena for copy in self._copies}
        for number in [number for number in self._arenas if number not in in_use]:
            self._arenas.pop(number).close()

    def _end(self, job: LoadJob | StoreJob, *, failed: bool) -> None:
        if isinstance(job, StoreJob):
            self._report.num_ranks_done[job.number] += 1
            if failed:
                self._report.failed.add(job.number)
            return
        if failed:
            self._failed_pages.update(job.pages)
            self._failed_loads.add(job.request_id)
        self._num_left[job.request_id] -= 1
        if self._num_left[job.request_id] <= 0:
            del self._num_left[job.request_id]
            self._loaded.add(job.request_id)

    def _poll(self) -> None:
        left = []
        for copy in self._copies:
            if copy.ticket.done():
                self._end(copy.job, failed=copy.ticket.failed)
            else:
                left.append(copy)
        self._copies = left
