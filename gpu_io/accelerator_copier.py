"""Copies for pages on an accelerator: gathered or scattered on the device, one copy for each run of adjacent slots.

Each direction has a side stream and a staging buffer of its own. Work of one stream runs in order, so the buffer is
used again and again without a wait. Where host memory is not pinned the driver makes the host wait: correct, slower.
"""

import ctypes
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from gpu_io.copier import COPY_TIMEOUT_S, Ticket
from gpu_io.pages import PagedKV
from gpu_io.streams import Fence, SideStream, TorchSideStream
from kvstore.errors import ClosedError

MAX_TICKETS = 16
"""In flight in each direction."""
STAGING_BYTES = 32 << 20
"""Of each direction; more only for a single block that is larger."""
_QUERY_INTERVAL_S = 0.0002

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""What to move elements as: not every device indexes every type of float."""

_log = logging.getLogger(__name__)


class AcceleratorTicket:
    """Fences of one copy: one after each layer where compute waits for layers, and one at the end."""

    def __init__(self, slots: Sequence[memoryview], fences: Sequence[Fence], *, failed: bool) -> None:
        self.failed = failed
        self._fences = fences
        self._slots = slots  # kept alive as long as the device may touch them

    def done(self) -> bool:
        """Whether the device has passed the end."""
        return self._fences[-1].query()

    def wait(self) -> None:
        """Ask again and again, because a wait for the device itself could not be given up."""
        deadline_s = time.monotonic() + COPY_TIMEOUT_S
        while not self.done():
            if time.monotonic() >= deadline_s:
                self.failed = True
                return
            time.sleep(_QUERY_INTERVAL_S)

    def wait_layer(self, layer: int) -> None:
        """Let the current stream wait for ``layer``."""
        self._fences[min(layer, len(self._fences) - 1)].wait()


class AcceleratorCopier:
    """Copies through a staging buffer and a side stream for each direction."""

    def __init__(self, kv: PagedKV, side_stream: Callable[[torch.device], SideStream] = TorchSideStream) -> None:
        """``side_stream`` makes the streams of a device that torch does not know."""
        self._kv = kv
        self._bits = _BITS[kv.layers[0].itemsize]
        self._layers = [layer.view(self._bits) for layer in kv.layers]
        self._offloads = _Direction(kv, side_stream(kv.device), self._bits)
        self._onboards = _Direction(kv, side_stream(kv.device), self._bits)
        self._closed = False

    def offload(self, pages: Sequence[int], slots: Sequence[memoryview]) -> Ticket | None:
        """Gather after the compute submitted so far, then copy out."""
        self._require_open()
        self._kv.require_room(pages, slots)
        return self._offloads.start(slots, lambda: self._offload(self._offloads, pages, slots))

    def onboard(self, slots: Sequence[memoryview], pages: Sequence[int]) -> Ticket | None:
        """Copy in after the compute submitted so far, then scatter a layer of all pages before the next."""
        self._require_open()
        self._kv.require_fit(pages, slots)
        return self._onboards.start(slots, lambda: self._onboard(self._onboards, slots, pages))

    def close(self) -> None:
        """Wait for what is in flight."""
        self._closed = True
        for direction in (self._offloads, self._onboards):
            direction.close()

    # ---- submitted to the side streams

    def _offload(self, direction: "_Direction", pages: Sequence[int], slots: Sequence[memoryview]) -> list[Fence]:
        for index, part, staging in self._parts(direction, pages, slots):
            for layer, tensor in enumerate(self._layers):
                gathered = tensor.index_select(0, index)
                staging[:, layer].copy_(gathered.view(len(part), -1, *gathered.shape[1:]).transpose(1, 2))
            for run in adjacent(addresses(part), self._kv.layout.block_bytes):
                self._host(part, run).copy_(staging[run.start : run.stop].view(-1), non_blocking=True)
        return []

    def _onboard(self, direction: "_Direction", slots: Sequence[memoryview], pages: Sequence[int]) -> list[Fence]:
        fences: list[Fence] = []
        for index, part, staging in self._parts(direction, pages, slots):
            for run in adjacent(addresses(part), self._kv.layout.block_bytes):
                staging[run.start : run.stop].view(-1).copy_(self._host(part, run), non_blocking=True)
            fences = []  # a layer is in place when its last part is
            for layer, tensor in enumerate(self._layers):
                tensor.index_copy_(0, index, staging[:, layer].transpose(1, 2).flatten(0, 1))
                fences.append(direction.stream.fence())
        return fences

    def _parts(
        self, direction: "_Direction", pages: Sequence[int], slots: Sequence[memoryview]
    ) -> Iterator[tuple[Tensor, Sequence[memoryview], Tensor]]:
        """Page ids, slots and staging ``[block, layer, plane, page, token, head, dim]``, as much as fits at a time."""
        num_pages = self._kv.pages_per_block
        for start in range(0, len(slots), direction.num_staged):
            part = slots[start : start + direction.num_staged]
            index = direction.stream.index(pages[start * num_pages : (start + len(part)) * num_pages])
            yield index, part, direction.staging[: len(part)]

    def _host(self, slots: Sequence[memoryview], run: range) -> Tensor:
        """Adjacent slots as one flat tensor."""
        num_bytes = len(run) * self._kv.layout.block_bytes
        address = addresses(slots[run.start : run.start + 1])[0]
        return torch.frombuffer((ctypes.c_uint8 * num_bytes).from_address(address), dtype=self._bits)

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("the copier is closed; open another one")


class _Direction:
    """A side stream, its staging buffer and its tickets in flight."""

    def __init__(self, kv: PagedKV, stream: SideStream, bits: torch.dtype) -> None:
        layout = kv.layout
        self.stream = stream
        self.num_staged = max(1, STAGING_BYTES // layout.block_bytes)
        shape = (kv.num_planes, kv.pages_per_block, kv.tokens_per_page, layout.num_heads, layout.plane_dims[0])
        self.staging = torch.empty((self.num_staged, layout.num_layers, *shape), dtype=bits, device=kv.device)
        self._in_flight: deque[AcceleratorTicket] = deque()

    def start(self, slots: Sequence[memoryview], submit: Callable[[], list[Fence]]) -> Ticket | None:
        """Submit a copy; None while too many are in flight. What cannot be submitted whole is a failed copy."""
        while self._in_flight and self._in_flight[0].done():
            self._in_flight.popleft()
        if len(self._in_flight) >= MAX_TICKETS:
            return None
        failed, fences = False, list[Fence]()
        with torch.inference_mode(), self.stream.after_compute():
            try:
                fences = submit()
            except RuntimeError:  # what torch raises when device memory is short, or the device is lost
                _log.exception("a copy between pages and slots failed; its blocks count as missing")
                failed = True
            fences.append(self.stream.fence())
        ticket = AcceleratorTicket(slots, fences, failed=failed)
        self._in_flight.append(ticket)
        return ticket

    def close(self) -> None:
        """Wait for what is in flight."""
        while self._in_flight:
            self._in_flight.popleft().wait()


def addresses(slots: Sequence[memoryview]) -> list[int]:
    """Where each slot begins."""
    return [np.frombuffer(slot, dtype=np.uint8).ctypes.data for slot in slots]


def adjacent(starts: Sequence[int], num_bytes: int) -> list[range]:
    """Runs of slots that follow each other in memory, as ranges of indices into ``starts``."""
    breaks = [index for index, (one, next_one) in enumerate(pairwise(starts), 1) if next_one != one + num_bytes]
    return [range(*bounds) for bounds in pairwise([0, *breaks, len(starts)])] if starts else []
