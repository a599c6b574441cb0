"""Sizes and durations as people write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.quantity import format_size, parse_duration, parse_size


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("64GiB", 64 << 30),
        ("1.5TiB", 3 << 39),
        ("500GB", 500 * 10**9),
        ("360 KiB", 360 << 10),
        (" 4096B ", 4096),
        ("0", 0),
        ("0.0", 0),
        ("0GiB", 0),
        ("0.1KiB", 102),
        ("8PiB", 8 << 50),
    ],
)
def test_a_size_is_exact(text: str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize(
    "text",
    ["", "GiB", "8", "8G", "8Gb", "8gib", "-1GiB", "1e3GiB", "1GiB2", "8 GiB free", "٣GiB", "nan", "inf", ".5GiB"],
)
def test_nonsense_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a size|unit"):
        parse_size(text)


def test_a_wrong_unit_is_told_the_right_ones() -> None:
    with pytest.raises(ValueError, match=r"'Gb' is none of .*GiB"):
        parse_size("8Gb")


@pytest.mark.parametrize(
    ("text", "duration_ms"),
    [("30m", 1_800_000), ("24h", 86_400_000), ("250ms", 250), ("1.5s", 1500), ("7d", 604_800_000), ("0", 0)],
)
def test_a_duration_is_exact(text: str, duration_ms: int) -> None:
    assert parse_duration(text) == duration_ms


@pytest.mark.parametrize("text", ["", "30", "30 minutes", "1h30m", "-1s", "1M"])
def test_nonsense_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a duration|unit"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0B"), (1023, "1023B"), (1024, "1KiB"), (3 << 29, "1.5GiB"), (8 << 50, "8PiB")]
)
def test_a_size_is_written_for_people(num_bytes: int, text: str) -> None:
    assert format_size(num_bytes) == text


@given(st.integers(0, 1 << 60))
def test_what_is_written_reads_back_within_a_twentieth(num_bytes: int) -> None:
    assert parse_size(format_size(num_bytes)) == pytest.approx(num_bytes, rel=0.05)
