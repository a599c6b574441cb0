"""One directory of the file tier: whose it is, which part of which store, and its open files.

Rule 1: whoever has the lock is the only one who reads or writes here; it is taken before anything else is touched.
Rule 2: files stay open while anyone is inside ``held``, so that a late copy never meets a number that was given to
another file; ``close`` waits for nobody, and the last one out closes.
"""

import errno
import fcntl
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from enum import Enum
from pathlib import Path
from typing import Literal

from kvstore.errors import ConfigError, OwnershipError
from kvstore.quantity import format_size
from kvstore.tiers import superblock
from kvstore.tiers.disk_speed import SLOW_BYTES_PER_S, DiskSpeed, measure
from kvstore.tiers.file_geometry import PAGE_BYTES, Geometry, Place
from kvstore.tiers.os_files import Buffers, OsFiles, is_disk_full, refuses_direct
from kvstore.tiers.slot_table import ExtentLayout, SlotTable, num_extents_in
from kvstore.tiers.superblock import Superblock
from kvstore.types import Outcome


class Access(Enum):
    """What somebody wants of a directory. Only ``OWN`` makes, cuts or lengthens anything."""

    OWN = "own"
    ERASE = "erase"
    LOOK = "look"


LOCK, SUPERBLOCK, BLOCKS, SLOTS, LEDGER = "lock", "superblock", "blocks", "slots", "ledger"

MAX_NOTE_BYTES = 16 << 20

PREALLOCATE_BYTES = 64 << 20
"""Disk space is taken in steps of this: writing to space that the file owns is a third faster than extending it."""

_LOCK_FLAGS = {Access.OWN: os.O_RDWR | os.O_CREAT, Access.ERASE: os.O_RDWR, Access.LOOK: os.O_RDONLY}
_NEW_SUPERBLOCK, _NOTE, _NEW_NOTE, _PROBE = "superblock.new", "note", "note.new", "probe"
_OURS = {LOCK, SUPERBLOCK, BLOCKS, SLOTS, LEDGER, _NEW_SUPERBLOCK, _NOTE, _NEW_NOTE, _PROBE}
_OF_FILE_SYSTEMS = {"lost+found"}
_NO_PREALLOCATION = {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}
_RETRY_S = 10.0

log = logging.getLogger("kvstore.tiers.file")


class Pause:
    """Something that found the disk full is not tried again for a while."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._until_s: float | None = None

    @property
    def is_stopped(self) -> bool:
        """Whether the last try found the disk full."""
        return self._until_s is not None

    def allows(self) -> bool:
        """Whether to try now."""
        return self._until_s is None or self._clock() >= self._until_s

    def stop(self) -> bool:
        """The disk is full; returns whether that is news."""
        is_news = not self.is_stopped
        self._until_s = self._clock() + _RETRY_S
        return is_news

    def resume(self) -> bool:
        """A try went well; returns whether that is news."""
        is_news = self.is_stopped
        self._until_s = None
        return is_news


class Directory:
    """A directory that this process has for itself. Look at ``found``, then ``open`` it, or ``open_existing``."""

    io_mode: Literal["direct", "buffered"] = "direct"
    speed: DiskSpeed | None = None
    table: SlotTable

    def __init__(self, path: Path, files: OsFiles, clock: Callable[[], float], access: Access = Access.OWN) -> None:
        """Keep owners away from ``path`` until ``close``; who wants to LOOK shares it with others who do.

        Raises ``OwnershipError``, ``ConfigError``, ``FormatError`` or ``OSError``.
        """
        self.path = path
        self._access = access
        self._files = files
        self._clock = clock
        self._fds = ExitStack()
        self._guard, self._growing = threading.Lock(), threading.Lock()
        self._num_held = 0
        self._is_closed = False
        self._preallocated: set[tuple[int, int]] = set()
        self._reported: set[tuple[str, int | None]] = set()
        self.growth, self.writes = Pause(clock), Pause(clock)
        self.found: Superblock | None = None
        if access is Access.OWN:
            _make(path)
        elif not (path / SUPERBLOCK).exists():
            return  # there is nothing to keep anybody away from
        with ExitStack() as undo:
            undo.callback(self.close)
            self._lock_fd = self._open_file(LOCK, _LOCK_FLAGS[access])
            _lock(self._lock_fd, path, access)
            self.found = self._read_superblock()
            undo.pop_all()

    def open(self, own: Superblock, geometry: Geometry) -> None:
        """Open the files as ``own`` says, made afresh if there is no such store here, cut to the budget if larger."""
        if self.found is None:
            for name in (BLOCKS, SLOTS, LEDGER, _NOTE):
                (self.path / name).unlink(missing_ok=True)
        if self.found != own:
            self._write_superblock(own)
        self.number = own.directory
        self._own = own
        self._geometry = geometry
        self._blocks_fd = self._open_file(BLOCKS, os.O_RDWR | os.O_CREAT)
        self._slots_fd = self._open_file(SLOTS, os.O_RDWR | os.O_CREAT)
        self._ledger_fd = self._open_file(LEDGER, os.O_RDWR | os.O_CREAT)
        before_bytes = self.usage_bytes()
        self.table = SlotTable(self._files, self._slots_fd, geometry.stride_bytes, geometry.num_extents)
        self._cut_blocks()
        if (cut_bytes := before_bytes - self.usage_bytes()) > 0:
            log.warning(
                "%s: file.capacity is smaller than before: %s were given back, with the blocks that lay there",
                self.path,
                format_size(cut_bytes),
            )
        self._open_direct()

    def open_existing(self, geometry: Geometry) -> None:
        """Open the files as they are. To be called where a store was ``found``, with extents enough for all of it."""
        assert self.found is not None
        self.number = self.found.directory
        self._blocks_fd = self._open_file(BLOCKS, os.O_RDONLY)
        self._slots_fd = self._open_file(SLOTS, os.O_RDWR if self._access is Access.ERASE else os.O_RDONLY)
        self.table = SlotTable(self._files, self._slots_fd, geometry.stride_bytes, geometry.num_extents)
        try:
            self._direct_fd = self._open_file(BLOCKS, os.O_RDONLY | os.O_DIRECT)
        except OSError as error:
            if not refuses_direct(error):
                raise
            self._fall_back(error)

    def num_extents_there(self) -> int:
        """How many extents the table in a directory that was ``found`` can tell of. Raises ``OSError``."""
        assert self.found is not None
        return num_extents_in((self.path / SLOTS).stat().st_size, self.found.stride_bytes)

    def again(self, files: OsFiles, clock: Callable[[], float]) -> "Directory":
        """The same part of the same store, opened anew. Raises as the constructor and ``open`` do."""
        anew = Directory(self.path, files, clock)
        with ExitStack() as undo:
            undo.callback(anew.close)
            if anew.found not in (None, self._own):
                raise ConfigError(f"{self.path} has become a part of another store")
            anew.open(self._own, self._geometry)
            undo.pop_all()
        return anew

    # ---- life

    @contextmanager
    def held(self) -> "Iterator[Directory | None]":
        """The directory itself, whose files stay open meanwhile; None if it is closed."""
        with self._guard:
            is_open = not self._is_closed
            self._num_held += is_open
        try:
            yield self if is_open else None
        finally:
            if is_open:
                with self._guard:
                    self._num_held -= 1
                    is_last = self._is_closed and not self._num_held
                if is_last:
                    self._fds.close()

    def close(self) -> None:
        """Let go of files and lock as soon as nobody is inside. Safe to call twice."""
        with self._guard:
            is_last = not self._is_closed and not self._num_held
            self._is_closed = True
        if is_last:
            self._fds.close()

    @property
    def is_lost(self) -> bool:
        """Whether someone deleted the files that are open here. To be asked while held."""
        return not all(self._files.stat(fd).st_nlink for fd in (self._blocks_fd, self._slots_fd, self._lock_fd))

    def usage_bytes(self) -> int:
        """Disk space that the files take; holes take none."""
        used_bytes = 0
        for name in _OURS:
            with suppress(OSError):  # it may have been deleted
                found = (self.path / name).stat()
                used_bytes += min(found.st_size, found.st_blocks * 512)
        return used_bytes

    # ---- bytes

    def read(self, buffers: Buffers, offset: int) -> int:
        """Fill ``buffers`` from the file of blocks; returns how many bytes there were. Raises ``OSError``."""
        return self._move(self._files.preadv, buffers, offset)

    def write(self, buffers: Buffers, offset: int) -> int:
        """Write ``buffers`` to the file of blocks; returns how many bytes were written. Raises ``OSError``."""
        return self._move(self._files.pwritev, buffers, offset)

    def prepare(self, first: Place, count: int, layout: ExtentLayout) -> bool:
        """Let ``count`` slots from ``first`` on be written: the extent serves ``layout`` and the file owns the space.

        False if there is no room on the disk. Raises ``OSError``.
        """
        slot_bytes = self._geometry.grid(layout.block_bytes).file_slot_bytes
        start, end = first.slot * slot_bytes, (first.slot + count) * slot_bytes
        chunks = [(first.extent, chunk) for chunk in range(start // PREALLOCATE_BYTES, -(-end // PREALLOCATE_BYTES))]
        if self.table.layout(first.extent) == layout and self._preallocated.issuperset(chunks):
            return True
        with self._growing:
            if not self.growth.allows():
                return False
            try:
                self._grow(first.extent, chunks, (start, end), layout)
            except OSError as error:
                if not is_disk_full(error):
                    raise
                if self.growth.stop():
                    log.warning("%s: the disk is full (%s): no growth until there is room", self.path, error)
                return False
            if self.growth.resume():
                log.warning("%s: there is room on the disk again", self.path)
            return True

    def report(self, what: str, error: OSError) -> None:
        """Log an error of the disk, each kind once."""
        if (what, error.errno) not in self._reported:
            self._reported.add((what, error.errno))
            log.warning(
                "%s: %s failed: %s; further errors of this kind are counted, not logged", self.path, what, error
            )

    def judge_write(self, error: OSError) -> Outcome:
        """What an error while writing means for the block. If the disk is full, ``writes`` pauses."""
        if not is_disk_full(error):
            self.report("writing", error)
            return Outcome.FAILED
        if self.writes.stop():
            log.warning("%s: the disk is full (%s): no writes until there is room", self.path, error)
        return Outcome.FULL

    def read_ledger(self) -> bytes:
        """What ``save_ledger`` saved last."""
        page = bytearray(PAGE_BYTES)
        return bytes(page[: self._files.preadv(self._ledger_fd, [page], 0)])

    def save_ledger(self, data: bytes) -> None:
        """Keep ``data`` over a restart; the block is written even if that fails."""
        try:
            self._files.pwritev(self._ledger_fd, [data], 0)
        except OSError as error:
            self.report("saving the write ledger", error)

    def read_note(self) -> bytes:
        """What ``save_note`` saved last; empty where there is none that can be read."""
        path = self.path / _NOTE
        try:
            return path.read_bytes() if path.stat().st_size <= MAX_NOTE_BYTES else b""
        except FileNotFoundError:
            return b""
        except OSError as error:
            self.report("reading the note", error)
            return b""

    def save_note(self, data: bytes) -> None:
        """Keep ``data`` over a restart, whole or not at all."""
        try:
            self._replace(_NOTE, _NEW_NOTE, data)
        except OSError as error:
            self.report("saving the note", error)

    # ---- the inside

    def _move(self, call: Callable[[int, Buffers, int], int], buffers: Buffers, offset: int) -> int:
        if self.io_mode == "direct":
            try:
                return call(self._direct_fd, buffers, offset)
            except OSError as error:
                if not refuses_direct(error):
                    raise
                self._fall_back(error)
        return call(self._blocks_fd, buffers, offset)

    def _fall_back(self, error: OSError) -> None:
        if self.io_mode == "direct":
            self.io_mode = "buffered"
            log.warning(
                "%s: O_DIRECT is refused (%s): blocks go through the page cache, at many times the CPU;"
                " put the directory on a local ext4 or xfs",
                self.path,
                error,
            )

    def _grow(
        self, extent: int, chunks: Sequence[tuple[int, int]], needed: tuple[int, int], layout: ExtentLayout
    ) -> None:
        """Take the space of whole ``chunks``; of a disk that lacks it, only what is ``needed``, from start to end."""
        grid = self._geometry.grid(layout.block_bytes)
        num_slots = grid.num_slots(self.number, extent)
        if self.table.layout(extent) != layout:
            self._hand_over(extent, layout, num_slots)
        piece_bytes, extent_start = num_slots * grid.file_slot_bytes, extent * self._geometry.stride_bytes
        for chunk in chunks:
            if chunk in self._preallocated:
                continue
            start = chunk[1] * PREALLOCATE_BYTES
            end = min(start + PREALLOCATE_BYTES, piece_bytes)
            try:
                self._preallocate(extent_start + start, end - start)
                self._preallocated.add(chunk)
            except OSError as error:
                if not is_disk_full(error):
                    raise
                start, end = max(start, needed[0]), min(end, needed[1])
                self._preallocate(extent_start + start, end - start)

    def _hand_over(self, extent: int, layout: ExtentLayout, num_slots: int) -> None:
        """Empty an extent of another layout's blocks, disk space included, so that the budget holds."""
        self._preallocated -= {chunk for chunk in self._preallocated if chunk[0] == extent}
        if self.table.layout(extent) is not None:
            with suppress(OSError):  # where holes cannot be punched, the space stays with the file
                self._files.punch(self._blocks_fd, extent * self._geometry.stride_bytes, self._geometry.stride_bytes)
        self.table.hand_over(extent, layout, num_slots)

    def _preallocate(self, offset: int, num_bytes: int) -> None:
        try:
            self._files.preallocate(self._blocks_fd, offset, num_bytes)
        except OSError as error:
            if error.errno not in _NO_PREALLOCATION:
                raise
            self.report("preallocating", error)  # slower, no worse: the file grows as it is written

    def _cut_blocks(self) -> None:
        """Nothing lies beyond the budget."""
        last = self._geometry.num_extents - 1
        layout = self.table.layout(last)
        end = last * self._geometry.stride_bytes
        if layout is not None:
            grid = self._geometry.grid(layout.block_bytes)
            end += grid.num_slots(self.number, last) * grid.file_slot_bytes
        if self._files.stat(self._blocks_fd).st_size > end:
            self._files.truncate(self._blocks_fd, end)

    def _open_direct(self) -> None:
        """Open the file of blocks once more, past the page cache, if bytes can be written and read in this way."""
        try:
            self.speed = self._probe_direct()
            self._direct_fd = self._open_file(BLOCKS, os.O_RDWR | os.O_DIRECT)
        except OSError as error:
            if not refuses_direct(error):
                raise
            self._fall_back(error)
        if self.speed is not None and self.speed.is_slow:
            log.warning(
                "%s: this disk %s, below %s/s: recomputing is likely to be faster than loading from it;"
                " put the directory on a local NVMe, not on a container's overlay or a network volume",
                self.path,
                self.speed,
                format_size(SLOW_BYTES_PER_S),
            )

    def _probe_direct(self) -> DiskSpeed | None:
        """Some file systems take O_DIRECT when they open a file and refuse it when it is written."""
        path = self.path / _PROBE
        with ExitStack() as after:
            after.callback(path.unlink, missing_ok=True)
            fd = self._files.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
            after.callback(self._files.close, fd)
            try:
                return measure(self._files, fd, self._clock)
            except OSError as error:
                if not is_disk_full(error):  # which tells nothing of O_DIRECT
                    raise
                return None

    def _open_file(self, name: str, flags: int) -> int:
        fd = self._files.open(self.path / name, flags)
        self._fds.callback(self._files.close, fd)
        return fd

    def _read_superblock(self) -> Superblock | None:
        path = self.path / SUPERBLOCK
        if not path.exists():
            return None
        found = superblock.parse(path.read_bytes(), str(path))
        if found is None and self._access is Access.OWN:
            log.warning("%s is damaged or of an older format: its directory starts afresh", path)
        return found

    def _write_superblock(self, own: Superblock) -> None:
        self._replace(SUPERBLOCK, _NEW_SUPERBLOCK, own.pack())

    def _replace(self, name: str, new_name: str, data: bytes) -> None:
        """Whole or not at all. Raises ``OSError``."""
        fresh = self.path / new_name
        fd = self._files.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            if self._files.pwritev(fd, [data], 0) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(fresh))
            self._files.sync(fd)
        finally:
            self._files.close(fd)
        fresh.rename(self.path / name)


def has_store(paths: Sequence[Path]) -> bool:
    """Whether some store has used one of the directories."""
    return any((path / SUPERBLOCK).exists() for path in paths)


def _make(path: Path) -> None:
    """A directory of this user, for this user alone, with nothing in it that is not ours."""
    os.makedirs(path, mode=0o700, exist_ok=True)
    found = path.stat()
    if found.st_uid != os.geteuid():
        raise OwnershipError(
            f"{path} belongs to user {found.st_uid}, not to {os.geteuid()}, who runs this process:"
            " give file.directories a directory of this user"
        )
    names = set(os.listdir(path))
    if SUPERBLOCK not in names and (strange := sorted(names - _OURS - _OF_FILE_SYSTEMS)):
        raise ConfigError(
            f"{path} has other files in it, such as {strange[0]}: give file.directories an empty directory"
        )
    path.chmod(0o700)


def _lock(fd: int, path: Path, access: Access) -> None:
    is_shared = access is Access.LOOK
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError as error:
        if not is_shared and _is_looked_at(fd):
            raise OwnershipError(
                f"{path} is being looked at by `kvstore stats` or `kvstore check`: try again when that has ended"
            ) from error
        owner = os.pread(fd, 256, 0).decode(errors="replace").partition("\n")[0] or "another process"
        raise OwnershipError(
            f"{path} belongs to {owner}, which has it open: stop that process or use another directory; several"
            " processes share one through `kvstore serve`"
        ) from error
    if not is_shared:
        os.ftruncate(fd, 0)
        os.pwrite(fd, _owner().encode(), 0)


def _is_looked_at(fd: int) -> bool:
    """Whether those who have the lock share it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(fd, fcntl.LOCK_UN)
    return True


def _owner() -> str:
    return (
        f"pid {os.getpid()} on {socket.gethostname()}\n"
        "which holds a lock on this file while it has the directory open. Processes share it through `kvstore serve`.\n"
    )
