"""How much a cache holds, as people write it: ``1%`` of the trace's blocks, ``5000`` blocks, or ``64GiB``. Pure."""

from fractions import Fraction

from kvstore.errors import ConfigError
from kvstore.quantity import parse_size


def parse_capacity(text: str, num_unique_blocks: int, block_bytes: int) -> int:
    """Blocks, rounded down. Raises ``ConfigError`` if ``text`` is no capacity."""
    text = text.strip()
    try:
        if text.endswith("%"):
            capacity_blocks = int(Fraction(text[:-1]) * num_unique_blocks / 100)
        elif text.isascii() and text.isdigit():
            capacity_blocks = int(text)
        else:
            capacity_blocks = parse_size(text) // block_bytes
    except (ValueError, ZeroDivisionError) as error:
        raise ConfigError(f"capacity {text!r} is none: write 1%, 5000 (blocks) or 64GiB") from error
    if capacity_blocks < 0:
        raise ConfigError(f"capacity {text!r} is negative")
    return capacity_blocks


def split_list(text: str) -> list[str]:
    """The words between the commas, in order, each once."""
    return list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
