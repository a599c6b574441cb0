"""Where the bytes of a page lie: runs, the layout that follows, and what is refused."""

import ctypes
import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gpu_io.pages import PagedKV, Run
from gpu_io.testing import IN_ORDER, NUM_LAYERS, NUM_PAGES, STRIDED, TOKENS_PER_PAGE, Pages, Slots
from kvstore.errors import LayoutError
from kvstore.layout import Layout

CROSS_LAYER, LAYER_FIRST, PAGE_FIRST, PLANE_FIRST = IN_ORDER


def pages_of(axes: str, pages_per_block: int = 1) -> Pages:
    return Pages(axes, 1, dtype=torch.bfloat16, device="cpu", pages_per_block=pages_per_block)


def sizes(runs: list[Run], kv: PagedKV) -> list[int]:
    """Sizes in pieces: the bytes of one page in one layer and plane."""
    piece_bytes = kv.layout.block_bytes // (NUM_LAYERS * kv.num_planes * kv.pages_per_block)
    return [num_bytes // piece_bytes for _, _, num_bytes in runs]


@pytest.mark.parametrize("axes", [*IN_ORDER, *STRIDED])
def test_every_arrangement_of_one_model_has_the_same_layout(axes: str) -> None:
    expected = Layout("bfloat16", NUM_LAYERS, 2, (8, 8), TOKENS_PER_PAGE * 2)
    assert pages_of(axes, pages_per_block=2).kv.layout == expected


def test_mla_is_one_plane_and_one_head() -> None:
    layout = Layout("float32", 2, 1, (24,), 4)
    assert PagedKV([torch.zeros(3, 4, 24), torch.zeros(3, 4, 24)], "page token dim").layout == layout


def test_the_tensors_are_viewed_not_copied() -> None:
    engine = pages_of(STRIDED[0])
    engine.kv.layers[1][2].fill_(7)
    assert (engine.content()[2, 1] == 7).all()


@pytest.mark.parametrize("axes", IN_ORDER)
def test_bytes_in_a_blocks_order_are_known_to_be(axes: str) -> None:
    assert pages_of(axes).kv.is_in_order


@pytest.mark.parametrize("axes", STRIDED)
def test_bytes_in_another_order_have_no_runs(axes: str) -> None:
    kv = pages_of(axes).kv
    assert not kv.is_in_order
    with pytest.raises(LayoutError):
        kv.runs([0], [0])


def test_bytes_that_are_quantised_on_their_way_have_no_runs() -> None:
    kv = PagedKV([torch.zeros(3, 2, 2, 4, 1, 8)], CROSS_LAYER, quantisation="int8")
    assert not kv.is_in_order
    assert not kv.is_one_run
    assert kv.run_bytes == 0
    with pytest.raises(LayoutError):
        kv.runs([0], [0])


def test_only_pages_with_all_layers_in_a_row_are_one_run() -> None:
    assert [pages_of(axes).kv.is_one_run for axes in IN_ORDER] == [True, False, False, False]
    assert not pages_of(CROSS_LAYER, pages_per_block=2).kv.is_one_run
    assert not pages_of(STRIDED[0]).kv.is_one_run


def test_heads_outside_tokens_are_in_order_where_there_is_one_head() -> None:
    assert PagedKV([torch.zeros(3, 2, 1, 4, 8)], "page plane head token dim").is_in_order


@pytest.mark.parametrize(
    ("axes", "pages_per_block", "pages", "expected"),
    [
        (CROSS_LAYER, 1, [5, 2], [6, 6]),
        (CROSS_LAYER, 1, [2, 3, 5], [12, 6]),
        (CROSS_LAYER, 2, [2, 3], [1] * 12),
        (PAGE_FIRST, 1, [2, 3], [2] * 6),
        (PLANE_FIRST, 1, [2, 3], [1] * 12),
        (PLANE_FIRST, 2, [2, 3], [2] * 6),
        (PLANE_FIRST, 2, [3, 2], [1] * 12),
        (LAYER_FIRST, 1, [2, 3], [2] * 6),
    ],
)
def test_adjacent_bytes_are_one_run(axes: str, pages_per_block: int, pages: list[int], expected: list[int]) -> None:
    kv = pages_of(axes, pages_per_block).kv
    block_bytes = kv.layout.block_bytes
    slots = [number * block_bytes for number in range(len(pages) // pages_per_block)]
    assert sizes(kv.runs(pages, slots), kv) == expected


def test_slots_with_something_between_them_are_runs_of_their_own() -> None:
    kv = pages_of(CROSS_LAYER).kv
    assert sizes(kv.runs([2, 3], [0, kv.layout.block_bytes + 64]), kv) == [6, 6]


def test_a_layer_alone_is_a_run_in_its_place() -> None:
    kv = pages_of(CROSS_LAYER).kv
    layer_bytes = kv.layout.block_bytes // NUM_LAYERS
    address = kv.layers[1][4].data_ptr()
    assert kv.runs([4], [1000], range(1, 2)) == [(address, 1000 + layer_bytes, layer_bytes)]


def test_no_pages_are_no_runs() -> None:
    assert pages_of(CROSS_LAYER).kv.runs([], []) == []


@given(
    axes=st.sampled_from(IN_ORDER),
    pages_per_block=st.integers(1, 3),
    order=st.permutations(range(NUM_PAGES)),
    gap_bytes=st.sampled_from([0, 32]),
    by_layer=st.booleans(),
)
def test_runs_move_exactly_the_block_and_cannot_be_joined(
    axes: str, pages_per_block: int, order: list[int], gap_bytes: int, by_layer: bool
) -> None:
    engine = pages_of(axes, pages_per_block)
    kv = engine.kv
    pages = order[: 2 * pages_per_block]
    slots = Slots(kv, 2, gap_bytes)
    base = ctypes.addressof(ctypes.c_char.from_buffer(slots.memory))
    starts = [base, base + kv.layout.block_bytes + gap_bytes]
    parts = [range(layer, layer + 1) for layer in range(NUM_LAYERS)] if by_layer else [range(NUM_LAYERS)]
    num_bytes_moved = 0
    for layers in parts:
        runs = kv.runs(pages, starts, layers)
        for (page, slot, size), (next_page, next_slot, _) in itertools.pairwise(runs):
            assert (page + size, slot + size) != (next_page, next_slot)
        for page, slot, size in runs:
            ctypes.memmove(slot, page, size)
            num_bytes_moved += size
    assert num_bytes_moved == 2 * kv.layout.block_bytes
    assert bytes(slots.views[0]) == engine.block(pages[:pages_per_block])
    assert bytes(slots.views[1]) == engine.block(pages[pages_per_block:])


@pytest.mark.parametrize(
    ("tensors", "axes", "names"),
    [
        (list, PAGE_FIRST, "0 tensors"),
        (lambda: [torch.zeros(2, 2)], PAGE_FIRST, r"\(2, 2\)"),
        (lambda: [torch.zeros(2, 2, 2)], "page token", "axes 'page token'"),
        (lambda: [torch.zeros(2, 2, 2)], "page page dim", "at most once"),
        (lambda: [torch.zeros(2, 2, 2)], "page token width", "name each of"),
        (lambda: [torch.zeros(2, 2, 2, 2)] * 2, "page layer token dim", "2 tensors"),
        (lambda: [torch.zeros(2, 2, 2), torch.zeros(2, 2, 3)], "page token dim", "layer 1 differs"),
        (lambda: [torch.zeros(2, 2, 2), torch.zeros(2, 2, 2).half()], "page token dim", "layer 1 differs"),
        (lambda: [torch.zeros(2, 2, 2), torch.zeros(2, 2, 2).mT], "page token dim", "layer 1 differs"),
        (lambda: [torch.zeros(2, 2, 4)[:, :, ::2]], "page token dim", "2 apart"),
        (lambda: [torch.zeros(0, 2, 2)], "page token dim", r"\(0, 2, 2\)"),
        (lambda: [torch.zeros(1, 2, 2).expand(4, 2, 2)], "page token dim", "share bytes"),
        (lambda: [torch.zeros(2, 2, 2)] * 2, "page token dim", "share bytes"),
        (lambda: [torch.zeros(2, 2, 2).to_sparse()], "page token dim", "sparse"),
        (lambda: [torch.zeros(2, 2, 2, dtype=torch.float64)], "page token dim", "float64"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_served_is_refused(tensors: Callable[[], list[Tensor]], axes: str, names: str) -> None:
    with pytest.raises(LayoutError, match=names):
        PagedKV(tensors(), axes)


def test_a_block_of_no_pages_is_refused() -> None:
    with pytest.raises(LayoutError, match="pages_per_block"):
        pages_of(CROSS_LAYER, pages_per_block=0)
