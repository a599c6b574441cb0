"""Asynchronous copies for an engine whose pages are CPU tensors: one long-lived thread for each direction.

Compute on a CPU has happened when a copy is submitted, so there is nothing to order. Whatever moves bytes here lets go
of the interpreter lock while it does.
"""

import ctypes
import logging
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from threading import Condition, Thread

import numpy as np
import torch
from numpy.typing import NDArray

from gpu_io.copier import COPY_TIMEOUT_S, Ticket
from gpu_io.copy_plan import Shape, groups_of, in_turn
from gpu_io.packing import Packer, torch_packer
from gpu_io.pages import PagedKV
from kvstore.errors import ClosedError, LayoutError

MAX_TICKETS = 64
"""In flight in each direction."""
RUN_BYTES = 128 << 10
"""Onboard as many layers of a page at once as make a run of this size: smaller ones copy at half the speed or less."""

_log = logging.getLogger(__name__)


class CpuTicket:
    """Progress of one copy, in layers; the copying thread advances it."""

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._num_ready = 0
        self._failed = False
        self._changed = Condition()

    @property
    def failed(self) -> bool:
        """Whether the copy went wrong, or somebody waited too long for it."""
        return self._failed

    def done(self) -> bool:
        """Whether the last layer is there."""
        return self._num_ready == self._num_layers

    def pages_free(self) -> bool:
        """When it is done, and not before: nothing is staged."""
        return self.done()

    def wait(self) -> None:
        """Wait for the last layer."""
        self.wait_layer(self._num_layers - 1)

    def wait_layer(self, layer: int) -> None:
        """Wait for ``layer``, which also means those before it."""
        if self._num_ready > layer:
            return
        with self._changed:
            if not self._changed.wait_for(lambda: self._num_ready > layer, COPY_TIMEOUT_S):
                self._failed = True

    def advance(self, num_ready: int) -> None:
        """In the copying thread: the first ``num_ready`` layers are in place."""
        with self._changed:
            self._num_ready = num_ready
            self._changed.notify_all()

    def fail(self) -> None:
        """In the copying thread: it went wrong, and touches nothing any more."""
        self._failed = True
        self.advance(self._num_layers)


class CpuCopier:
    """One memmove for each run of bytes where pages are in a block's order, else one strided copy for each page.

    What is quantised goes layer by layer, through memory as large as one layer of all its blocks.
    """

    def __init__(self, kv: PagedKV) -> None:
        """Raises ``LayoutError`` if ``kv`` is not on a CPU."""
        if kv.device.type != "cpu":
            raise LayoutError(f"the CPU copier cannot reach pages on {kv.device}; copier_for finds one that can")
        self._kv = kv
        self._layers = [layer.view(torch.uint8).numpy() for layer in kv.layers]
        self._quantiser: Packer | None = torch_packer(kv) if kv.quantisation else None
        self._shape = shape = Shape.of(kv.layout)
        step = -(-RUN_BYTES // shape.layer_bytes) if kv.is_one_run else 1
        self._steps = in_turn(shape, groups_of(range(shape.num_layers), step))
        self._offloads = _Lane("kvstore-offload", shape.num_layers)
        self._onboards = _Lane("kvstore-onboard", shape.num_layers)

    def offload(self, pages: Sequence[int], slots: Sequence[memoryview]) -> Ticket | None:
        """Start to copy pages into slots."""
        self._kv.require_room(pages, slots)
        pages, slots = tuple(pages), tuple(slots)
        return self._offloads.start(lambda ticket: self._offload(pages, slots, ticket))

    def onboard(self, slots: Sequence[memoryview], pages: Sequence[int]) -> Ticket | None:
        """Start to copy slots into pages, a layer, or a few, of all pages before the next."""
        self._kv.require_fit(pages, slots)
        pages, slots = tuple(pages), tuple(slots)
        return self._onboards.start(lambda ticket: self._onboard(slots, pages, ticket))

    def reach(self, memory: memoryview | None) -> None:
        """Nothing: a CPU reaches all memory alike."""

    def close(self) -> None:
        """Let both threads end after what is queued."""
        for lane in (self._offloads, self._onboards):
            lane.close()

    # ---- in the copying threads

    def _offload(self, pages: Sequence[int], slots: Sequence[memoryview], ticket: CpuTicket) -> None:
        blocks = [np.frombuffer(slot, dtype=np.uint8) for slot in slots]
        if self._kv.is_in_order:
            for page_address, slot_address, num_bytes in self._kv.runs(pages, _addresses(blocks)):
                ctypes.memmove(slot_address, page_address, num_bytes)
        elif self._quantiser is not None:
            self._quantise(self._quantiser, pages, blocks)
        else:
            for layer in range(len(self._layers)):
                for in_page, in_block in self._pairs(layer, pages, blocks):
                    np.copyto(in_block, in_page)
        ticket.advance(self._shape.num_layers)

    def _onboard(self, slots: Sequence[memoryview], pages: Sequence[int], ticket: CpuTicket) -> None:
        blocks = [np.frombuffer(slot, dtype=np.uint8) for slot in slots]
        addresses = _addresses(blocks)
        for step in self._steps:
            if self._kv.is_in_order:
                for page_address, slot_address, num_bytes in self._kv.runs(pages, addresses, step):
                    ctypes.memmove(page_address, slot_address, num_bytes)
            elif self._quantiser is not None:
                self._dequantise(self._quantiser, blocks, pages, step)
            else:
                for in_page, in_block in self._pairs(step.start, pages, blocks):
                    np.copyto(in_page, in_block)
            if num_ready := self._shape.num_ready(step):
                ticket.advance(num_ready)

    @torch.inference_mode()
    def _quantise(self, quantiser: Packer, pages: Sequence[int], blocks: Sequence[NDArray[np.uint8]]) -> None:
        for layer in self._shape.layers if blocks else ():
            staged = torch.empty(len(blocks), self._shape.layer_bytes, dtype=torch.uint8)
            quantiser.pack(torch.tensor(pages), staged.view(-1), range(layer, layer + 1))
            for block, piece in zip(blocks, staged.numpy(), strict=True):
                np.copyto(self._layer_of(block, layer), piece)

    @torch.inference_mode()
    def _dequantise(
        self, quantiser: Packer, blocks: Sequence[NDArray[np.uint8]], pages: Sequence[int], layers: range
    ) -> None:
        for layer in layers if blocks else ():
            staged = torch.from_numpy(np.stack([self._layer_of(block, layer) for block in blocks]))
            quantiser.unpack(staged.view(-1), range(layer, layer + 1), torch.tensor(pages), range(layer, layer + 1))

    def _layer_of(self, block: NDArray[np.uint8], layer: int) -> NDArray[np.uint8]:
        return block[layer * self._shape.layer_bytes :][: self._shape.layer_bytes]

    def _pairs(
        self, layer: int, pages: Sequence[int], blocks: Sequence[NDArray[np.uint8]]
    ) -> list[tuple[NDArray[np.uint8], NDArray[np.uint8]]]:
        """Each page's bytes of ``layer`` in its tensor and in its block, ``[plane, token, head, byte]`` both."""
        _, num_planes, num_tokens, num_heads, dim_bytes = self._layers[layer].shape
        num_pages = self._kv.pages_per_block
        shape = (len(self._layers), num_planes, num_pages, num_tokens, num_heads, dim_bytes)
        return [
            (self._layers[layer][page], blocks[index // num_pages].reshape(shape)[layer, :, index % num_pages])
            for index, page in enumerate(pages)
        ]


class _Lane:
    """A thread that copies in order of submission, and the tickets it has not finished."""

    def __init__(self, name: str, num_layers: int) -> None:
        self._num_layers = num_layers
        self._in_flight: deque[CpuTicket] = deque()
        self._queue: SimpleQueue[tuple[Callable[[CpuTicket], None], CpuTicket] | None] = SimpleQueue()
        self._closed = False
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def start(self, copy: Callable[[CpuTicket], None]) -> CpuTicket | None:
        """Queue a copy; None while too many are."""
        if self._closed:
            raise ClosedError("the copier is closed; open another one")
        while self._in_flight and self._in_flight[0].done():
            self._in_flight.popleft()
        if len(self._in_flight) >= MAX_TICKETS:
            return None
        ticket = CpuTicket(self._num_layers)
        self._in_flight.append(ticket)
        self._queue.put((copy, ticket))
        return ticket

    def close(self) -> None:
        """End the thread after what is queued; it is a daemon, so that a stuck one keeps nobody."""
        if not self._closed:
            self._closed = True
            self._queue.put(None)
            self._thread.join(COPY_TIMEOUT_S)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            copy, ticket = item
            try:
                copy(ticket)
            except Exception:  # noqa: BLE001 - the edge of a copying thread: a bug is a failed copy, not a hang
                _log.exception("a copy between pages and slots failed; its blocks count as missing")
                ticket.fail()


def _addresses(blocks: Sequence[NDArray[np.uint8]]) -> list[int]:
    return [block.ctypes.data for block in blocks]
