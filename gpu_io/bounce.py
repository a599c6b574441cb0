"""Pinned memory of our own, for slots that the driver was not told of: a device copies here, and the host the rest.

Given such slots, a driver copies through memory of its own while the host waits. Here nobody waits: what finds no place
is not begun.

Rule 1: a place has room for a block. It is of one ticket until that has ended, and of the next one then.
Rule 2: no ticket takes more than half of the places, so that another can begin beside it.

Invariant: every place is free or of exactly one ticket.
"""

from gpu_io.streams import Device
from gpu_io.works import host_bytes

BOUNCE_BYTES = 64 << 20
"""Of each direction; less where all blocks are less, more where a single block is larger."""


class Bounce:
    """The places of one direction."""

    def __init__(self, device: Device, block_bytes: int, num_blocks: int) -> None:
        """Reserves them all. Raises ``RuntimeError`` if so little memory cannot be pinned."""
        self._device = device
        self._block_bytes = block_bytes
        self.num_places = max(1, min(BOUNCE_BYTES // block_bytes, num_blocks))
        self._memory = device.pinned_memory(self.num_places * block_bytes)
        first = self._memory.data_ptr()
        self._free = [first + place * block_bytes for place in range(self.num_places)]

    def take(self, num_blocks: int) -> list[int] | None:
        """Addresses of places for so many blocks, or for as many as one ticket may have; None if too few are free.

        They are in the order of memory, since the device makes one copy of those that are adjacent.
        """
        num_places = min(num_blocks, max(1, self.num_places // 2))
        if num_places > len(self._free):
            return None
        taken, self._free = self._free[:num_places], self._free[num_places:]
        return taken

    def give_back(self, places: list[int]) -> None:
        """No stream touches them any more."""
        self._free = sorted(self._free + places)

    def copy(self, target: int, source: int) -> None:
        """The host copies a block between a place and a slot, now."""
        self._device.host_copy(host_bytes(target, self._block_bytes), host_bytes(source, self._block_bytes))

    def close(self) -> None:
        """Give the memory back."""
        self._device.free(self._memory)
