"""What is ordered and what is not, and where bytes lie."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpu_io.hazards import HazardError, Hazards
from gpu_io.ranges import Ranges, range_of, ranges_of

START, SIZE = 1000, 64


def world() -> tuple[Hazards, int, int]:
    hazards = Hazards()
    one, other = hazards.actor("one"), hazards.actor("other")
    hazards.know("memory", START, SIZE)
    return hazards, one, other


def touch(hazards: Hazards, actor: int, kind: str, start: int = START, num_bytes: int = 8) -> None:
    ranges = [range_of(start, num_bytes)]
    hazards.access(actor, *((ranges, []) if kind == "read" else ([], ranges)), "somebody")


@pytest.mark.parametrize("pair", [("read", "write"), ("write", "read"), ("write", "write")])
def test_accesses_that_nothing_orders_are_a_hazard(pair: tuple[str, str]) -> None:
    hazards, one, other = world()
    touch(hazards, one, pair[0])
    with pytest.raises(HazardError, match=r"somebody .* memory in other, and nothing says that it is after one"):
        touch(hazards, other, pair[1])


@pytest.mark.parametrize("pair", [("read", "write"), ("write", "read"), ("write", "write")])
def test_accesses_are_ordered_by_what_an_actor_learns(pair: tuple[str, str]) -> None:
    hazards, one, other = world()
    touch(hazards, one, pair[0])
    hazards.learn(other, hazards.clock(one))
    touch(hazards, other, pair[1])


def test_what_happens_after_it_was_learnt_is_not_known() -> None:
    hazards, one, other = world()
    touch(hazards, one, "write", START)
    hazards.learn(other, hazards.clock(one))
    touch(hazards, one, "write", START + 8)
    touch(hazards, other, "read", START)
    with pytest.raises(HazardError):
        touch(hazards, other, "read", START + 8)


def test_what_one_actor_knows_another_learns_from_it() -> None:
    hazards, one, other = world()
    third = hazards.actor("third")
    touch(hazards, one, "write")
    hazards.learn(other, hazards.clock(one))
    hazards.learn(third, hazards.clock(other))
    touch(hazards, third, "write")


def test_no_hazard_without_a_common_byte_or_a_write() -> None:
    hazards, one, other = world()
    touch(hazards, one, "write", START, 8)
    touch(hazards, other, "write", START + 8, 8)
    touch(hazards, one, "read", START + 32, 8)
    touch(hazards, other, "read", START + 32, 8)


def test_one_byte_in_common_is_enough() -> None:
    hazards, one, other = world()
    touch(hazards, one, "write", START, 9)
    with pytest.raises(HazardError):
        touch(hazards, other, "read", START + 8, 8)


@pytest.mark.parametrize(("start", "num_bytes"), [(START - 1, 4), (START + SIZE - 3, 4), (START + SIZE, 1)])
def test_memory_that_is_nobodys_is_a_hazard(start: int, num_bytes: int) -> None:
    hazards, one, _ = world()
    with pytest.raises(HazardError, match="nobody"):
        touch(hazards, one, "read", start, num_bytes)


def test_freed_memory_is_nobodys() -> None:
    hazards, one, _ = world()
    hazards.know("more", START + SIZE, SIZE)
    hazards.forget(START)
    touch(hazards, one, "read", START + SIZE)
    with pytest.raises(HazardError, match="nobody"):
        touch(hazards, one, "read")


def test_pieces_may_lie_in_several_regions() -> None:
    hazards, one, other = world()
    hazards.know("more", START + SIZE, SIZE)
    hazards.access(one, [], [Ranges(np.array([START, START + SIZE, START + 16]), 8)], "somebody")
    for start in (START, START + 16, START + SIZE):
        with pytest.raises(HazardError):
            touch(hazards, other, "read", start)
    touch(hazards, other, "read", START + 8)


@given(
    shape=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    order=st.permutations(range(4)),
    data=st.data(),
    dtype=st.sampled_from([torch.uint8, torch.int16]),
)
def test_ranges_are_the_bytes_of_a_view_and_no_others(
    shape: list[int], order: list[int], data: st.DataObject, dtype: torch.dtype
) -> None:
    whole = torch.zeros([size + 1 for size in shape], dtype=dtype)
    view = whole[tuple(slice(0, size) for size in shape)]
    view = view.permute([axis for axis in order if axis < len(shape)])
    axis = data.draw(st.integers(0, view.dim() - 1))
    indices = data.draw(st.none() | st.lists(st.integers(0, view.shape[axis] - 1), max_size=3))
    starts, num_bytes = ranges_of(view, None if indices is None else {axis: indices})
    covered = {address for start in starts.tolist() for address in range(start, start + num_bytes)}
    chosen = view if indices is None else view.index_select(axis, torch.tensor(indices, dtype=torch.int64))
    marked = view if indices is None else view.index_fill_(axis, torch.tensor(indices, dtype=torch.int64), -1)
    if indices is None:
        marked.fill_(-1)
    touched = whole.view(torch.uint8).flatten().nonzero().flatten() + whole.data_ptr()
    assert covered == set(touched.tolist())
    assert chosen.numel() * view.itemsize >= len(covered)


def test_adjacent_axes_are_one_piece() -> None:
    tensor = torch.zeros(3, 4, 5, dtype=torch.int16)
    assert ranges_of(tensor)[1] == tensor.numel() * 2
    assert [len(part) for part in (ranges_of(tensor[:, 1:])[0], ranges_of(tensor[1])[0])] == [3, 1]
