"""Layouts: sizes, and what is refused. Fingerprints: tests/unit/test_hashing.py."""

from typing import Any

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
