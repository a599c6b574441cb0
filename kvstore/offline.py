"""The blocks on file while no store has them open: what there is, whether it is whole, and making room."""

import heapq
import mmap
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from kvstore.layout import FoundLayout, slot_bytes
from kvstore.tiers.base import BlockMove, StoredBlock
from kvstore.tiers.file_blocks import FileBlocks
from kvstore.types import NAMESPACE_DIGEST_BYTES, Outcome

BATCH_BLOCKS = 16
BATCH_TIMEOUT_S = 60.0

BROKEN = (Outcome.DAMAGED, Outcome.ABSENT)
"""ABSENT: the table names a block that its slot does not hold."""


@dataclass(frozen=True, slots=True)
class Holding:
    """What the files hold of one namespace."""

    namespace: bytes
    fingerprint: bytes
    block_bytes: int
    num_blocks: int
    used_bytes: int


def holdings(files: FileBlocks) -> list[Holding]:
    """What the files hold, by namespace, most bytes first."""
    counts = Counter(
        (block.key[:NAMESPACE_DIGEST_BYTES], block.fingerprint, block.block_bytes) for block in files.scan()
    )
    found = [
        Holding(namespace, fingerprint, block_bytes, num_blocks, num_blocks * files.slot_bytes(block_bytes))
        for (namespace, fingerprint, block_bytes), num_blocks in counts.items()
    ]
    return sorted(found, key=lambda holding: holding.used_bytes, reverse=True)


def verify(files: FileBlocks) -> Iterator[tuple[StoredBlock, Outcome]]:
    """Read every block and verify it; OK, or what is wrong with it."""
    for batch in _batches(list(files.scan())):
        buffers = [mmap.mmap(-1, slot_bytes(block.block_bytes)) for block in batch]  # whole pages, as O_DIRECT wants
        moves = [_move(block, memoryview(buffer)) for block, buffer in zip(batch, buffers, strict=True)]
        yield from zip(batch, files.read(moves, time.monotonic() + BATCH_TIMEOUT_S), strict=True)


def erase(files: FileBlocks, blocks: Iterable[StoredBlock]) -> int:
    """Erase ``blocks``; returns how many."""
    moves = [_move(block, memoryview(b"")) for block in blocks]
    files.erase(moves)
    return len(moves)


def oldest_leaves(blocks: Iterable[StoredBlock]) -> Iterator[StoredBlock]:
    """Every block, oldest first, but none before its children: whatever is left stays reachable from its root."""
    by_key = {block.key: block for block in blocks}
    num_children = Counter(block.parent for block in by_key.values() if block.parent in by_key)
    leaves = [(block.created_unix_s, key) for key, block in by_key.items() if not num_children[key]]
    heapq.heapify(leaves)
    while leaves:
        _, key = heapq.heappop(leaves)
        block = by_key[key]
        yield block
        if block.parent in by_key:
            num_children[block.parent] -= 1
            if not num_children[block.parent]:
                heapq.heappush(leaves, (by_key[block.parent].created_unix_s, block.parent))


def of_namespace(blocks: Iterable[StoredBlock], namespace: bytes) -> Iterator[StoredBlock]:
    """The blocks whose keys begin with ``namespace``."""
    return (block for block in blocks if block.key.startswith(namespace))


def of_size(blocks: Iterable[StoredBlock], files: FileBlocks, num_bytes: int) -> Iterator[StoredBlock]:
    """The first blocks that together take at least ``num_bytes`` of the budget, or all of them."""
    taken_bytes = 0
    for block in blocks:
        if taken_bytes >= num_bytes:
            return
        taken_bytes += files.slot_bytes(block.block_bytes)
        yield block


def _batches(blocks: Sequence[StoredBlock]) -> Iterator[Sequence[StoredBlock]]:
    rest = iter(blocks)
    while batch := list(islice(rest, BATCH_BLOCKS)):
        yield batch


def _move(block: StoredBlock, buffer: memoryview) -> BlockMove:
    return BlockMove(
        key=block.key,
        parent=block.parent,
        layout=FoundLayout.of(block.block_bytes, block.fingerprint),
        buffer=buffer,
        offset_bytes=block.offset_bytes,
        created_unix_s=block.created_unix_s,
    )
