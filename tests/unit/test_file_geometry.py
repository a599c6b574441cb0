"""Where slots lie: no two on top of each other, none outside, none lost, and all within the budget."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import ConfigError
from kvstore.tiers.file_geometry import (
    ENTRY_BYTES,
    PAGE_BYTES,
    Geometry,
    Place,
    budget_slot_bytes,
    file_slot_bytes,
    stride_bytes_for,
)

geometries = st.builds(
    lambda capacity, stride, directories: Geometry.within(capacity * 16384, stride * PAGE_BYTES, directories),
    st.integers(120, 600),
    st.integers(40, 400),
    st.integers(1, 4),
)
block_sizes = st.one_of(st.integers(1, 20_000), st.integers(1, 1 << 20), st.just(4096))


def offsets(geometry: Geometry, block_bytes: int) -> list[int]:
    """Every slot, as the pools above count them."""
    slot_bytes = budget_slot_bytes(block_bytes)
    found = []
    for start in range(0, geometry.capacity_bytes, geometry.extent_bytes):
        size_bytes = min(geometry.extent_bytes, geometry.capacity_bytes - start)
        found += [start + slot * slot_bytes for slot in range(size_bytes // slot_bytes)]
    return found


@given(geometries, block_sizes)
def test_every_slot_has_a_place_of_its_own_and_the_way_back(geometry: Geometry, block_bytes: int) -> None:
    grid = geometry.grid(block_bytes)
    places = [grid.place(offset) for offset in offsets(geometry, block_bytes)]
    found = [place for place in places if place is not None]
    assert len(found) == len(places) == len(set(found))
    assert [grid.offset_bytes(place) for place in found] == offsets(geometry, block_bytes)
    for directory in range(geometry.num_directories):
        for extent in range(geometry.num_extents):
            here = [place.slot for place in found if (place.directory, place.extent) == (directory, extent)]
            assert sorted(here) == list(range(grid.num_slots(directory, extent)))


@given(geometries, block_sizes)
def test_slots_lie_on_pages_side_by_side_within_their_extent(geometry: Geometry, block_bytes: int) -> None:
    grid = geometry.grid(block_bytes)
    for offset in offsets(geometry, block_bytes):
        place = grid.place(offset)
        assert place is not None
        start = grid.file_offset_bytes(place)
        assert start % PAGE_BYTES == 0
        assert start // geometry.stride_bytes == place.extent
        assert start + file_slot_bytes(block_bytes) <= (place.extent + 1) * geometry.stride_bytes
        assert start % geometry.stride_bytes == place.slot * file_slot_bytes(block_bytes)


@given(geometries, block_sizes)
def test_a_full_tier_stays_within_its_budget(geometry: Geometry, block_bytes: int) -> None:
    """CR-017: blocks and tables of all directories together."""
    used_bytes = 0
    for directory in range(geometry.num_directories):
        for extent in range(geometry.num_extents):
            num_slots = geometry.grid(block_bytes).num_slots(directory, extent)
            table_bytes = -(-(1 + num_slots) * ENTRY_BYTES // PAGE_BYTES) * PAGE_BYTES
            used_bytes += num_slots * file_slot_bytes(block_bytes) + table_bytes
    assert used_bytes <= geometry.capacity_bytes + geometry.num_directories * geometry.num_extents * 2 * PAGE_BYTES


@given(geometries, block_sizes, st.integers(-(1 << 24), 1 << 24))
def test_where_no_slot_starts_there_is_no_place(geometry: Geometry, block_bytes: int, offset: int) -> None:
    is_slot = offset in set(offsets(geometry, block_bytes))
    assert (geometry.grid(block_bytes).place(offset) is not None) == is_slot


def test_runs_take_turns_between_directories() -> None:
    geometry = Geometry.within(64 << 20, 16 << 20, 3)
    grid = geometry.grid(1 << 20)
    slot_bytes = budget_slot_bytes(1 << 20)
    directories = [grid.place(slot * slot_bytes) for slot in range(8)]
    assert [place.directory for place in directories if place] == [0, 0, 1, 1, 2, 2, 0, 0]


def test_a_budget_that_shrank_below_an_extent_is_one_short_extent() -> None:
    geometry = Geometry.within(1 << 20, 16 << 20, 1)
    assert geometry.num_extents == 1
    assert geometry.extent_bytes == geometry.capacity_bytes < 1 << 20
    grid = geometry.grid(4096)
    assert grid.place(budget_slot_bytes(4096)) == Place(0, 0, 1)
    assert grid.num_slots(0, 0) < 1000


@given(st.integers(1 << 16, 1 << 42), st.integers(1, 8))
def test_a_new_store_can_use_nearly_all_of_its_budget(configured_bytes: int, num_directories: int) -> None:
    configured_bytes += num_directories << 16
    geometry = Geometry.within(configured_bytes, stride_bytes_for(configured_bytes, num_directories), num_directories)
    assert geometry.stride_bytes % PAGE_BYTES == 0
    assert configured_bytes * 0.999 - num_directories * 14 * PAGE_BYTES <= geometry.capacity_bytes < configured_bytes


def test_a_budget_for_no_block_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"file\.capacity"):
        Geometry.within(20_000, 20_000, 1)
