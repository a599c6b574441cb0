"""Copies for pages on an accelerator, near the speed of the link: many in flight, and compute hardly notices.

Scattered pages are gathered into one of a few staging buffers on the device and leave it in one large copy for each run
of adjacent slots; onboarding is the mirror image. Pages that are large runs already go directly. Kernels and copies of
each direction have a stream each, so that one buffer is filled while another is emptied.

Rule 1: an offload starts after the compute submitted before it has written, an onboard after it has read.
Rule 2: a staging buffer is used again after its last use; one stream waits for the other, the host for neither.
Rule 3: compute waits for the layer it is about to read, and for nothing else.
Rule 4: slots, pages and tables are somebody else's again when the host has seen the fence after their last use.
Rule 5: a device is given no slot that is not registered; its bytes go through the bounce.
"""

from collections.abc import Sequence

from gpu_io.bounce import Bounce
from gpu_io.bounced_ticket import BouncedTicket, Round, rounds_of
from gpu_io.copier import Ticket
from gpu_io.direct_path import DIRECT_BYTES, DirectPath
from gpu_io.direction import Direction, keep_for_good
from gpu_io.packing import Packer
from gpu_io.pages import PagedKV
from gpu_io.pipeline_ticket import PipelineTicket
from gpu_io.registration import Registration, span_of
from gpu_io.staged_path import StagedPath
from gpu_io.streams import Device
from gpu_io.works import addresses
from kvstore.errors import ClosedError

NUM_BUFFERS = 4
"""Of each direction: one is filled, one is emptied, and two make up for what is late."""


class PipelineCopier:
    """Copies between pages and slots, through staging buffers or directly."""

    def __init__(self, kv: PagedKV, device: Device, packer: Packer) -> None:
        """``packer`` gathers and scatters what is not copied directly."""
        self._kv = kv
        self._device = device
        self._span: tuple[int, int] | None = None
        """What is registered, or about to be: address and bytes."""
        self._registration: Registration | None = None
        self._path: DirectPath | StagedPath
        if kv.run_bytes >= DIRECT_BYTES:
            self._path, buffers = DirectPath(kv, device), (0, 0)
        else:
            self._path = StagedPath(kv, device, packer)
            buffers = NUM_BUFFERS, self._path.buffer_bytes
        num_blocks = -(-kv.num_pages // kv.pages_per_block)
        self._offloads, self._onboards = (
            Direction(device, *buffers, Bounce(device, kv.layout.block_bytes, num_blocks)) for _ in range(2)
        )
        self._closed = False

    def offload(self, pages: Sequence[int], slots: Sequence[memoryview]) -> Ticket | None:
        """Start to copy pages into slots."""
        self._require_open()
        self._kv.require_room(pages, slots)
        return self._begin(self._offloads, pages, slots)

    def onboard(self, slots: Sequence[memoryview], pages: Sequence[int]) -> Ticket | None:
        """Start to copy slots into pages, the first layers first."""
        self._require_open()
        self._kv.require_fit(pages, slots)
        return self._begin(self._onboards, pages, slots)

    def reach(self, memory: memoryview | None) -> None:
        """Register ``memory`` in the background instead of what was given before, once no copy is in flight."""
        span = None if memory is None else span_of(memory)
        if self._closed or span == self._span or not (self._offloads.is_idle and self._onboards.is_idle):
            return
        if self._registration is not None:
            self._registration.let_go()
        runtime = self._device.host_runtime()
        self._span = span
        self._registration = None if memory is None or runtime is None else Registration(memory, runtime)
        self._offloads.registration = self._onboards.registration = self._registration

    @property
    def registered_bytes(self) -> int:
        """How much of the memory that was given to ``reach`` the driver knows by now."""
        return 0 if self._registration is None else self._registration.registered_bytes

    def close(self) -> None:
        """Wait for what is in flight, and let go. What a device never lets go of is kept for good."""
        if self._closed:
            return
        self._closed = True
        is_over = [direction.close() for direction in (self._offloads, self._onboards)]
        if self._registration is not None:
            self._registration.close() if all(is_over) else keep_for_good(self._registration)

    def _begin(self, to: Direction, pages: Sequence[int], slots: Sequence[memoryview]) -> Ticket | None:
        if not to.has_room:
            return None
        starts = addresses(slots)
        are_registered = [to.is_registered(start, self._kv.layout.block_bytes) for start in starts]
        places = to.bounce.take(are_registered.count(False))
        if places is None:
            return None
        is_offload = to is self._offloads
        copy, pages = self._path.offload if is_offload else self._path.onboard, tuple(pages)

        def submit(part: Round) -> PipelineTicket:
            of_block = self._kv.pages_per_block
            ticket = PipelineTicket(slots, self._device.free)
            with to.follow(ticket):
                if part.starts:
                    copy(to, ticket, pages[part.blocks.start * of_block : part.blocks.stop * of_block], part.starts)
            return ticket

        rounds = rounds_of(starts, are_registered, places)
        ticket = BouncedTicket(slots, rounds, to.bounce, submit, is_offload=is_offload) if places else submit(rounds[0])
        to.add(ticket)
        return ticket

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("the copier is closed; open another one")
