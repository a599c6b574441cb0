"""Opening file tiers in tests."""

from contextlib import closing
from pathlib import Path
from typing import Any

from kvstore.layout import Layout
from kvstore.testing.blocks import empty_moves, full_moves, is_right, layout_of, soon
from kvstore.tiers.file import FileTier
from kvstore.types import Outcome

CAPACITY_BYTES = 16 << 20
EXTENT_BYTES = 4 << 20
LAYOUT = layout_of(64 << 10)


class ManualClock:
    """Time that passes when a test says so."""

    def __init__(self, now_s: float) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


def opened(*directories: Path, capacity_bytes: int = CAPACITY_BYTES, **options: Any) -> closing[FileTier]:
    """A small tier with several extents, closed at the end of the ``with``."""
    return closing(FileTier(directories, capacity_bytes, **{"extent_bytes": EXTENT_BYTES} | options))


def store(tier: FileTier, *numbers: int, layout: Layout = LAYOUT) -> None:
    """Write blocks, which must go well."""
    assert tier.write(full_moves(tier, numbers, layout), soon()) == [Outcome.OK] * len(numbers)


def readable(tier: FileTier, numbers: range, layout: Layout = LAYOUT) -> set[int]:
    """Which of the blocks are there; their bytes must be right."""
    moves = empty_moves(tier, numbers, layout)
    found = set()
    for number, move, outcome in zip(numbers, moves, tier.read(moves, soon()), strict=True):
        if outcome is Outcome.OK:
            assert is_right(move)
            found.add(number)
    return found
