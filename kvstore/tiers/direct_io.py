"""Memory as O_DIRECT wants it: whole pages on page boundaries."""

import ctypes
import mmap

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
