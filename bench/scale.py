"""How much work a benchmark does."""

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Scale:
    """Bytes per round of each kind of row, and counts."""

    repeats: int
    memory_bytes: int
    file_bytes: int
    redis_bytes: int
    hash_tokens: int
    prefix_blocks: int
    indexed_blocks: int
    restart_blocks: int
    processes: int
    """How often a process is started to see how long that takes."""
    clients: int
    """How many processes use a sidecar at once."""


FULL = Scale(
    repeats=15,
    memory_bytes=128 * MIB,
    file_bytes=256 * MIB,
    redis_bytes=64 * MIB,
    hash_tokens=128 << 10,
    prefix_blocks=8192,
    indexed_blocks=100_000,
    restart_blocks=100_000,
    processes=5,
    clients=4,
)
QUICK = Scale(
    repeats=1,
    memory_bytes=4 * MIB,
    file_bytes=4 * MIB,
    redis_bytes=4 * MIB,
    hash_tokens=1 << 10,
    prefix_blocks=64,
    indexed_blocks=500,
    restart_blocks=200,
    processes=1,
    clients=1,
)
"""For a test that the benchmark runs at all; its numbers say nothing."""
