"""A file of memory as one process sees it: an arena of its own, or one that it was handed a descriptor of."""

import contextlib
import ctypes
import gc
import mmap
import os
import threading
import weakref
from collections.abc import Sequence

import numpy as np

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
