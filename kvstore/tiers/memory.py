"""Host RAM: one arena in a memfd, so that other processes and an accelerator's DMA can reach the very same bytes."""

import fcntl
import mmap
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from kvstore import layout
from kvstore.errors import ConfigError
from kvstore.extents import extent_bytes_for
from kvstore.mapping import HUGE_PAGE_BYTES, Mapping
from kvstore.tiers.base import BlockMove, StoredBlock
from kvstore.types import Outcome


class Region(Protocol):
    """Bytes that slots lie in."""

    capacity_bytes: int

    @property
    def pages_stay(self) -> bool:
        """Whether a page of it is the same one for as long as it is mapped, so that a device may be given it."""

    def view(self, offset_bytes: int, num_bytes: int) -> memoryview:
        """Writable bytes; valid until ``close``."""

    def views(self, offsets_bytes: Sequence[int], num_bytes: int) -> list[memoryview]:
        """As many writable bytes from each offset on."""

    def close(self) -> None:
        """Give the memory back as soon as nobody views it any more."""


class Arena(Mapping):
    """Memory for blocks in a memfd of its own, on huge pages where enough are reserved."""

    def __init__(self, capacity_bytes: int, *, prefault: bool = True, may_be_huge: bool = True) -> None:
        """Make the memory. Raises ``ConfigError`` if the kernel refuses."""
        fd, self.page_bytes = _memfd(capacity_bytes, may_be_huge=may_be_huge)
        try:
            super().__init__(fd, capacity_bytes, prefault=prefault)
        except OSError as error:
            raise ConfigError(
                f"cannot map {capacity_bytes} bytes of memory: {error}; lower memory.capacity or the container's limits"
            ) from error


class MemoryTier:
    """Slots in an arena. RAM is trusted: blocks carry no header, and what a slot holds is known to its pool alone."""

    name = "memory"

    def __init__(
        self, arena: Region, *, extent_bytes: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.arena = arena
        self.capacity_bytes = arena.capacity_bytes
        self.extent_bytes = extent_bytes or extent_bytes_for(arena.capacity_bytes)
        self._clock = clock

    @property
    def descriptors(self) -> tuple[int, ...]:
        """What another process needs to map the arena; none where it is not one piece of shared memory."""
        return (self.arena.fd,) if isinstance(self.arena, Mapping) else ()

    def slot_bytes(self, block_bytes: int) -> int:
        """Whole pages, so that O_DIRECT can move a slot as it is."""
        return layout.slot_bytes(block_bytes)

    def write(self, moves: Sequence[BlockMove], deadline_s: float) -> list[Outcome]:
        """Copy each buffer into its slot."""
        return [self._copy(self._slot(move), move.buffer[: move.layout.block_bytes], deadline_s) for move in moves]

    def read(self, moves: Sequence[BlockMove], deadline_s: float) -> list[Outcome]:
        """Copy each slot into its buffer."""
        return [self._copy(move.buffer[: move.layout.block_bytes], self._slot(move), deadline_s) for move in moves]

    def erase(self, moves: Sequence[BlockMove]) -> None:
        """Nothing to do: a slot that its pool forgot cannot be found."""

    def scan(self) -> Iterator[StoredBlock]:
        """Nothing: RAM does not outlive the process."""
        return iter(())

    def close(self) -> None:
        """Give the arena back."""
        self.arena.close()

    def _slot(self, move: BlockMove) -> memoryview:
        return self.arena.view(move.offset_bytes, move.layout.block_bytes)

    def _copy(self, destination: memoryview, source: memoryview, deadline_s: float) -> Outcome:
        if self._clock() >= deadline_s:
            return Outcome.LATE
        # numpy lets go of the interpreter lock while it copies; a memoryview assignment does not.
        np.copyto(np.frombuffer(destination, dtype=np.uint8), np.frombuffer(source, dtype=np.uint8))
        return Outcome.OK


def _memfd(capacity_bytes: int, *, may_be_huge: bool) -> tuple[int, int]:
    """A memfd of the capacity and its page size: huge pages if enough are free now, else ordinary ones.

    Its size is sealed: whoever else has the descriptor cannot pull the ground away from under our feet.
    """
    num_huge_pages = -(-capacity_bytes // HUGE_PAGE_BYTES)
    if may_be_huge and _num_free_huge_pages() >= num_huge_pages:
        return _sealed("kvstore-arena", os.MFD_HUGETLB, num_huge_pages * HUGE_PAGE_BYTES), HUGE_PAGE_BYTES
    return _sealed("kvstore-arena", 0, -(-capacity_bytes // mmap.PAGESIZE) * mmap.PAGESIZE), mmap.PAGESIZE


def _sealed(name: str, flags: int, num_bytes: int) -> int:
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
    os.ftruncate(fd, num_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return fd


def _num_free_huge_pages() -> int:
    path = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")
    return int(path.read_text()) if path.exists() else 0
