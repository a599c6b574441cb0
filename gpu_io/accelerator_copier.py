"""Copies for pages on an accelerator, through torch's streams and events: CUDA and, by the same calls, ROCm.

Offload gathers scattered pages into one staging tensor on the device, then moves that in one asynchronous copy; onboard
is the mirror image, a layer at a time. This is the plain and correct way; the seam for the fast one is ``Copier``.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gpu_io.copier import Ticket
from gpu_io.pages import PagedKV
from kvstore.errors import LayoutError

MAX_TICKETS = 8


class AcceleratorTicket:
    """Events of one copy: one for each layer where layers are waited for, and one at its end."""

    failed = False

    def __init__(self, staging: Tensor) -> None:
        self.layers: list[torch.Event] = []
        self.end: torch.Event | None = None
        self._staging = staging
        """Kept until the copy has returned: its memory must not serve another tensor before."""

    def done(self) -> bool:
        """Whether the device has come past the end."""
        return self.end is not None and bool(self.end.query())

    def wait(self) -> None:
        """Wait on the host for the end."""
        if self.end is not None:
            self.end.synchronize()

    def wait_layer(self, layer: int) -> None:
        """Let the current stream wait for ``layer``."""
        torch.accelerator.current_stream().wait_event(self.layers[layer])


class AcceleratorCopier:
    """Two side streams, one for each direction."""

    def __init__(self, kv: PagedKV) -> None:
        """Raises ``LayoutError`` if ``kv`` is on a CPU, or a block is more than one page."""
        if kv.device.type == "cpu":
            raise LayoutError("pages on a CPU have no streams; use the CPU copier")
        if kv.pages_per_block != 1:
            raise LayoutError(f"a block of {kv.pages_per_block} pages is not served on {kv.device}; use blocks of one")
        self._kv = kv
        self._offloads = torch.Stream(kv.device)
        self._onboards = torch.Stream(kv.device)
        self._in_flight: list[AcceleratorTicket] = []

    def offload(self, pages: Sequence[int], slots: Sequence[memoryview]) -> Ticket | None:
        """Gather after the compute submitted so far, then copy out."""
        if not self._has_room():
            return None
        staging = self._staging(len(pages))
        ticket = AcceleratorTicket(staging)
        self._offloads.wait_stream(torch.accelerator.current_stream(self._kv.device))
        with self._offloads:
            index = torch.tensor(list(pages), device=self._kv.device)
            for layer, tensor in enumerate(self._kv.layers):
                staging[:, layer] = tensor.index_select(0, index)
            for row, slot in enumerate(slots):
                self._host(slot).copy_(staging[row], non_blocking=True)
            ticket.end = self._offloads.record_event()
        self._in_flight.append(ticket)
        return ticket

    def onboard(self, slots: Sequence[memoryview], pages: Sequence[int]) -> Ticket | None:
        """Copy in after the last reader submitted so far, and scatter layer by layer."""
        if not self._has_room():
            return None
        staging = self._staging(len(pages))
        ticket = AcceleratorTicket(staging)
        self._onboards.wait_stream(torch.accelerator.current_stream(self._kv.device))
        with self._onboards:
            index = torch.tensor(list(pages), device=self._kv.device)
            hosts = [self._host(slot) for slot in slots]
            for layer, tensor in enumerate(self._kv.layers):
                for row, host in enumerate(hosts):
                    staging[row, layer].copy_(host[layer], non_blocking=True)
                tensor.index_copy_(0, index, staging[:, layer])
                ticket.layers.append(self._onboards.record_event())
            ticket.end = ticket.layers[-1]
        self._in_flight.append(ticket)
        return ticket

    def close(self) -> None:
        """Wait for what is in flight."""
        for ticket in self._in_flight:
            ticket.wait()
        self._in_flight = []

    def _has_room(self) -> bool:
        self._in_flight = [ticket for ticket in self._in_flight if not ticket.done()]
        return len(self._in_flight) < MAX_TICKETS

    def _shape(self) -> tuple[int, ...]:
        layout = self._kv.layout
        return layout.num_layers, self._kv.num_planes, layout.tokens_per_block, layout.num_heads, layout.plane_dims[0]

    def _staging(self, num_blocks: int) -> Tensor:
        first = self._kv.layers[0]
        return torch.empty((num_blocks, *self._shape()), dtype=first.dtype, device=first.device)

    def _host(self, slot: memoryview) -> Tensor:
        return torch.frombuffer(slot, dtype=self._kv.layers[0].dtype).view(self._shape())
