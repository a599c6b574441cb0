"""The little that the pipeline asks of a device: the seam between it and CUDA, ROCm or a simulated device.

Rule 1: what one stream is given runs in that order. Nothing else orders two streams but a fence that one waits for.
Rule 2: what is given to a stream runs after what the host did before, and at any time after that.
Rule 3: the host knows that a fence was passed when ``query`` says so, and not before.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gpu_io.host_runtime import HostRuntime
from gpu_io.ranges import Ranges


class Work(Protocol):
    """One thing for a stream to do. What it touches can be told before it runs."""

    def run(self) -> None:
        """Do it, or on an accelerator: have it done in the stream that is current."""

    def reads(self) -> list[Ranges]:
        """The bytes it reads, in host memory too."""

    def writes(self) -> list[Ranges]:
        """The bytes it writes."""


class Fence(Protocol):
    """A point in a stream. ``torch.Event`` is one."""

    def query(self) -> bool:
        """Whether the stream has passed it. Never waits. Raises ``RuntimeError`` for a device that is lost."""

    def wait(self) -> None:
        """Let what compute is given from now on wait for it. The host does not wait."""


class Batch(Protocol):
    """Copies many runs of bytes in one call, in the stream that is current and in any order among themselves."""

    def copy(self, targets: NDArray[np.int64], sources: NDArray[np.int64], sizes: NDArray[np.int64]) -> None:
        """``sizes`` bytes from addresses to addresses, all of the device's or in pinned host memory.

        Raises ``RuntimeError`` if the driver refuses; some of the copies may be on their way all the same.
        """


class Stream(Protocol):
    """A queue of device work beside the engine's compute."""

    def submit(self, work: Work) -> None:
        """Have it done. Raises ``RuntimeError`` if the device cannot, for want of memory or because it is lost."""

    def wait(self, fence: Fence) -> None:
        """Let what is submitted here from now on wait for ``fence``. The host does not wait."""

    def fence(self) -> Fence:
        """The point after all that was submitted here so far."""


class Device(Protocol):
    """Streams, and memory that they reach."""

    def stream(self) -> Stream:
        """A new stream."""

    def compute_fence(self) -> Fence:
        """The point after all that compute, the caller's current stream, was given so far."""

    def memory(self, num_bytes: int) -> Tensor:
        """Bytes on the device. Compute may have used them before: a stream is to wait for it first."""

    def pinned(self, values: Sequence[int]) -> Tensor:
        """``values`` as int64 in host memory that streams reach."""

    def pinned_memory(self, num_bytes: int) -> Tensor:
        """Bytes in host memory that streams reach. Raises ``RuntimeError`` if there is none."""

    def host_copy(self, target: Tensor, source: Tensor) -> None:
        """The host copies flat bytes between two places in host memory, now, without the interpreter lock."""

    def free(self, memory: Tensor) -> None:
        """Give back any of these bytes, when nothing touches them any more."""

    def batch(self) -> Batch | None:
        """What copies many runs in one call, whether or not that is faster; None where nothing does."""

    def host_runtime(self) -> HostRuntime | None:
        """What registers host memory, so that copies from and to it are fast; None where nothing does."""
