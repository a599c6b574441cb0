"""The nouns that every layer shares. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NewType

BlockKey = NewType("BlockKey", bytes)
"""Identity of a block: 16 bytes of namespace digest, then the chain digest (32 bytes for sha256, 16 for xxh3_128)."""

NAMESPACE_DIGEST_BYTES = 16


class Outcome(Enum):
    """What one block's move came to. Everything but OK is a miss, never an exception."""

    OK = "ok"
    ABSENT = "absent"  # the tier does not have it
    DAMAGED = "damaged"  # ours and broken: checksum, length or key do not fit; to be erased
    FOREIGN = "foreign"  # a newer version's or another layout's bytes: left alone
    LATE = "late"  # the deadline passed before it was done
    FULL = "full"  # no room
    FAILED = "failed"  # the tier answered with an error


@dataclass(frozen=True, slots=True)
class Rank:
    """One worker process of an engine that computes a part of every block: number ``index`` of ``num_ranks``."""

    engine: str
    """The same for all ranks of one engine, and nobody else's."""
    index: int
    num_ranks: int


@dataclass(frozen=True, slots=True)
class Request:
    """What an engine tells the store of one request, once, when it arrives.

    ``now_s`` is wall-clock seconds and may jump. ``hints`` are what the engine knows of the future, e.g.
    ``{"session_end": True}``; a policy may ignore every one of them.
    """

    request_id: str
    now_s: float
    namespace: bytes
    input_tokens: int
    hints: Mapping[str, object] = field(default_factory=dict)
