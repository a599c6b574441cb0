"""A trace: requests in order, each a chain of blocks and its lengths. Pure."""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvstore.types import Request


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request. ``chain`` has its blocks, root first: whole ones, and perhaps the partial one at the end.

    ``hints`` are for policies, as in ``Request``; ``session`` in them tells what goes together, where it is known.
    """

    now_s: float
    input_tokens: int
    output_tokens: int
    chain: Sequence[int]
    namespace: bytes = b""
    hints: Mapping[str, object] = field(default_factory=dict)

    def announced(self, number: int) -> Request:
        """What an engine would tell a store of it."""
        return Request(str(number), self.now_s, self.namespace, self.input_tokens, self.hints)


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
    note: str = ""
    """What a reader of its numbers should know."""

    @classmethod
    def of(cls, name: str, tokens_per_block: int, requests: Requests, note: str = "") -> "Trace":
        """A trace whose blocks are counted here."""
        num_unique = num_referenced = 0
        for request in requests:
            num_unique = max(num_unique, 1 + max(request.chain, default=-1))
            num_referenced += len(request.chain)
        return cls(name, tokens_per_block, requests, num_unique, num_referenced, note)

    def hit_tokens(self, request: TraceRequest, num_hit_blocks: int) -> int:
        """Tokens of ``num_hit_blocks`` leading blocks."""
        return min(num_hit_blocks * self.tokens_per_block, request.input_tokens)


def known_prefixes(trace: Trace) -> Iterator[tuple[TraceRequest, int]]:
    """Each request, and how many leading blocks of it some earlier request had: there it parts from all before it."""
    num_seen = 0
    for request in trace.requests:
        # Blocks are numbered as they appear: the seen ones are those below what has been counted.
        num_known = next((depth for depth, block in enumerate(request.chain) if block >= num_seen), len(request.chain))
        num_seen += len(request.chain) - num_known
        yield request, num_known


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
