"""The half of the connector that runs beside the model: it copies between pages and slots, and says what became of it.

Rule 1: every load that comes is reported once, when its copy touches nothing any more; one that cannot be begun failed.
Rule 2: a store job is begun after the step's compute was submitted, and reported once.
Rule 3: an arena stays mapped while a job has slots in it, and while it is the last that was seen.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from connectors.vllm.door import ArenaView
from connectors.vllm.messages import LoadJob, Slots, Step, StoreJob, StoreReport
from connectors.vllm.pages import PageFormat, paged, stripe
from gpu_io.copier import Copier, Ticket
from gpu_io.device import copier_for

_log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Copy:
    """A job under way."""

    ticket: Ticket
    arena: int


class WorkerHalf:
    """One rank's pages. The worker's own thread only."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        """``rank`` of ``num_ranks`` that have a part of every block."""
        self._rank = rank
        self._num_ranks = num_ranks
        self._copier: Copier | None = None
        self.form: PageFormat | None = None
        self._arenas: dict[int, ArenaView] = {}
        self._waiting: list[LoadJob | StoreJob] = []
        self._loads: dict[str, tuple[_Copy, LoadJob]] = {}
        self._stores: dict[int, _Copy] = {}
        self._loaded: set[str] = set()
        self._failed_pages: set[int] = set()
        self._report = StoreReport()

    def register(self, layers: Mapping[str, Tensor], num_pages: int, tokens_per_page: int) -> None:
        """The pages, once. Raises ``LayoutError`` for some that cannot be stored."""
        kv, self.form = paged(layers, num_pages, tokens_per_page)
        self._copier = copier_for(kv)

    def begin(self, step: Step) -> None:
        """Begin what the step asks for, after its compute was submitted."""
        for load in step.lost:
            self._fail(load)
        waiting, self._waiting = [*self._waiting, *step.loads, *step.stores], []
        for job in waiting:
            self._begin(job)

    def take_loaded(self) -> set[str]:
        """Requests whose loads are over, whatever came of them."""
        self._poll()
        loaded, self._loaded = self._loaded, set()
        return loaded

    def take_failed_pages(self) -> set[int]:
        """Pages that do not hold what they should; of loads that ``take_loaded`` has named or will."""
        failed, self._failed_pages = self._failed_pages, set()
        return failed

    def take_report(self) -> StoreReport | None:
        """Store jobs that are over since the last time."""
        report, self._report = self._report, StoreReport()
        return report if report.num_ranks_done else None

    def close(self) -> None:
        """See the copies through and let go."""
        if self._copier is not None:
            self._copier.close()
        self._poll()
        if not self._loads and not self._stores:
            for arena in self._arenas.values():
                arena.close()
            self._arenas.clear()

    # ---- the inside

    def _begin(self, job: LoadJob | StoreJob) -> None:
        slots = job.slots
        try:
            views = self._views(slots)
            self._of_copier.reach(self._arenas[slots.arena].fixed_memory)
            if isinstance(job, LoadJob):
                ticket = self._of_copier.onboard(views, job.pages)
            else:
                ticket = self._of_copier.offload(job.pages, views)
        except Exception:  # noqa: BLE001 - the edge: a bug or a lost arena costs a miss, not the engine
            _log.exception("a copy between pages and slots could not be begun; its blocks count as missing")
            self._fail(job)
            return
        if ticket is None:
            self._waiting.append(job)
        elif isinstance(job, LoadJob):
            self._loads[job.request_id] = _Copy(ticket, slots.arena), job
        else:
            self._stores[job.number] = _Copy(ticket, slots.arena)

    @property
    def _of_copier(self) -> Copier:
        if self._copier is None:
            raise RuntimeError("a step came before the KV tensors were registered; a bug")
        return self._copier

    def _views(self, slots: Slots) -> list[memoryview]:
        if self.form is None:
            raise RuntimeError("a step came before the KV tensors were registered; a bug")
        arena = self._arenas.get(slots.arena)
        if arena is None:
            arena = ArenaView(slots.door, slots.arena)
            self._forget_arenas()
            self._arenas[slots.arena] = arena
        stripe_bytes = self.form.stripe_bytes
        return stripe(arena.views(slots.offsets_bytes, stripe_bytes * self._num_ranks), stripe_bytes, self._rank)

    def _forget_arenas(self) -> None:
        """Of a store that has gone: another has taken its place."""
        in_use = {copy.arena for copy, _ in self._loads.values()} | {copy.arena for copy in self._stores.values()}
        for number in [number for number in self._arenas if number not in in_use]:
            self._arenas.pop(number).close()

    def _fail(self, job: LoadJob | StoreJob) -> None:
        if isinstance(job, LoadJob):
            self._loaded.add(job.request_id)
            self._failed_pages.update(job.pages)
        else:
            self._report.num_ranks_done[job.number] += 1
            self._report.failed.add(job.number)

    def _poll(self) -> None:
        for request_id, (copy, load) in list(self._loads.items()):
            if copy.ticket.done():
                del self._loads[request_id]
                self._loaded.add(request_id)
                if copy.ticket.failed:
                    self._failed_pages.update(load.pages)
        for number, copy in list(self._stores.items()):
            if copy.ticket.done():
                del self._stores[number]
                self._report.num_ranks_done[number] += 1
                if copy.ticket.failed:
                    self._report.failed.add(number)
