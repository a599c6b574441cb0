"""How copies are cut: everything once, nothing too large, large things large."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_io.copy_plan import Part, Shape, adjacent, dmas, offload_parts, onboard_parts, steps


def cells(parts: list[Part]) -> list[tuple[int, int]]:
    return [(block, layer) for part in parts for block in part.blocks for layer in part.layers]


@given(
    num_layers=st.integers(1, 9),
    num_stripes=st.integers(1, 4),
    layer_bytes=st.integers(1, 50),
    num_blocks=st.integers(0, 9),
    buffer_layers=st.integers(1, 100),
    least_bytes=st.integers(1, 200),
)
def test_parts_cover_every_layer_of_every_block_once_and_fit(
    num_layers: int, num_stripes: int, layer_bytes: int, num_blocks: int, buffer_layers: int, least_bytes: int
) -> None:
    shape, buffer_bytes = Shape(num_layers, layer_bytes, num_stripes), buffer_layers * layer_bytes
    expected = [(block, layer) for block in range(num_blocks) for layer in range(num_layers * num_stripes)]
    for parts in (
        offload_parts(shape, num_blocks, buffer_bytes),
        onboard_parts(shape, num_blocks, buffer_bytes, least_bytes),
    ):
        assert sorted(cells(parts)) == expected
        assert all(len(part.blocks) * len(part.layers) * layer_bytes <= buffer_bytes for part in parts)


@given(
    num_layers=st.integers(1, 9),
    num_stripes=st.integers(1, 4),
    num_blocks=st.integers(1, 5),
    buffer_layers=st.integers(1, 40),
    least_bytes=st.integers(1, 20),
)
def test_a_layer_that_is_said_to_be_there_has_come_in_every_stripe_of_every_block(
    num_layers: int, num_stripes: int, num_blocks: int, buffer_layers: int, least_bytes: int
) -> None:
    shape = Shape(num_layers, 4, num_stripes)
    come: set[tuple[int, int]] = set()
    num_ready = 0
    for part in onboard_parts(shape, num_blocks, buffer_layers * 4, least_bytes):
        come.update((block, layer) for block in part.blocks for layer in part.layers)
        if part.blocks.stop == num_blocks:
            num_ready = max(num_ready, shape.num_ready(part.layers))
        assert all(
            (block, stripe * num_layers + layer) in come
            for block in range(num_blocks)
            for stripe in range(num_stripes)
            for layer in range(num_ready)
        )
    assert num_ready == num_layers


def test_the_first_layers_of_every_stripe_come_before_the_next_of_any() -> None:
    parts = onboard_parts(Shape(4, 10, 2), 1, 50, 20)
    assert [part.layers for part in parts] == [range(0, 2), range(4, 6), range(2, 4), range(6, 8)]
    assert [Shape(4, 10, 2).num_ready(part.layers) for part in parts] == [0, 2, 0, 4]


def test_blocks_leave_whole_as_many_as_fit() -> None:
    assert offload_parts(Shape(4, 10), 5, 90) == [
        Part(range(4), range(0, 2)), Part(range(4), range(2, 4)), Part(range(4), range(4, 5)),
    ]  # fmt: skip


def test_a_block_that_does_not_fit_leaves_in_layers() -> None:
    assert offload_parts(Shape(4, 10), 2, 30) == [
        Part(range(0, 3), range(0, 1)), Part(range(3, 4), range(0, 1)),
        Part(range(0, 3), range(1, 2)), Part(range(3, 4), range(1, 2)),
    ]  # fmt: skip


def test_what_fits_as_a_whole_comes_as_a_whole() -> None:
    assert onboard_parts(Shape(4, 10), 2, 80, 1) == [Part(range(4), range(2))]


def test_what_does_not_fit_comes_by_layers_the_first_ones_of_all_blocks_first() -> None:
    assert onboard_parts(Shape(4, 10), 3, 50, 15) == [
        Part(range(0, 2), range(0, 2)), Part(range(0, 2), range(2, 3)),
        Part(range(2, 4), range(0, 2)), Part(range(2, 4), range(2, 3)),
    ]  # fmt: skip


@given(num_layers=st.integers(1, 90), layer_bytes=st.integers(1, 100), least_bytes=st.integers(1, 1000))
def test_steps_are_large_enough_and_no_larger_than_need_be(num_layers: int, layer_bytes: int, least_bytes: int) -> None:
    found = steps(num_layers, layer_bytes, least_bytes)
    assert [layer for layers in found for layer in layers] == list(range(num_layers))
    needed = min(num_layers, -(-least_bytes // layer_bytes))
    assert all(needed <= len(layers) < 2 * needed for layers in found)


def test_a_run_of_adjacent_slots_is_one_dma() -> None:
    shape = Shape(2, 10)
    assert dmas(shape, Part(range(2), range(1, 5)), [0, 100, 120, 140, 200]) == [(100, 0, 60), (200, 60, 20)]


def test_some_layers_of_adjacent_slots_are_a_dma_each() -> None:
    assert dmas(Shape(3, 10), Part(range(1, 3), range(0, 2)), [100, 130]) == [(110, 0, 20), (140, 20, 20)]


@pytest.mark.parametrize(
    ("starts", "expected"),
    [
        ([], []),
        ([40], [range(1)]),
        ([0, 10, 20], [range(3)]),
        ([0, 10, 30, 40, 0], [range(2), range(2, 4), range(4, 5)]),
        ([20, 10, 0], [range(1), range(1, 2), range(2, 3)]),
    ],
)
def test_slots_that_follow_each_other_are_one_run(starts: list[int], expected: list[range]) -> None:
    assert adjacent(starts, 10) == expected
