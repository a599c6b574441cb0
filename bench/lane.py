"""The threads that the store would move a tier's blocks with, to have a benchmark's jobs done by."""

from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue

from kvstore.mover import LANE_SHAPES, ThreadExecutor

Job = Callable[[], object]


class Lane:
    """As many threads as the store has for a tier."""

    def __init__(self, tier: str) -> None:
        self._executor = ThreadExecutor("bench", LANE_SHAPES[tier].num_threads)
        self._results: SimpleQueue[BaseException | None] = SimpleQueue()

    def run(self, jobs: Sequence[Job]) -> None:
        """Every job once; raises what the first one to fail raised."""
        for job in jobs:
            self._executor.submit(partial(self._run, job))
        errors = [self._results.get() for _ in jobs]
        for error in filter(None, errors):
            raise error

    def close(self) -> None:
        self._executor.close()

    def _run(self, job: Job) -> None:
        try:
            job()
        except Exception as error:  # noqa: BLE001 - it belongs to the thread that waits
            self._results.put(error)
        else:
            self._results.put(None)
