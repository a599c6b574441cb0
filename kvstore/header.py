"""The header that makes a block outside RAM self-describing. Pure.

256 bytes, little-endian; the last eight are the xxh3-64 of the rest. It lies before the payload where a block is one
value, and in the table of slots where payloads lie in slots. A block is served only if every field fits what
was asked for and the stored payload hashes to ``checksum``. xxh3 finds damage, not tampering.
"""

import struct
from typing import NamedTuple

import xxhash

from kvstore.types import BlockKey, Outcome

HEADER_BYTES = 256
MAGIC = b"TKVBLOCK"
VERSION = 1

_FIELDS = struct.Struct("<8sHBBBx16s64s64sQQQQQQ")
_TRAILER = struct.Struct("<Q")
_BODY_BYTES = HEADER_BYTES - _TRAILER.size

KEY_LENGTH_OFFSET = struct.calcsize("<8sHB")
SEQUENCE_OFFSET = _FIELDS.size - struct.calcsize("<Q")


def checksum(payload: bytes | bytearray | memoryview) -> int:
    """xxh3-64 of the stored payload."""
    return xxhash.xxh3_64_intdigest(payload)


class Header(NamedTuple):
    """What is stored beside a block's payload."""

    key: BlockKey
    parent: BlockKey | None
    fingerprint: bytes
    block_bytes: int
    """Length of the decoded payload."""
    stored_bytes: int
    """Length of the payload as stored, after the codec."""
    checksum: int
    """xxh3-64 of the stored payload."""
    created_unix_s: int
    codec_id: int = 0
    expires_unix_s: int = 0
    """When the block must be gone, whoever reads it; 0: never."""
    sequence: int = 0
    """Rises from write to write, over restarts too, where a tier keeps the order; else 0."""

    def pack(self) -> bytes:
        """The header's 256 bytes."""
        body = _FIELDS.pack(
            MAGIC,
            VERSION,
            self.codec_id,
            len(self.key),
            len(self.parent or b""),
            self.fingerprint,
            self.key,
            self.parent or b"",
            self.block_bytes,
            self.stored_bytes,
            self.checksum,
            self.created_unix_s,
            self.expires_unix_s,
            self.sequence,
        ).ljust(_BODY_BYTES, b"\0")
        return body + _TRAILER.pack(xxhash.xxh3_64_intdigest(body))


def parse(data: bytes | bytearray | memoryview) -> Header | Outcome:
    """The header in the first 256 bytes of ``data``, or why there is none.

    ABSENT: not our magic. FOREIGN: another format version, older or newer. DAMAGED: ours and broken.
    """
    if len(data) < HEADER_BYTES or data[: len(MAGIC)] != MAGIC:
        return Outcome.ABSENT
    fields = _FIELDS.unpack_from(data)
    _, version, codec_id, key_len, parent_len, fingerprint, key, parent, block, stored, check, *times = fields
    if version != VERSION:
        return Outcome.FOREIGN
    (trailer,) = _TRAILER.unpack_from(data, _BODY_BYTES)
    if trailer != xxhash.xxh3_64_intdigest(data[:_BODY_BYTES]):
        return Outcome.DAMAGED
    return Header(
        key=BlockKey(key[:key_len]),
        parent=BlockKey(parent[:parent_len]) if parent_len else None,
        fingerprint=fingerprint,
        block_bytes=block,
        stored_bytes=stored,
        checksum=check,
        created_unix_s=times[0],
        codec_id=codec_id,
        expires_unix_s=times[1],
        sequence=times[2],
    )


def admit(
    data: bytes | bytearray | memoryview, key: BlockKey, fingerprint: bytes, block_bytes: int
) -> Header | Outcome:
    """The header, if it is that of ``key`` in this layout; else the outcome a reader reports.

    ABSENT where another block's bytes lie here: the place was reused, which is no damage.
    """
    header = parse(data)
    if isinstance(header, Outcome):
        return header
    if header.key != key:
        return Outcome.ABSENT
    if header.fingerprint != fingerprint:
        return Outcome.FOREIGN
    if header.block_bytes != block_bytes:
        return Outcome.DAMAGED
    return header
