"""A disk that errs: what each error costs, and that it costs no more."""

import errno
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvstore.errors import TierUnavailableError
from kvstore.testing.blocks import POISON, empty_move, empty_moves, full_move, full_moves, is_right, layout_of, soon
from kvstore.testing.file_faults import Call, Fault, FaultyFiles, fails, flips, moves_only, stalls, tears
from kvstore.tiers.file import FileTier
from kvstore.tiers.file_directory import BLOCKS, LEDGER, SLOTS
from kvstore.tiers.file_geometry import PAGE_BYTES, file_slot_bytes
from kvstore.types import Outcome
from tests.file_tiers import LAYOUT, ManualClock, opened, readable, store

OK, ABSENT, DAMAGED, FULL, LATE, FAILED = (
    Outcome.OK,
    Outcome.ABSENT,
    Outcome.DAMAGED,
    Outcome.FULL,
    Outcome.LATE,
    Outcome.FAILED,
)
SLOT_BYTES = file_slot_bytes(LAYOUT.block_bytes)


def touches(slot: int) -> Callable[[Call], bool]:
    """Whether a call on the file of blocks moves this slot of the first extent."""

    def where(call: Call) -> bool:
        return call.offset <= slot * SLOT_BYTES < call.offset + sum(map(len, call.buffers))

    return where


def io_mode(tier: FileTier) -> str:
    """What it is now; a property would be taken to stay as it was."""
    return tier.io_mode


def is_stopped(tier: FileTier) -> bool:
    """The same of ``writes_stopped``."""
    return tier.writes_stopped


@pytest.mark.parametrize("number", [errno.EIO, errno.ENODEV, errno.EROFS])
def test_a_bad_sector_costs_the_block_on_it(tmp_path: Path, number: int) -> None:
    """CR-046: blocks that move in the same operation are written and read all the same."""
    files = FaultyFiles()
    with opened(tmp_path, files=files) as tier:
        files.inject(Fault("pwritev", fails(number), file=BLOCKS, where=touches(3), times=None))
        assert tier.write(full_moves(tier, range(6), LAYOUT), soon()) == [OK, OK, OK, FAILED, OK, OK]
        assert readable(tier, range(6)) == {0, 1, 2, 4, 5}
        files.heal()
        store(tier, 3)
        files.inject(Fault("preadv", fails(number), file=BLOCKS, where=touches(1), times=None))
        moves = empty_moves(tier, range(6), LAYOUT)
        assert tier.read(moves, soon()) == [OK, FAILED, OK, OK, OK, OK]
        assert [is_right(move) for move in moves] == [True, False, True, True, True, True]


def test_a_block_that_failed_is_not_there_after_a_restart(tmp_path: Path) -> None:
    """CR-046: nothing is claimed that was not written."""
    files = FaultyFiles()
    with opened(tmp_path, files=files) as tier:
        store(tier, 0, 1)
        files.inject(Fault("pwritev", fails(errno.EIO), file=BLOCKS, times=2))
        assert tier.write(full_moves(tier, [1], LAYOUT), soon()) == [FAILED]
    with opened(tmp_path) as tier:
        assert {block.offset_bytes // tier.slot_bytes(LAYOUT.block_bytes) for block in tier.scan()} == {0}


def test_an_entry_that_cannot_be_written_fails_its_block(tmp_path: Path) -> None:
    """OK would mean that the block is there after a restart."""
    files = FaultyFiles()
    with opened(tmp_path, files=files) as tier:
        store(tier, 0)
        files.inject(Fault("pwritev", fails(errno.EIO), file=SLOTS, skip=1))  # after the clearing of the entry
        assert tier.write(full_moves(tier, [1], LAYOUT), soon()) == [FAILED]
        store(tier, 1)


@pytest.mark.parametrize("keep_pages", [0, 1, 15])
def test_a_short_read_is_no_hit(tmp_path: Path, keep_pages: int) -> None:
    """WK-002: what was not filled is not served."""
    files = FaultyFiles()
    with opened(tmp_path, files=files) as tier:
        store(tier, 0)
        files.inject(Fault("preadv", moves_only(keep_pages * PAGE_BYTES), file=BLOCKS))
        move = empty_move(tier, 0, LAYOUT)
        assert tier.read([move], soon()) == [DAMAGED]
        assert move.buffer[-1] == POISON


def test_a_read_that_comes_up_short_is_tried_block_by_block(tmp_path: Path) -> None:
    files = FaultyFiles()
    with opened(tmp_path, files=files) as tier:
        store(tier, *range(4))
        fault = files.inject(Fault("preadv", moves_only(2 * SLOT_BYTES), file=BLOCKS))
        assert readable(tier, range(4)) == {0, 1, 2, 3}
        assert fault.num_hits == 1


def test_a_write_that_comes_up_short_is_tried_block_by_block(tmp_path: Path) -> None:
    files = FaultyFiles()
    with opened(tmp_path, files=files) as tier:
        files.inject(Fault("pwritev", moves_only(SLOT_BYTES), file=BLOCKS))
        store(tier, *range(4))
        files.inject(Fault("pwritev", moves_only(PAGE_BYTES), file=BLOCKS))
        assert tier.write([full_move(tier, 4, LAYOUT)], soon()) == [FAILED]
        assert readable(tier, range(5)) == {0, 1, 2, 3}


@pytest.mark.parametrize("keep_pages", [0, 1, 9, 15])
def test_a_torn_write_is_noticed_when_it_is_read(tmp_path: Path, keep_pages: int) -> None:
    """CR-045, WK-060: a disk that lies about what it wrote, over an older block of the same key or of another."""
    files = FaultyFiles()
    with opened(tmp_path, files=files) as tier:
        for older in (0, 1):
            assert tier.write([full_move(tier, older, LAYOUT, slot=0)], soon()) == [OK]
            files.inject(Fault("pwritev", tears(keep_pages * PAGE_BYTES), file=BLOCKS))
            newer = replace(full_move(tier, 0, LAYOUT), buffer=memoryview(bytes([7]) * LAYOUT.block_bytes))
            assert tier.write([newer], soon()) == [OK]
            assert tier.read([empty_move(tier, 0, LAYOUT)], soon()) == [DAMAGED]


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
@pytest.mark.parametrize(
    ("file", "position"),
    [(BLOCKS, 0), (BLOCKS, 33_333), (BLOCKS, SLOT_BYTES - 1), (SLOTS, 0), (SLOTS, 20), (SLOTS, 200)],
)
def test_a_bit_that_flips_on_the_way_is_no_hit(tmp_path: Path, call: str, file: str, position: int) -> None:
    """WK-052."""
    files = FaultyFiles()
    with opened(tmp_path, files=files) as tier:
        if call == "preadv":
            store(tier, 0)
        is_put = call == "pwritev" and file == SLOTS  # after the clearing of the header and of the extent
        fault = files.inject(Fault(call, flips(position * 8 + 3), file=file, skip=3 if is_put else 0))
        if call == "pwritev":
            store(tier, 0)
        (outcome,) = tier.read([empty_move(tier, 0, LAYOUT)], soon())
        assert fault.num_hits == 1
        assert outcome in (ABSENT, DAMAGED)


def test_random_faults_never_give_a_wrong_byte(tmp_path: Path) -> None:
    """And leave no descriptor behind (LK-018)."""
    files = FaultyFiles(seed=7)
    with opened(tmp_path / "a", tmp_path / "b", files=files) as tier:
        num_open = len(os.listdir("/proc/self/fd"))
        for effect in (fails(errno.EIO), moves_only(3 * PAGE_BYTES), tears(5 * PAGE_BYTES), flips(40_000)):
            for call in ("preadv", "pwritev"):
                files.inject(Fault(call, effect, file=BLOCKS, times=None, probability=0.05))
        files.inject(Fault("pwritev", fails(errno.EIO), file=SLOTS, times=None, probability=0.05))
        outcomes: list[Outcome] = []
        for round_number in range(40):
            numbers = range(round_number, round_number + 20)
            outcomes += tier.write(full_moves(tier, numbers, LAYOUT), soon())
            moves = empty_moves(tier, numbers, LAYOUT)
            read = tier.read(moves, soon())
            assert all(is_right(move) for move, outcome in zip(moves, read, strict=True) if outcome is OK)
            outcomes += read
            tier.erase(moves[:3])
        assert {OK, FAILED, DAMAGED} <= set(outcomes)
        assert len(os.listdir("/proc/self/fd")) == num_open
    assert files.open_files == {}


def test_o_direct_refused_at_a_write_falls_back_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """CR-012: some file systems take O_DIRECT at open and refuse it later."""
    files = FaultyFiles()
    with opened(tmp_path, files=files) as tier:
        store(tier, 0)
        assert io_mode(tier) == "direct"
        files.inject(Fault("pwritev", fails(errno.EINVAL), flags=os.O_DIRECT, times=None))
        store(tier, *range(1, 9))
        assert io_mode(tier) == "buffered"
        assert readable(tier, range(9)) == set(range(9))
        store(tier, 3)
    assert caplog.text.count("O_DIRECT is refused") == 1


@pytest.mark.parametrize("call", ["open", "pwritev", "preadv"])
def test_o_direct_refused_at_start_falls_back_and_says_so(
    tmp_path: Path, call: str, caplog: pytest.LogCaptureFixture
) -> None:
    """CR-012, CR-013."""
    files = FaultyFiles()
    files.inject(Fault(call, fails(errno.EINVAL), flags=os.O_DIRECT, times=None))
    with opened(tmp_path, files=files) as tier:
        assert io_mode(tier) == "buffered"
        assert caplog.text.count("O_DIRECT is refused") == 1
        store(tier, *range(9))
    with opened(tmp_path) as tier:
        assert io_mode(tier) == "direct"
        assert readable(tier, range(9)) == set(range(9))
    assert not (tmp_path / "probe").exists()


@pytest.mark.parametrize(
    ("call", "mib_per_s", "is_slow"),
    [("pwritev", 200, True), ("preadv", 200, True), ("preadv", 300, False), ("pwritev", 5, True), ("preadv", 5, True)],
)
def test_a_slow_disk_is_said_at_start_and_soon(
    tmp_path: Path, call: str, mib_per_s: int, is_slow: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """PF-022: as the overlay of a container, or a network volume, may be."""
    clock = ManualClock(0.0)

    def slowly(delayed: Call) -> Any:
        clock.now_s += sum(map(len, delayed.buffers)) / (mib_per_s << 20)
        return delayed.proceed(delayed.buffers)

    files = FaultyFiles()
    files.inject(Fault(call, slowly, file="probe", times=None))
    with opened(tmp_path, files=files, clock=clock) as tier:
        store(tier, 0)
        assert readable(tier, range(1)) == {0}
        expected = pytest.approx(mib_per_s << 20, rel=0.01) if call == "preadv" else None
        assert expected is None or tier.read_bytes_per_s() == expected
    assert caplog.text.count("recomputing is likely to be faster") == is_slow
    assert clock.now_s < 0.5, "a start waited for more than two pieces"


def test_a_disk_that_gives_other_bytes_than_it_took_is_not_used(tmp_path: Path) -> None:
    files = FaultyFiles()
    files.inject(Fault("preadv", flips(77), file="probe", times=None))
    with pytest.raises(TierUnavailableError, match="what was read is not what was written"):
        opened(tmp_path, files=files)
    assert not (tmp_path / "probe").exists()


def test_no_preallocation_is_slower_and_no_worse(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """CR-014."""
    files = FaultyFiles()
    files.inject(Fault("preallocate", fails(errno.EOPNOTSUPP), times=None))
    with opened(tmp_path, files=files) as tier:
        store(tier, 0, 20, 40)
        assert readable(tier, range(41)) == {0, 20, 40}
    assert caplog.text.count("preallocating failed") == 1


def test_a_full_disk_is_full_until_it_has_room(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """CR-015: what the file owns goes on being written; more is asked for again after a while, not at every block."""
    files, clock = FaultyFiles(), ManualClock(100.0)
    with opened(tmp_path, files=files, clock=clock) as tier:
        store(tier, 0)
        fault = files.inject(Fault("preallocate", fails(errno.ENOSPC), times=None))
        moves = [replace(full_move(tier, 9, LAYOUT), offset_bytes=tier.extent_bytes)]  # asks for space
        assert not is_stopped(tier)
        for _ in range(3):
            assert tier.write(moves, clock() + 1) == [FULL]
        assert is_stopped(tier)
        assert fault.num_hits == 2  # once for a whole step, once for the block alone
        assert tier.write(full_moves(tier, [1, 2], LAYOUT), clock() + 1) == [OK, OK]
        assert is_stopped(tier)
        clock.now_s += 60
        assert tier.write(moves, clock() + 1) == [FULL]
        assert fault.num_hits == 4
        files.heal()
        assert tier.write(moves, clock() + 1) == [FULL]
        clock.now_s += 60
        assert tier.write(moves, clock() + 1) == [OK]
        assert not is_stopped(tier)
    assert caplog.text.count("the disk is full") == 1
    assert caplog.text.count("there is room on the disk again") == 1


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("file", [BLOCKS, SLOTS])
def test_a_disk_that_is_full_when_written_stops_writes_for_a_while(tmp_path: Path, number: int, file: str) -> None:
    """CR-015: as on file systems that copy on write."""
    files, clock = FaultyFiles(), ManualClock(100.0)
    with opened(tmp_path, files=files, clock=clock) as tier:
        assert tier.write(full_moves(tier, [0, 1], LAYOUT), clock() + 1) == [OK, OK]
        fault = files.inject(Fault("pwritev", fails(number), file=file, times=None))
        assert tier.write(full_moves(tier, range(1, 9), LAYOUT), clock() + 1) == [FULL] * 8
        num_hits = fault.num_hits
        assert is_stopped(tier)
        assert tier.write(full_moves(tier, [2], LAYOUT), clock() + 1) == [FULL]
        assert fault.num_hits == num_hits
        moves = empty_moves(tier, [0], LAYOUT)
        assert tier.read(moves, clock() + 1) == [OK]
        files.heal()
        clock.now_s += 60
        assert tier.write(full_moves(tier, [2], LAYOUT), clock() + 1) == [OK]
        assert not is_stopped(tier)


def test_a_stalled_disk_holds_up_nothing_but_its_own_call(tmp_path: Path) -> None:
    """Others go on, ``close`` waits for nobody, and the late one neither meets another's file nor leaks its own."""
    files = FaultyFiles()
    has_begun, until = threading.Event(), threading.Event()
    with opened(tmp_path, files=files) as tier, ThreadPoolExecutor(1) as threads:
        store(tier, *range(4))
        files.inject(Fault("preadv", stalls(has_begun, until), file=BLOCKS, where=touches(0)))
        move = empty_move(tier, 0, LAYOUT)
        try:
            late = threads.submit(tier.read, [move], soon())
            assert has_begun.wait(30)
            assert readable(tier, range(1, 4)) == {1, 2, 3}
            store(tier, 5)
            tier.close()
            assert tier.read(empty_moves(tier, [1], LAYOUT), soon()) == [FAILED]
            assert files.open_files
        finally:
            until.set()
        assert late.result() == [OK]
        assert is_right(move)
        assert files.open_files == {}


def test_a_block_that_is_being_written_cannot_be_read(tmp_path: Path) -> None:
    """WK-003: nor the one that was in its slot."""
    files = FaultyFiles()
    has_begun, until = threading.Event(), threading.Event()
    with opened(tmp_path, files=files) as tier, ThreadPoolExecutor(1) as threads:
        store(tier, 0)
        files.inject(Fault("pwritev", stalls(has_begun, until), file=BLOCKS))
        try:
            written = threads.submit(tier.write, [full_move(tier, 1, LAYOUT, slot=0)], soon())
            assert has_begun.wait(30)
            assert tier.read([empty_move(tier, 1, LAYOUT, slot=0)], soon()) == [ABSENT]
            assert list(tier.scan()) == []
        finally:
            until.set()
        assert written.result() == [OK]
        assert tier.read([empty_move(tier, 1, LAYOUT, slot=0)], soon()) == [OK]


def test_a_batch_is_late_from_where_the_deadline_passes(tmp_path: Path) -> None:
    """What was moved before counts, and what comes after is not touched."""
    clock, files = ManualClock(0.0), FaultyFiles()
    layout = layout_of(2 << 20)  # each block is an operation of its own
    with opened(tmp_path, files=files, clock=clock) as tier:

        def takes_a_second(call: Call) -> object:
            clock.now_s += 1
            return call.proceed(call.buffers)

        for call in ("pwritev", "preadv"):
            files.inject(Fault(call, takes_a_second, file=BLOCKS, times=None))
        moves = [
            replace(full_move(tier, number, layout), offset_bytes=number * tier.extent_bytes) for number in range(3)
        ]
        assert tier.write(moves, 2.0) == [OK, OK, LATE]
        got = [
            replace(empty_move(tier, number, layout), offset_bytes=number * tier.extent_bytes) for number in range(3)
        ]
        assert tier.read(got, clock() + 1) == [OK, LATE, LATE]
        assert set(got[1].buffer) == {POISON}


def test_an_erasure_that_fails_is_logged_and_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = FaultyFiles()
    with opened(tmp_path, files=files) as tier:
        store(tier, 0, 1)
        files.inject(Fault("pwritev", fails(errno.EIO), file=SLOTS))
        tier.erase(empty_moves(tier, [0, 1], LAYOUT))
        assert "erasing failed" in caplog.text
        assert readable(tier, range(2)) == {0}
        assert len(list(tier.scan())) == 1


def test_a_table_that_cannot_be_read_costs_its_extent(tmp_path: Path) -> None:
    files = FaultyFiles()
    with opened(tmp_path, files=files) as tier:
        store(tier, 0)
        other = replace(full_move(tier, 1, LAYOUT), offset_bytes=tier.extent_bytes)
        assert tier.write([other], soon()) == [OK]
        files.inject(Fault("preadv", fails(errno.EIO), file=SLOTS))
        assert [block.key for block in tier.scan()] == [other.key]


def test_the_bytes_of_a_day_are_not_begun_anew_by_a_restart(tmp_path: Path) -> None:
    """Even if the process was killed: what is written is counted first."""
    wall_clock = ManualClock(1_700_000_000.0)
    options: dict[str, Any] = {"write_bytes_per_day": 40 * SLOT_BYTES, "wall_clock": wall_clock}

    def num_written(tier: FileTier) -> int:
        outcomes = tier.write(full_moves(tier, range(30), LAYOUT), soon())
        assert set(outcomes) <= {OK, FULL}
        return outcomes.count(OK)

    with opened(tmp_path, **options) as tier:
        assert num_written(tier) == 10
        assert readable(tier, range(30)) == set(range(10))
        assert num_written(tier) == 0
    with opened(tmp_path, **options) as tier:
        assert num_written(tier) == 0
        wall_clock.now_s += 86_400 / 10
        assert num_written(tier) == 3
    (tmp_path / LEDGER).write_bytes(b"damage")
    with opened(tmp_path, **options) as tier:
        assert num_written(tier) == 0
