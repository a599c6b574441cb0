"""Pages that are large runs of bytes in a block's order: one DMA for each run, and no kernel."""

from collections.abc import Sequence

from gpu_io.copy_plan import Shape, in_turn, steps
from gpu_io.direction import Direction
from gpu_io.pages import PagedKV
from gpu_io.pipeline_ticket import PipelineTicket
from gpu_io.streams import Device
from gpu_io.works import Copy, host_bytes

DIRECT_BYTES = 256 << 10
"""A DMA of this size reaches the speed of the link. Runs that are smaller are staged; none is cut to less."""


class DirectPath:
    """Copies of one ``PagedKV`` whose runs are large."""

    def __init__(self, kv: PagedKV, device: Device) -> None:
        self._kv = kv
        self._device = device
        self._shape = Shape.of(kv.layout)

    def offload(self, to: Direction, ticket: PipelineTicket, pages: Sequence[int], starts: Sequence[int]) -> None:
        """Copy ``pages`` to the slots at ``starts``."""
        to.copies.wait(self._device.compute_fence())
        for page_address, slot_address, num_bytes in self._kv.runs(pages, starts):
            for offset, size in to.cuts(slot_address, num_bytes):
                in_slots, in_pages = (
                    host_bytes(slot_address + offset, size),
                    self._kv.bytes_at(page_address + offset, size),
                )
                ticket.submit(to.copies, Copy(in_slots, in_pages))

    def onboard(self, to: Direction, ticket: PipelineTicket, pages: Sequence[int], starts: Sequence[int]) -> None:
        """Copy the slots at ``starts`` to ``pages``, some layers of all before the next."""
        to.copies.wait(self._device.compute_fence())
        groups = steps(self._shape.num_layers, self._shape.layer_bytes, DIRECT_BYTES)
        for layers in in_turn(self._shape, groups):
            for page_address, slot_address, num_bytes in self._kv.runs(pages, starts, layers):
                for offset, size in to.cuts(slot_address, num_bytes):
                    in_slots = host_bytes(slot_address + offset, size)
                    ticket.submit(to.copies, Copy(self._kv.bytes_at(page_address + offset, size), in_slots))
            if num_ready := self._shape.num_ready(layers):
                ticket.layer_ends.append((num_ready, to.copies.fence()))
