"""Lent buffers: an engine with a host pool of its own stores from it and loads into it. Owner thread only.

Bytes move straight between the lent buffers and a level. A lent buffer is the caller's again when ``busy`` is false,
which may be after ``done``: a copy past its deadline may still touch it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt

from kvstore.copies import PROBE_BLOCKS, Block, Copies
from kvstore.errors import LayoutError
from kvstore.level import Level
from kvstore.mover import Mover
from kvstore.namespace import Namespace
from kvstore.shared_level import SharedLevel
from kvstore.tiers.base import BlockMove
from kvstore.types import BlockKey, Outcome


@dataclass(eq=False, slots=True)
class Transfer:
    """One ``store_from`` or ``load_into``."""

    ns: Namespace
    keys: Sequence[BlockKey]
    deadline_s: float
    outcomes: list[Outcome | None]
    """Of each block by its place in the call; None while it is under way."""
    accepted: set[BlockKey] = field(default_factory=set)
    """``store_from``: blocks that were stored, or are being copied down."""
    num_in_flight: int = 0
    num_waiting: int = 0

    @property
    def done(self) -> bool:
        """Whether every block has an outcome."""
        return self.num_waiting == 0

    @property
    def busy(self) -> bool:
        """Whether a copy may still touch the buffers."""
        return self.num_in_flight > 0

    @property
    def num_blocks(self) -> int:
        """Leading blocks that arrived and verified, or were stored."""
        for index, outcome in enumerate(self.outcomes):
            if outcome is not Outcome.OK:
                return index
        return len(self.outcomes)


LentBuffer = memoryview | bytearray | bytes | npt.NDArray[Any]
"""Contiguous bytes of at least a block, whatever the caller takes them for; writable where a block is loaded into."""

OnStored = Callable[[Namespace, Sequence[BlockKey]], None]


class Lending:
    """Transfers between lent buffers and levels."""

    def __init__(self, levels: Sequence[Level], copies: Copies, mover: Mover, on_stored: OnStored) -> None:
        """``levels``: all of them, the fastest first. ``on_stored`` is told of blocks that were stored."""
        self._levels = levels
        self._copies = copies
        self._mover = mover
        self._on_stored = on_stored

    def store_from(
        self,
        ns: Namespace,
        keys: Sequence[BlockKey],
        parent: BlockKey | None,
        buffers: Sequence[memoryview],
        deadline_s: float,
        levels: Sequence[Level],
    ) -> Transfer:
        """Write each buffer to ``levels``; a block's outcome is OK when the first of them has it."""
        transfer = Transfer(ns, keys, deadline_s, [Outcome.OK] * len(keys))
        parents = [parent, *keys[:-1]]
        for level in levels:
            missing = level.missing(ns, keys)
            blocks = [Block(keys[index], parents[index], buffers[index]) for index in missing]
            self._start(transfer, level, blocks, missing, self._copies.write, counts=level is levels[0])
        return transfer

    def load_into(
        self, ns: Namespace, chain: Sequence[BlockKey], buffers: Sequence[memoryview], deadline_s: float
    ) -> Transfer:
        """Read the longest prefix of ``chain`` that the levels have into the buffers, each block from the fastest.

        What no table knows of is asked for on the shared level while the rest is being read.
        """
        transfer = Transfer(ns, chain, deadline_s, [Outcome.ABSENT] * len(chain))
        start = self._read_known(transfer, buffers, 0)
        unknown = chain[start : start + PROBE_BLOCKS]
        shared = next((level for level in self._levels if isinstance(level, SharedLevel)), None)

        def on_end() -> None:
            transfer.num_waiting -= 1
            transfer.num_in_flight -= 1
            self._read_known(transfer, buffers, start)

        if shared is not None and unknown and transfer.outcomes[start] is Outcome.ABSENT:
            is_asked = self._copies.probe(shared, unknown, deadline_s, on_end)
            transfer.num_waiting += is_asked
            transfer.num_in_flight += is_asked
        return transfer

    def _read_known(self, transfer: Transfer, buffers: Sequence[memoryview], start: int) -> int:
        """Start to read the blocks from ``start`` on that the tables know of; returns where that ends."""
        ns, chain = transfer.ns, transfer.keys
        oldest_unix_s = self._copies.oldest_unix_s(ns)
        while start < len(chain):
            for level in self._levels:
                count = level.covered(ns, chain, start, oldest_unix_s)
                if count:
                    break
            else:
                break
            indices = range(start, start + count)
            blocks = [Block(chain[i], chain[i - 1] if i else None, buffers[i]) for i in indices]
            if self._start(transfer, level, blocks, list(indices), self._copies.read, counts=True) < count:
                break
            start += count
        return start

    def _start(
        self,
        transfer: Transfer,
        level: Level,
        blocks: Sequence[Block],
        indices: Sequence[int],
        start: Callable[..., int],
        *,
        counts: bool,
    ) -> int:
        """Start copies of ``blocks``, which are those at ``indices`` of the call; returns how many could be started."""
        index_of = {block.key: index for block, index in zip(blocks, indices, strict=True)}
        abandoned: set[BlockKey] = set()

        def settle(moves: Sequence[BlockMove], outcomes: Sequence[Outcome]) -> None:
            transfer.num_waiting -= len(moves)
            if counts:
                for move, outcome in zip(moves, outcomes, strict=True):
                    transfer.outcomes[index_of[move.key]] = outcome
            whole = [move.key for move, outcome in zip(moves, outcomes, strict=True) if outcome is Outcome.OK]
            transfer.accepted.update(whole)
            if whole and start == self._copies.write:
                self._on_stored(transfer.ns, whole)

        def on_abandon(moves: Sequence[BlockMove]) -> None:
            abandoned.update(move.key for move in moves)
            settle(moves, [Outcome.LATE] * len(moves))

        def on_return(moves: Sequence[BlockMove], outcomes: Sequence[Outcome]) -> None:
            transfer.num_in_flight -= len(moves)
            if moves[0].key not in abandoned:
                settle(moves, outcomes)

        num_started = start(level, transfer.ns, blocks, transfer.deadline_s, on_return, on_abandon)
        transfer.num_in_flight += num_started
        transfer.num_waiting += num_started
        if counts:
            for position, index in enumerate(indices):
                transfer.outcomes[index] = None if position < num_started else Outcome.FULL
        return num_started


def readable_bytes(ns: Namespace, keys: Sequence[BlockKey], buffers: Sequence[LentBuffer]) -> list[memoryview]:
    """The bytes of the block that each key has in its buffer, to be read.

    Raises ``LayoutError`` unless there is a contiguous buffer for each key, long enough for a block.
    """
    if len(buffers) < len(keys):
        raise LayoutError(f"{len(keys)} blocks need a buffer each, and there are {len(buffers)}")
    return [_bytes(buffer, ns.layout.block_bytes) for buffer, _ in zip(buffers, keys, strict=False)]


def writable_bytes(ns: Namespace, keys: Sequence[BlockKey], buffers: Sequence[LentBuffer]) -> list[memoryview]:
    """The bytes of each buffer to be filled with a key's block. Raises as that does, and for read-only ones."""
    views = readable_bytes(ns, keys, buffers)
    if any(view.readonly for view in views):
        raise LayoutError("a buffer that a block is to be loaded into is read-only: lend a writable one")
    return views


def _bytes(buffer: LentBuffer, block_bytes: int) -> memoryview:
    try:
        view = memoryview(buffer)  # type: ignore[arg-type]  # an array is a buffer, which types know from 3.12 on
    except TypeError as error:
        raise LayoutError(
            f"a lent buffer is a {type(buffer).__name__}: lend a memoryview, bytearray, bytes or array of numpy"
        ) from error
    if not view.c_contiguous:
        raise LayoutError("a lent buffer has gaps between its bytes: lend contiguous ones")
    if view.nbytes < block_bytes:
        raise LayoutError(f"a lent buffer has {view.nbytes} bytes: blocks of this layout need at least {block_bytes}")
    try:
        return view.cast("B")[:block_bytes]
    except (TypeError, ValueError) as error:
        raise LayoutError(f"a lent buffer of format {view.format!r} has no plain bytes: lend it as uint8") from error
