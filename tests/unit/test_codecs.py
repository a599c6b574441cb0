"""Codecs give back the very bytes, and never more than a block whatever they are fed."""

import threading
import tracemalloc

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from kvstore.codecs.registry import CODECS, CODECS_BY_ID, NONE, encode
from kvstore.layout import Layout

NAMES = ["none", "lz4", "zstd", "lz4-planes", "zstd-planes"]
DTYPES = ["bfloat16", "float16", "float32", "float8_e4m3fn", "int8"]


def layout(dtype: str = "bfloat16", tokens: int = 16) -> Layout:
    return Layout(dtype=dtype, num_layers=2, num_heads=2, plane_dims=(8, 8), tokens_per_block=tokens)


def smooth(shape: Layout, seed: int = 0) -> memoryview:
    """Bytes of bell-shaped numbers, as KV has them."""
    numbers = np.random.default_rng(seed).normal(size=shape.block_bytes).astype(np.float32)
    if shape.dtype == "bfloat16":
        data = (numbers.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    elif shape.dtype == "float16":
        data = numbers.astype(np.float16).tobytes()
    elif shape.dtype == "float32":
        data = numbers.tobytes()
    else:
        data = (numbers * 20).astype(np.int8).tobytes()
    return memoryview(data)[: shape.block_bytes]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_a_block_comes_back_bit_for_bit(name: str, dtype: str) -> None:
    """NU-003: no codec here loses a bit."""
    shape = layout(dtype)
    payload = smooth(shape)
    stored = CODECS[name].encode(payload, shape)
    out = bytearray(shape.block_bytes)
    assert CODECS[name].decode(memoryview(stored), memoryview(out), shape)
    assert out == payload


@pytest.mark.parametrize("name", NAMES)
@given(data=st.binary(min_size=128, max_size=128))
def test_any_bytes_come_back(name: str, data: bytes) -> None:
    """NU-005: codecs take bytes as they are, whatever a layout says they mean."""
    shape = Layout("bfloat16", num_layers=1, num_heads=1, plane_dims=(2, 2), tokens_per_block=16)
    codec_id, stored = encode(CODECS[name], memoryview(data), shape)
    out = bytearray(len(data))
    assert CODECS_BY_ID[codec_id].decode(memoryview(stored), memoryview(out), shape)
    assert out == data


@pytest.mark.parametrize("name", NAMES[1:])
@given(stored=st.binary(max_size=300))
def test_hostile_bytes_are_refused_or_fill_the_block(name: str, stored: bytes) -> None:
    shape = Layout("bfloat16", num_layers=1, num_heads=1, plane_dims=(2, 2), tokens_per_block=16)
    out = bytearray(shape.block_bytes)
    assert CODECS[name].decode(memoryview(stored), memoryview(out), shape) in (True, False)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kept", [0, 1, 3, 0.5, -1])
def test_a_cut_encoding_is_refused(name: str, kept: float) -> None:
    shape = layout()
    stored = memoryview(CODECS[name].encode(smooth(shape), shape))
    cut = stored[: int(len(stored) * kept) if 0 < kept < 1 else int(kept)]
    assert not CODECS[name].decode(cut, memoryview(bytearray(shape.block_bytes)), shape)


@pytest.mark.parametrize("name", ["none", "lz4", "lz4-planes", "zstd-planes"])
def test_surplus_bytes_are_refused(name: str) -> None:
    shape = layout()
    stored = bytes(CODECS[name].encode(smooth(shape), shape)) + b"surplus"
    assert not CODECS[name].decode(memoryview(stored), memoryview(bytearray(shape.block_bytes)), shape)


@pytest.mark.parametrize("name", NAMES)
def test_an_encoding_of_another_length_is_refused(name: str) -> None:
    long, short = layout(tokens=32), layout(tokens=16)
    stored = memoryview(CODECS[name].encode(smooth(long), long))
    assert not CODECS[name].decode(stored, memoryview(bytearray(short.block_bytes)), short)
    stored = memoryview(CODECS[name].encode(smooth(short), short))
    assert not CODECS[name].decode(stored, memoryview(bytearray(long.block_bytes)), long)


def test_a_zstd_bomb_allocates_nothing_like_its_size() -> None:
    """CR-044: sizes that stored bytes claim are checked before anything is allocated for them."""
    shape = layout()
    out = memoryview(bytearray(shape.block_bytes))
    bomb = zstandard.ZstdCompressor().compress(bytes(64 << 20))
    narrow = zstandard.ZstdCompressionParameters.from_level(1, window_log=10)
    long = zstandard.ZstdCompressor(compression_params=narrow).compress(bytes(3 * shape.block_bytes))
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(64 << 20))
    # A frame by hand (RFC 8878): content size as it should be, a 128 MiB window, one block of repeated zeros.
    size = shape.block_bytes
    windowed = (
        b"\x28\xb5\x2f\xfd\x80\x88" + size.to_bytes(4, "little") + (size << 3 | 0b011).to_bytes(3, "little") + b"\0"
    )
    assert zstandard.ZstdDecompressor().decompress(windowed) == bytes(size)
    tracemalloc.start()
    try:
        assert not CODECS["zstd"].decode(memoryview(bomb), out, shape)
        assert not CODECS["zstd"].decode(memoryview(long), out, shape)
        assert not CODECS["zstd"].decode(memoryview(unsized), out, shape)
        assert not CODECS["zstd"].decode(memoryview(windowed), out, shape)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", NAMES)
def test_what_does_not_shrink_is_stored_as_it_is(name: str) -> None:
    shape = layout()
    noise = memoryview(np.random.default_rng(1).bytes(shape.block_bytes))
    codec_id, stored = encode(CODECS[name], noise, shape)
    assert codec_id == NONE.codec_id
    assert stored is noise


def test_planes_find_the_exponents_that_bytes_hide() -> None:
    shape = layout(tokens=256)
    payload = smooth(shape)
    sizes = {name: len(CODECS[name].encode(payload, shape)) for name in NAMES}
    assert sizes["lz4"] >= len(payload)
    assert sizes["lz4-planes"] < 0.95 * len(payload)
    assert sizes["zstd-planes"] < sizes["zstd"] < len(payload)


def test_ids_are_what_stored_blocks_were_written_with() -> None:
    assert {name: codec.codec_id for name, codec in CODECS.items()} == {
        "none": 0,
        "lz4": 1,
        "zstd": 2,
        "lz4-planes": 3,
        "zstd-planes": 4,
    }
    assert {codec.codec_id: codec for codec in CODECS.values()} == CODECS_BY_ID


@pytest.mark.parametrize("name", NAMES)
def test_threads_may_share_a_codec(name: str) -> None:
    """CR-044: compressors that must not be shared are kept per thread."""
    shape = layout(tokens=256)
    wrong: list[int] = []

    def work(seed: int) -> None:
        payload = smooth(shape, seed)
        for _ in range(20):
            out = bytearray(shape.block_bytes)
            stored = memoryview(CODECS[name].encode(payload, shape))
            if not CODECS[name].decode(stored, memoryview(out), shape) or out != payload:
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
