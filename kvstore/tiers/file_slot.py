"""What lies in a slot of the file tier, and which slots move together."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvstore import header
from kvstore.header import Header
from kvstore.layout import Layout
from kvstore.tiers.base import BlockMove
from kvstore.tiers.file_geometry import Geometry, Grid, Place
from kvstore.tiers.slot_table import ExtentLayout
from kvstore.types import Outcome

PLAIN = 0
"""The codec id of a payload that is stored as it is; file slots take no other."""


@dataclass(frozen=True, slots=True)
class Run:
    """Blocks of one layout in adjacent slots of a directory, to be moved in one operation."""

    grid: Grid
    layout: ExtentLayout
    first: Place
    positions: list[int]
    """Where in the batch each block is."""
    moves: list[BlockMove]

    def __len__(self) -> int:
        return len(self.moves)

    @property
    def file_offset_bytes(self) -> int:
        """Where the first slot starts."""
        return self.grid.file_offset_bytes(self.first)

    def part(self, start: int, end: int) -> "Run":
        """The blocks from ``start`` up to ``end``."""
        first = self.first._replace(slot=self.first.slot + start)
        return Run(self.grid, self.layout, first, self.positions[start:end], self.moves[start:end])

    def singles(self) -> "Iterator[Run]":
        """Each block alone."""
        return (self.part(index, index + 1) for index in range(len(self)))


def runs(moves: Sequence[BlockMove], geometry: Geometry) -> Iterator[Run]:
    """``moves`` in the order of their places, in as few runs as may be; those that have no place are left out."""
    for stretch in _stretches(moves, geometry):
        num_parts = -(-len(stretch) // stretch.grid.slots_per_run)
        cuts = [len(stretch) * part // num_parts for part in range(num_parts + 1)]  # evenly: a small one costs as much
        for start, end in itertools.pairwise(cuts):
            yield stretch.part(start, end)


def _stretches(moves: Sequence[BlockMove], geometry: Geometry) -> Iterator[Run]:
    """Runs of any length."""
    placed = []
    for position, move in enumerate(moves):
        place = geometry.grid(move.layout.block_bytes).place(move.offset_bytes)
        if place is not None:
            placed.append((place, position))
    placed.sort()
    run: Run | None = None
    following: tuple[int, int, int] | None = None
    for place, position in placed:
        move = moves[position]
        if run is not None and place == following and _is_of(move.layout, run):
            run.positions.append(position)
            run.moves.append(move)
        else:
            if run is not None:
                yield run
            layout = ExtentLayout(move.layout.fingerprint, move.layout.block_bytes)
            run = Run(geometry.grid(layout.block_bytes), layout, place, [position], [move])
        following = (place.directory, place.extent, place.slot + 1)
    if run is not None:
        yield run


def seal(move: BlockMove, sequence: int) -> Header:
    """The header of a block that is to be written."""
    payload = move.buffer[: move.layout.block_bytes]
    return Header(
        key=move.key,
        parent=move.parent,
        fingerprint=move.layout.fingerprint,
        block_bytes=len(payload),
        stored_bytes=len(payload),
        checksum=header.checksum(payload),
        created_unix_s=move.created_unix_s,
        codec_id=PLAIN,
        expires_unix_s=move.created_unix_s + move.max_age_s if move.max_age_s else 0,
        sequence=sequence,
    )


def expected(data: bytes, move: BlockMove, now_unix_s: float) -> Header | Outcome:
    """The header in ``data`` if it is that of the block ``move`` asks for, and not too old; else what that means."""
    found = header.admit(data, move.key, move.layout.fingerprint, move.layout.block_bytes)
    if isinstance(found, Outcome):
        return found
    if found.codec_id != PLAIN:
        return Outcome.FOREIGN
    if found.stored_bytes != found.block_bytes:
        return Outcome.DAMAGED
    if has_expired(found.expires_unix_s, now_unix_s) or (
        move.max_age_s and found.created_unix_s + move.max_age_s <= now_unix_s
    ):
        return Outcome.ABSENT
    return found


def has_expired(expires_unix_s: int, now_unix_s: float) -> bool:
    """Whether the time has passed; 0 never does."""
    return 0 < expires_unix_s <= now_unix_s


def _is_of(layout: Layout, run: Run) -> bool:
    return layout is run.moves[0].layout or (layout.fingerprint, layout.block_bytes) == run.layout
