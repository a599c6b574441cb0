"""Blocks that lie in the directories of a file tier: finding, reading and erasing them.

Rule: nothing here cuts, makes or lengthens a file. It is what the tier reads with, and all that anybody does who looks
at a store which no process has open.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from operator import itemgetter
from pathlib import Path

from kvstore import header
from kvstore.errors import ConfigError, TierUnavailableError
from kvstore.header import Header
from kvstore.tiers import file_slot, superblock
from kvstore.tiers.base import BlockMove, StoredBlock
from kvstore.tiers.direct_io import bounce, in_place
from kvstore.tiers.file_directory import Access, Directory
from kvstore.tiers.file_geometry import Geometry, Place, budget_slot_bytes
from kvstore.tiers.file_slot import Run, runs
from kvstore.tiers.os_files import OsFiles
from kvstore.tiers.slot_table import ExtentLayout
from kvstore.types import Outcome


class FileBlocks:
    """The blocks in ``directories``, open and by number; whoever replaces one in the mapping replaces it here."""

    def __init__(
        self,
        directories: Mapping[int, Directory],
        geometry: Geometry,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._directories = directories
        self._geometry = geometry
        self._clock = clock
        self._wall_clock = wall_clock
        self.last_sequence = 0
        """Of the newest block that ``scan`` has found."""
        self._expired: list[tuple[Directory, Place]] = []

    def slot_bytes(self, block_bytes: int) -> int:
        """The payload in whole pages, and the header in the slot table."""
        return budget_slot_bytes(block_bytes)

    def read(self, moves: Sequence[BlockMove], deadline_s: float) -> list[Outcome]:
        """Fill each buffer from its slot, and verify it."""
        outcomes = [Outcome.ABSENT] * len(moves)
        for run in runs(moves, self._geometry):
            read = [Outcome.LATE] * len(run)
            if self._clock() < deadline_s:
                with self._directories[run.first.directory].held() as directory:
                    read = [Outcome.FAILED] * len(run) if directory is None else self._read_run(directory, run)
            for position, outcome in zip(run.positions, read, strict=True):
                outcomes[position] = outcome
        return outcomes

    def erase(self, moves: Sequence[BlockMove]) -> None:
        """Clear the header of each block that is still in its slot."""
        for run in runs(moves, self._geometry):
            with self._directories[run.first.directory].held() as directory:
                if directory is not None:
                    for single in run.singles():
                        self._erase(directory, single)

    def scan(self) -> Iterator[StoredBlock]:
        """Every block that the tables name, newest first, but for those past their age."""
        self._expired.clear()
        rows = [row for directory in self._directories.values() for row in self._rows(directory)]
        rows.sort(key=itemgetter(0), reverse=True)
        self.last_sequence = rows[0][0] if rows else 0
        now_unix_s = self._wall_clock()
        layouts: dict[int, ExtentLayout | None] = {}
        for _, directory, extent, index, data in rows:
            layout = directory.table.layout(extent)
            if layouts.setdefault(extent, layout) != layout:
                continue  # in this directory the extent has yet to be handed over
            entry = directory.table.parse(extent, data)
            if entry is None:
                continue
            place = Place(directory.number, extent, index)
            if file_slot.has_expired(entry.expires_unix_s, now_unix_s):
                self._expired.append((directory, place))
                continue
            yield StoredBlock(
                entry.key,
                entry.parent,
                entry.fingerprint,
                entry.block_bytes,
                self._geometry.grid(entry.block_bytes).offset_bytes(place),
                entry.created_unix_s,
                entry.expires_unix_s,
            )

    def erase_expired(self) -> None:
        """Clear the headers of the blocks that the last ``scan`` left out because of their age."""
        for directory, place in self._expired:
            with directory.held() as held:
                if held is not None:
                    self._clear(held, place)
        self._expired.clear()

    def close(self) -> None:
        """Let go of the directories, each as soon as no call is inside it."""
        for directory in self._directories.values():
            directory.close()

    # ---- the inside

    def _read_run(self, directory: Directory, run: Run) -> list[Outcome]:
        """Read the payloads of the run in one operation; where that fails, each by itself."""
        first, block_bytes = run.first, run.layout.block_bytes
        if directory.is_lost:
            return [Outcome.ABSENT] * len(run)
        num_bytes = -1
        try:
            now_unix_s = self._wall_clock()
            found = [
                file_slot.expected(data, move, now_unix_s)
                for data, move in zip(
                    directory.table.headers(first.extent, first.slot, len(run)), run.moves, strict=True
                )
            ]
            outcomes = [outcome for outcome in found if isinstance(outcome, Outcome)]
            if len(outcomes) == len(run):
                return outcomes
            payloads = [in_place(move.buffer, block_bytes) or bounce(block_bytes) for move in run.moves]
            num_bytes = directory.read(payloads, run.file_offset_bytes)
        except OSError as error:
            directory.report("reading", error)
        else:
            if num_bytes == len(run) * run.grid.file_slot_bytes:
                return [_admit(*of_block) for of_block in zip(found, payloads, run.moves, strict=True)]
        if len(run) > 1:
            return [outcome for single in run.singles() for outcome in self._read_run(directory, single)]
        return [Outcome.FAILED if num_bytes < 0 else Outcome.DAMAGED]

    def _erase(self, directory: Directory, run: Run) -> None:
        """Erase the one block of ``run``, unless its slot or extent has been given to another."""
        place, (move,) = run.first, run.moves
        if directory.table.layout(place.extent) != run.layout:
            return
        try:
            found = header.parse(directory.table.headers(place.extent, place.slot, 1)[0])
        except OSError as error:
            directory.report("erasing", error)
            return
        if found is Outcome.DAMAGED or (isinstance(found, Header) and found.key == move.key):
            self._clear(directory, place)

    def _clear(self, directory: Directory, place: Place) -> None:
        try:
            directory.table.clear(place.extent, place.slot)
        except OSError as error:
            directory.report("erasing", error)

    def _rows(self, directory: Directory) -> Iterator[tuple[int, Directory, int, int, bytes]]:
        """Sequence, directory, extent, index and bytes of every entry in a table."""
        with directory.held() as held:
            for extent in range(self._geometry.num_extents if held else 0):
                try:
                    for sequence, index, data in directory.table.scan(extent, self._num_slots(directory, extent)):
                        yield sequence, directory, extent, index, data
                except OSError as error:
                    directory.report("reading the slot table", error)

    def _num_slots(self, directory: Directory, extent: int) -> int:
        layout = directory.table.layout(extent)
        return 0 if layout is None else self._geometry.grid(layout.block_bytes).num_slots(directory.number, extent)


def open_existing(paths: Sequence[Path], *, access: Access) -> FileBlocks:
    """The blocks of the store in ``paths``, as they lie there and whatever the capacity it is used with.

    To read them alone, or to erase some. Raises ``ConfigError`` where no store is, ``OwnershipError`` where a process
    has it open, ``FormatError`` for a newer format, ``TierUnavailableError`` where the system refuses.
    """
    files, names = OsFiles(), ", ".join(map(str, paths))
    with ExitStack() as undo:
        try:
            claimed: list[Directory] = []
            for path in paths:
                claimed.append(Directory(path, files, time.monotonic, access))
                undo.callback(claimed[-1].close)
            found = [directory.found for directory in claimed]
            superblock.complete(found, list(map(str, paths)), 0, b"")  # only to see that they belong together
            own = next((block for block in found if block is not None), None)
            if own is None:
                raise ConfigError(
                    f"a store is not there in {names}: none has used it yet, or file.directories is wrong"
                )
            known = {block.directory: there for block, there in zip(found, claimed, strict=True) if block is not None}
            num_extents = max(1, *(directory.num_extents_there() for directory in known.values()))
            geometry = Geometry(num_extents * own.stride_bytes, own.stride_bytes, own.num_directories)
            for directory in known.values():
                directory.open_existing(geometry)
        except OSError as error:
            raise TierUnavailableError(f"the files in {names} cannot be looked at: {error}") from error
        undo.pop_all()
    return FileBlocks(known, geometry)


def _admit(found: Header | Outcome, pages: memoryview, move: BlockMove) -> Outcome:
    """Verify what was read, and bring it into the buffer if it is not there yet."""
    if isinstance(found, Outcome):
        return found
    payload = pages[: found.block_bytes]
    if found.checksum != header.checksum(payload):
        return Outcome.DAMAGED
    move.created_unix_s = found.created_unix_s
    if pages.obj is not move.buffer.obj:
        move.buffer[: len(payload)] = payload
    return Outcome.OK
