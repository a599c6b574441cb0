"""Tiers in a dict: fakes for tests of what lies above a tier. They keep a tier's promises, and break them when told."""

import time
from collections.abc import Callable, Iterator, Sequence

from kvstore.layout import slot_bytes
from kvstore.tiers.base import BlockMove, StoredBlock
from kvstore.types import NAMESPACE_DIGEST_BYTES, BlockKey, Outcome

Fault = Callable[[str, BlockMove], Outcome | None]
"""Given "read" or "write" and the move: the outcome to answer with instead of doing it, or None."""


def no_fault(_op: str, _move: BlockMove) -> Outcome | None:
    """Everything works."""
    return None


class _Kept:
    """A block as a tier keeps it."""

    def __init__(self, move: BlockMove) -> None:
        self.move = move
        self.payload = bytes(move.buffer[: move.layout.block_bytes])


class DictSlotTier:
    """Slots in a dict by offset, each knowing whose block it holds, as a file tier's header does."""

    def __init__(
        self,
        num_slots: int,
        block_bytes: int,
        *,
        num_extents: int = 1,
        name: str = "file",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.capacity_bytes = num_slots * self.slot_bytes(block_bytes)
        self.extent_bytes = self.capacity_bytes // num_extents
        self.fault: Fault = no_fault
        self.kept: dict[int, _Kept] = {}
        self._clock = clock

    def slot_bytes(self, block_bytes: int) -> int:
        """Whole pages."""
        return slot_bytes(block_bytes)

    def write(self, moves: Sequence[BlockMove], deadline_s: float) -> list[Outcome]:
        """Keep each block at its offset."""
        return [self._write(move, deadline_s) for move in moves]

    def read(self, moves: Sequence[BlockMove], deadline_s: float) -> list[Outcome]:
        """Give each block back if its offset holds it."""
        return [self._read(move, deadline_s) for move in moves]

    def erase(self, moves: Sequence[BlockMove]) -> None:
        """Forget what lies at each offset."""
        for move in moves:
            self.kept.pop(move.offset_bytes, None)

    def scan(self) -> Iterator[StoredBlock]:
        """Every block, newest first."""
        for offset_bytes, kept in reversed(self.kept.items()):
            move = kept.move
            yield StoredBlock(
                move.key,
                move.parent,
                move.layout.fingerprint,
                move.layout.block_bytes,
                offset_bytes,
                move.created_unix_s,
                move.created_unix_s + move.max_age_s if move.max_age_s else 0,
            )

    def close(self) -> None:
        """Blocks stay."""

    def _write(self, move: BlockMove, deadline_s: float) -> Outcome:
        if self._clock() >= deadline_s:
            return Outcome.LATE
        self.kept.pop(move.offset_bytes, None)
        fault = self.fault("write", move)
        if fault is None:
            self.kept[move.offset_bytes] = _Kept(move)
        return fault or Outcome.OK

    def _read(self, move: BlockMove, deadline_s: float) -> Outcome:
        if self._clock() >= deadline_s:
            return Outcome.LATE
        fault = self.fault("read", move)
        if fault is not None:
            move.buffer[:] = b"\xaa" * len(move.buffer)  # what is not OK is undefined, so make it wrong
            return fault
        return _give(self.kept.get(move.offset_bytes), move)


class DictSharedTier:
    """Blocks in a dict by key, as a server shared with other hosts keeps them."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = "redis"
        self.fault: Fault = no_fault
        self.kept: dict[BlockKey, _Kept] = {}
        self.renewed: list[BlockKey] = []
        self._clock = clock

    def slot_bytes(self, block_bytes: int) -> int:
        """Just the block."""
        return block_bytes

    def write(self, moves: Sequence[BlockMove], deadline_s: float) -> list[Outcome]:
        """Keep each block under its key."""
        return [self._write(move, deadline_s) for move in moves]

    def read(self, moves: Sequence[BlockMove], deadline_s: float) -> list[Outcome]:
        """Give each block back."""
        return [self._read(move, deadline_s) for move in moves]

    def erase(self, moves: Sequence[BlockMove]) -> None:
        """Forget each key."""
        for move in moves:
            self.kept.pop(move.key, None)

    def scan(self) -> Iterator[StoredBlock]:
        """Nothing: it belongs to everybody."""
        return iter(())

    def close(self) -> None:
        """Blocks stay."""

    def probe(self, keys: Sequence[BlockKey], deadline_s: float) -> list[Outcome]:
        """Which keys are kept."""
        return [Outcome.OK if key in self.kept else Outcome.ABSENT for key in keys]

    def renew(self, keys: Sequence[BlockKey], deadline_s: float) -> list[Outcome]:
        """Remember that it was asked."""
        self.renewed.extend(keys)
        return self.probe(keys, deadline_s)

    def clear(self, namespace: bytes, deadline_s: float) -> int | None:
        """Forget every key of a namespace."""
        keys = [key for key in self.kept if key[:NAMESPACE_DIGEST_BYTES] == namespace]
        for key in keys:
            del self.kept[key]
        return len(keys)

    def _write(self, move: BlockMove, deadline_s: float) -> Outcome:
        if self._clock() >= deadline_s:
            return Outcome.LATE
        fault = self.fault("write", move)
        if fault is None:
            self.kept[move.key] = _Kept(move)
        return fault or Outcome.OK

    def _read(self, move: BlockMove, deadline_s: float) -> Outcome:
        if self._clock() >= deadline_s:
            return Outcome.LATE
        fault = self.fault("read", move)
        if fault is not None:
            move.buffer[:] = b"\xaa" * len(move.buffer)
            return fault
        return _give(self.kept.get(move.key), move)


def _give(kept: _Kept | None, move: BlockMove) -> Outcome:
    if kept is None or kept.move.key != move.key:
        return Outcome.ABSENT
    if kept.move.layout.fingerprint != move.layout.fingerprint:
        return Outcome.FOREIGN
    move.buffer[: move.layout.block_bytes] = kept.payload
    move.created_unix_s = kept.move.created_unix_s
    return Outcome.OK
