"""Host RAM: one arena in a memfd, so that other processes and an accelerator's DMA can reach the very same bytes."""

import contextlib
import ctypes
import fcntl
import gc
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from kvstore import layout
from kvstore.errors import ConfigError
from kvstore.extents import extent_bytes_for
from kvstore.tiers.base import BlockMove, StoredBlock
from kvstore.types import Outcome

HUGE_PAGE_BYTES = 2 << 20
_PREFAULT_STEP_BYTES = 32 << 20
_LOWEST_PRIORITY = 19
# linux/mman.h and mman-linux.h; the mmap module has no names for these.
_MADV_POPULATE_WRITE = 23  # since Linux 5.14
_MADV_COLLAPSE = 25  # since Linux 6.1
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_LIBC.mmap.restype = ctypes.c_void_p


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


class Mapping:
    """``capacity_bytes`` of shared memory as this process sees them, by default prefaulted in the background.

    It begins on a huge page, so that ``populate`` can make the kernel put its pages together to huge ones: copies then
    run at up to 1.4 times the speed, and O_DIRECT at two to three times (ADR 12).
    """

    def __init__(self, fd: int, capacity_bytes: int, *, prefault: bool = True, pages_stay: bool = True) -> None:
        """Map the file ``fd``, which is this object's from now on. Raises ``OSError`` if the kernel refuses."""
        self.fd = fd
        self.capacity_bytes = capacity_bytes
        self._pages_stay = pages_stay
        self.collapsed_bytes = 0
        """How much ``populate`` has put on huge pages so far."""
        self._num_bytes = os.fstat(fd).st_size
        try:
            self._map, start = _mapped(fd, self._num_bytes)
        except OSError:
            os.close(fd)
            raise
        self._close_fd = weakref.finalize(self, os.close, fd)
        self._view = memoryview(self._map)[start : start + self._num_bytes]
        self._address = np.frombuffer(self._view, dtype=np.uint8).ctypes.data
        self._closed = False
        self._closing = threading.Event()
        self._prefault: threading.Thread | None = None
        if prefault:
            self._prefault = threading.Thread(target=self._touch_pages, name="kvstore-prefault", daemon=True)
            self._prefault.start()

    def keep_from_children(self) -> None:
        """Processes that this one forks do not get the mapping: what they hold on to would outlive this process."""
        self._map.madvise(mmap.MADV_DONTFORK)

    @property
    def pages_stay(self) -> bool:
        """Whether whoever made the memory takes no page of it back. This process's own arena loses none."""
        return self._pages_stay

    def view(self, offset_bytes: int, num_bytes: int) -> memoryview:
        """Writable bytes of the arena; valid until ``close``."""
        return self._view[offset_bytes : offset_bytes + num_bytes]

    def views(self, offsets_bytes: Sequence[int], num_bytes: int) -> list[memoryview]:
        """As many writable bytes from each offset on; valid until ``close``."""
        view = self._view
        return [view[offset : offset + num_bytes] for offset in offsets_bytes]

    def stop_populating(self) -> None:
        """Let ``populate`` return early from now on, whichever thread it is in."""
        self._closing.set()

    def close(self) -> None:
        """Give the memory back as soon as nobody views it any more. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self.stop_populating()
        if self._prefault is not None:
            self._prefault.join()
        self._view.release()
        try:
            self._map.close()
        except BufferError:  # somebody has a view, perhaps only a cycle of references that nobody can reach any more
            gc.collect()
            with contextlib.suppress(BufferError):  # somebody does; the mapping goes with that view
                self._map.close()
        self._close_fd()

    def populate(self, offset_bytes: int, num_bytes: int) -> None:
        """Fault pages in ahead of use, huge ones if it can be: a first touch inside a copy would halve its speed.

        ``offset_bytes`` is on a page. Returns early if closed meanwhile. Bytes that are there already stay as they are.
        """
        end = min(offset_bytes + num_bytes, self._num_bytes)
        for offset in range(offset_bytes, end, _PREFAULT_STEP_BYTES):
            if self._closing.is_set():
                return
            step_end = min(offset + _PREFAULT_STEP_BYTES, end)
            self._collapse(offset, step_end)
            if not self._advise(offset, step_end, _MADV_POPULATE_WRITE):
                return  # an older kernel: pages come at their first use

    def _collapse(self, start: int, end: int) -> None:
        """Make huge pages of what lies whole in the range. A kernel that cannot leaves ordinary ones.

        A huge page needs one page that is there to begin with; what is missing around it comes as zeros, and in less
        time than to fault it in.
        """
        start = -(-start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        end = end // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        for offset in range(start, end, HUGE_PAGE_BYTES):
            self._advise(offset, offset + mmap.PAGESIZE, _MADV_POPULATE_WRITE)
        if start < end and self._advise(start, end, _MADV_COLLAPSE):
            self.collapsed_bytes += end - start

    def _advise(self, start: int, end: int, advice: int) -> bool:
        return bool(_LIBC.madvise(ctypes.c_void_p(self._address + start), ctypes.c_size_t(end - start), advice) == 0)

    def _touch_pages(self) -> None:
        # Where memory is fragmented a huge page takes the kernel 10 ms; whoever computes meanwhile goes first.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
        self.populate(0, self.capacity_bytes)


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


def _mapped(fd: int, num_bytes: int) -> tuple[mmap.mmap, int]:
    """The file in memory, and where in it the file begins: on a huge page. Raises ``OSError``.

    The mmap module cannot say where to map; so it reserves enough addresses, and the file takes the place of some.
    """
    reserved = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    first = np.frombuffer(reserved, dtype=np.uint8).ctypes.data
    start = -first % HUGE_PAGE_BYTES
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED
    if _LIBC.mmap(first + start, num_bytes, protection, flags, fd, 0) != first + start:
        number = ctypes.get_errno()
        reserved.close()
        raise OSError(number, os.strerror(number))
    return reserved, start


def _sealed(name: str, flags: int, num_bytes: int) -> int:
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
    os.ftruncate(fd, num_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return fd


def _num_free_huge_pages() -> int:
    path = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")
    return int(path.read_text()) if path.exists() else 0
