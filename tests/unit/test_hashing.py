"""Identity: published test vectors, canonical bytes, and everything that must make a key different."""

import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import ConfigError, IdentityError, LayoutError, TokenError
from kvstore.hashing import DIGESTS, Identity, block_keys, namespace_digest
from kvstore.layout import QUANTISED, Layout
from kvstore.namespace import Namespace
from kvstore.types import BlockKey

LAYOUT = Layout("bfloat16", 30, 3, (64, 64), 16)
IDENTITY = Identity("HuggingFaceTB/SmolLM2-135M-Instruct", b"\x01" * 16, revision="main", salt="tenant-a")

# Test vectors for other implementations: an engine, a router (MN-017). They must never change.
VECTORS = {
    "sha256": [
        "ee601167f385739208bc5624a3be371d5dd8e62e8573ec55433ceb243da56514",
        "0da6e3700ba8d0bdb240b3c0918e47f79ce97709452829164faab3e9171ef1e1",
    ],
    "xxh3_128": ["6d9111b410e874450a694c4a9fcf6d82", "e8ea8decec019d955fb13497a2380914"],
}
WITH_EXTRAS = {
    "sha256": "69d947519f036a366c13d393d2149717bb35662f7123b9e571fb68d08f07b970",
    "xxh3_128": "a8eaccff3b33314d2beb1bc3f102f9ed",
}


def test_vectors_of_layout_and_namespace() -> None:
    assert LAYOUT.fingerprint.hex() == "ec0a490de1fc35475596469459f91e15"
    assert namespace_digest(IDENTITY, LAYOUT).hex() == "d697fd643850fba5bd702af2c05cb9e4"


@pytest.mark.parametrize("scheme", DIGESTS)
def test_vectors_of_chains(scheme: str) -> None:
    """Tokens 0..7 in blocks of 4 under a namespace of zeros."""
    keys = block_keys(bytes(16), range(8), 4, scheme=scheme)
    assert [key[16:].hex() for key in keys] == VECTORS[scheme]
    extra = block_keys(bytes(16), range(8), 4, scheme=scheme, extras={1: b"img"})
    assert extra[0] == keys[0]
    assert extra[1][16:].hex() == WITH_EXTRAS[scheme]


def test_a_process_with_another_hash_seed_computes_the_same_keys() -> None:
    """UX-001, WK-025: nothing depends on PYTHONHASHSEED."""
    program = (
        "from kvstore.hashing import *; from kvstore.layout import QUANTISED, Layout;"
        "i = Identity('m', b'w', adapter='lora', salt='s');"
        "print(namespace_digest(i, Layout('float16', 2, 2, (8, 8), 4)).hex());"
        "print(block_keys(bytes(16), range(8), 4)[-1].hex())"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("0", "1", "4711")
    }
    assert len(outputs) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"model": "other"},
        {"weights": b"\x02" * 16},
        {"revision": "v2"},
        {"salt": "tenant-b"},
        {"adapter": "lora"},
        {"adapter_version": "2"},
        {"epoch": 1},
        {"hash_scheme": "xxh3_128"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_everything_that_changes_the_bytes_changes_the_namespace(change: dict[str, object]) -> None:
    """WK-012, WK-016, WK-017, WK-018: weights, adapters, epochs and tenants never share a key."""
    assert namespace_digest(replace(IDENTITY, **change), LAYOUT) != namespace_digest(IDENTITY, LAYOUT)  # type: ignore[arg-type]  # any field


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "float16"},
        {"num_layers": 31},
        {"num_heads": 4},
        {"plane_dims": (64, 65)},
        {"plane_dims": (128,)},
        {"tokens_per_block": 32},
        {"quantisation": "fp8"},
        {"engine_format": "vllm-cpu-amx"},
        {"num_stripes": 3},
    ],
    ids=str,
)
def test_every_field_of_a_layout_changes_its_fingerprint(change: dict[str, object]) -> None:
    """WK-012, WK-047, NU-006: same bytes, other meaning: another fingerprint."""
    assert replace(LAYOUT, **change).fingerprint != LAYOUT.fingerprint  # type: ignore[arg-type]  # any field


def test_how_blocks_are_quantised_and_from_what_changes_the_fingerprint() -> None:
    """WK-012: a block with scales is never read as one without, nor as one of another format or of other elements."""
    plain = [replace(LAYOUT, dtype=dtype) for dtype in ("bfloat16", "float16", "int8", "float8_e4m3fn")]
    stored = [layout.quantised(name) for layout in plain[:2] for name in QUANTISED]
    assert len({layout.fingerprint for layout in (*plain, *stored)}) == 8


def test_a_value_cannot_pass_for_that_of_another_field() -> None:
    """WK-014, WK-027: fields are length-prefixed, so moving a character between two of them is seen."""
    one = replace(IDENTITY, salt="X", adapter="")
    other = replace(IDENTITY, salt="", adapter="X")
    assert namespace_digest(one, LAYOUT) != namespace_digest(other, LAYOUT)


@pytest.mark.parametrize(
    "field", ["model", "weights", "revision", "salt", "adapter", "adapter_version", "epoch", "hash_scheme"]
)
@pytest.mark.parametrize("value", [None, 1.5, [1]])
def test_an_identity_of_the_wrong_kind_is_refused_by_field(field: str, value: object) -> None:
    with pytest.raises(IdentityError, match=field):
        replace(IDENTITY, **{field: value})  # type: ignore[arg-type]  # the mistake in question


@pytest.mark.parametrize("change", [{"epoch": -1}, {"epoch": 1 << 64}, {"weights": "digest"}, {"salt": "\ud800"}])
def test_an_identity_out_of_range_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(IdentityError, match=next(iter(change))):
        replace(IDENTITY, **change)  # type: ignore[arg-type]  # any field


@pytest.mark.parametrize("age", [-1, 1.5, None, 1 << 32, "1h"])
def test_an_age_that_is_no_number_of_seconds_is_refused(age: Any) -> None:
    with pytest.raises(ConfigError, match="max_age_s"):
        Namespace(IDENTITY, LAYOUT, age)


@pytest.mark.parametrize(
    "tokens",
    [np.zeros((16, 2), np.int64), np.zeros((16, 1), np.int64), [[1]] * 16, 5, iter([1]), None, {1: 2}, "a" * 16],
)
def test_what_is_no_row_of_token_ids_is_refused(tokens: Any) -> None:
    with pytest.raises(TokenError):
        Namespace(IDENTITY, LAYOUT).keys(tokens)


@pytest.mark.parametrize("parent", [b"", b"x", b"x" * 48])
def test_a_parent_of_another_namespace_is_refused(parent: bytes) -> None:
    ns = Namespace(IDENTITY, LAYOUT)
    for wrong in (parent, ns.digest):
        with pytest.raises(LayoutError, match="parent"):
            ns.keys(range(16), parent=BlockKey(wrong))


def test_a_chain_goes_on_where_its_parent_ended() -> None:
    whole = block_keys(bytes(16), range(64), 16)
    assert block_keys(bytes(16), range(32, 64), 16, parent=whole[1]) == whole[2:]


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(1, 8))
def test_containers_of_tokens_do_not_matter_and_partial_blocks_have_no_key(tokens: list[int], size: int) -> None:
    keys = block_keys(bytes(16), tokens, size)
    assert len(keys) == len(tokens) // size
    assert keys == block_keys(bytes(16), np.array(tokens, dtype=np.uint32), size)
    assert keys == block_keys(bytes(16), tuple(tokens), size)


@given(st.lists(st.integers(0, 1000), min_size=8, max_size=8), st.integers(0, 7), st.integers(1, 50))
def test_another_token_anywhere_changes_every_key_from_there_on(tokens: list[int], where: int, by: int) -> None:
    """WK-023, WK-024: no arithmetic of ids collides."""
    other = [token + by * (index == where) for index, token in enumerate(tokens)]
    before, after = (block_keys(bytes(16), chain, 2) for chain in (tokens, other))
    assert [a == b for a, b in zip(before, after, strict=True)] == [index < where // 2 for index in range(4)]


@pytest.mark.parametrize("tokens", [[-1, 0], [2**32, 0], [0.5, 1.0], ["a", "b"], [2**70, 1]])
def test_impossible_token_ids_are_refused(tokens: list[int]) -> None:
    with pytest.raises(TokenError, match="token ids"):
        block_keys(bytes(16), tokens, 2)


def test_multimodal_content_enters_the_chain() -> None:
    """WK-020, WK-022: the same placeholder ids with another image are another block, and so is all that follows."""
    plain, cat, dog = (block_keys(bytes(16), [9] * 6, 2, extras=extras) for extras in (None, {1: b"cat"}, {1: b"dog"}))
    assert plain[0] == cat[0] == dog[0]
    assert len({plain[1], cat[1], dog[1]}) == len({plain[2], cat[2], dog[2]}) == 3
