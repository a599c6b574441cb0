"""The compact CSV: lengths and what is shared with which earlier request, no hashes. Pure.

A first line ``# NAME block=B columns: ...``, then ms, input, output, parent request (-1: none), shared blocks. Block i
of a request is its parent's block i for i < shared, and new after that; the number of blocks is ceil(input / B).
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from kvstore.replay.trace import TraceRequest

_HEAD = re.compile(r"# *(\S+) +block=([1-9]\d*) +columns:")


def tokens_per_block_in(first_line: str) -> int | None:
    """The block's size if ``first_line`` is the head of such a file."""
    head = _HEAD.match(first_line)
    return int(head[2]) if head else None


def read_compact(
    lines: Iterable[tuple[int, str]], tokens_per_block: int, report: Callable[[int, str], None]
) -> Iterator[TraceRequest]:
    """The requests in numbered ``lines``; one that is not a request is reported, and so are those that build on it."""
    tree = _Tree()
    for number, line in lines:
        try:
            ms, input_tokens, output_tokens, parent, shared = map(int, line.split(","))
            _require_lengths(ms, input_tokens, output_tokens, shared)
            chain = tree.add(parent, shared, -(-input_tokens // tokens_per_block))
        except ValueError as error:
            tree.add_nothing()
            report(number, f"{error}: not ms,input,output,parent,shared: {line.strip()[:80]}")
            continue
        yield TraceRequest(ms / 1000, input_tokens, output_tokens, chain)


def _require_lengths(*values: int) -> None:
    if min(values) < 0:
        raise ValueError(f"{min(values)} is negative")


class _Tree:
    """Which requests build on which; a chain is put together from the runs of new blocks along the way."""

    def __init__(self) -> None:
        self._requests: list[tuple[int, int, int, int] | None] = []  # parent, shared, first new block, length
        self._num_blocks = 0

    def add(self, parent: int, shared: int, length: int) -> Sequence[int]:
        if parent < 0:
            if shared:
                raise ValueError(f"{shared} blocks shared with no request")
        elif parent >= len(self._requests):
            raise ValueError(f"request {parent} comes later")
        else:
            above = self._requests[parent]
            if above is None:
                raise ValueError(f"request {parent} was on a bad line")
            if shared > min(above[3], length):
                raise ValueError(f"{shared} blocks shared of {min(above[3], length)}")
        self._requests.append((parent, shared, self._num_blocks, length))
        self._num_blocks += length - shared
        return self._chain(len(self._requests) - 1)

    def add_nothing(self) -> None:
        self._requests.append(None)

    def _chain(self, index: int) -> Sequence[int]:
        runs: list[range] = []
        node = self._requests[index]
        wanted = node[3] if node else 0
        while wanted and node is not None:
            parent, shared, first, _ = node
            if wanted > shared:
                runs.append(range(first, first + wanted - shared))
                wanted = shared
            node = self._requests[parent]
        return [block for run in reversed(runs) for block in run]
