"""What the pipeline gives to streams, each saying which bytes it touches."""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu_io.packing import Packer
from gpu_io.pages import PagedKV
from gpu_io.ranges import Ranges, ranges_of
from gpu_io.streams import Batch


@dataclass(frozen=True, slots=True)
class Copy:
    """One DMA between host memory and the device, both flat and of one size; queued if the host memory is pinned."""

    target: Tensor
    source: Tensor

    def run(self) -> None:
        """Have it done."""
        self.target.copy_(self.source, non_blocking=True)

    def reads(self) -> list[Ranges]:
        """The source."""
        return [ranges_of(self.source)]

    def writes(self) -> list[Ranges]:
        """The target."""
        return [ranges_of(self.target)]


@dataclass(frozen=True, slots=True)
class CopyBatch:
    """Copies between pinned host memory and the device in one call."""

    batch: Batch
    rows: NDArray[np.int64]
    """``[copy][address of the target, address of the source, bytes]``."""
    refused: Callable[[RuntimeError], None]
    """Called in the stream that is current, to do it another way. Some of the copies may be on their way already."""

    def run(self) -> None:
        """Have it done."""
        try:
            self.batch.copy(*self.rows.T)
        except RuntimeError as error:
            self.refused(error)

    def reads(self) -> list[Ranges]:
        """All sources."""
        return self._ranges(1)

    def writes(self) -> list[Ranges]:
        """All targets."""
        return self._ranges(0)

    def _ranges(self, side: int) -> list[Ranges]:
        sizes = self.rows[:, 2]
        return [Ranges(self.rows[sizes == size, side], size) for size in set(sizes.tolist())]


@dataclass(frozen=True, slots=True)
class Pack:
    """Gather ``layers`` of ``pages``, whose ids are also in ``table`` on the device, into ``staged``."""

    kv: PagedKV
    packer: Packer
    pages: Sequence[int]
    table: Tensor
    staged: Tensor
    layers: range

    def run(self) -> None:
        """Have it done."""
        self.packer.pack(self.table, self.staged, self.layers)

    def reads(self) -> list[Ranges]:
        """The table and the pages."""
        return [ranges_of(self.table), *self.kv.ranges(self.pages, self.layers)]

    def writes(self) -> list[Ranges]:
        """What is staged."""
        return [ranges_of(self.staged)]


@dataclass(frozen=True, slots=True)
class Unpack:
    """Scatter ``layers`` of ``staged``, which has ``staged_layers``, to ``pages``, whose ids are also in ``table``."""

    kv: PagedKV
    packer: Packer
    pages: Sequence[int]
    table: Tensor
    staged: Tensor
    staged_layers: range
    layers: range

    def run(self) -> None:
        """Have it done."""
        self.packer.unpack(self.staged, self.staged_layers, self.table, self.layers)

    def reads(self) -> list[Ranges]:
        """The table and what is staged."""
        return [ranges_of(self.table), ranges_of(self.staged)]

    def writes(self) -> list[Ranges]:
        """The pages."""
        return self.kv.ranges(self.pages, self.layers)


def addresses(slots: Sequence[memoryview]) -> list[int]:
    """Where each slot begins."""
    return [np.frombuffer(slot, dtype=np.uint8).ctypes.data for slot in slots]


def host_bytes(address: int, num_bytes: int) -> Tensor:
    """Host memory as a flat uint8 tensor. Whoever uses it keeps that memory alive."""
    return torch.frombuffer((ctypes.c_uint8 * num_bytes).from_address(address), dtype=torch.uint8)
