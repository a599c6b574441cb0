"""Blocks for the tests of the Redis tier."""

import time
from collections.abc import Sequence

import numpy as np

from kvstore.layout import Layout
from kvstore.tiers.base import BlockMove
from kvstore.tiers.redis import RedisTier
from kvstore.types import BlockKey, Outcome

LAYOUT = Layout(dtype="bfloat16", num_layers=2, num_heads=2, plane_dims=(32, 32), tokens_per_block=16)
"""8 KiB a block."""

WHOLE = Layout(dtype="bfloat16", num_layers=64, num_heads=8, plane_dims=(128, 128), tokens_per_block=96)
"""24 MiB a block: three parts."""

NAMESPACE = bytes(range(16))


def key(number: int, namespace: bytes = NAMESPACE) -> BlockKey:
    """The key of a block, spread over the slots of a Cluster."""
    return BlockKey(namespace + np.random.default_rng(number).bytes(32))


def keys(count: int, namespace: bytes = NAMESPACE) -> list[BlockKey]:
    """The first ``count`` keys."""
    return [key(number, namespace) for number in range(count)]


def full(
    of: Sequence[BlockKey], layout: Layout = LAYOUT, *, created_unix_s: int | None = None, max_age_s: int = 0
) -> list[BlockMove]:
    """Moves to write blocks whose bytes follow from their keys."""
    return [
        BlockMove(
            key=one,
            parent=None,
            layout=layout,
            buffer=memoryview(bytearray(content(one, layout))),
            offset_bytes=0,
            created_unix_s=int(time.time()) if created_unix_s is None else created_unix_s,
            max_age_s=max_age_s,
        )
        for one in of
    ]


def empty(of: Sequence[BlockKey], layout: Layout = LAYOUT, *, max_age_s: int = 0) -> list[BlockMove]:
    """Moves to read blocks, their buffers poisoned."""
    poison = b"\xaa" * layout.block_bytes
    return [BlockMove(one, None, layout, memoryview(bytearray(poison)), 0, 0, max_age_s) for one in of]


def content(of: BlockKey, layout: Layout = LAYOUT) -> bytes:
    """The right bytes of a block."""
    return np.random.default_rng(list(of)).bytes(layout.block_bytes)


def are_right(moves: Sequence[BlockMove]) -> bool:
    """Every buffer holds the bytes of its key."""
    return all(move.buffer == content(move.key, move.layout) for move in moves)


def soon(seconds: float = 5.0) -> float:
    """A deadline."""
    return time.monotonic() + seconds


def probed(tier: RedisTier, of: Sequence[BlockKey], deadline_s: float) -> list[bool]:
    """Which blocks the tier says it has."""
    return [outcome is Outcome.OK for outcome in tier.probe(of, deadline_s)]
