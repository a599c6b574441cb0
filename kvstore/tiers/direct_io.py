"""Memory as O_DIRECT wants it: whole pages on page boundaries."""

import ctypes
import mmap
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from kvstore.layout import slot_bytes as whole_pages
from kvstore.tiers.file_geometry import PAGE_BYTES


def in_place(buffer: memoryview, num_bytes: int) -> memoryview | None:
    """The whole pages of ``buffer`` that hold its first ``num_bytes``, if it lies on pages; else None."""
    padded_bytes = whole_pages(num_bytes)
    if buffer.readonly or not buffer.c_contiguous or buffer.nbytes < padded_bytes:
        return None
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    return None if address % PAGE_BYTES else buffer[:padded_bytes]


def bounce(num_bytes: int) -> memoryview:
    """Fresh pages for ``num_bytes``, for a buffer that does not lie on pages itself."""
    return memoryview(mmap.mmap(-1, whole_pages(num_bytes)))


class HeaderPages:
    """A pool of pages for headers, so that none are mapped in the course of an operation."""

    def __init__(self, num_pages: int) -> None:
        """``num_pages`` is what one operation needs at most."""
        self._num_pages = num_pages
        self._free: deque[list[memoryview]] = deque()  # append and pop are atomic

    @contextmanager
    def lent(self) -> Iterator[list[memoryview]]:
        """The pages of one operation."""
        try:
            pages = self._free.pop()
        except IndexError:
            pages = self._map()
        try:
            yield pages
        finally:
            self._free.append(pages)

    def _map(self) -> list[memoryview]:
        mapping = memoryview(mmap.mmap(-1, self._num_pages * PAGE_BYTES))
        return [mapping[start : start + PAGE_BYTES] for start in range(0, len(mapping), PAGE_BYTES)]
