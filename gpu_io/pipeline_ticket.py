"""The ticket of a copy that streams make: what the host may know of it, and compute may wait for."""

import logging
import time
from collections.abc import Callable, Sequence

from torch import Tensor

from gpu_io.copier import COPY_TIMEOUT_S
from gpu_io.streams import Fence, Stream, Work

_QUERY_INTERVAL_S = 0.0002

_log = logging.getLogger(__name__)


class PipelineTicket:
    """Fences of one copy: after its pages, after each layer, after all of it."""

    def __init__(self, slots: Sequence[memoryview], free: Callable[[Tensor], None]) -> None:
        """``free`` takes tables."""
        self.failed = False
        self.num_works = 0
        """Submitted so far, or begun to be, a batch counted by its copies: what fails on its way to the device may have
        reached it."""
        self.tables: list[Tensor] = []
        """To be given back when the ticket is done."""
        self.ends: list[Fence] = []
        self.pages_end: Fence | None = None
        """After the last access to the pages, where that is before the ends."""
        self.layer_ends: list[tuple[int, Fence]] = []
        """How many layers are in place, and the fence that says so; in order."""
        self._free = free
        self._slots = slots  # kept alive as long as the device may touch them

    def submit(self, stream: Stream, work: Work, num_copies: int = 1) -> None:
        """Give ``work``, a part of this copy, to ``stream``."""
        self.num_works += num_copies
        stream.submit(work)

    def done(self) -> bool:
        """Whether the streams have passed the ends. A device that is lost never has."""
        return all(self._is_passed(fence) for fence in self.ends)

    def pages_free(self) -> bool:
        """Whether the copy touches its pages no more."""
        return self.done() if self.pages_end is None else self._is_passed(self.pages_end)

    def wait(self) -> None:
        """See it through, or give up."""
        self.failed |= not comes_true(self.done)

    def wait_layer(self, layer: int) -> None:
        """Let compute wait for ``layer``."""
        for num_layers, fence in self.layer_ends:
            if layer < num_layers:
                fence.wait()
                return

    def let_go(self) -> None:
        """Give back the tables, when the ticket is done."""
        for table in self.tables:
            self._free(table)
        self.tables = []

    def _is_passed(self, fence: Fence) -> bool:
        try:
            return fence.query()
        except RuntimeError:  # an error of the device: what it did, and may do yet, nobody knows
            if not self.failed:
                _log.exception("the device failed while it copied; the pages and slots stay in quarantine")
            self.failed = True
            return False


def comes_true(ask: Callable[[], bool]) -> bool:
    """Ask again and again, because a wait for the device itself could not be given up; for a while at most."""
    deadline_s = time.monotonic() + COPY_TIMEOUT_S
    while not ask():
        if time.monotonic() >= deadline_s:
            return False
        time.sleep(_QUERY_INTERVAL_S)
    return True
