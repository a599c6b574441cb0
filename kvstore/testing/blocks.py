"""Blocks for tests of tiers: keys, bytes that follow from the key, and buffers as arenas and as strangers lend them."""

import mmap
import time
from collections.abc import Sequence

import numpy as np

from kvstore.layout import Layout, slot_bytes
from kvstore.tiers.base import BlockMove, Tier
from kvstore.types import BlockKey

NAMESPACE = bytes(range(16))
POISON = 0xAA
"""What buffers to read into are full of beforehand."""


def layout_of(block_bytes: int, dtype: str = "uint8") -> Layout:
    """A layout whose blocks have ``block_bytes``; another ``dtype`` of the same size gives another fingerprint."""
    itemsize_bytes = 2 if dtype in ("bfloat16", "float16") else 1
    return Layout(dtype, 1, 1, (block_bytes // itemsize_bytes,), 1)


def key_of(number: int, namespace: bytes = NAMESPACE) -> BlockKey:
    """The key of block ``number``."""
    return BlockKey(namespace + np.random.default_rng(number).bytes(32))


def content_of(key: BlockKey, layout: Layout) -> bytes:
    """The right bytes of a block."""
    return np.random.default_rng(list(key)).bytes(layout.block_bytes)


def aligned_buffer(num_bytes: int) -> memoryview:
    """Whole pages on a page boundary, as a slot of an arena is."""
    return memoryview(mmap.mmap(-1, slot_bytes(num_bytes)))


def unaligned_buffer(num_bytes: int) -> memoryview:
    """Just ``num_bytes``, one byte off a page boundary."""
    return memoryview(mmap.mmap(-1, slot_bytes(num_bytes + 1)))[1 : num_bytes + 1]


def full_move(
    tier: Tier, number: int, layout: Layout, *, slot: int | None = None, parent: int | None = None
) -> BlockMove:
    """A move to write block ``number`` to slot ``slot``, by default the one of the same number."""
    key = key_of(number)
    buffer = aligned_buffer(layout.block_bytes)
    buffer[: layout.block_bytes] = content_of(key, layout)
    return BlockMove(
        key=key,
        parent=None if parent is None else key_of(parent),
        layout=layout,
        buffer=buffer,
        offset_bytes=(number if slot is None else slot) * tier.slot_bytes(layout.block_bytes),
        created_unix_s=int(time.time()),
    )


def empty_move(tier: Tier, number: int, layout: Layout, *, slot: int | None = None) -> BlockMove:
    """A move to read block ``number``, its buffer poisoned."""
    buffer = aligned_buffer(layout.block_bytes)
    buffer[:] = bytes([POISON]) * len(buffer)
    slot = number if slot is None else slot
    return BlockMove(key_of(number), None, layout, buffer, slot * tier.slot_bytes(layout.block_bytes), 0)


def full_moves(tier: Tier, numbers: Sequence[int], layout: Layout) -> list[BlockMove]:
    """Moves to write blocks, each to the slot of its number."""
    return [full_move(tier, number, layout) for number in numbers]


def empty_moves(tier: Tier, numbers: Sequence[int], layout: Layout) -> list[BlockMove]:
    """Moves to read blocks, each from the slot of its number."""
    return [empty_move(tier, number, layout) for number in numbers]


def is_right(move: BlockMove) -> bool:
    """Whether the buffer holds the bytes of its key."""
    return bytes(move.buffer[: move.layout.block_bytes]) == content_of(move.key, move.layout)


def soon(seconds: float = 30.0) -> float:
    """A deadline that does not pass in a test."""
    return time.monotonic() + seconds
