"""The table of the slots in one directory: a compact file with the header of the block in each slot.

Every extent has a region of the file: a head that names the one layout the extent serves, then a header for each slot.
Both are of ``ENTRY_BYTES`` and end in their own checksum. Headers lie here and not in the slots, so that slots that lie
side by side are one stretch of payload, and a start reads all headers at once.
"""

import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import xxhash

from kvstore import header
from kvstore.header import HEADER_BYTES, KEY_LENGTH_OFFSET, SEQUENCE_OFFSET, Header
from kvstore.layout import FINGERPRINT_BYTES
from kvstore.tiers.file_geometry import ENTRY_BYTES, PAGE_BYTES, file_slot_bytes
from kvstore.tiers.os_files import OsFiles
from kvstore.types import Outcome

_HEAD = struct.Struct("<8s16sQ")
_HEAD_MAGIC = b"TKVTABLE"
_CHECKSUM = struct.Struct("<Q")
_BODY_BYTES = ENTRY_BYTES - _CHECKSUM.size
_EMPTY = bytes(ENTRY_BYTES)
_USE = np.dtype(
    {
        "names": ["key_len", "sequence"],
        "formats": ["u1", "<u8"],
        "offsets": [KEY_LENGTH_OFFSET, SEQUENCE_OFFSET],
        "itemsize": ENTRY_BYTES,
    }
)


class ExtentLayout(NamedTuple):
    """The layout an extent serves."""

    fingerprint: bytes
    block_bytes: int


class SlotTable:
    """The file, and which layout each extent serves. Threads may share it if they write different slots."""

    def __init__(self, files: OsFiles, fd: int, stride_bytes: int, num_extents: int) -> None:
        """Read the heads; regions beyond ``num_extents`` are cut off."""
        self._files = files
        self._fd = fd
        self._stride_bytes = stride_bytes
        if files.stat(fd).st_size > num_extents * _region_bytes(stride_bytes):
            files.truncate(fd, num_extents * _region_bytes(stride_bytes))
        self._layouts: list[ExtentLayout | None] = [self._read_head(extent) for extent in range(num_extents)]

    def layout(self, extent: int) -> ExtentLayout | None:
        """The layout that an extent serves, if any."""
        return self._layouts[extent]

    def hand_over(self, extent: int, layout: ExtentLayout, num_slots: int) -> None:
        """Empty the extent's region, then let it serve ``layout``; a kill in between leaves it empty."""
        start, size = self._offset(extent), ENTRY_BYTES * (1 + num_slots)
        self._layouts[extent] = None
        with suppress(OSError):  # where holes cannot be punched, zeros do as well
            self._files.punch(self._fd, start, _region_bytes(self._stride_bytes))
        self._files.pwritev(self._fd, [bytes(size)], start)
        head = _HEAD.pack(_HEAD_MAGIC, layout.fingerprint, layout.block_bytes).ljust(_BODY_BYTES, b"\0")
        self._files.pwritev(self._fd, [head + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(head))], start)
        self._layouts[extent] = layout

    def put(self, extent: int, index: int, headers: Sequence[Header]) -> None:
        """Enter blocks in adjacent slots from ``index`` on. Raises ``OSError``."""
        self._write(extent, index, b"".join(found.pack() for found in headers))

    def clear(self, extent: int, index: int, count: int = 1) -> None:
        """``count`` slots from ``index`` on hold nothing. Raises ``OSError``."""
        self._write(extent, index, _EMPTY * count)

    def headers(self, extent: int, index: int, count: int) -> list[bytes]:
        """The headers of ``count`` slots from ``index`` on, to be parsed; short if cut. Raises ``OSError``."""
        region = self._read(self._offset(extent, index), ENTRY_BYTES * count)
        return [region[start : start + ENTRY_BYTES] for start in range(0, ENTRY_BYTES * count, ENTRY_BYTES)]

    def scan(self, extent: int, num_slots: int) -> Iterator[tuple[int, int, bytes]]:
        """Sequence, index and bytes, to be parsed, of each header in use among the first ``num_slots``.

        Raises ``OSError``.
        """
        region = self._read(self._offset(extent, 0), ENTRY_BYTES * num_slots)
        rows = np.frombuffer(region, dtype=_USE, count=len(region) // ENTRY_BYTES)
        used = np.flatnonzero(rows["key_len"])
        for index, sequence in zip(used.tolist(), rows["sequence"][used].tolist(), strict=True):
            yield sequence, index, region[index * ENTRY_BYTES : (index + 1) * ENTRY_BYTES]

    def parse(self, extent: int, data: bytes) -> Header | None:
        """The header, if it is whole and of the layout that the extent serves."""
        found, layout = header.parse(data), self._layouts[extent]
        if isinstance(found, Outcome) or layout != (found.fingerprint, found.block_bytes):
            return None
        return found

    def _write(self, extent: int, index: int, data: bytes) -> None:
        written = self._files.pwritev(self._fd, [data], self._offset(extent, index))
        if written != len(data):
            raise OSError(f"{written} of {len(data)} bytes of the slot table were written")

    def _read(self, offset: int, num_bytes: int) -> bytes:
        """What there is of this range; less where the file is shorter."""
        data = bytearray(num_bytes)
        return bytes(data[: self._files.preadv(self._fd, [data], offset)])

    def _read_head(self, extent: int) -> ExtentLayout | None:
        data = self._read(self._offset(extent), ENTRY_BYTES)
        if len(data) != ENTRY_BYTES or not data.startswith(_HEAD_MAGIC):
            return None
        if _CHECKSUM.unpack_from(data, _BODY_BYTES) != (xxhash.xxh3_64_intdigest(data[:_BODY_BYTES]),):
            return None
        _, fingerprint, block_bytes = _HEAD.unpack_from(data)
        return ExtentLayout(fingerprint, block_bytes)

    def _offset(self, extent: int, index: int = -1) -> int:
        """Of a slot's header, or of the head before them."""
        return entry_offset_bytes(self._stride_bytes, extent, index)


def entry_offset_bytes(stride_bytes: int, extent: int, index: int) -> int:
    """Where the header of a slot lies in the file; of index -1 the head of the extent."""
    return extent * _region_bytes(stride_bytes) + ENTRY_BYTES * (1 + index)


def num_extents_in(table_bytes: int, stride_bytes: int) -> int:
    """How many extents a file of this length can tell of."""
    return -(-table_bytes // _region_bytes(stride_bytes))


def _region_bytes(stride_bytes: int) -> int:
    """Room for as many headers as an extent of the smallest slots needs; what is not used is a hole."""
    max_slots = stride_bytes // (file_slot_bytes(1) + ENTRY_BYTES)
    return -(-ENTRY_BYTES * (1 + max_slots) // PAGE_BYTES) * PAGE_BYTES


assert ENTRY_BYTES == HEADER_BYTES
assert FINGERPRINT_BYTES == 16
