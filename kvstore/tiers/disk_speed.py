"""How fast a disk takes and gives bytes, tried out with a few MiB as the file tier would move them."""

import errno
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass

from kvstore.quantity import format_size
from kvstore.tiers.os_files import OsFiles

PIECE_BYTES = 1 << 20
NUM_PIECES = 8
LIMIT_S = 0.1
"""Each way; a slow disk is known as such after two pieces, and a start waits for it no longer."""

SLOW_BYTES_PER_S = 256 << 20
"""What an accelerator that prefills 2,000 tokens a second makes of KV with 128 KiB a token, as Llama 3 8B has it: from
a slower disk not even a small one loads faster than it computes."""


@dataclass(frozen=True, slots=True)
class DiskSpeed:
    """What one thread got at best."""

    write_bytes_per_s: float
    read_bytes_per_s: float

    @property
    def is_slow(self) -> bool:
        """Whether recomputing is likely to beat loading."""
        return min(self.write_bytes_per_s, self.read_bytes_per_s) < SLOW_BYTES_PER_S

    def __str__(self) -> str:
        return f"writes {format_size(int(self.write_bytes_per_s))}/s, reads {format_size(int(self.read_bytes_per_s))}/s"


def measure(files: OsFiles, fd: int, clock: Callable[[], float]) -> DiskSpeed:
    """Write the first MiB of an empty file, and read them.

    It is to be open with O_DIRECT: the speed of a page cache says nothing. Raises ``OSError``: what the disk says, or
    EIO where it gives other bytes than it took.
    """
    with mmap.mmap(-1, PIECE_BYTES) as written, mmap.mmap(-1, PIECE_BYTES) as read:  # mappings lie on pages
        written[:] = os.urandom(PIECE_BYTES)
        with memoryview(written) as source, memoryview(read) as target:
            write_bytes_per_s, num_written = _best(
                lambda offset: files.pwritev(fd, [source], offset), NUM_PIECES, clock
            )
            read_bytes_per_s, _ = _best(lambda offset: files.preadv(fd, [target], offset), num_written, clock)
        if read[:] != written[:]:
            raise OSError(errno.EIO, "what was read is not what was written")
    return DiskSpeed(write_bytes_per_s, read_bytes_per_s)


def _best(move: Callable[[int], int], num_pieces: int, clock: Callable[[], float]) -> tuple[float, int]:
    """Bytes per second of the fastest piece, as others may have met a busy machine; how many there was time for."""
    best, began_s = 0.0, clock()
    now_s = began_s
    for index in range(num_pieces):
        before_s = now_s
        num_bytes = move(index * PIECE_BYTES)
        now_s = clock()
        best = max(best, num_bytes / max(now_s - before_s, 1e-9))
        if index and now_s - began_s >= LIMIT_S:
            return best, index + 1
    return best, num_pieces
