"""Layouts: sizes, and what is refused. Fingerprints: tests/unit/test_hashing.py."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import LayoutError
from kvstore.layout import QUANTISED, Layout, slot_bytes


def test_bytes_of_a_block() -> None:
    llama8b = Layout("bfloat16", 32, 8, (128, 128), 16)
    assert llama8b.token_bytes == 131072
    assert llama8b.block_bytes == 2 << 20
    mla = Layout("bfloat16", 61, 1, (576,), 64)
    assert mla.token_bytes == 61 * 576 * 2


def test_slots_are_whole_pages() -> None:
    assert [slot_bytes(size) for size in (1, 4096, 4097)] == [4096, 4096, 8192]


@pytest.mark.parametrize(
    ("dtype", "layers", "heads", "dims", "tokens"),
    [
        ("float128", 1, 1, (1,), 1),
        ("float16", 0, 1, (1,), 1),
        ("float16", 1, 0, (1,), 1),
        ("float16", 1, 1, (), 1),
        ("float16", 1, 1, (0,), 1),
        ("float16", 1, 1, (1,), 0),
        ("float16", 1.5, 1, (1,), 1),
        ("float16", "1", 1, (1,), 1),
        ("float16", True, 1, (1,), 1),
        ("float16", 1 << 32, 1, (1,), 1),
        ("float16", 1, None, (1,), 1),
        ("float16", 1, 1, (64.0,), 1),
        ("float16", 1, 1, (1 << 32,), 1),
        ("float16", 1, 1, [64, 64], 1),
        ("float16", 1, 1, 64, 1),
        (None, 1, 1, (64,), 1),
        ([], 1, 1, (64,), 1),
    ],
)
def test_impossible_layouts_are_refused(dtype: Any, layers: Any, heads: Any, dims: Any, tokens: Any) -> None:
    with pytest.raises(LayoutError, match="layout"):
        Layout(dtype, layers, heads, dims, tokens)


@pytest.mark.parametrize("field", ["quantisation", "engine_format"])
def test_a_scheme_that_is_no_text_is_refused(field: str) -> None:
    extra: dict[str, Any] = {field: None}
    with pytest.raises(LayoutError, match=field):
        Layout("float16", 1, 1, (1,), 1, **extra)


# ---- quantised

LLAMA8B = Layout("bfloat16", 32, 8, (128, 128), 16)


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_quantised_block_is_a_byte_for_each_element_and_its_scales(name: str, dtype: str) -> None:
    stored = replace(LLAMA8B, dtype=dtype).quantised(name)
    num_elements, num_scales = 2 * 32 * 16 * 8 * 128, 32 * 8 * (128 + 16)
    assert stored.block_bytes == num_elements + 2 * num_scales
    assert stored.has_scales
    assert not LLAMA8B.has_scales


@pytest.mark.parametrize(
    "change",
    [
        {"plane_dims": (576,), "num_heads": 1},  # MLA
        {"plane_dims": (128, 64)},
        {"plane_dims": (128, 128, 128)},
        {"dtype": "float8_e4m3fn"},
        {"dtype": "uint8"},
        {"engine_format": "packed"},
        {"quantisation": "fp8"},
    ],
)
def test_blocks_that_are_not_k_and_v_in_wide_floats_cannot_be_quantised(change: dict[str, Any]) -> None:
    with pytest.raises(LayoutError, match="cannot be quantised"):
        replace(LLAMA8B, **change).quantised("int8")


def test_what_is_quantised_is_not_quantised_again() -> None:
    with pytest.raises(LayoutError, match="cannot be quantised"):
        LLAMA8B.quantised("int8").quantised("int8")


@pytest.mark.parametrize("name", ["", "none", "int4", "float8_e4m3fn"])
def test_a_format_that_nobody_knows_is_refused_with_those_there_are(name: str) -> None:
    with pytest.raises(LayoutError, match="fp8, int8"):
        LLAMA8B.quantised(name)


@pytest.mark.parametrize(
    "change", [{"dtype": "bfloat16"}, {"plane_dims": (128,)}, {"plane_dims": (128, 64)}, {"engine_format": "packed"}]
)
def test_a_layout_that_comes_from_elsewhere_has_scales_only_where_they_can_be(change: dict[str, Any]) -> None:
    with pytest.raises(LayoutError, match="cannot have scales"):
        replace(LLAMA8B.quantised("int8"), **change)


def test_heads_have_their_own_scales_so_that_quantised_blocks_make_stripes() -> None:
    layout = replace(LLAMA8B, num_stripes=8).quantised("fp8")
    parts = [layout.bytes_of(rank, 4) for rank in range(4)]
    assert [part.start for part in parts] == [rank * layout.block_bytes // 4 for rank in range(4)]
    assert parts[-1].stop == layout.block_bytes
    assert layout.part(4) == replace(LLAMA8B, num_heads=2, num_stripes=2).quantised("fp8")


# ---- stripes

GQA = Layout("bfloat16", 2, 8, (16, 16), 4, num_stripes=8)


@given(heads_per_stripe=st.integers(1, 4), num_stripes=st.integers(1, 16), num_ranks=st.integers(1, 16))
def test_ranks_have_every_byte_of_a_block_once_and_their_own_heads(
    heads_per_stripe: int, num_stripes: int, num_ranks: int
) -> None:
    layout = Layout("float16", 3, heads_per_stripe * num_stripes, (8, 8), 4, num_stripes=num_stripes)
    if num_stripes % num_ranks:
        with pytest.raises(LayoutError, match="a miss"):
            layout.bytes_of(0, num_ranks)
        return
    whole = range(layout.block_bytes)
    parts = [whole[layout.bytes_of(rank, num_ranks)] for rank in range(num_ranks)]
    assert [at for part in parts for at in part] == list(whole)
    assert {len(part) for part in parts} == {layout.part(num_ranks).block_bytes}
    assert layout.part(num_ranks).num_heads * num_ranks == layout.num_heads


@pytest.mark.parametrize(
    ("layout", "num_ranks"),
    [
        (replace(GQA, num_stripes=1), 2),
        (replace(GQA, num_stripes=4), 8),
        (replace(GQA, num_heads=4, num_stripes=4), 8),  # fewer heads than ranks, which have copies
        (GQA, 3),
        (GQA, 16),
        (GQA, 0),
        (Layout("bfloat16", 2, 1, (576,), 4), 2),  # MLA: every rank has all of it
        (replace(GQA, num_stripes=1, quantisation="fp8"), 2),
        (replace(GQA, num_stripes=1, engine_format="packed"), 2),
    ],
)
def test_ranks_that_have_no_stripes_of_their_own_are_refused(layout: Layout, num_ranks: int) -> None:
    with pytest.raises(LayoutError, match="a miss"):
        layout.part(num_ranks)


def test_no_rank_has_another_ones_part() -> None:
    for rank in (-1, 2):
        with pytest.raises(LayoutError, match=f"rank {rank} of 2"):
            GQA.bytes_of(rank, 2)


@pytest.mark.parametrize(
    "change", [{"num_stripes": 3}, {"num_stripes": 16}, {"quantisation": "fp8"}, {"engine_format": "packed"}]
)
def test_stripes_whose_heads_nobody_knows_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(LayoutError, match="stripes"):
        replace(GQA, **change)
