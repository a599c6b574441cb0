"""The division of a tier's byte budget into extents, each lent whole to one pool. Pure."""

import heapq

from kvstore.errors import ConfigError

MIN_EXTENT_BYTES = 1 << 20
USUAL_EXTENT_BYTES = 64 << 20
MAX_EXTENT_BYTES = 1 << 30


def extent_bytes_for(capacity_bytes: int) -> int:
    """The size of a tier's extents: a sixteenth of its budget within 64 MiB and 1 GiB; a quarter of a small one.

    Small enough that models can share a tier, large enough that the remainder after the last whole slot is noise. A
    budget of less than 1 MiB is one extent.
    """
    least_bytes = max(MIN_EXTENT_BYTES, min(USUAL_EXTENT_BYTES, capacity_bytes // 4))
    return min(capacity_bytes, max(least_bytes, min(MAX_EXTENT_BYTES, capacity_bytes // 16)))


class Extents:
    """Which extents of a budget are free. The last one may be short."""

    def __init__(self, capacity_bytes: int, extent_bytes: int) -> None:
        if not 0 < extent_bytes <= capacity_bytes:
            raise ConfigError(
                f"extents of {extent_bytes} bytes do not divide a capacity of {capacity_bytes} bytes;"
                " give a capacity of at least one block"
            )
        self.capacity_bytes = capacity_bytes
        self.extent_bytes = extent_bytes
        self._num = -(-capacity_bytes // extent_bytes)
        self._free = list(range(self._num))

    @property
    def num_extents(self) -> int:
        """Extents in all, free or lent."""
        return self._num

    @property
    def num_free(self) -> int:
        """Extents that no pool owns."""
        return len(self._free)

    def size_bytes(self, index: int) -> int:
        """Bytes of extent ``index``."""
        return min(self.extent_bytes, self.capacity_bytes - index * self.extent_bytes)

    def acquire(self, min_bytes: int) -> int | None:
        """The lowest free extent of at least ``min_bytes``, now lent; None if there is none."""
        if not self._free:
            return None
        index = heapq.heappop(self._free)
        if self.size_bytes(index) < min_bytes:
            heapq.heappush(self._free, index)
            return None
        return index

    def claim(self, index: int) -> None:
        """Lend extent ``index``, which must be free: a scan found blocks in it."""
        self._free.remove(index)
        heapq.heapify(self._free)

    def release(self, index: int) -> None:
        """An emptied extent comes back."""
        heapq.heappush(self._free, index)
