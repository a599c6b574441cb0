"""What lies under which name on the server. Pure.

A block is one value, ``tkv1:<namespace hex>:{<chain digest hex>}``: its header, then the payload as the codec left it.
A payload longer than ``PART_BYTES`` goes on under ``<name>:1``, ``<name>:2`` ..., each as long as that but the last.
Parts are written before the head, so that a head means a whole block; a part that is missing means none. All names of a
block have its hash tag and so share a server, while blocks spread evenly.

The number after ``tkv`` is the header's version: releases of another format never meet under one name.
"""

from kvstore import header
from kvstore.codecs import registry
from kvstore.codecs.base import Buffer, Codec
from kvstore.header import Header
from kvstore.tiers.base import BlockMove
from kvstore.types import NAMESPACE_DIGEST_BYTES, BlockKey, Outcome

PART_BYTES = 8 << 20
"""A server is busy with one value at a time: this one takes it a few milliseconds."""

_PREFIX = b"tkv%d:" % header.VERSION


def hash_tag(key: BlockKey) -> bytes:
    """What a Cluster hashes of the block's names."""
    return key[NAMESPACE_DIGEST_BYTES:].hex().encode()


def name(key: BlockKey, part: int = 0) -> bytes:
    """The name of the block's head, or of a further part."""
    head = b"%b%b:{%b}" % (_PREFIX, key[:NAMESPACE_DIGEST_BYTES].hex().encode(), hash_tag(key))
    return head if part == 0 else b"%b:%d" % (head, part)


def names(key: BlockKey, num_bytes: int) -> list[bytes]:
    """The names of a block whose payload takes ``num_bytes``, head first."""
    return [name(key, part) for part in range(num_parts(num_bytes))]


def pattern(namespace: bytes) -> bytes:
    """What SCAN matches with every name of a namespace; hex has no wildcards."""
    return b"%b%b:*" % (_PREFIX, namespace.hex().encode())


def is_head(server_name: bytes) -> bool:
    """Whether a name is that of a block rather than of a further part."""
    return server_name.endswith(b"}")


def num_parts(num_bytes: int) -> int:
    """How many names a payload of ``num_bytes`` takes."""
    return max(1, -(-num_bytes // PART_BYTES))


def part_slice(num_bytes: int, part: int) -> slice:
    """Which bytes of a payload of ``num_bytes`` a part holds; none beyond the last."""
    return slice(min(num_bytes, part * PART_BYTES), min(num_bytes, (part + 1) * PART_BYTES))


def lifetime_ms(move: BlockMove, ttl_s: int, now_unix_s: float) -> int | None:
    """How long the server may keep the block, at most until its age ends; 0 or less: it is too old; None: no limit."""
    limits_s = [float(ttl_s)] if ttl_s else []
    if move.max_age_s:
        limits_s.append(move.created_unix_s + move.max_age_s - now_unix_s)
    return int(min(limits_s) * 1000) if limits_s else None


def seal(move: BlockMove, codec: Codec) -> tuple[bytes, memoryview]:
    """The header and the stored payload of a block that is to be written."""
    payload = move.buffer[: move.layout.block_bytes]
    codec_id, encoded = registry.encode(codec, payload, move.layout)
    stored = memoryview(encoded)
    head = Header(
        key=move.key,
        parent=move.parent,
        fingerprint=move.layout.fingerprint,
        block_bytes=len(payload),
        stored_bytes=len(stored),
        checksum=header.checksum(stored),
        created_unix_s=move.created_unix_s,
        codec_id=codec_id,
        expires_unix_s=move.created_unix_s + move.max_age_s if move.max_age_s else 0,
    )
    return head.pack(), stored


def admit(head: Buffer, move: BlockMove, now_unix_s: float) -> Header | Outcome:
    """The header, if its block may be read for ``move``; else the outcome."""
    found = header.admit(memoryview(head), move.key, move.layout.fingerprint, move.layout.block_bytes)
    if isinstance(found, Outcome):
        # Only this block belongs under its name: another's bytes, or no header at all, are damage here.
        return Outcome.DAMAGED if found is Outcome.ABSENT else found
    if found.codec_id not in registry.CODECS_BY_ID:
        return Outcome.FOREIGN
    if found.stored_bytes > found.block_bytes or (is_plain(found) and found.stored_bytes != found.block_bytes):
        return Outcome.DAMAGED
    oldest_unix_s = now_unix_s - move.max_age_s if move.max_age_s else 0
    if found.created_unix_s < oldest_unix_s or has_expired(found, now_unix_s):
        return Outcome.ABSENT
    move.created_unix_s = found.created_unix_s
    return found


def is_plain(found: Header) -> bool:
    """Whether the payload is stored as it is."""
    return found.codec_id == registry.NONE.codec_id


def has_expired(found: Header, now_unix_s: float) -> bool:
    """Whether the block is past the age that its writer gave it."""
    return 0 < found.expires_unix_s <= now_unix_s


def destination(found: Header, move: BlockMove) -> memoryview:
    """Where the stored payload is to be received: the move's buffer itself, unless it has yet to be decoded."""
    return move.buffer[: found.stored_bytes] if is_plain(found) else memoryview(bytearray(found.stored_bytes))


def unseal(found: Header, stored: memoryview, move: BlockMove) -> Outcome:
    """OK once ``stored``, received at its ``destination``, has been verified and lies decoded in the move's buffer."""
    if header.checksum(stored) != found.checksum:
        return Outcome.DAMAGED
    if is_plain(found):
        return Outcome.OK
    out = move.buffer[: found.block_bytes]
    return Outcome.OK if registry.CODECS_BY_ID[found.codec_id].decode(stored, out, move.layout) else Outcome.DAMAGED
