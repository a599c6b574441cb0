"""JSON objects one after another, as an array, as lines or just so, without holding more than one. Pure."""

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

MAX_OBJECT_CHARS = 64 << 20
READ_CHARS = 1 << 16

_BETWEEN = re.compile(r"[\s,\[\]]*")
_SLACK_CHARS = 12
"""An error so near the end of what was read may be gone when more is read: a cut number, word or escape."""


class JsonStreamError(ValueError):
    """What follows is no JSON; ``line`` says where it begins."""

    def __init__(self, line: int, why: str) -> None:
        super().__init__(why)
        self.line = line


def read_objects(pieces: Iterable[str], read_chars: int = READ_CHARS) -> Iterator[tuple[int, Any]]:
    """(number of the line it begins on, value) of each. ``pieces`` may be cut anywhere. Raises ``JsonStreamError``.

    At least ``read_chars`` are taken from them at a time.
    """
    decoder = json.JSONDecoder(strict=False)
    source = iter(pieces)
    text, start, line, at_end = "", 0, 1, False
    while True:
        between = _BETWEEN.match(text, start)
        end = between.end() if between else start
        line += text.count("\n", start, end)
        start = end
        if start < len(text):
            try:
                value, end = decoder.raw_decode(text, start)
            except json.JSONDecodeError as error:
                if at_end or not _may_be_cut(error, text) or len(text) - start > MAX_OBJECT_CHARS:
                    raise JsonStreamError(line, f"no JSON: {error.msg}") from error
            else:
                yield line, value
                line += text.count("\n", start, end)
                start = end
                continue
        elif at_end:
            return
        # Reading as much as is there already keeps the work in proportion when an object is long.
        more = _take(source, max(read_chars, len(text) - start))
        at_end = not more
        text, start = text[start:] + more, 0


def _may_be_cut(error: json.JSONDecodeError, text: str) -> bool:
    return error.msg.startswith("Unterminated string") or error.pos >= len(text) - _SLACK_CHARS


def _take(source: Iterator[str], num_chars: int) -> str:
    taken, length = [], 0
    for piece in source:
        taken.append(piece)
        length += len(piece)
        if length >= num_chars:
            break
    return "".join(taken)
