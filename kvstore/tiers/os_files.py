"""The system calls that the file tier makes on files, in one object, so that a test can have any of them fail."""

import ctypes
import errno
import os
from collections.abc import Sequence
from pathlib import Path

Buffers = Sequence[bytes | bytearray | memoryview]

_PUNCH_HOLE_KEEP_SIZE = 0x03  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE of linux/falloc.h
_LIBC = ctypes.CDLL(None, use_errno=True)


class OsFiles:
    """The real calls. Each raises ``OSError``; all let go of the interpreter lock while they wait."""

    def open(self, path: Path, flags: int) -> int:
        """A descriptor; a new file is for its owner alone, whatever the umask."""
        fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        if flags & os.O_CREAT:
            os.fchmod(fd, 0o600)
        return fd

    def close(self, fd: int) -> None:
        """Close the descriptor."""
        os.close(fd)

    def preadv(self, fd: int, buffers: Buffers, offset: int) -> int:
        """Fill ``buffers`` one after the other; the bytes that there were."""
        return os.preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Buffers, offset: int) -> int:
        """Write ``buffers`` back to back; the bytes that were written."""
        return os.pwritev(fd, buffers, offset)

    def preallocate(self, fd: int, offset: int, num_bytes: int) -> None:
        """Let the file own the disk space of this range."""
        os.posix_fallocate(fd, offset, num_bytes)

    def punch(self, fd: int, offset: int, num_bytes: int) -> None:
        """Give the disk space of this range back; it reads as zeros."""
        args = ctypes.c_int(fd), _PUNCH_HOLE_KEEP_SIZE, ctypes.c_int64(offset), ctypes.c_int64(num_bytes)
        if _LIBC.fallocate64(*args) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    def truncate(self, fd: int, num_bytes: int) -> None:
        """Give the file this length."""
        os.ftruncate(fd, num_bytes)

    def stat(self, fd: int) -> os.stat_result:
        """What the file system says of the file."""
        return os.fstat(fd)

    def sync(self, fd: int) -> None:
        """Wait until the file is on the disk."""
        os.fsync(fd)


def refuses_direct(error: OSError) -> bool:
    """Whether the file system takes no O_DIRECT."""
    return error.errno in (errno.EINVAL, errno.EOPNOTSUPP)


def is_disk_full(error: OSError) -> bool:
    """Whether there is no room: on the disk, in the quota, or in the largest file allowed."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
