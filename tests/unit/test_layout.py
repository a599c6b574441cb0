"""Layouts: sizes, and what is refused. Fingerprints: tests/unit/test_hashing.py."""

import pytest

from kvstore.errors import LayoutError
from kvstore.layout import Layout, slot_bytes


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
    ],
)
def test_impossible_layouts_are_refused(
    dtype: str, layers: int, heads: int, dims: tuple[int, ...], tokens: int
) -> None:
    with pytest.raises(LayoutError, match="layout"):
        Layout(dtype, layers, heads, dims, tokens)
