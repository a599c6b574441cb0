"""What policies learn, in a thread of its own, so that the owner never waits for it. Owner thread only, but ``_run``.

At most one job is at work; what it found is applied by ``poll``. One that failed found nothing: the others go on.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

from kvstore.mover import Executor
from kvstore.policy.base import Refit
from kvstore.pool import BlockPool

log = logging.getLogger(__name__)


class Refits:
    """The way from a policy to the thread and back."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._found: deque[Callable[[], None]] = deque()  # append and popleft are atomic
        self._is_busy = False

    def poll(self, pools: Iterable[BlockPool]) -> None:
        """Apply what was learned, then let the next pool learn that wants to."""
        while self._found:
            apply = self._found.popleft()
            self._is_busy = False
            apply()
        if self._is_busy:
            return
        for pool in pools:
            job = pool.refit()
            if job is not None:
                self._is_busy = True
                self._executor.submit(partial(self._run, job))
                return

    def close(self) -> None:
        """Learn no more; waits for nothing."""
        self._executor.close()

    def _run(self, job: Refit) -> None:
        try:
            found = job()
        except Exception:  # the edge of the thread: learning is no reason to fail
            log.exception("the policy of one pool could not learn, which is a bug; it goes on with what it knows")
            found = _nothing
        self._found.append(found)


def _nothing() -> None:
    """What a job found that failed."""
