"""The table of slots, in a real file: what was entered is found, what is doubtful is not."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore import header
from kvstore.header import Header
from kvstore.testing.blocks import key_of
from kvstore.testing.file_faults import Fault, FaultyFiles, fails, moves_only
from kvstore.tiers.file_geometry import ENTRY_BYTES
from kvstore.tiers.slot_table import ExtentLayout, SlotTable
from kvstore.types import BlockKey, Outcome

STRIDE_BYTES = 4 << 20
LAYOUT = ExtentLayout(b"f" * 16, 1000)
OTHER = ExtentLayout(b"g" * 16, 5000)


class Place:
    """A table's file, opened as often as a test likes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = FaultyFiles()
        self.fd = self.files.open(path, os.O_RDWR | os.O_CREAT)

    def table(self, num_extents: int = 3) -> SlotTable:
        return SlotTable(self.files, self.fd, STRIDE_BYTES, num_extents)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path / "slots")
    yield place
    place.files.close(place.fd)


def entry(number: int, layout: ExtentLayout = LAYOUT, *, parent: int | None = None) -> Header:
    return Header(
        key=key_of(number),
        parent=None if parent is None else key_of(parent),
        fingerprint=layout.fingerprint,
        block_bytes=layout.block_bytes,
        stored_bytes=layout.block_bytes,
        checksum=number << 40,
        created_unix_s=1_700_000_000 + number,
        expires_unix_s=number,
        sequence=1000 + number,
    )


def scanned(table: SlotTable, extent: int, num_slots: int = 100) -> dict[int, Header]:
    found = {index: table.parse(extent, data) for _, index, data in table.scan(extent, num_slots)}
    return {index: whole for index, whole in found.items() if whole is not None}


def test_what_was_entered_is_found_after_a_restart(place: Place) -> None:
    table = place.table()
    table.hand_over(1, LAYOUT, 100)
    table.put(1, 7, [entry(1), entry(2, parent=1)])
    for again in (table, place.table()):
        assert again.layout(0) is None
        assert again.layout(1) == LAYOUT
        assert scanned(again, 1) == {7: entry(1), 8: entry(2, parent=1)}
        assert [header.parse(data) for data in again.headers(1, 7, 3)] == [entry(1), entry(2, parent=1), Outcome.ABSENT]
        assert [sequence for sequence, _, _ in again.scan(1, 100)] == [1001, 1002]


def test_a_short_key_is_no_longer_for_it(place: Place) -> None:
    table = place.table()
    table.hand_over(0, LAYOUT, 10)
    short = entry(1)._replace(key=BlockKey(key_of(1)[:32]))
    table.put(0, 0, [short])
    assert scanned(table, 0) == {0: short}


def test_a_key_that_ends_in_zeros_keeps_them(place: Place) -> None:
    table = place.table()
    table.hand_over(0, LAYOUT, 10)
    zeros = entry(1)._replace(key=BlockKey(key_of(1)[:40] + bytes(8)))
    table.put(0, 0, [zeros])
    assert scanned(table, 0) == {0: zeros}


def test_cleared_slots_hold_nothing(place: Place) -> None:
    table = place.table()
    table.hand_over(0, LAYOUT, 100)
    table.put(0, 0, [entry(number) for number in range(5)])
    table.clear(0, 1, 3)
    assert scanned(place.table(), 0) == {0: entry(0), 4: entry(4)}


def test_only_what_is_in_use_is_read(place: Place) -> None:
    table = place.table()
    table.hand_over(0, LAYOUT, 10)
    table.put(0, 0, [entry(number) for number in range(10)])
    assert set(scanned(table, 0, num_slots=4)) == {0, 1, 2, 3}


@pytest.mark.parametrize("position", range(0, ENTRY_BYTES, 7))
def test_a_damaged_entry_is_none(place: Place, position: int) -> None:
    table = place.table()
    table.hand_over(0, LAYOUT, 10)
    table.put(0, 0, [entry(1, parent=3), entry(2)])
    data = bytearray(place.path.read_bytes())
    data[ENTRY_BYTES + position] ^= 0x10
    place.path.write_bytes(data)
    assert scanned(table, 0) == {1: entry(2)}


def test_an_extent_with_a_damaged_head_serves_nothing(place: Place) -> None:
    table = place.table()
    table.hand_over(0, LAYOUT, 10)
    table.put(0, 0, [entry(1)])
    data = bytearray(place.path.read_bytes())
    data[20] ^= 1
    place.path.write_bytes(data)
    assert place.table().layout(0) is None


def test_a_file_that_was_cut_has_fewer_entries(place: Place) -> None:
    """CR-045."""
    table = place.table()
    table.hand_over(0, LAYOUT, 10)
    table.put(0, 0, [entry(1), entry(2)])
    os.truncate(place.path, ENTRY_BYTES * 2 + 50)
    assert scanned(table, 0) == {0: entry(1)}
    assert [header.parse(data) for data in table.headers(0, 0, 2)] == [entry(1), Outcome.ABSENT]
    os.truncate(place.path, 0)
    assert scanned(table, 0) == {}
    assert place.table().layout(0) is None


def test_a_handed_over_extent_is_empty(place: Place) -> None:
    table = place.table()
    table.hand_over(0, LAYOUT, 100)
    table.put(0, 50, [entry(1)])
    table.put(0, 3, [entry(2)])
    table.hand_over(0, OTHER, 20)
    assert table.layout(0) == OTHER
    assert scanned(table, 0) == {}
    table.hand_over(0, LAYOUT, 100)
    assert scanned(place.table(), 0) == {}


def test_where_holes_cannot_be_punched_zeros_do(place: Place) -> None:
    place.files.inject(Fault("punch", fails(errno.EOPNOTSUPP), times=None))
    test_a_handed_over_extent_is_empty(place)


@pytest.mark.parametrize("skip", [0, 1])
def test_a_hand_over_that_is_cut_short_leaves_nothing(place: Place, skip: int) -> None:
    table = place.table()
    table.hand_over(0, LAYOUT, 100)
    table.put(0, 3, [entry(2)])
    place.files.inject(Fault("pwritev", fails(errno.EIO), skip=skip))
    with pytest.raises(OSError, match="slots"):
        table.hand_over(0, OTHER, 20)
    assert table.layout(0) is None
    assert place.table().layout(0) is None


def test_an_entry_of_another_layout_than_its_extent_is_none(place: Place) -> None:
    table = place.table()
    table.hand_over(0, LAYOUT, 100)
    table.put(0, 0, [entry(1, OTHER), entry(2)])
    assert scanned(table, 0) == {1: entry(2)}


def test_a_short_write_is_an_error(place: Place) -> None:
    table = place.table()
    table.hand_over(0, LAYOUT, 100)
    place.files.inject(Fault("pwritev", moves_only(100)))
    with pytest.raises(OSError, match="100 of 256"):
        table.put(0, 0, [entry(1)])


def test_extents_beyond_the_budget_are_cut_off(place: Place) -> None:
    table = place.table(3)
    for extent in range(3):
        table.hand_over(extent, LAYOUT, 10)
        table.put(extent, 0, [entry(extent)])
    assert scanned(place.table(2), 1) == {0: entry(1)}
    grown = place.table(3)
    assert grown.layout(2) is None
    assert scanned(grown, 1) == {0: entry(1)}
