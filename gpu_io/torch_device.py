"""Every accelerator that torch knows: CUDA, ROCm and others are one device, through ``torch.accelerator``."""

import ctypes
import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from gpu_io.driver_batch import DriverBatch
from gpu_io.host_runtime import HostRuntime, cuda_driver, host_runtime
from gpu_io.streams import Batch, Fence, Work
from kvstore.errors import LayoutError

HIGH_PRIORITY = -1
"""Where a device knows priorities, small kernels of a side stream do not queue behind the large ones of a prefill."""

_log = logging.getLogger(__name__)


class TorchStream:
    """A stream beside the one that is current."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device, priority=HIGH_PRIORITY)

    def submit(self, work: Work) -> None:
        """Make this stream the current one of its device for a while, and leave the caller's device as it was."""
        outer = torch.accelerator.current_stream()
        compute = torch.accelerator.current_stream(self._device)
        torch.accelerator.set_stream(self._stream)
        try:
            with torch.inference_mode():
                work.run()
        finally:
            torch.accelerator.set_stream(compute)
            torch.accelerator.set_stream(outer)

    def wait(self, fence: Fence) -> None:
        """Wait for an event."""
        assert isinstance(fence, torch.Event)
        self._stream.wait_event(fence)

    def fence(self) -> Fence:
        """An event recorded now."""
        return self._stream.record_event()


class TorchDevice:
    """The accelerator that torch can use on this machine."""

    def __init__(self, device: torch.device) -> None:
        """Raises ``LayoutError`` for a device that is not of that kind."""
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is None or device.type != accelerator.type:
            raise LayoutError(
                f"pages on {device} cannot be copied: the accelerator that torch can use is {accelerator}"
            )
        self._device = device

    def stream(self) -> TorchStream:
        """A stream of high priority."""
        return TorchStream(self._device)

    def compute_fence(self) -> Fence:
        """An event recorded now in the caller's stream on this device."""
        return torch.accelerator.current_stream(self._device).record_event()

    def memory(self, num_bytes: int) -> Tensor:
        """From torch's own reserve, where it is the current stream's."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def pinned(self, values: Sequence[int]) -> Tensor:
        """Pinned, because a copy from pageable memory would make the host wait for the stream."""
        return torch.tensor(values, dtype=torch.int64, pin_memory=True)

    def pinned_memory(self, num_bytes: int) -> Tensor:
        """From torch's own reserve."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def host_copy(self, target: Tensor, source: Tensor) -> None:
        """In this thread: torch's own pool would take cores from the engine."""
        ctypes.memmove(target.data_ptr(), source.data_ptr(), target.numel())

    def free(self, memory: Tensor) -> None:
        """Nothing: torch takes it back with the last reference."""

    def batch(self) -> Batch | None:
        """CUDA's, from 12.8 on."""
        try:
            return DriverBatch(cuda_driver(), lambda: torch.cuda.current_stream(self._device).cuda_stream)
        except RuntimeError as error:
            _log.info("there are no batches of copies on %s: %s", self._device, error)
            return None

    def host_runtime(self) -> HostRuntime | None:
        """CUDA's or HIP's."""
        return host_runtime(self._device)
