"""Directories between runs and behind the tier's back: whose they are, what they belong to, and what is left."""

import os
import re
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.errors import ConfigError, FormatError, OwnershipError, TierUnavailableError
from kvstore.testing.blocks import empty_moves, full_move, full_moves, key_of, layout_of, soon
from kvstore.testing.file_faults import FaultyFiles
from kvstore.tiers.file import FileTier
from kvstore.tiers.file_directory import BLOCKS, LEDGER, LOCK, SLOTS, SUPERBLOCK
from kvstore.types import Outcome
from tests.file_tiers import EXTENT_BYTES, LAYOUT, ManualClock, opened, readable, store

OK, ABSENT, DAMAGED, FULL, FAILED = Outcome.OK, Outcome.ABSENT, Outcome.DAMAGED, Outcome.FULL, Outcome.FAILED
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")

_OWN = """
import sys
from pathlib import Path
from kvstore.tiers.file import FileTier
from kvstore.errors import OwnershipError
try:
    tier = FileTier([Path(sys.argv[1])], 16 << 20, extent_bytes=4 << 20)
except OwnershipError as error:
    print("refused", error, flush=True)
else:
    print("opened", flush=True)
    sys.stdin.read()
"""


@contextmanager
def owner(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has opened, or tried to open, the directory; its answer is yet to be read."""
    command = [sys.executable, "-c", _OWN, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# Whose it is -----------------------------------------------------------------------------------------


def test_a_second_process_is_refused_and_told_by_whom(tmp_path: Path) -> None:
    """WK-028: and it gets the directory as soon as the first is gone, killed or not."""
    with owner(tmp_path) as process:
        assert answer(process) == "opened\n"
        with pytest.raises(OwnershipError, match=rf"pid {process.pid} .*`kvstore serve`"), opened(tmp_path):
            pass
        process.kill()
        process.wait()
        with opened(tmp_path) as tier:
            store(tier, 0)


def test_a_second_tier_in_one_process_is_refused_too(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        store(tier, 0)
        with pytest.raises(OwnershipError, match=f"pid {os.getpid()} "), opened(tmp_path):
            pass
        assert readable(tier, range(1)) == {0}


def test_of_many_that_start_at_once_one_wins(tmp_path: Path) -> None:
    """CR-004: nobody trips over a directory that another is making."""
    path = tmp_path / "new" / "nested"
    with owner(path) as first, owner(path) as second, owner(path) as third, owner(path) as fourth:
        answers = [answer(process).partition(" ")[0].strip() for process in (first, second, third, fourth)]
    assert sorted(answers) == ["opened", "refused", "refused", "refused"]


@needs_root
def test_another_users_directory_is_refused(tmp_path: Path) -> None:
    os.chown(tmp_path, 12345, 12345)
    with pytest.raises(OwnershipError, match="12345"), opened(tmp_path):
        pass
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("umask", [0o000, 0o777])
def test_nobody_else_may_look_inside_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    """CR-004: KV is prompt data."""
    path = tmp_path / "cache"
    before = os.umask(umask)
    try:
        with opened(path, write_bytes_per_day=1 << 40) as tier:
            store(tier, 0)
    finally:
        os.umask(before)
    assert mode(path) == 0o700
    assert {name: mode(path / name) for name in os.listdir(path)} == dict.fromkeys(
        (BLOCKS, LEDGER, LOCK, SLOTS, SUPERBLOCK), 0o600
    )


def test_a_directory_that_was_open_to_all_is_closed_to_them(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with opened(tmp_path):
        assert mode(tmp_path) == 0o700


def test_a_directory_with_other_files_is_refused_and_untouched(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigError, match=r"thesis\.tex"), opened(tmp_path):
        pass
    assert os.listdir(tmp_path) == ["thesis.tex"]
    assert mode(tmp_path) == 0o755


def test_a_disk_of_its_own_may_have_lost_and_found(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    with opened(tmp_path) as tier:
        store(tier, 0)


def test_a_file_in_the_place_of_a_directory_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    with pytest.raises(TierUnavailableError, match="cache"), opened(tmp_path / "cache"):
        pass


# Formats ---------------------------------------------------------------------------------------------


def contents(path: Path) -> dict[str, bytes]:
    return {name: (path / name).read_bytes() for name in os.listdir(path) if name != LOCK}


def set_version(path: Path, version: int) -> None:
    page = bytearray((path / SUPERBLOCK).read_bytes())
    page[8:10] = version.to_bytes(2, "little")
    (path / SUPERBLOCK).write_bytes(page)


def test_a_newer_format_is_refused_and_untouched(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        store(tier, 0)
    set_version(tmp_path, 2)
    before = contents(tmp_path)
    files = FaultyFiles()
    with pytest.raises(FormatError, match="newer"), opened(tmp_path, files=files):
        pass
    assert contents(tmp_path) == before
    assert files.open_files == {}


@pytest.mark.parametrize("what", ["older", "damaged", "empty", "missing"])
def test_any_other_superblock_starts_afresh(tmp_path: Path, what: str) -> None:
    """CR-018, CR-019, CR-045: what is in the files then counts for nothing and takes no room."""
    with opened(tmp_path) as tier:
        store(tier, *range(20))
    path = tmp_path / SUPERBLOCK
    if what == "older":
        set_version(tmp_path, 0)
    elif what == "damaged":
        path.write_bytes(b"".join((path.read_bytes()[:-1], b"!")))
    elif what == "empty":
        path.write_bytes(b"")
    else:
        path.unlink()
    with opened(tmp_path) as tier:
        assert list(tier.scan()) == []
        assert tier.usage_bytes() < 64 << 10
        store(tier, 0)


def test_what_a_kill_at_start_leaves_behind_is_cleared_away(tmp_path: Path) -> None:
    """LK-019."""
    for name in ("superblock.new", "probe", LOCK):
        (tmp_path / name).write_bytes(b"half")
    with opened(tmp_path) as tier:
        store(tier, 0)
    assert sorted(os.listdir(tmp_path)) == sorted((BLOCKS, LEDGER, LOCK, SLOTS, SUPERBLOCK))


# Several directories ---------------------------------------------------------------------------------


def spread(tier: FileTier) -> list[int]:
    """Offsets of blocks of 1 MiB, two of which make a run."""
    return [slot * tier.slot_bytes(1 << 20) for slot in range(12)]


MEGABYTE = layout_of(1 << 20)


def write_spread(tier: FileTier) -> None:
    moves = [
        replace(move, offset_bytes=at)
        for move, at in zip(full_moves(tier, range(12), MEGABYTE), spread(tier), strict=True)
    ]
    assert tier.write(moves, soon()) == [OK] * 12


def scanned(tier: FileTier) -> list[int]:
    numbers = {key_of(number): number for number in range(30)}
    return sorted(numbers[block.key] for block in tier.scan())


def read_spread(tier: FileTier) -> list[Outcome]:
    moves = [
        replace(move, offset_bytes=at)
        for move, at in zip(empty_moves(tier, range(12), MEGABYTE), spread(tier), strict=True)
    ]
    return tier.read(moves, soon())


def test_directories_share_the_load_and_may_be_named_in_any_order(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in "abc"]
    with opened(*paths, extent_bytes=None, capacity_bytes=64 << 20) as tier:
        write_spread(tier)
        assert all((path / BLOCKS).stat().st_blocks * 512 > 3 << 20 for path in paths)
    with opened(*reversed(paths), capacity_bytes=64 << 20) as tier:
        assert read_spread(tier) == [OK] * 12
        assert scanned(tier) == list(range(12))


def test_a_lost_directory_costs_its_blocks(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in "ab"]
    with opened(*paths, extent_bytes=None, capacity_bytes=64 << 20) as tier:
        write_spread(tier)
    (tmp_path / "b").rename(tmp_path / "lost")
    with opened(*paths, capacity_bytes=64 << 20) as tier:
        assert scanned(tier) == [0, 1, 4, 5, 8, 9]
        assert read_spread(tier) == [OK, OK, ABSENT, ABSENT] * 3
        write_spread(tier)
        assert read_spread(tier) == [OK] * 12
    shutil.rmtree(tmp_path / "b")
    (tmp_path / "lost").rename(tmp_path / "b")
    with pytest.raises(ConfigError, match="different stores"), opened(*paths, capacity_bytes=64 << 20):
        pass


def test_directories_of_different_stores_are_told_apart(tmp_path: Path) -> None:
    for name in "ab":
        with opened(tmp_path / name) as tier:
            store(tier, 0)
    before = contents(tmp_path / "a"), contents(tmp_path / "b")
    with pytest.raises(ConfigError, match=re.escape(str(tmp_path))), opened(tmp_path / "a", tmp_path / "b"):
        pass
    assert (contents(tmp_path / "a"), contents(tmp_path / "b")) == before
    with opened(tmp_path / "a") as tier:
        assert scanned(tier) == [0]


def test_one_of_two_directories_alone_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path / "a", tmp_path / "b"):
        pass
    with pytest.raises(ConfigError, match="2 directories"), opened(tmp_path / "b"):
        pass


def test_an_extent_that_changed_hands_in_one_directory_has_done_so_in_all(tmp_path: Path) -> None:
    """The other one learns of it when it is written to, and its old blocks do not come back before that."""
    paths = [tmp_path / name for name in "ab"]
    with opened(*paths, extent_bytes=None, capacity_bytes=64 << 20) as tier:
        write_spread(tier)
        assert tier.write([full_move(tier, 20, LAYOUT, slot=0)], soon()) == [OK]
    with opened(*paths, capacity_bytes=64 << 20) as tier:
        assert scanned(tier) == [20]


# Capacity --------------------------------------------------------------------------------------------


def fill(tier: FileTier, block_bytes: int) -> int:
    """Write a block to every slot there is; returns how many."""
    layout, slot_bytes = layout_of(block_bytes), tier.slot_bytes(block_bytes)
    offsets = [
        start + slot * slot_bytes
        for start in range(0, tier.capacity_bytes, tier.extent_bytes)
        for slot in range(min(tier.extent_bytes, tier.capacity_bytes - start) // slot_bytes)
    ]
    buffer = full_move(tier, 0, layout).buffer
    move = full_move(tier, 0, layout)
    moves = [replace(move, buffer=buffer, offset_bytes=offset) for offset in offsets]
    assert set(tier.write(moves, soon())) == {OK}
    return len(moves)


@pytest.mark.parametrize("num_directories", [1, 3])
@pytest.mark.parametrize("block_bytes", [1000, 65536, 1 << 20])
def test_a_full_tier_takes_its_capacity_and_not_a_byte_more(
    tmp_path: Path, num_directories: int, block_bytes: int
) -> None:
    """CR-017, CR-018: tables and superblocks included, all directories together."""
    capacity_bytes = 16 << 20
    paths = [tmp_path / str(number) for number in range(num_directories)]
    with opened(*paths, capacity_bytes=capacity_bytes) as tier:
        fill(tier, block_bytes)
        assert 0.7 * capacity_bytes < tier.usage_bytes() <= capacity_bytes
        on_disk = sum(
            min(file.stat().st_size, file.stat().st_blocks * 512) for path in paths for file in path.iterdir()
        )
        assert on_disk == tier.usage_bytes()


def test_an_extent_that_changes_hands_gives_its_room_back(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        for block_bytes in (1000, 1 << 20, 65536):
            fill(tier, block_bytes)
            assert tier.usage_bytes() <= 16 << 20


def test_usage_is_the_same_after_a_restart(tmp_path: Path) -> None:
    """CR-019, LK-020: it is what the file system says, and cannot drift."""
    with opened(tmp_path) as tier:
        num_blocks = fill(tier, 65536)
        usage_bytes = tier.usage_bytes()
    with opened(tmp_path) as tier:
        assert tier.usage_bytes() == usage_bytes
        assert len(list(tier.scan())) == num_blocks


def test_a_smaller_capacity_keeps_what_fits_and_gives_the_rest_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """CR-018: and says so, since it may have been a slip."""
    with opened(tmp_path, capacity_bytes=16 << 20) as tier:
        fill(tier, 65536)
    with opened(tmp_path, capacity_bytes=16 << 20):
        assert "smaller than before" not in caplog.text
    for capacity_bytes in (9 << 20, 3 << 20):
        with opened(tmp_path, capacity_bytes=capacity_bytes) as tier:
            assert tier.usage_bytes() <= capacity_bytes
            assert tier.extent_bytes <= tier.capacity_bytes
            found = list(tier.scan())
            assert len(found) * 65_792 > capacity_bytes * 0.9
            assert all(block.offset_bytes + 65_792 <= tier.capacity_bytes for block in found)
            assert min(readable(tier, range(1))) == 0
            assert "smaller than before" in caplog.text
            caplog.clear()
            assert fill(tier, 65536) == len(found)


def test_a_larger_capacity_keeps_all_and_grows(tmp_path: Path) -> None:
    with opened(tmp_path, capacity_bytes=7 << 20) as tier:
        num_blocks = fill(tier, 65536)
    with opened(tmp_path, capacity_bytes=20 << 20) as tier:
        assert len(list(tier.scan())) == num_blocks
        assert fill(tier, 65536) > 2 * num_blocks
        assert tier.usage_bytes() <= 20 << 20


def test_a_store_keeps_the_extents_it_was_made_with(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        store(tier, 0, 40)
    with opened(tmp_path, extent_bytes=1 << 20) as tier:
        assert tier.extent_bytes == EXTENT_BYTES
        assert readable(tier, range(41)) == {0, 40}


@pytest.mark.parametrize("capacity_bytes", [1, 4096, 20_000])
def test_a_capacity_below_one_block_is_an_error(tmp_path: Path, capacity_bytes: int) -> None:
    with pytest.raises(ConfigError, match=r"file\.capacity"), opened(tmp_path, capacity_bytes=capacity_bytes):
        pass


def test_a_capacity_above_the_disk_is_an_error_with_both_numbers(tmp_path: Path) -> None:
    """CR-015, CR-031."""
    with pytest.raises(ConfigError, match=r"1024PiB .*GiB|1024PiB .*TiB"), opened(tmp_path, capacity_bytes=1 << 60):
        pass
    assert os.listdir(tmp_path) == []


def test_a_capacity_above_what_is_free_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """CR-017."""
    found = os.statvfs(tmp_path)
    if found.f_bavail == found.f_blocks:
        pytest.skip("this file system is quite empty")
    with opened(tmp_path, capacity_bytes=found.f_blocks * found.f_frsize):
        assert "there is room for" in caplog.text


def test_where_no_slot_is_nothing_is_written(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        store(tier, 0)
        for offset_bytes in (1, tier.capacity_bytes, -tier.slot_bytes(LAYOUT.block_bytes), 1 << 60):
            move = replace(full_move(tier, 1, LAYOUT), offset_bytes=offset_bytes)
            assert tier.write([move], soon()) == [FAILED]
            assert tier.read([move], soon()) == [ABSENT]
            tier.erase([move])
        assert scanned(tier) == [0]


def test_blocks_past_their_age_are_erased_when_the_files_are_opened(tmp_path: Path) -> None:
    """Whoever opens them: no header of a block outlives it for long."""
    with opened(tmp_path) as tier:
        for number, max_age_s in ((0, 50), (1, 0)):
            move = replace(full_move(tier, number, LAYOUT), created_unix_s=int(time.time()) - 100, max_age_s=max_age_s)
            assert tier.write([move], soon()) == [Outcome.OK]
    assert bytes(key_of(0)) in (tmp_path / SLOTS).read_bytes()
    with opened(tmp_path) as tier:
        assert [block.key for block in tier.scan()] == [key_of(1)]
    assert bytes(key_of(0)) not in (tmp_path / SLOTS).read_bytes()
    assert bytes(key_of(1)) in (tmp_path / SLOTS).read_bytes()


# Behind its back -------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep_bytes", [0, 4096, 200_000])
def test_files_that_are_cut_while_open_are_misses(tmp_path: Path, keep_bytes: int) -> None:
    """CR-045, WK-061: and can be written again."""
    with opened(tmp_path) as tier:
        store(tier, *range(6))
        os.truncate(tmp_path / BLOCKS, keep_bytes)
        assert readable(tier, range(6)) == set(range(keep_bytes // 65_536))
        os.truncate(tmp_path / SLOTS, 0)
        assert list(tier.scan()) == []
        store(tier, 3)
        assert 3 in readable(tier, range(6))
    with opened(tmp_path) as tier:
        assert readable(tier, range(6)) <= set(range(keep_bytes // 65_536)) | {3}


@pytest.mark.parametrize("names", [[BLOCKS], [SLOTS], [LOCK], [BLOCKS, SLOTS, LOCK, LEDGER, SUPERBLOCK]])
def test_files_that_are_deleted_while_open_are_misses_and_are_made_anew(tmp_path: Path, names: list[str]) -> None:
    """LK-020: writes go on, and what they say is there after a restart is there."""
    files, clock = FaultyFiles(), ManualClock(0.0)
    with opened(tmp_path, files=files, clock=clock) as tier:
        assert set(tier.write(full_moves(tier, range(3), LAYOUT), 1.0)) == {OK}
        num_open = len(files.open_files)
        for name in names:
            (tmp_path / name).unlink()
        assert tier.read(empty_moves(tier, range(3), LAYOUT), 1.0) == [ABSENT] * 3
        tier.erase(empty_moves(tier, range(3), LAYOUT))
        assert tier.write(full_moves(tier, [7], LAYOUT), 1.0) == [OK]
        assert len(files.open_files) == num_open
    assert files.open_files == {}
    with opened(tmp_path) as tier:
        assert 7 in readable(tier, range(8))


def test_a_directory_that_is_deleted_while_open_is_made_anew(tmp_path: Path) -> None:
    with opened(tmp_path / "cache") as tier:
        store(tier, 0)
        shutil.rmtree(tmp_path / "cache")
        assert readable(tier, range(1)) == set()
        store(tier, 1)
        assert mode(tmp_path / "cache") == 0o700
        with pytest.raises(OwnershipError), opened(tmp_path / "cache"):
            pass
    with opened(tmp_path / "cache") as tier:
        assert readable(tier, range(2)) == {1}


def test_a_deleted_directory_that_cannot_be_made_anew_fails_until_it_can(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files, clock = FaultyFiles(), ManualClock(0.0)
    with opened(tmp_path / "cache", files=files, clock=clock) as tier:
        assert tier.write(full_moves(tier, [0], LAYOUT), 1.0) == [OK]
        shutil.rmtree(tmp_path / "cache")
        (tmp_path / "cache").write_text("in the way")
        for _ in range(3):
            assert tier.write(full_moves(tier, [0], LAYOUT), 1.0) == [FAILED]
        assert tier.read(empty_moves(tier, [0], LAYOUT), 1.0) == [FAILED]
        assert list(tier.scan()) == []
        assert tier.usage_bytes() == 0
        assert caplog.text.count("cannot be opened anew") == 1
        (tmp_path / "cache").unlink()
        clock.now_s = 60.0
        assert tier.write(full_moves(tier, [0], LAYOUT), 61.0) == [OK]
    assert files.open_files == {}
