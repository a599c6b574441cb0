"""A trace: requests in order, each a chain of blocks and its lengths. Pure."""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request. ``chain`` has ceil(input_tokens / tokens_per_block) blocks, root first; the last may be partial."""

    now_s: float
    input_tokens: int
    output_tokens: int
    chain: Sequence[int]


class Requests(Protocol):
    """Requests that can be gone through again and again."""

    def __len__(self) -> int:
        """How many there are."""

    def __iter__(self) -> Iterator[TraceRequest]:
        """In order, from the first."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests with blocks of one size. Blocks are numbered from 0 in order of appearance."""

    name: str
    tokens_per_block: int
    requests: Requests
    num_unique_blocks: int
    num_referenced_blocks: int

    @classmethod
    def of(cls, name: str, tokens_per_block: int, requests: Requests) -> "Trace":
        """A trace whose blocks are counted here."""
        num_unique = num_referenced = 0
        for request in requests:
            num_unique = max(num_unique, 1 + max(request.chain, default=-1))
            num_referenced += len(request.chain)
        return cls(name, tokens_per_block, requests, num_unique, num_referenced)

    def hit_tokens(self, request: TraceRequest, num_hit_blocks: int) -> int:
        """Tokens of ``num_hit_blocks`` leading blocks."""
        return min(num_hit_blocks * self.tokens_per_block, request.input_tokens)


class BlockNumbers:
    """Numbers blocks by what they hold and what precedes them, as a store does.

    Where a trace's hashes are chained already this changes nothing but the numbers; where the same content has the same
    hash wherever it stands, blocks after different prefixes become different ones.
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, Hashable], int] = {}

    def chain(self, hashes: Iterable[Hashable]) -> list[int]:
        """The blocks of a request, root first."""
        numbers = self._numbers
        above = -1
        blocks = []
        for content in hashes:
            above = numbers.setdefault((above, content), len(numbers))
            blocks.append(above)
        return blocks
