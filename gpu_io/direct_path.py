"""Pages that are large runs of bytes in a block's order: one DMA for each run, and no kernel.

Where the device has batches, and they were faster when it was opened, DMAs are given to the driver in those. It may
refuse one at any time: then its copies are made one by one, in the same place of the same stream, and so are all after
it. Some of the batch may be on their way, which does not matter: the same bytes arrive twice.
"""

import logging
from collections.abc import Sequence
from functools import partial

import numpy as np

from gpu_io.calibration import calibrated
from gpu_io.copy_plan import Shape, in_turn, steps
from gpu_io.direction import Direction
from gpu_io.pages import PagedKV, Run
from gpu_io.pipeline_ticket import PipelineTicket
from gpu_io.streams import Device
from gpu_io.works import Copy, CopyBatch, host_bytes

DIRECT_BYTES = 256 << 10
"""A DMA of this size reaches the speed of the link. Runs that are smaller are staged; none is cut to less."""
BATCH_COPIES = 512
"""Of one call: drivers were seen to crash over batches of tens of thousands (vllm-project/vllm#49276)."""

_log = logging.getLogger(__name__)


class DirectPath:
    """Copies of one ``PagedKV`` whose runs are large."""

    def __init__(self, kv: PagedKV, device: Device) -> None:
        """Tries batches on ``device``."""
        self._kv = kv
        self._device = device
        self._shape = Shape.of(kv.layout)
        self._batch = calibrated(device, DIRECT_BYTES)

    def offload(self, to: Direction, ticket: PipelineTicket, pages: Sequence[int], starts: Sequence[int]) -> None:
        """Copy ``pages`` to the slots at ``starts``."""
        to.copies.wait(self._device.compute_fence())
        self._submit(to, ticket, self._kv.runs(pages, starts), is_offload=True)

    def onboard(self, to: Direction, ticket: PipelineTicket, pages: Sequence[int], starts: Sequence[int]) -> None:
        """Copy the slots at ``starts`` to ``pages``, some layers of all before the next."""
        to.copies.wait(self._device.compute_fence())
        groups = steps(self._shape.num_layers, self._shape.layer_bytes, DIRECT_BYTES)
        for layers in in_turn(self._shape, groups):
            self._submit(to, ticket, self._kv.runs(pages, starts, layers), is_offload=False)
            if num_ready := self._shape.num_ready(layers):
                ticket.layer_ends.append((num_ready, to.copies.fence()))

    def _submit(self, to: Direction, ticket: PipelineTicket, runs: Sequence[Run], *, is_offload: bool) -> None:
        pieces = [
            (page_address + offset, slot_address + offset, size)
            for page_address, slot_address, num_bytes in runs
            for offset, size in to.cuts(slot_address, num_bytes)
        ]
        if self._batch is None or len(pieces) == 1:
            for piece in pieces:
                ticket.submit(to.copies, self._copy(piece, is_offload=is_offload))
            return
        for start in range(0, len(pieces), BATCH_COPIES):
            some = pieces[start : start + BATCH_COPIES]
            rows = np.array(some, dtype=np.int64)[:, [1, 0, 2] if is_offload else [0, 1, 2]]
            instead = partial(self._copy_one_by_one, some, is_offload)
            ticket.submit(to.copies, CopyBatch(self._batch, rows, instead), len(some))

    def _copy_one_by_one(self, pieces: Sequence[Run], is_offload: bool, error: RuntimeError) -> None:
        """What the driver refused to do in a batch, in the stream that is current."""
        if self._batch is not None:
            _log.warning("the driver refused a batch of copies; from now on they are made one by one: %s", error)
            self._batch = None
        for piece in pieces:
            self._copy(piece, is_offload=is_offload).run()

    def _copy(self, piece: Run, *, is_offload: bool) -> Copy:
        page_address, slot_address, num_bytes = piece
        in_pages, in_slots = self._kv.bytes_at(page_address, num_bytes), host_bytes(slot_address, num_bytes)
        return Copy(in_slots, in_pages) if is_offload else Copy(in_pages, in_slots)
