"""The little that copiers ask of a device's streams: the seam between them and CUDA, ROCm or a simulated device."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch import Tensor

from kvstore.errors import LayoutError


class Fence(Protocol):
    """A point in a stream. ``torch.Event`` is one."""

    def query(self) -> bool:
        """Whether the stream has passed it. Never waits."""

    def wait(self) -> None:
        """Let what the current stream is given from now on wait for it. The host does not wait."""


class SideStream(Protocol):
    """A queue of device work beside the engine's compute."""

    def after_compute(self) -> AbstractContextManager[None]:
        """What is submitted inside runs here, after all that the current stream was given before."""

    def fence(self) -> Fence:
        """The point after all that was submitted here so far."""

    def index(self, pages: Sequence[int]) -> Tensor:
        """Page ids as an int64 tensor on the device. To be called inside ``after_compute``."""


class TorchSideStream:
    """A stream of an accelerator that torch knows."""

    def __init__(self, device: torch.device) -> None:
        """Raises ``LayoutError`` for a device that is not the accelerator of this machine."""
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is None or device.type != accelerator.type:
            raise LayoutError(
                f"pages on {device} cannot be copied: the accelerator that torch can use is {accelerator}"
            )
        self._device = device
        self._stream = torch.Stream(device)

    @contextmanager
    def after_compute(self) -> Iterator[None]:
        """Make this stream the current one of its device for a while, and leave the caller's device as it was."""
        outer = torch.accelerator.current_stream()
        compute = torch.accelerator.current_stream(self._device)
        self._stream.wait_stream(compute)
        torch.accelerator.set_stream(self._stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(compute)
            torch.accelerator.set_stream(outer)

    def fence(self) -> Fence:
        """An event recorded now."""
        return self._stream.record_event()

    def index(self, pages: Sequence[int]) -> Tensor:
        """From pinned memory, because a copy from pageable memory would make the host wait for this stream."""
        return torch.tensor(pages, dtype=torch.int64, pin_memory=True).to(self._device, non_blocking=True)
