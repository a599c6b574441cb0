"""Where a slot of the file tier's budget lies: in which directory, and where in its files. Pure arithmetic.

A slot takes whole pages for its payload and its header in the slot table. The budget counts both, so that a full tier
takes its capacity on disk and not a byte more. That is why slots do not start on pages in the budget, though they do in
the file.

With several directories every extent has a piece in each, and runs of ``RUN_BYTES`` take turns, so that one prefix is
read from all disks at once. A piece starts at the extent's own offset in each file; what is not used there is a hole.
"""

from typing import NamedTuple

from kvstore.errors import ConfigError
from kvstore.extents import extent_bytes_for
from kvstore.layout import slot_bytes as whole_pages

PAGE_BYTES = 4096
"""What O_DIRECT moves."""
ENTRY_BYTES = 256
"""What a block takes in the slot table: its header."""
RUN_BYTES = 2 << 20
"""The size of operation at which disks are fastest."""

_DIRECTORY_OVERHEAD_BYTES = 4 * PAGE_BYTES  # the directory itself, superblock, lock, ledger
_PIECE_OVERHEAD_BYTES = 2 * PAGE_BYTES  # the head of a table and its rounding


class Place(NamedTuple):
    """The ``slot``-th slot of an extent's piece in a directory."""

    directory: int
    extent: int
    slot: int


def file_slot_bytes(block_bytes: int) -> int:
    """What a slot takes in the file of blocks: the payload in whole pages."""
    return whole_pages(block_bytes)


def budget_slot_bytes(block_bytes: int) -> int:
    """What a slot takes of the budget, its header in the slot table included."""
    return file_slot_bytes(block_bytes) + ENTRY_BYTES


class Geometry:
    """How a budget is cut over directories.

    ``stride_bytes`` is from extent to extent in a file, and fixed when a store is made; ``extent_bytes``
    is the same in the budget, or less where the budget has shrunk to less than one extent. ``capacity_bytes`` is what
    slots can take.
    """

    def __init__(self, capacity_bytes: int, stride_bytes: int, num_directories: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.stride_bytes = stride_bytes
        self.num_directories = num_directories
        self.extent_bytes = min(stride_bytes, self.capacity_bytes)
        self.num_extents = -(-self.capacity_bytes // self.extent_bytes)
        self._grids: dict[int, Grid] = {}

    @classmethod
    def within(cls, configured_bytes: int, stride_bytes: int, num_directories: int) -> "Geometry":
        """What fits into ``configured_bytes`` of disk. Raises ``ConfigError`` where that is not a single block."""
        num_extents = -(-configured_bytes // stride_bytes)
        overhead_bytes = num_directories * (_DIRECTORY_OVERHEAD_BYTES + num_extents * _PIECE_OVERHEAD_BYTES)
        if configured_bytes - overhead_bytes < budget_slot_bytes(1):
            raise ConfigError(
                f"the file tier's capacity of {configured_bytes} bytes holds no block: it needs {overhead_bytes} bytes"
                " for itself; raise file.capacity"
            )
        return cls(configured_bytes - overhead_bytes, stride_bytes, num_directories)

    def grid(self, block_bytes: int) -> "Grid":
        """The slots for blocks of this size."""
        grid = self._grids.get(block_bytes)
        if grid is None:
            grid = self._grids[block_bytes] = Grid(self, block_bytes)
        return grid

    def size_bytes(self, extent: int) -> int:
        """What slots can take of an extent; the last one may be short."""
        return min(self.extent_bytes, self.capacity_bytes - extent * self.extent_bytes)


class Grid:
    """The slots for blocks of one size."""

    def __init__(self, geometry: Geometry, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self.file_slot_bytes = file_slot_bytes(block_bytes)
        self.slots_per_run = max(1, RUN_BYTES // self.file_slot_bytes)
        self._slot_bytes = budget_slot_bytes(block_bytes)
        self._geometry = geometry
        self._extent_bytes = geometry.extent_bytes
        self._num_slots = [geometry.size_bytes(extent) // self._slot_bytes for extent in range(geometry.num_extents)]

    def place(self, offset_bytes: int) -> Place | None:
        """Where the slot at ``offset_bytes`` of the budget lies; None if none starts there."""
        extent, within = divmod(offset_bytes, self._extent_bytes)
        slot, remainder = divmod(within, self._slot_bytes)
        if remainder or not 0 <= extent < len(self._num_slots) or slot >= self._num_slots[extent]:
            return None
        if self._geometry.num_directories == 1:
            return Place(0, extent, slot)
        run, position = divmod(slot, self.slots_per_run)
        turn, directory = divmod(run, self._geometry.num_directories)
        return Place(directory, extent, turn * self.slots_per_run + position)

    def offset_bytes(self, place: Place) -> int:
        """The inverse of ``place``."""
        turn, position = divmod(place.slot, self.slots_per_run)
        slot = (turn * self._geometry.num_directories + place.directory) * self.slots_per_run + position
        return place.extent * self._extent_bytes + slot * self._slot_bytes

    def num_slots(self, directory: int, extent: int) -> int:
        """How many slots an extent has in a directory."""
        turns, rest = divmod(self._num_slots[extent], self.slots_per_run * self._geometry.num_directories)
        return turns * self.slots_per_run + min(self.slots_per_run, max(0, rest - directory * self.slots_per_run))

    def file_offset_bytes(self, place: Place) -> int:
        """Where the slot starts in its directory's file of blocks."""
        return place.extent * self._geometry.stride_bytes + place.slot * self.file_slot_bytes


def stride_bytes_for(configured_bytes: int, num_directories: int) -> int:
    """The stride of a new store: whole pages, and no more than its budget."""
    stride_bytes = extent_bytes_for(configured_bytes)
    fitting_bytes = Geometry.within(configured_bytes, stride_bytes, num_directories).extent_bytes
    return max(PAGE_BYTES, fitting_bytes // PAGE_BYTES * PAGE_BYTES)
