"""The table of the slots in one directory: a compact file that says at start which block each slot holds.

Every extent has a region of the file: a head that names the one layout the extent serves, then an entry for each slot.
Both are of ``ENTRY_BYTES`` and end in their own checksum. An entry is a hint: whoever reads the block verifies the
header in the slot itself, so a table that is wrong costs a miss.
"""

import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import xxhash

from kvstore.layout import FINGERPRINT_BYTES
from kvstore.tiers.file_geometry import ENTRY_BYTES, PAGE_BYTES, file_slot_bytes
from kvstore.tiers.os_files import OsFiles
from kvstore.types import BlockKey

_HEAD = struct.Struct("<8s16sQ152x")
_HEAD_MAGIC = b"TKVTABLE"
_ENTRY = struct.Struct("<BB6x64s64s16sQQQQ")
_CHECKSUM = struct.Struct("<Q")
_BODY_BYTES = ENTRY_BYTES - _CHECKSUM.size
_EMPTY = bytes(ENTRY_BYTES)
_USE = np.dtype(
    {"names": ["key_len", "sequence"], "formats": ["u1", "<u8"], "offsets": [0, 176], "itemsize": ENTRY_BYTES}
)


class Entry(NamedTuple):
    """What the table says of a slot."""

    key: BlockKey
    parent: BlockKey | None
    fingerprint: bytes
    block_bytes: int
    created_unix_s: int
    expires_unix_s: int
    """0: never."""
    sequence: int
    """Rises from write to write, over restarts too."""

    def pack(self) -> bytes:
        """The entry as it lies in the file."""
        return _sealed(
            _ENTRY.pack(
                len(self.key),
                len(self.parent or b""),
                self.key,
                self.parent or b"",
                self.fingerprint,
                self.block_bytes,
                self.created_unix_s,
                self.expires_unix_s,
                self.sequence,
            )
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
        self._region_bytes = _region_bytes(stride_bytes)
        if files.stat(fd).st_size > num_extents * self._region_bytes:
            files.truncate(fd, num_extents * self._region_bytes)
        self._layouts: list[ExtentLayout | None] = [self._read_head(extent) for extent in range(num_extents)]

    def layout(self, extent: int) -> ExtentLayout | None:
        """The layout that an extent serves, if any."""
        return self._layouts[extent]

    def hand_over(self, extent: int, layout: ExtentLayout, num_slots: int) -> None:
        """Empty the extent's region, then let it serve ``layout``; a kill in between leaves it empty."""
        start, size = self._offset(extent), ENTRY_BYTES * (1 + num_slots)
        self._layouts[extent] = None
        with suppress(OSError):  # where holes cannot be punched, zeros do as well
            self._files.punch(self._fd, start, self._region_bytes)
        self._files.pwritev(self._fd, [bytes(size)], start)
        self._files.pwritev(self._fd, [_sealed(_HEAD.pack(_HEAD_MAGIC, layout.fingerprint, layout.block_bytes))], start)
        self._layouts[extent] = layout

    def put(self, extent: int, index: int, entries: Sequence[Entry]) -> None:
        """Enter blocks in adjacent slots from ``index`` on. Raises ``OSError``."""
        self._write(extent, index, b"".join(entry.pack() for entry in entries))

    def clear(self, extent: int, index: int, count: int = 1) -> None:
        """``count`` slots from ``index`` on hold nothing. Raises ``OSError``."""
        self._write(extent, index, _EMPTY * count)

    def entry(self, extent: int, index: int) -> Entry | None:
        """What a slot holds, if anything. Raises ``OSError``."""
        return _parse(self._read(self._offset(extent, index), ENTRY_BYTES))

    def scan(self, extent: int, num_slots: int) -> Iterator[tuple[int, int, bytes]]:
        """Sequence, index and bytes, to be parsed, of each entry in use among the first ``num_slots``.

        Raises ``OSError``.
        """
        region = self._read(self._offset(extent, 0), ENTRY_BYTES * num_slots)
        rows = np.frombuffer(region, dtype=_USE, count=len(region) // ENTRY_BYTES)
        used = np.flatnonzero(rows["key_len"])
        for index, sequence in zip(used.tolist(), rows["sequence"][used].tolist(), strict=True):
            yield sequence, index, region[index * ENTRY_BYTES : (index + 1) * ENTRY_BYTES]

    def parse(self, extent: int, data: bytes) -> Entry | None:
        """The entry, if it is whole and of the layout that the extent serves."""
        entry, layout = _parse(data), self._layouts[extent]
        if entry is None or layout != ExtentLayout(entry.fingerprint, entry.block_bytes):
            return None
        return entry

    def _write(self, extent: int, index: int, data: bytes) -> None:
        written = self._files.pwritev(self._fd, [data], self._offset(extent, index))
        if written != len(data):
            raise OSError(f"{written} of {len(data)} bytes of the slot table were written")

    def _read(self, offset: int, num_bytes: int) -> bytes:
        """What there is of this range; less where the file is shorter."""
        data = bytearray(num_bytes)
        return bytes(data[: self._files.preadv(self._fd, [data], offset)])

    def _read_head(self, extent: int) -> ExtentLayout | None:
        head = _unsealed(self._read(self._offset(extent), ENTRY_BYTES))
        if head is None or not head.startswith(_HEAD_MAGIC):
            return None
        _, fingerprint, block_bytes = _HEAD.unpack(head)
        return ExtentLayout(fingerprint, block_bytes)

    def _offset(self, extent: int, index: int = -1) -> int:
        """Of an entry, or of the head before them."""
        return extent * self._region_bytes + ENTRY_BYTES * (1 + index)


def _region_bytes(stride_bytes: int) -> int:
    """Room for as many entries as an extent of the smallest slots needs; what is not used is a hole."""
    max_slots = stride_bytes // (file_slot_bytes(1) + ENTRY_BYTES)
    return -(-ENTRY_BYTES * (1 + max_slots) // PAGE_BYTES) * PAGE_BYTES


def _sealed(body: bytes) -> bytes:
    return body + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body))


def _unsealed(data: bytes) -> bytes | None:
    """The body, if the checksum behind it fits."""
    if len(data) != ENTRY_BYTES:
        return None
    body = data[:_BODY_BYTES]
    return body if _CHECKSUM.unpack_from(data, _BODY_BYTES) == (xxhash.xxh3_64_intdigest(body),) else None


def _parse(data: bytes) -> Entry | None:
    body = _unsealed(data)
    if body is None or not body[0]:
        return None
    key_len, parent_len, key, parent, fingerprint, block_bytes, created, expires, sequence = _ENTRY.unpack(body)
    return Entry(
        key=BlockKey(key[:key_len]),
        parent=BlockKey(parent[:parent_len]) if parent_len else None,
        fingerprint=fingerprint,
        block_bytes=block_bytes,
        created_unix_s=created,
        expires_unix_s=expires,
        sequence=sequence,
    )


assert _ENTRY.size == _HEAD.size == _BODY_BYTES
assert FINGERPRINT_BYTES == 16
