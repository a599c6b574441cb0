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
from kvstore.tiers.file_directory import BLOCKS
from kvstore.tiers.file_geometry import PAGE_BYTES, Geometry

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
        path, offset = self.slot_of(move)
        with path.open("rb") as file:
            file.seek(offset)
            slot = file.read(PAGE_BYTES + move.layout.block_bytes)
        return slot[:HEADER_BYTES] + slot[PAGE_BYTES:]

    def tamper(self, tier: Tier, move: BlockMove, stored: bytes) -> None:
        path, offset = self.slot_of(move)
        with path.open("r+b") as file:
            file.seek(offset)
            file.write(stored[:HEADER_BYTES])
            file.seek(offset + PAGE_BYTES)
            file.write(stored[HEADER_BYTES:])

    def slot_of(self, move: BlockMove) -> tuple[Path, int]:
        """The file a block lies in, and where."""
        grid = Geometry(CAPACITY_BYTES, EXTENT_BYTES, self.num_directories).grid(move.layout.block_bytes)
        place = grid.place(move.offset_bytes)
        assert place is not None
        return self.directories[place.directory] / BLOCKS, grid.file_offset_bytes(place)


class TestFileTierInThreeDirectories(TestFileTier):
    num_directories = 3


class TestFileTierThroughThePageCache(TestFileTier):
    def open(self) -> FileTier:
        files = FaultyFiles()
        files.inject(Fault("open", fails(errno.EINVAL), flags=os.O_DIRECT, times=None))
        self.tiers.append(FileTier(self.directories, CAPACITY_BYTES, extent_bytes=EXTENT_BYTES, files=files))
        assert self.tiers[-1].io_mode == "buffered"
        return self.tiers[-1]
