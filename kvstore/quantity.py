"""Sizes and durations as people write them: ``"64GiB"``, ``"1.5TiB"``, ``"500GB"``, ``"30m"``, ``"250ms"``. Pure."""

import re
from fractions import Fraction

SIZE_UNITS_BYTES = {
    "B": 1,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "PB": 10**15,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "PiB": 2**50,
}
DURATION_UNITS_MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}

_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", re.ASCII)


def parse_size(text: str) -> int:
    """Bytes, rounded down to whole ones. Raises ``ValueError`` that says what is wrong with ``text``."""
    return _parse(text, "size", SIZE_UNITS_BYTES)


def parse_duration(text: str) -> int:
    """Milliseconds, rounded down to whole ones. Raises ``ValueError`` that says what is wrong with ``text``."""
    return _parse(text, "duration", DURATION_UNITS_MS)


def format_size(num_bytes: int) -> str:
    """One decimal and a binary unit, for people to read: ``1.5GiB``."""
    for unit in ("PiB", "TiB", "GiB", "MiB", "KiB"):
        if num_bytes >= SIZE_UNITS_BYTES[unit]:
            return f"{num_bytes / SIZE_UNITS_BYTES[unit]:.1f}".removesuffix(".0") + unit
    return f"{num_bytes}B"


def _parse(text: str, what: str, units: dict[str, int]) -> int:
    match = _QUANTITY.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"not a {what}")
    number, unit = match.groups()
    if not unit and Fraction(number) == 0:
        return 0
    if unit not in units:
        raise ValueError(f"the unit {unit!r} is none of {', '.join(units)}" if unit else "no unit")
    return int(Fraction(number) * units[unit])
