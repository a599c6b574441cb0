"""The file tier against the contract of tiers, with O_DIRECT and without it, in one directory and in three."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.header import HEADER_BYTES
from kvstore.testing.file_faults import Fault, FaultyFiles, fails
from kvstore.testing.tier_contract import CAPACITY_BYTES, AdoptingTierContract
from kvstore.tiers.base import BlockMove, Tier
from kvstore.tiers.file import FileTier
from kvstore.tiers.file_directory import BLOCKS, SLOTS
from kvstore.tiers.file_geometry import Geometry
from kvstore.tiers.slot_table import entry_offset_bytes

EXTENT_BYTES = 16 << 20


class TestFileTier(AdoptingTierContract):
    num_directories = 1

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[Tier]:
        self.tiers: list[FileTier] = []
        self.directories = [tmp_path / f"disk{number}" for number in range(self.num_directories)]
        yield self.open()
        for tier in self.tiers:
            tier.close()

    def open(self) -> FileTier:
        self.tiers.append(FileTier(self.directories, CAPACITY_BYTES, extent_bytes=EXTENT_BYTES))
        return self.tiers[-1]

    def reopen(self, tier: Tier) -> Tier:
        tier.close()
        return self.open()

    def stored(self, tier: Tier, move: BlockMove) -> bytes:
        header, payload = self.places_of(move)
        return _read(*header, HEADER_BYTES) + _read(*payload, move.layout.block_bytes)

    def tamper(self, tier: Tier, move: BlockMove, stored: bytes) -> None:
        header, payload = self.places_of(move)
        _write(*header, stored[:HEADER_BYTES])
        _write(*payload, stored[HEADER_BYTES:])

    def places_of(self, move: BlockMove) -> tuple[tuple[Path, int], tuple[Path, int]]:
        """The files that a block's header and its payload lie in, and where."""
        geometry = Geometry.within(CAPACITY_BYTES, EXTENT_BYTES, self.num_directories)
        grid = geometry.grid(move.layout.block_bytes)
        place = grid.place(move.offset_bytes)
        assert place is not None
        directory = self.directories[place.directory]
        return (
            (directory / SLOTS, entry_offset_bytes(geometry.stride_bytes, place.extent, place.slot)),
            (directory / BLOCKS, grid.file_offset_bytes(place)),
        )


def _read(path: Path, offset: int, num_bytes: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(num_bytes)


def _write(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


class TestFileTierInThreeDirectories(TestFileTier):
    num_directories = 3


class TestFileTierThroughThePageCache(TestFileTier):
    def open(self) -> FileTier:
        files = FaultyFiles()
        files.inject(Fault("open", fails(errno.EINVAL), flags=os.O_DIRECT, times=None))
        self.tiers.append(FileTier(self.directories, CAPACITY_BYTES, extent_bytes=EXTENT_BYTES, files=files))
        assert self.tiers[-1].io_mode == "buffered"
        return self.tiers[-1]
