"""kill -9 in the middle of writes, in a process of its own, again and again on the same directory."""

import itertools
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

from kvstore.testing.blocks import aligned_buffer, empty_move, full_move, is_right, layout_of, soon
from kvstore.tiers.base import BlockMove
from kvstore.tiers.file import FileTier
from kvstore.tiers.file_geometry import file_slot_bytes
from kvstore.types import Outcome
from tests.file_tiers import opened

LAYOUT = layout_of(50_000)
NUM_SLOTS = 160
BATCH = 8
THREADS = 2
ROUNDS = 50


def offset_bytes(tier: FileTier, slot: int) -> int:
    """Slots of several extents."""
    per_extent = tier.extent_bytes // tier.slot_bytes(LAYOUT.block_bytes)
    extent, index = divmod(slot, per_extent)
    return extent * tier.extent_bytes + index * tier.slot_bytes(LAYOUT.block_bytes)


def moves(tier: FileTier, first: int) -> list[BlockMove]:
    """Blocks to write, each to the slot of its number modulo the number of slots."""
    return [
        replace(full_move(tier, number, LAYOUT), offset_bytes=offset_bytes(tier, number % NUM_SLOTS))
        for number in range(first, first + BATCH)
    ]


def write_until_killed(directory: Path, start: int) -> None:
    """Write batch after batch from threads, and say which are done."""
    batches = itertools.count(start, BATCH)

    def run() -> None:
        while True:
            first = next(batches)
            os.write(1, b"begin %d\n" % first)
            assert set(tier.write(moves(tier, first), soon())) == {Outcome.OK}
            os.write(1, b"done %d\n" % first)

    with opened(directory) as tier:
        threads = [threading.Thread(target=run) for _ in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def killed_run(directory: Path, start: int, after_batches: int) -> tuple[set[int], set[int]]:
    """The batches that a child began, and those it was done with, when it was killed."""
    command = [sys.executable, "-m", __name__, str(directory), str(start)]
    begun: set[int] = set()
    done: set[int] = set()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:  # to the end of what it said before it died
            word, first = line.split()
            (done if word == "done" else begun).add(int(first))
            if len(done) == after_batches:
                child.kill()
    assert child.returncode == -9
    return begun, done


def test_a_kill_costs_the_blocks_being_written_and_no_others(tmp_path: Path) -> None:
    """LK-019, WK-060: every block that was done is read, whole, by what the scan says, unless it was being replaced."""
    start = 0
    expected: dict[int, int] = {}  # the number of the block in each slot
    for round_number in range(ROUNDS):
        begun, done = killed_run(tmp_path, start, after_batches=3 + 7 * round_number % 19)
        for first in sorted(begun):  # a slot that was being written holds the old block, the new one, or none
            for number in range(first, first + BATCH):
                expected.pop(number % NUM_SLOTS, None)
        for first in sorted(done):
            if not any(first < later and (later - first) % NUM_SLOTS == 0 for later in begun):
                expected.update({number % NUM_SLOTS: number for number in range(first, first + BATCH)})
        with opened(tmp_path) as tier:
            slot_of = {offset_bytes(tier, slot): slot for slot in range(NUM_SLOTS)}
            by_slot = {slot_of[block.offset_bytes]: block.key for block in tier.scan()}
            for slot, number in expected.items():
                move = empty_move(tier, number, LAYOUT)
                assert by_slot[slot] == move.key
                move.offset_bytes = offset_bytes(tier, slot)
                assert tier.read([move], soon()) == [Outcome.OK]
                assert is_right(move)
            assert len(by_slot) <= NUM_SLOTS
            assert tier.usage_bytes() <= 16 << 20
        start = max(begun) + BATCH
    assert len(expected) > BATCH


def test_a_slot_that_is_half_written_serves_nothing(tmp_path: Path) -> None:
    """Neither block, whichever page the payload is torn at, as a kill or a power failure may leave it."""
    with opened(tmp_path) as tier:
        old = replace(full_move(tier, 1, LAYOUT), offset_bytes=0)
        new = replace(full_move(tier, 2, LAYOUT), offset_bytes=0)
        num_slot_pages = file_slot_bytes(LAYOUT.block_bytes) // 4096
        slot_pages = {}
        for move in (old, new):
            assert tier.write([move], soon()) == [Outcome.OK]
            slot_pages[move.key] = (tmp_path / "blocks").read_bytes()[: num_slot_pages * 4096]
        for num_pages in range(1, num_slot_pages):
            mixture = slot_pages[new.key][: num_pages * 4096] + slot_pages[old.key][num_pages * 4096 :]
            with (tmp_path / "blocks").open("r+b") as file:
                file.write(mixture)
            for move in (old, new):
                got = replace(move, buffer=aligned_buffer(LAYOUT.block_bytes))
                assert tier.read([got], soon()) in ([Outcome.ABSENT], [Outcome.DAMAGED])


if __name__ == "__main__":
    os.umask(0o077)
    write_until_killed(Path(sys.argv[1]), int(sys.argv[2]))
