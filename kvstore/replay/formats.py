"""Reading traces, whatever their format: hashes (``hashed``), the compact CSV (``compact``), chats (``chat``).

Pure: takes pieces of text, does no I/O, keeps none. What is no request is reported by the number of its line; nothing
is skipped in silence.
"""

import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import NoReturn

from kvstore.errors import KVStoreError
from kvstore.replay import chat
from kvstore.replay.compact import read_compact, tokens_per_block_in
from kvstore.replay.hashed import dialect_of, read_hashed
from kvstore.replay.trace import Requests, Trace, TraceRequest

_CHAT = re.compile(r'\s*(\[|\{\s*$)|.*"(conversations?|messages)"\s*:', re.DOTALL)
_LENGTHS_ONLY = re.compile(r"timestamp,.*tokens", re.IGNORECASE)


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
    encode: chat.Encode = chat.estimate,
    keep: Callable[[Iterator[TraceRequest]], Requests] = list,
    report: Callable[[int, str], None] = refuse,
) -> Trace:
    """The trace in ``lines``, whose format the first of them shows; a very long line may come in pieces.

    ``tokens_per_block`` is for hashes of blocks that are not of the usual size, and for chats, which are cut into
    blocks here; ``encode`` makes tokens of what is said in them. ``keep`` takes the requests as they are read. Each bad
    line is passed to ``report``, and left out where that returns. Raises ``TraceError`` if there is no trace in it.
    """
    source = iter(lines)
    num_blank = 0
    first = ""
    for first in source:
        if first.strip():
            break
        num_blank += 1
    if not first.strip():
        raise TraceError(f"{name} is empty")
    if _LENGTHS_ONLY.match(first):
        raise TraceError(f"{name} has lengths only: what requests share, and so what a cache would spare, is not in it")
    compact_tokens = tokens_per_block_in(first)
    if compact_tokens:
        numbered = _numbered(source, num_blank + 2)
        return Trace.of(name, compact_tokens, keep(read_compact(numbered, compact_tokens, report)))
    if _CHAT.match(first):
        pieces = itertools.chain(["\n" * num_blank, first], source)
        tokens = tokens_per_block or chat.TOKENS_PER_BLOCK
        notes = [chat.ESTIMATED_TOKENS] * (encode is chat.estimate) + [chat.MADE_UP_TIMES]
        return Trace.of(name, tokens, keep(chat.read_chats(pieces, tokens, encode, report)), "; ".join(notes))
    dialect = dialect_of(first)
    if tokens_per_block:
        dialect = replace(dialect, tokens_per_block=tokens_per_block)
    numbered = _numbered(itertools.chain([first], source), num_blank + 1)
    return Trace.of(name, dialect.tokens_per_block, keep(read_hashed(numbered, dialect, report)))


def _numbered(pieces: Iterable[str], number: int) -> Iterator[tuple[int, str]]:
    """Lines that are not blank, by number; each piece of a line that came in several has the line's."""
    for piece in pieces:
        if piece.strip():
            yield number, piece
        number += piece.endswith("\n")
