"""Traces that name blocks by hashes, one JSON object a line. Pure.

* Mooncake: ``timestamp`` ms, ``input_length``, ``output_length``, ``hash_ids`` of 512-token blocks.
* a store's recording, see ``kvstore.recording``: the same, with ``tokens_per_block``, ``namespace`` and ``hints``.
* Qwen-Bailian: the same as Mooncake, with ``timestamp`` in seconds, 16-token blocks, and ``chat_id``,
  ``parent_chat_id``, ``type`` and ``turn``.
"""

import heapq
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvstore.replay.trace import BlockNumbers, TraceRequest

MOONCAKE_TOKENS_PER_BLOCK = 512
BAILIAN_TOKENS_PER_BLOCK = 16

WINDOW = 4096
"""A recording's lines are in the order in which requests ended; none is further from its place than this."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """What differs between the formats."""

    tokens_per_block: int
    second: float
    """A unit of ``timestamp``."""


def dialect_of(first_line: str) -> Dialect:
    """That of the first line; Mooncake's where it says nothing else."""
    try:
        record = json.loads(first_line)
    except ValueError:
        record = None
    if isinstance(record, dict):
        if "chat_id" in record:
            return Dialect(BAILIAN_TOKENS_PER_BLOCK, 1.0)
        tokens = record.get("tokens_per_block")
        if isinstance(tokens, int) and tokens > 0:
            return Dialect(tokens, 1e-3)
    return Dialect(MOONCAKE_TOKENS_PER_BLOCK, 1e-3)


def read_hashed(
    lines: Iterable[tuple[int, str]], dialect: Dialect, report: Callable[[int, str], None]
) -> Iterator[TraceRequest]:
    """The requests in numbered ``lines`` by their ``index`` if they have one; what is no request is reported."""
    numbers = BlockNumbers()
    for _, _, hashes, request in _in_order(_parsed(lines, dialect, report)):
        yield replace(request, chain=numbers.chain(hashes))


_Parsed = tuple[int, int, list[int | str], TraceRequest]
"""Place in the order, place in the file, hashes, and the request but for its chain."""


def _in_order(parsed: Iterable[_Parsed]) -> Iterator[_Parsed]:
    early: list[_Parsed] = []
    next_index = 0
    for entry in parsed:
        heapq.heappush(early, entry)
        while early and (early[0][0] <= next_index or len(early) > WINDOW):
            next_index = max(next_index, early[0][0] + 1)
            yield heapq.heappop(early)
    while early:
        yield heapq.heappop(early)


def _parsed(
    lines: Iterable[tuple[int, str]], dialect: Dialect, report: Callable[[int, str], None]
) -> Iterator[_Parsed]:
    chats = _Chats()
    for place, (number, line) in enumerate(lines):
        try:
            record = json.loads(line)
            now_s = _time(record["timestamp"]) * dialect.second
            input_tokens, output_tokens = _count(record["input_length"]), _count(record["output_length"])
            hashes = _hashes(record["hash_ids"], input_tokens, dialect.tokens_per_block)
            _require_size(record.get("tokens_per_block", dialect.tokens_per_block), dialect.tokens_per_block)
            namespace = bytes.fromhex(record.get("namespace", ""))
            hints = _hints(record, chats)
            index = _count(record.get("index", place))
        except (KeyError, TypeError, ValueError) as error:
            why = f"no {error}" if isinstance(error, KeyError) else str(error)
            report(number, f"{why}: not a request: {line.strip()[:80]}")
            continue
        yield index, place, hashes, TraceRequest(now_s, input_tokens, output_tokens, (), namespace, hints)


class _Chats:
    """Which chat goes on which: a session is named by its first request."""

    def __init__(self) -> None:
        self._root: dict[int, int] = {}

    def root_of(self, chat: int, parent: int) -> int:
        root = self._root.get(parent, chat if parent < 0 else parent)
        self._root[chat] = root
        return root


def _hints(record: Mapping[str, Any], chats: _Chats) -> Mapping[str, object]:
    if "chat_id" in record:
        root = chats.root_of(int(record["chat_id"]), int(record.get("parent_chat_id", -1)))
        return {"session": root, "kind": record.get("type", "")}
    hints = record.get("hints", {})
    if not isinstance(hints, dict):
        raise ValueError("hints is no object")  # noqa: TRY004 - one kind of error for every bad value
    return hints


def _time(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"{value!r} is no time")
    return float(value)


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is no number of tokens")
    return value


def _require_size(value: Any, tokens_per_block: int) -> None:
    if value != tokens_per_block:
        raise ValueError(f"blocks of {value!r} tokens among blocks of {tokens_per_block}")


def _hashes(value: Any, input_tokens: int, tokens_per_block: int) -> list[int | str]:
    """Whole blocks, and perhaps the partial one at the end."""
    if not isinstance(value, list) or not all(isinstance(content, int | str) for content in value):
        raise ValueError("hash_ids is no list of numbers or texts")
    if len(value) not in (input_tokens // tokens_per_block, -(-input_tokens // tokens_per_block)):
        raise ValueError(
            f"{input_tokens} tokens are not {len(value)} blocks of {tokens_per_block}; if they are of another size,"
            " give --block-tokens"
        )
    return value
