"""Reading traces, whatever their format. Pure: takes lines, does no I/O, keeps no line.

* Mooncake JSONL: ``timestamp`` ms, ``input_length``, ``output_length``, ``hash_ids`` of 512-token blocks.
* Qwen-Bailian JSONL: the same with ``timestamp`` in seconds, ``chat_id`` and so on, and 16-token blocks.
* compact CSV, see ``compact``.

A line that is not a request is reported by its number; nothing is skipped in silence.
"""

import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

from kvstore.errors import KVStoreError
from kvstore.replay.compact import read_compact, tokens_per_block_in
from kvstore.replay.trace import BlockNumbers, Requests, Trace, TraceRequest

MOONCAKE_TOKENS_PER_BLOCK = 512
BAILIAN_TOKENS_PER_BLOCK = 16


class TraceError(KVStoreError):
    """A trace cannot be read; the message names the line."""


def refuse(number: int, why: str) -> NoReturn:
    """What becomes of a bad line unless the caller has another use for it."""
    raise TraceError(f"line {number}: {why}")


def read_trace(
    name: str,
    lines: Iterable[str],
    *,
    tokens_per_block: int | None = None,
    keep: Callable[[Iterator[TraceRequest]], Requests] = list,
    report: Callable[[int, str], None] = refuse,
) -> Trace:
    """The trace in ``lines``, whose format the first of them shows.

    ``tokens_per_block`` is for files of hashes whose blocks are not of the usual size. ``keep`` takes the requests as
    they are read. Each bad line is passed to ``report``, and left out where that returns. Raises ``TraceError`` if
    there is nothing to read.
    """
    numbered = ((number, line) for number, line in enumerate(lines, start=1) if line.strip())
    first = next(numbered, None)
    if first is None:
        raise TraceError(f"{name} is empty")
    compact_tokens = tokens_per_block_in(first[1])
    if compact_tokens:
        return Trace.of(name, compact_tokens, keep(read_compact(numbered, compact_tokens, report)))
    is_bailian = '"chat_id"' in first[1]
    tokens = tokens_per_block or (BAILIAN_TOKENS_PER_BLOCK if is_bailian else MOONCAKE_TOKENS_PER_BLOCK)
    requests = _hashed(itertools.chain([first], numbered), 1.0 if is_bailian else 1e-3, tokens, report)
    return Trace.of(name, tokens, keep(requests))


def _hashed(
    lines: Iterable[tuple[int, str]], second: float, tokens_per_block: int, report: Callable[[int, str], None]
) -> Iterator[TraceRequest]:
    numbers = BlockNumbers()
    for number, line in lines:
        try:
            record = json.loads(line)
            now_s = _time(record["timestamp"]) * second
            input_tokens, output_tokens = _count(record["input_length"]), _count(record["output_length"])
            hashes = _hashes(record["hash_ids"], input_tokens, tokens_per_block)
        except (KeyError, TypeError, ValueError) as error:
            missing = f"no {error}" if isinstance(error, KeyError) else str(error)
            report(number, f"{missing}: not a request: {line.strip()[:80]}")
            continue
        yield TraceRequest(now_s, input_tokens, output_tokens, numbers.chain(hashes))


def _time(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"{value!r} is no time")
    return float(value)


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is no number of tokens")
    return value


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
