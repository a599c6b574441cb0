"""Pages that lie scattered: gathered into a staging buffer and copied out in large runs, or the other way round."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gpu_io.copy_plan import Part, Shape, dmas, offload_parts, onboard_parts, steps
from gpu_io.direct_path import DIRECT_BYTES
from gpu_io.direction import Direction
from gpu_io.packing import Packer
from gpu_io.pages import PagedKV
from gpu_io.pipeline_ticket import PipelineTicket
from gpu_io.streams import Device
from gpu_io.works import Copy, Pack, Unpack, host_bytes

BUFFER_BYTES = 32 << 20
"""More only where a single layer of a block is larger."""
KERNEL_BYTES = 4 << 20
"""Layers are scattered together until they are so large: less is over before the next kernel is launched."""


class StagedPath:
    """Copies of one ``PagedKV`` in any arrangement."""

    def __init__(self, kv: PagedKV, device: Device, packer: Packer) -> None:
        self._kv = kv
        self._device = device
        self._packer = packer
        self._shape = Shape.of(kv.layout)
        all_bytes = self._shape.block_bytes * -(-kv.num_pages // kv.pages_per_block)
        self.buffer_bytes = max(min(BUFFER_BYTES, all_bytes), self._shape.layer_bytes)

    def offload(self, to: Direction, ticket: PipelineTicket, pages: Sequence[int], starts: Sequence[int]) -> None:
        """Copy ``pages`` to the slots at ``starts``."""
        table = self._table(to, ticket, pages)
        for part in offload_parts(self._shape, len(starts), self.buffer_bytes):
            buffer = to.next_buffer()
            if buffer.last_use is not None:
                to.kernels.wait(buffer.last_use)
            staged = self._staged(part, buffer.memory)
            those = self._pages_of(part)
            ticket.submit(to.kernels, Pack(self._kv, self._packer, pages[those], table[those], staged, part.layers))
            to.copies.wait(to.kernels.fence())
            for address, offset, num_bytes in dmas(self._shape, part, starts):
                for start, size in to.cuts(address, num_bytes):
                    piece = staged[offset + start : offset + start + size]
                    ticket.submit(to.copies, Copy(host_bytes(address + start, size), piece))
            buffer.last_use = to.copies.fence()
        ticket.pages_end = to.kernels.fence()

    def onboard(self, to: Direction, ticket: PipelineTicket, pages: Sequence[int], starts: Sequence[int]) -> None:
        """Copy the slots at ``starts`` to ``pages``, the first layers first."""
        table = self._table(to, ticket, pages)
        for part in onboard_parts(self._shape, len(starts), self.buffer_bytes, DIRECT_BYTES):
            buffer = to.next_buffer()
            if buffer.last_use is not None:
                to.copies.wait(buffer.last_use)
            staged = self._staged(part, buffer.memory)
            for address, offset, num_bytes in dmas(self._shape, part, starts):
                for start, size in to.cuts(address, num_bytes):
                    piece = staged[offset + start : offset + start + size]
                    ticket.submit(to.copies, Copy(piece, host_bytes(address + start, size)))
            to.kernels.wait(to.copies.fence())
            those = self._pages_of(part)
            for layers in self._scattered_together(part):
                work = Unpack(self._kv, self._packer, pages[those], table[those], staged, part.layers, layers)
                ticket.submit(to.kernels, work)
                num_ready = self._shape.num_ready(layers)
                if num_ready and part.blocks.stop == len(starts):
                    ticket.layer_ends.append((num_ready, to.kernels.fence()))
            buffer.last_use = to.kernels.fence()

    def _table(self, to: Direction, ticket: PipelineTicket, pages: Sequence[int]) -> Tensor:
        """Page ids on the device, put there in the stream that reads them, after what compute did to the pages."""
        host = self._device.pinned(pages)
        table = self._device.memory(host.numel() * host.itemsize).view(torch.int64)
        ticket.tables = [host, table]
        to.kernels.wait(self._device.compute_fence())
        ticket.submit(to.kernels, Copy(table, host))
        return table

    def _staged(self, part: Part, memory: Tensor) -> Tensor:
        return memory[: len(part.blocks) * len(part.layers) * self._shape.layer_bytes]

    def _pages_of(self, part: Part) -> slice:
        return slice(part.blocks.start * self._kv.pages_per_block, part.blocks.stop * self._kv.pages_per_block)

    def _scattered_together(self, part: Part) -> list[range]:
        first = part.layers.start
        together = steps(len(part.layers), self._shape.layer_bytes * len(part.blocks), KERNEL_BYTES)
        return [range(first + layers.start, first + layers.stop) for layers in together]
