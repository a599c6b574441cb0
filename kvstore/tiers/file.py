"""NVMe: self-describing blocks in slots of preallocated files, moved past the page cache straight from and into arenas.

A slot is the payload in whole pages, its header lies in the slot table; slots that lie side by side move in one
operation. The order of a write is: clear the header, write the payload, write the header. So a kill at any moment loses
at most the blocks being written. A read believes the header and the payload's checksum in it, and nothing else. Nothing
is synced: a power failure may lose blocks, and a payload that is not that of its header does not verify.

Rule 1: no call raises for a block's sake; an error of the disk costs the blocks it hit, and is logged once.
Rule 2: a full disk is FULL and no failure: blocks go on being written where the file owns its space, and growing is
tried again after a while.
Rule 3: the tier owns no threads and keeps no record of blocks, only of the layout that each extent serves.
"""

import errno
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

from kvstore import machine
from kvstore.errors import ConfigError, KVStoreError, TierUnavailableError
from kvstore.quantity import format_size
from kvstore.tiers import file_slot, superblock
from kvstore.tiers.base import BlockMove, StoredBlock
from kvstore.tiers.direct_io import bounce, in_place
from kvstore.tiers.file_blocks import FileBlocks
from kvstore.tiers.file_directory import Directory, Pause
from kvstore.tiers.file_geometry import Geometry, budget_slot_bytes, stride_bytes_for
from kvstore.tiers.file_slot import Run, runs
from kvstore.tiers.os_files import OsFiles
from kvstore.tiers.write_ledger import WriteLedger
from kvstore.types import Outcome

log = logging.getLogger(__name__)


class FileTier:
    """Blocks in the files of one or several directories, which this process owns until ``close``.

    Slots go by their offset in a budget of ``capacity_bytes``, which is cut into extents of ``extent_bytes``.
    """

    name = "file"

    def __init__(
        self,
        directories: Sequence[Path],
        capacity_bytes: int,
        *,
        extent_bytes: int | None = None,
        write_bytes_per_day: int | None = None,
        files: OsFiles | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Open or make a store that takes up to ``capacity_bytes`` of disk in all directories together.

        ``extent_bytes`` is for a new store; an old one keeps its own. Raises ``ConfigError`` for a capacity that the
        disks lack or directories that do not belong together, ``OwnershipError`` where another process has one,
        ``FormatError`` for a newer format, ``TierUnavailableError`` where the system refuses.
        """
        self._files = files or OsFiles()
        self._clock = clock
        self._wall_clock = wall_clock
        self._guard, self._ledger_guard = threading.Lock(), threading.Lock()
        self._closed = threading.Event()
        self._repairs = Pause(clock)
        self._sequence = itertools.count(int(wall_clock() * 1e9))
        with ExitStack() as undo:
            try:
                _check_room(directories, capacity_bytes)
                self._open(directories, capacity_bytes, extent_bytes, undo)
                self._ledger = self._open_ledger(write_bytes_per_day)
            except OSError as error:
                names = ", ".join(map(str, directories))
                raise TierUnavailableError(f"the file tier cannot be opened in {names}: {error}") from error
            undo.pop_all()
        self.capacity_bytes = self._geometry.capacity_bytes
        """What slots can take: the capacity given, less what the tier needs for itself."""
        self.extent_bytes = self._geometry.extent_bytes

    # ---- the protocol of a tier

    def slot_bytes(self, block_bytes: int) -> int:
        """The payload in whole pages, and the header in the slot table."""
        return budget_slot_bytes(block_bytes)

    def write(self, moves: Sequence[BlockMove], deadline_s: float) -> list[Outcome]:
        """Store each block in its slot."""
        outcomes = [Outcome.FAILED] * len(moves)
        for run in runs(moves, self._geometry):
            written = [Outcome.LATE] * len(run)
            if self._clock() < deadline_s:
                written = self._write_run(run)
            for position, outcome in zip(run.positions, written, strict=True):
                outcomes[position] = outcome
        return outcomes

    def close(self) -> None:
        """Let go of the directories, each as soon as no call is inside it."""
        self._closed.set()
        self._blocks.close()

    def read(self, moves: Sequence[BlockMove], deadline_s: float) -> list[Outcome]:
        """Fill each buffer from its slot, and verify it."""
        return self._blocks.read(moves, deadline_s)

    def erase(self, moves: Sequence[BlockMove]) -> None:
        """Clear the header of each block that is still in its slot."""
        self._blocks.erase(moves)

    def scan(self) -> Iterator[StoredBlock]:
        """Every block that the tables name, newest first; those past their age are erased."""
        yield from self._blocks.scan()
        self._blocks.erase_expired()
        # a clock that was set back does not make new blocks look old
        self._sequence = itertools.count(max(self._blocks.last_sequence + 1, next(self._sequence)))

    # ---- the protocol of who keeps a note

    def read_note(self) -> bytes:
        """The note in the first directory."""
        with self._directories[0].held() as directory:
            return b"" if directory is None else directory.read_note()

    def save_note(self, data: bytes) -> None:
        """Replace it."""
        with self._directories[0].held() as directory:
            if directory is not None:
                directory.save_note(data)

    # ---- the protocol of who has measured itself

    def read_bytes_per_s(self) -> float | None:
        """That of all directories together, as far as they bypass the page cache."""
        speeds = [directory.speed for directory in self._directories.values() if directory.speed is not None]
        return sum(speed.read_bytes_per_s for speed in speeds) or None

    # ---- for statistics

    @property
    def io_mode(self) -> Literal["direct", "buffered"]:
        """``buffered`` as soon as one directory refuses O_DIRECT."""
        is_direct = all(directory.io_mode == "direct" for directory in self._directories.values())
        return "direct" if is_direct else "buffered"

    @property
    def writes_stopped(self) -> bool:
        """Whether a disk was full when space was last asked of it."""
        return any(
            directory.growth.is_stopped or directory.writes.is_stopped for directory in self._directories.values()
        )

    def usage_bytes(self) -> int:
        """Disk space that all files take."""
        return sum(directory.usage_bytes() for directory in self._directories.values())

    # ---- opening

    def _open(self, paths: Sequence[Path], capacity_bytes: int, extent_bytes: int | None, undo: ExitStack) -> None:
        claimed: list[Directory] = []
        for path in paths:
            claimed.append(Directory(path, self._files, self._clock))
            undo.callback(claimed[-1].close)
        if extent_bytes is None:
            extent_bytes = stride_bytes_for(capacity_bytes, len(paths))
        found = [directory.found for directory in claimed]
        own = superblock.complete(found, [str(path) for path in paths], extent_bytes, os.urandom(16))
        self._geometry = Geometry.within(capacity_bytes, own[0].stride_bytes, len(paths))
        # Old directories first: if this is cut short, those that are still fresh may join later.
        for directory, block in sorted(zip(claimed, own, strict=True), key=lambda pair: pair[0].found is None):
            directory.open(block, self._geometry)
        self._directories = {directory.number: directory for directory in claimed}
        self._blocks = FileBlocks(self._directories, self._geometry, self._clock, self._wall_clock)

    def _open_ledger(self, bytes_per_day: int | None) -> WriteLedger | None:
        if bytes_per_day is None:
            return None
        return WriteLedger(bytes_per_day, self._wall_clock(), self._directories[0].read_ledger())

    def _reopened(self, number: int) -> Directory | None:
        """The directory, opened anew because its files were deleted; None while that is not possible."""
        with self._guard:
            old = self._directories[number]
            if self._closed.is_set() or not self._repairs.allows():
                return None
            with old.held() as directory:
                if directory is not None and not directory.is_lost:
                    return old  # another thread was here first
            old.close()
            try:
                self._directories[number] = old.again(self._files, self._clock)
            except (OSError, KVStoreError) as error:
                if self._repairs.stop():
                    log.warning("%s: its files were deleted, and it cannot be opened anew: %s", old.path, error)
                return None
            if self._closed.is_set():  # meanwhile, and it may not have seen the new one
                self._directories[number].close()
            self._repairs.resume()
            log.warning("%s: its files were deleted; it starts afresh", old.path)
            return self._directories[number]

    # ---- runs

    def _write_run(self, run: Run) -> list[Outcome]:
        number = run.first.directory
        with self._directories[number].held() as directory:
            if directory is not None and not directory.is_lost:
                return self._write_granted(directory, run)
        reopened = self._reopened(number)
        if reopened is None:
            return [Outcome.FAILED] * len(run)
        with reopened.held() as directory:
            return [Outcome.FAILED] * len(run) if directory is None else self._write_granted(directory, run)

    def _write_granted(self, directory: Directory, run: Run) -> list[Outcome]:
        """Write as many blocks of the run as may be written today."""
        granted = self._grant(run)
        return self._write(directory, run.part(0, granted)) + [Outcome.FULL] * (len(run) - granted)

    def _grant(self, run: Run) -> int:
        if self._ledger is None:
            return len(run)
        with self._ledger_guard:
            granted = self._ledger.take(run.grid.file_slot_bytes, len(run), self._wall_clock())
            if granted:
                self._directories[0].save_ledger(self._ledger.pack())
        return granted

    def _write(self, directory: Directory, run: Run) -> list[Outcome]:
        """Write the run in one operation; where that fails, each block by itself, so that an error costs one block."""
        if not len(run):
            return []
        try:
            if not directory.writes.allows() or not directory.prepare(run.first, len(run), run.layout):
                outcome = Outcome.FULL
            else:
                self._write_at_once(directory, run)
                return [Outcome.OK] * len(run)
        except OSError as error:
            outcome = directory.judge_write(error)
        if len(run) > 1:
            return [outcome for single in run.singles() for outcome in self._write(directory, single)]
        return [outcome]

    def _write_at_once(self, directory: Directory, run: Run) -> None:
        first, block_bytes = run.first, run.layout.block_bytes
        headers = [file_slot.seal(move, next(self._sequence)) for move in run.moves]
        directory.table.clear(first.extent, first.slot, len(run))
        written = directory.write(
            [_filled_pages(move.buffer, block_bytes) for move in run.moves], run.file_offset_bytes
        )
        if written != len(run) * run.grid.file_slot_bytes:
            raise OSError(errno.EIO, f"only {written} bytes were written")
        directory.writes.resume()
        directory.table.put(first.extent, first.slot, headers)


def _filled_pages(buffer: memoryview, block_bytes: int) -> memoryview:
    """Whole pages that begin with the block in ``buffer``: those it lies on, or fresh ones."""
    pages = in_place(buffer, block_bytes)
    if pages is None:
        pages = bounce(block_bytes)
        pages[:block_bytes] = buffer[:block_bytes]
    return pages


def _check_room(directories: Sequence[Path], capacity_bytes: int) -> None:
    """Raises ``ConfigError`` where the disks are too small, warns where they are too full."""
    share_bytes = capacity_bytes // len(directories)
    for group in machine.by_file_system(directories):
        names, wanted_bytes = ", ".join(map(str, group)), share_bytes * len(group)
        found = os.statvfs(machine.existing(group[0]))
        size_bytes, room_bytes = found.f_blocks * found.f_frsize, machine.room_bytes(group)
        if wanted_bytes > size_bytes:
            raise ConfigError(
                f"file.capacity wants {format_size(wanted_bytes)} in {names}, and the disk there has"
                f" {format_size(size_bytes)} in all: lower file.capacity"
            )
        if wanted_bytes > room_bytes:
            log.warning(
                "file.capacity wants %s in %s, and there is room for %s: writing stops when the disk is full",
                format_size(wanted_bytes),
                names,
                format_size(room_bytes),
            )
