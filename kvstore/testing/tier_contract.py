# ruff: noqa: D102 - the name of a test says what it asserts
"""What every tier promises, as tests to inherit.

A subclass named ``Test...`` supplies the fixture ``tier`` and, where its suite asks for it, a way to reach the stored
bytes behind the tier's back. Which suite to inherit:

* ``TierContract``: any tier.
* ``VerifyingTierContract``: a tier that verifies what it reads, as every tier outside RAM must.
* ``AdoptingTierContract``: a tier of slots whose blocks outlive the process.

Blocks are small, so that a tier of ``CAPACITY_BYTES`` holds every test's.
"""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from kvstore.header import HEADER_BYTES, MAGIC, VERSION
from kvstore.layout import Layout
from kvstore.testing.blocks import (
    POISON,
    aligned_buffer,
    content_of,
    empty_move,
    empty_moves,
    full_move,
    full_moves,
    is_right,
    key_of,
    layout_of,
    soon,
    unaligned_buffer,
)
from kvstore.tiers.base import BlockMove, StoredBlock, Tier
from kvstore.types import NAMESPACE_DIGEST_BYTES, BlockKey, Outcome

CAPACITY_BYTES = 64 << 20

OK, ABSENT, DAMAGED, FOREIGN = Outcome.OK, Outcome.ABSENT, Outcome.DAMAGED, Outcome.FOREIGN
LATE, FAILED = Outcome.LATE, Outcome.FAILED
LAYOUT = layout_of(64 << 10)


class TierContract:
    """What holds for any tier."""

    @pytest.fixture
    def tier(self) -> Iterator[Tier]:
        """An open, empty tier of at least ``CAPACITY_BYTES``; closed afterwards."""
        raise NotImplementedError

    @pytest.mark.parametrize("block_bytes", [1, 255, 4095, 4096, 4097, 16384, 65536, 368640, 2 << 20, (5 << 20) + 3])
    def test_what_was_written_is_read(self, tier: Tier, block_bytes: int) -> None:
        layout = layout_of(block_bytes)
        assert tier.write(full_moves(tier, range(3), layout), soon()) == [OK] * 3
        moves = empty_moves(tier, range(3), layout)
        assert tier.read(moves, soon()) == [OK] * 3
        assert all(map(is_right, moves))

    def test_a_slot_holds_the_block(self, tier: Tier) -> None:
        for block_bytes in (1, 4096, 4097, 1 << 20):
            assert tier.slot_bytes(block_bytes) >= block_bytes

    def test_outcomes_come_in_the_order_of_the_moves(self, tier: Tier) -> None:
        numbers = [7, 2, 9, 3, 8, 0, 1]
        assert tier.write(full_moves(tier, numbers, LAYOUT), soon()) == [OK] * len(numbers)
        moves = empty_moves(tier, list(reversed(numbers)), LAYOUT)
        assert tier.read(moves, soon()) == [OK] * len(numbers)
        assert all(map(is_right, moves))

    def test_many_small_blocks_in_one_batch(self, tier: Tier) -> None:
        layout = layout_of(3000)
        numbers = range(1500)
        assert set(tier.write(full_moves(tier, numbers, layout), soon())) == {OK}
        moves = empty_moves(tier, numbers, layout)
        assert set(tier.read(moves, soon())) == {OK}
        assert all(map(is_right, moves))

    def test_buffers_need_not_be_aligned(self, tier: Tier) -> None:
        """CR-013: what a stranger lends is as good as a slot of the arena."""
        for number, size in enumerate((1000, 4096, 70_000)):
            layout = layout_of(size)
            written, got = unaligned_buffer(size), unaligned_buffer(size)
            written[:] = content_of(key_of(number), layout)
            move = full_move(tier, number, layout)
            assert tier.write([replace(move, buffer=written)], soon()) == [OK]
            assert tier.read([replace(move, buffer=got)], soon()) == [OK]
            assert got == written

    def test_reading_touches_nothing_beyond_whole_pages(self, tier: Tier) -> None:
        layout = layout_of(5000)
        assert tier.write([full_move(tier, 0, layout)], soon()) == [OK]
        for buffer in (aligned_buffer(5000 + 8192), memoryview(bytearray(5000 + 8192))):
            buffer[:] = bytes([POISON]) * len(buffer)
            move = replace(empty_move(tier, 0, layout), buffer=buffer)
            assert tier.read([move], soon()) == [OK]
            assert is_right(move)
            assert bytes(buffer[8192:]) == bytes([POISON]) * (len(buffer) - 8192)

    def test_writing_leaves_the_block_in_the_buffer_as_it_is(self, tier: Tier) -> None:
        move = full_move(tier, 0, layout_of(5000))
        assert tier.write([move], soon()) == [OK]
        assert is_right(move)

    def test_the_last_write_wins(self, tier: Tier) -> None:
        """LK-021: the same block twice is the same as once."""
        move = full_move(tier, 0, LAYOUT)
        assert tier.write([move], soon()) == [OK]
        other = replace(move, buffer=memoryview(bytes([7]) * LAYOUT.block_bytes))
        assert tier.write([other], soon()) == [OK]
        assert tier.write([other], soon()) == [OK]
        got = empty_move(tier, 0, LAYOUT)
        assert tier.read([got], soon()) == [OK]
        assert bytes(got.buffer) == bytes(other.buffer)

    def test_threads_do_not_disturb_each_other(self, tier: Tier) -> None:
        layout = layout_of(20_000)

        def churn(first: int) -> bool:
            for _ in range(8):
                numbers = range(first, first + 6)
                written = tier.write(full_moves(tier, numbers, layout), soon())
                moves = empty_moves(tier, numbers, layout)
                read = tier.read(moves, soon())
                if {*written, *read} != {OK} or not all(map(is_right, moves)):
                    return False
            return True

        with ThreadPoolExecutor(4) as threads:
            assert all(threads.map(churn, range(0, 24, 6)))

    def test_readers_of_one_block_all_get_it(self, tier: Tier) -> None:
        assert tier.write([full_move(tier, 0, LAYOUT)], soon()) == [OK]
        moves = empty_moves(tier, [0] * 16, LAYOUT)
        with ThreadPoolExecutor(4) as threads:
            assert list(threads.map(lambda move: tier.read([move], soon()), moves)) == [[OK]] * 16
        assert all(map(is_right, moves))

    def test_nothing_is_moved_after_the_deadline(self, tier: Tier) -> None:
        assert tier.write(full_moves(tier, range(2), LAYOUT), time.monotonic() - 1) == [LATE, LATE]
        assert tier.write([full_move(tier, 0, LAYOUT)], soon()) == [OK]
        moves = empty_moves(tier, [0, 0], LAYOUT)
        assert tier.read(moves, time.monotonic() - 1) == [LATE, LATE]
        assert all(set(move.buffer) == {POISON} for move in moves)

    def test_empty_batches(self, tier: Tier) -> None:
        assert tier.write([], soon()) == []
        assert tier.read([], soon()) == []
        tier.erase([])

    def test_a_new_tier_has_nothing_from_before(self, tier: Tier) -> None:
        assert list(tier.scan()) == []

    def test_closing_twice(self, tier: Tier) -> None:
        tier.close()
        tier.close()


class VerifyingTierContract(TierContract):
    """What holds where blocks lie outside RAM: any doubt is a miss, and a wrong byte is never served."""

    def stored(self, tier: Tier, move: BlockMove) -> bytes:
        """The bytes of a block as they lie in the tier: the 256 of its header, then the stored payload."""
        raise NotImplementedError

    def tamper(self, tier: Tier, move: BlockMove, stored: bytes) -> None:
        """Put ``stored``, as long as what ``stored`` returned, in its place behind the tier's back."""
        raise NotImplementedError

    def read_after(self, tier: Tier, stored: bytes, number: int = 0) -> Outcome:
        """Tamper with a block, then read it; on OK the bytes must be right."""
        move = empty_move(tier, number, LAYOUT)
        self.tamper(tier, move, stored)
        (outcome,) = tier.read([move], soon())
        assert outcome is not OK or is_right(move)
        return outcome

    def test_what_was_never_written_is_absent(self, tier: Tier) -> None:
        """CR-029, WK-002: a miss among hits is told apart from them."""
        assert tier.read(empty_moves(tier, range(3), LAYOUT), soon()) == [ABSENT] * 3
        assert tier.write(full_moves(tier, [0, 2], LAYOUT), soon()) == [OK, OK]
        moves = empty_moves(tier, range(4), LAYOUT)
        assert tier.read(moves, soon()) == [OK, ABSENT, OK, ABSENT]
        assert is_right(moves[0])
        assert is_right(moves[2])

    def test_another_key_is_absent(self, tier: Tier) -> None:
        """WK-001: the place of a block says nothing of its key."""
        assert tier.write([full_move(tier, 0, LAYOUT)], soon()) == [OK]
        move = empty_move(tier, 0, LAYOUT)
        other = BlockKey(bytes(NAMESPACE_DIGEST_BYTES) + move.key[NAMESPACE_DIGEST_BYTES:])
        assert tier.read([replace(move, key=key_of(1)), replace(move, key=other), move], soon()) == [ABSENT, ABSENT, OK]

    def test_another_layout_of_the_same_size_is_foreign(self, tier: Tier) -> None:
        stored, asked = layout_of(65536, "bfloat16"), layout_of(65536, "float16")
        assert tier.write([full_move(tier, 0, stored)], soon()) == [OK]
        assert tier.read([empty_move(tier, 0, asked)], soon()) == [FOREIGN]
        assert tier.read([empty_move(tier, 0, stored)], soon()) == [OK]

    @pytest.mark.parametrize("position", [0, 1, 255, 256, 4095, 4096, 40_000, 65535])
    @pytest.mark.parametrize("mask", [0x01, 0x80])
    def test_a_flipped_bit_in_the_payload_is_damage(self, tier: Tier, position: int, mask: int) -> None:
        """WK-052."""
        move = full_move(tier, 0, LAYOUT)
        assert tier.write([move], soon()) == [OK]
        stored = bytearray(self.stored(tier, move))
        stored[HEADER_BYTES + position] ^= mask
        assert self.read_after(tier, bytes(stored)) is DAMAGED

    def test_a_flipped_bit_in_the_header_is_a_miss(self, tier: Tier) -> None:
        move = full_move(tier, 0, LAYOUT)
        assert tier.write([move], soon()) == [OK]
        stored = self.stored(tier, move)
        for position in range(HEADER_BYTES):
            flipped = bytearray(stored)
            flipped[position] ^= 1 << position % 8
            assert self.read_after(tier, bytes(flipped)) in (ABSENT, DAMAGED, FOREIGN), position
        assert self.read_after(tier, stored) is OK

    def test_random_bytes_of_the_right_length_are_a_miss(self, tier: Tier) -> None:
        move = full_move(tier, 0, LAYOUT)
        assert tier.write([move], soon()) == [OK]
        stored = self.stored(tier, move)
        noise = content_of(key_of(99), layout_of(len(stored)))
        assert self.read_after(tier, noise) in (ABSENT, DAMAGED)
        assert self.read_after(tier, stored[:HEADER_BYTES] + noise[HEADER_BYTES:]) is DAMAGED
        assert self.read_after(tier, noise[:HEADER_BYTES] + stored[HEADER_BYTES:]) in (ABSENT, DAMAGED)

    def test_zeros_are_a_miss(self, tier: Tier) -> None:
        """CR-045: a page that never reached the disk."""
        move = full_move(tier, 0, LAYOUT)
        assert tier.write([move], soon()) == [OK]
        stored = self.stored(tier, move)
        for keep_bytes in (0, 128, HEADER_BYTES, HEADER_BYTES + 100, len(stored) - 1):
            assert self.read_after(tier, stored[:keep_bytes].ljust(len(stored), b"\0")) in (ABSENT, DAMAGED)

    def test_a_block_in_the_place_of_another_is_a_miss(self, tier: Tier) -> None:
        """WK-060, WK-061: nor is a mixture of two."""
        moves = full_moves(tier, range(2), LAYOUT)
        assert tier.write(moves, soon()) == [OK, OK]
        first, second = (self.stored(tier, move) for move in moves)
        assert self.read_after(tier, second) in (ABSENT, DAMAGED)
        assert self.read_after(tier, first[:HEADER_BYTES] + second[HEADER_BYTES:]) is DAMAGED
        half = len(first) // 2
        assert self.read_after(tier, first[:half] + second[half:]) is DAMAGED

    def test_a_newer_format_is_foreign_and_left_alone(self, tier: Tier) -> None:
        move = full_move(tier, 0, LAYOUT)
        assert tier.write([move], soon()) == [OK]
        newer = bytearray(self.stored(tier, move))
        newer[len(MAGIC) : len(MAGIC) + 2] = (VERSION + 1).to_bytes(2, "little")
        assert self.read_after(tier, bytes(newer)) is FOREIGN
        assert self.stored(tier, move) == bytes(newer)

    def test_damage_costs_one_block(self, tier: Tier) -> None:
        """The blocks beside it, read in the same batch, are served."""
        assert tier.write(full_moves(tier, range(5), LAYOUT), soon()) == [OK] * 5
        moves = empty_moves(tier, range(5), LAYOUT)
        stored = bytearray(self.stored(tier, moves[2]))
        stored[-1] ^= 1
        self.tamper(tier, moves[2], bytes(stored))
        assert tier.read(moves, soon()) == [OK, OK, DAMAGED, OK, OK]
        assert [is_right(move) for move in moves] == [True, True, False, True, True]

    def test_a_damaged_block_can_be_erased_and_written_again(self, tier: Tier) -> None:
        move = full_move(tier, 0, LAYOUT)
        assert tier.write([move], soon()) == [OK]
        stored = bytearray(self.stored(tier, move))
        stored[HEADER_BYTES] ^= 1
        assert self.read_after(tier, bytes(stored)) is DAMAGED
        tier.erase([move])
        assert tier.read([empty_move(tier, 0, LAYOUT)], soon()) == [ABSENT]
        assert tier.write([move], soon()) == [OK]
        assert tier.read([empty_move(tier, 0, LAYOUT)], soon()) == [OK]

    def test_a_late_write_wrote_nothing(self, tier: Tier) -> None:
        assert tier.write([full_move(tier, 0, LAYOUT)], time.monotonic() - 1) == [LATE]
        assert tier.read([empty_move(tier, 0, LAYOUT)], soon()) == [ABSENT]

    def test_a_closed_tier_misses(self, tier: Tier) -> None:
        move = full_move(tier, 0, LAYOUT)
        assert tier.write([move], soon()) == [OK]
        tier.close()
        assert tier.write([move], soon()) == [FAILED]
        assert tier.read([move], soon()) == [FAILED]
        tier.erase([move])

    def test_erased_blocks_are_absent(self, tier: Tier) -> None:
        """MN-012: and one that is not there keeps none behind it."""
        assert tier.write(full_moves(tier, range(3), LAYOUT), soon()) == [OK] * 3
        tier.erase([replace(empty_move(tier, number, LAYOUT), buffer=memoryview(b"")) for number in (1, 9, 2)])
        assert tier.read(empty_moves(tier, range(3), LAYOUT), soon()) == [OK, ABSENT, ABSENT]

    def test_the_time_of_a_block_travels_with_it(self, tier: Tier) -> None:
        created_unix_s = int(time.time()) - 12_345
        assert tier.write([replace(full_move(tier, 0, LAYOUT), created_unix_s=created_unix_s)], soon()) == [OK]
        move = empty_move(tier, 0, LAYOUT)
        assert tier.read([move], soon()) == [OK]
        assert move.created_unix_s == created_unix_s

    def test_a_block_past_its_age_is_a_miss(self, tier: Tier) -> None:
        """By the age that its writer gave it, or the one that its reader asks for."""
        created_unix_s = int(time.time()) - 100
        old = replace(full_move(tier, 0, LAYOUT), created_unix_s=created_unix_s)
        tier.write([replace(old, max_age_s=50)], soon())
        assert tier.read([empty_move(tier, 0, LAYOUT)], soon()) == [ABSENT]
        assert tier.write([replace(old, max_age_s=5000)], soon()) == [OK]
        assert tier.read([replace(empty_move(tier, 0, LAYOUT), max_age_s=50)], soon()) == [ABSENT]
        assert tier.read([replace(empty_move(tier, 0, LAYOUT), max_age_s=5000)], soon()) == [OK]


class AdoptingTierContract(VerifyingTierContract):
    """What holds where blocks lie in slots that outlive the process."""

    def reopen(self, tier: Tier) -> Tier:
        """Close ``tier`` and open the same place anew; closed after the test."""
        raise NotImplementedError

    def test_a_scan_says_all_that_a_write_said(self, tier: Tier) -> None:
        move = full_move(tier, 1, LAYOUT, parent=0)
        assert tier.write([replace(move, created_unix_s=1_234_567)], soon()) == [OK]
        block = StoredBlock(
            key=key_of(1),
            parent=key_of(0),
            fingerprint=LAYOUT.fingerprint,
            block_bytes=LAYOUT.block_bytes,
            offset_bytes=move.offset_bytes,
            created_unix_s=1_234_567,
        )
        assert list(tier.scan()) == [block]
        assert tier.write([replace(move, created_unix_s=1_234_567, max_age_s=1 << 40)], soon()) == [OK]
        block = block._replace(expires_unix_s=1_234_567 + (1 << 40))
        assert list(tier.scan()) == [block]
        assert list(self.reopen(tier).scan()) == [block]

    def test_a_scan_gives_the_newest_first(self, tier: Tier) -> None:
        for number in (2, 0, 1, 3, 0):
            assert tier.write([full_move(tier, number, LAYOUT)], soon()) == [OK]
        newest_first = [key_of(number) for number in (0, 3, 1, 2)]
        assert [block.key for block in tier.scan()] == newest_first
        assert [block.key for block in self.reopen(tier).scan()] == newest_first

    def test_blocks_outlive_the_tier_object(self, tier: Tier) -> None:
        """CR-019: after a restart everything is there, and can be read by what the scan says."""
        layout = layout_of(5000)
        assert tier.write(full_moves(tier, range(300), layout), soon()) == [OK] * 300
        reopened = self.reopen(tier)
        assert len(list(reopened.scan())) == 300
        moves = empty_moves(reopened, range(300), layout)
        assert reopened.read(moves, soon()) == [OK] * 300
        assert all(map(is_right, moves))
        assert reopened.write([full_move(reopened, 300, layout)], soon()) == [OK]
        assert next(reopened.scan()).key == key_of(300)

    def test_erased_blocks_stay_gone(self, tier: Tier) -> None:
        assert tier.write(full_moves(tier, range(3), LAYOUT), soon()) == [OK] * 3
        tier.erase([empty_move(tier, 1, LAYOUT)])
        reopened = self.reopen(tier)
        assert {block.key for block in reopened.scan()} == {key_of(0), key_of(2)}
        assert reopened.read(empty_moves(reopened, range(3), LAYOUT), soon()) == [OK, ABSENT, OK]

    def test_a_slot_that_was_reused_holds_the_newer_block(self, tier: Tier) -> None:
        assert tier.write([full_move(tier, 0, LAYOUT, slot=5)], soon()) == [OK]
        assert tier.write([full_move(tier, 1, LAYOUT, slot=5)], soon()) == [OK]
        assert tier.read([empty_move(tier, 0, LAYOUT, slot=5)], soon()) == [ABSENT]
        tier.erase([empty_move(tier, 0, LAYOUT, slot=5)])
        assert tier.read([empty_move(tier, 1, LAYOUT, slot=5)], soon()) == [OK]
        assert [block.key for block in self.reopen(tier).scan()] == [key_of(1)]

    def test_blocks_past_their_age_are_not_scanned(self, tier: Tier) -> None:
        created_unix_s = int(time.time()) - 100
        moves = [replace(move, created_unix_s=created_unix_s) for move in full_moves(tier, range(2), LAYOUT)]
        tier.write([replace(moves[0], max_age_s=50), replace(moves[1], max_age_s=5000)], soon())
        assert [block.key for block in self.reopen(tier).scan()] == [key_of(1)]

    def test_an_extent_can_change_hands_between_layouts(self, tier: Tier) -> None:
        first, second = Layout("uint8", 1, 1, (9000,), 1), Layout("uint8", 1, 1, (60_000,), 1)
        assert tier.write(full_moves(tier, range(4), first), soon()) == [OK] * 4
        assert tier.write(full_moves(tier, [0, 2], second), soon()) == [OK] * 2
        reopened = self.reopen(tier)
        assert {(block.key, block.block_bytes) for block in reopened.scan()} == {
            (key_of(0), 60_000),
            (key_of(2), 60_000),
        }
        moves = empty_moves(reopened, [0, 2], second)
        assert reopened.read(moves, soon()) == [OK, OK]
        assert all(map(is_right, moves))
