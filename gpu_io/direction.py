"""One direction of the pipeline: its two streams, its staging buffers, its bounce, its tickets in flight."""

import logging
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from gpu_io.bounce import Bounce
from gpu_io.bounced_ticket import BouncedTicket
from gpu_io.pipeline_ticket import PipelineTicket
from gpu_io.registration import Registration
from gpu_io.streams import Device, Fence

MAX_WORKS = 512
"""No ticket is begun while more are queued: a driver that has about a thousand makes the host wait."""

_log = logging.getLogger(__name__)
_kept_for_good: list[object] = []
"""What a device that hangs may still touch."""


@dataclass(slots=True)
class Buffer:
    """Staging memory. Whoever uses it next has a stream wait for the last use."""

    memory: Tensor
    last_use: Fence | None = None


class Direction:
    """``kernels`` gather or scatter, ``copies`` cross the link."""

    def __init__(self, device: Device, num_buffers: int, buffer_bytes: int, bounce: Bounce) -> None:
        self._device = device
        self.kernels, self.copies = device.stream(), device.stream()
        self._buffers = deque(Buffer(device.memory(buffer_bytes)) for _ in range(num_buffers))
        self.registration: Registration | None = None
        """Of the memory that slots lie in."""
        self.bounce = bounce
        self._in_flight: deque[PipelineTicket | BouncedTicket] = deque()
        if self._buffers:
            self.copies.wait(device.compute_fence())  # they may be memory that compute has just given up

    def next_buffer(self) -> Buffer:
        """The one that was used the longest time ago."""
        self._buffers.rotate(-1)
        return self._buffers[-1]

    @property
    def has_room(self) -> bool:
        """Whether another ticket can be begun."""
        self._settle()
        return sum(ticket.num_works for ticket in self._in_flight) < MAX_WORKS

    @property
    def is_idle(self) -> bool:
        """Whether no ticket is in flight."""
        self._settle()
        return not self._in_flight

    def cuts(self, address: int, num_bytes: int) -> list[tuple[int, int]]:
        """Offset and size of the copies that a run of slots takes: one, or one for each chunk that is registered."""
        return [(0, num_bytes)] if self.registration is None else self.registration.cuts(address, num_bytes)

    def is_registered(self, address: int, num_bytes: int) -> bool:
        """Whether the device reaches these bytes of the host by itself."""
        return self.registration is not None and self.registration.has(address, num_bytes)

    @contextmanager
    def follow(self, ticket: PipelineTicket) -> Iterator[None]:
        """What is submitted inside is ``ticket``'s; if it cannot be submitted whole, the ticket has failed."""
        try:
            yield
        except RuntimeError:  # what torch raises when device memory is short, or the device is lost
            _log.exception("a copy between pages and slots failed; its blocks count as missing")
            ticket.failed = True
        if ticket.num_works:
            ticket.ends = self._ends(ticket)

    def add(self, ticket: PipelineTicket | BouncedTicket) -> None:
        """It is in flight, until it is done."""
        self._in_flight.append(ticket)

    def close(self) -> bool:
        """Wait for what is in flight, and give all memory back; what a stuck copy may touch is kept for good.

        Whether nothing is stuck.
        """
        stuck = False
        while self._in_flight:
            ticket = self._in_flight.popleft()
            ticket.wait()
            if ticket.failed and not ticket.done():
                stuck = True
                keep_for_good(ticket)
            else:
                ticket.let_go()
        if stuck:
            keep_for_good((self._buffers, self.bounce))
            return False
        for buffer in self._buffers:
            self._device.free(buffer.memory)
        self._buffers.clear()
        self.bounce.close()
        return True

    def _ends(self, ticket: PipelineTicket) -> list[Fence]:
        try:
            if ticket.failed:  # what it left in the buffers may be on its way: neither stream runs ahead of the other
                self.kernels.wait(self.copies.fence())
                self.copies.wait(self.kernels.fence())
            return [self.kernels.fence(), self.copies.fence()]
        except RuntimeError:  # the device is lost
            ticket.failed = True
            return [_Never()]

    def _settle(self) -> None:
        """Let go of the tickets that are done, in their order."""
        while self._in_flight and self._in_flight[0].done():
            self._in_flight.popleft().let_go()


def keep_for_good(what: object) -> None:
    """Never give back what a device that hangs may still touch."""
    _kept_for_good.append(what)


class _Never:
    """A fence of a device that is lost."""

    def query(self) -> bool:
        return False

    def wait(self) -> None:
        pass
