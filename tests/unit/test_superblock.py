"""What a directory is a part of, and which directories belong together."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import ConfigError, FormatError
from kvstore.tiers.superblock import FORMAT_VERSION, SUPERBLOCK_BYTES, Superblock, complete, parse

BLOCK = Superblock(store_id=bytes(range(16)), directory=1, num_directories=3, stride_bytes=1 << 30)
NEW_ID = b"n" * 16
NAMES = ("a", "b", "c")


def trio() -> list[Superblock]:
    return [replace(BLOCK, directory=number) for number in range(3)]


def with_version(version: int) -> bytes:
    page = bytearray(BLOCK.pack())
    page[8:10] = version.to_bytes(2, "little")
    return bytes(page)


def test_what_was_packed_is_parsed() -> None:
    assert len(BLOCK.pack()) == SUPERBLOCK_BYTES
    assert parse(BLOCK.pack(), "here") == BLOCK


def test_a_newer_format_is_an_error_that_says_where() -> None:
    with pytest.raises(FormatError, match=r"here.*newer"):
        parse(with_version(FORMAT_VERSION + 1), "here")


def test_somebody_elses_file_is_an_error() -> None:
    with pytest.raises(FormatError, match="here"):
        parse(b"precious".ljust(SUPERBLOCK_BYTES, b"!"), "here")


@pytest.mark.parametrize("page", [b"", bytes(SUPERBLOCK_BYTES), BLOCK.pack()[:100], with_version(FORMAT_VERSION - 1)])
def test_nothing_or_an_older_format_starts_afresh(page: bytes) -> None:
    """CR-019, CR-045."""
    assert parse(page, "here") is None


@given(st.integers(10, SUPERBLOCK_BYTES - 1), st.integers(0, 7))
def test_damage_starts_afresh(position: int, bit: int) -> None:
    page = bytearray(BLOCK.pack())
    page[position] ^= 1 << bit
    assert parse(bytes(page), "here") is None


def test_fresh_directories_become_a_store() -> None:
    assert complete([None, None], ["a", "b"], 4096, NEW_ID) == [
        Superblock(NEW_ID, 0, 2, 4096),
        Superblock(NEW_ID, 1, 2, 4096),
    ]


def test_a_whole_store_stays_as_it_is_in_any_order() -> None:
    found = trio()[::-1]
    assert complete(found, NAMES, 4096, NEW_ID) == found


def test_a_fresh_directory_takes_the_place_of_a_lost_one_and_the_lost_one_is_never_taken_back() -> None:
    first, lost, third = trio()
    own = complete([third, None, first], NAMES, 4096, NEW_ID)
    assert own == [replace(block, store_id=NEW_ID) for block in (third, lost, first)]
    with pytest.raises(ConfigError, match="different stores"):
        complete([own[2], lost, own[0]], NAMES, 4096, NEW_ID)


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (trio()[:2], "3 directories"),
        ([*trio(), None], "3 directories"),
        ([trio()[0], replace(BLOCK, store_id=NEW_ID), trio()[2]], "different stores"),
        ([trio()[0], trio()[0], trio()[2]], "copies"),
    ],
)
def test_directories_that_do_not_belong_together_are_an_error(found: list[Superblock | None], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        complete(found, ["a", "b", "c", "d"][: len(found)], 4096, b"m" * 16)
