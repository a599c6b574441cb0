"""The block header: what it says, and every doubt it raises."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.header import HEADER_BYTES, VERSION, Header, admit, checksum, parse
from kvstore.testing.blocks import key_of
from kvstore.types import BlockKey, Outcome

HEADER = Header(
    key=key_of(1),
    parent=key_of(0),
    fingerprint=bytes(range(16)),
    block_bytes=4096,
    stored_bytes=4000,
    checksum=checksum(b"payload"),
    created_unix_s=1_800_000_000,
    codec_id=2,
)


def test_a_header_says_what_was_put_in() -> None:
    assert len(HEADER.pack()) == HEADER_BYTES
    assert parse(HEADER.pack()) == HEADER


def test_a_root_and_a_short_key_survive() -> None:
    header = Header(BlockKey(bytes(32)), None, bytes(16), 1, 1, 0, 0)
    assert parse(header.pack()) == header


@given(st.integers(0, HEADER_BYTES - 1), st.integers(0, 7))
def test_no_flipped_bit_is_believed(where: int, bit: int) -> None:
    """VERIFY: a flipped bit in a header is never another header."""
    data = bytearray(HEADER.pack())
    data[where] ^= 1 << bit
    assert isinstance(parse(data), Outcome)


@given(st.binary(max_size=2 * HEADER_BYTES))
def test_junk_is_no_header(data: bytes) -> None:
    assert parse(data) in (Outcome.ABSENT, Outcome.DAMAGED, Outcome.FOREIGN)


def test_another_format_version_is_foreign_and_not_damage() -> None:
    """A newer release's block is left alone, so that both can share a server."""
    data = bytearray(HEADER.pack())
    data[8:10] = struct.pack("<H", VERSION + 1)
    assert parse(data) is Outcome.FOREIGN


@pytest.mark.parametrize(
    ("key", "fingerprint", "block_bytes", "outcome"),
    [
        (key_of(2), HEADER.fingerprint, 4096, Outcome.ABSENT),
        (HEADER.key, bytes(16), 4096, Outcome.FOREIGN),
        (HEADER.key, HEADER.fingerprint, 8192, Outcome.DAMAGED),
    ],
)
def test_only_the_block_that_was_asked_for_is_admitted(
    key: BlockKey, fingerprint: bytes, block_bytes: int, outcome: Outcome
) -> None:
    data = HEADER.pack()
    assert admit(data, HEADER.key, HEADER.fingerprint, 4096) == HEADER
    assert admit(data, key, fingerprint, block_bytes) is outcome
