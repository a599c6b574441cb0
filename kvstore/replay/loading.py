"""Paths to traces, profiles and reports: the edge where files are opened and bad lines are told."""

import gzip
import sys
import zlib
from array import array
from functools import partial
from pathlib import Path
from typing import IO

from kvstore.errors import ConfigError
from kvstore.replay import chat
from kvstore.replay.formats import TraceError, read_trace
from kvstore.replay.hardware import HARDWARE, Hardware, parse_hardware
from kvstore.replay.spool import RequestSpool
from kvstore.replay.trace import Trace

MAX_BAD_LINES_SHOWN = 10
MAX_PIECE_CHARS = 64 << 20
"""A longer line is read in pieces."""


def load(path: Path, block_tokens: int | None, tokenizer: Path | None, *, skip_bad_lines: bool) -> Trace:
    """The trace at ``path``; what is bad in it goes to stderr. Raises ``KVStoreError`` if it cannot be used."""
    bad: list[str] = []

    def report(number: int, why: str) -> None:
        bad.append(f"{path}: line {number}: {why}" if len(bad) < MAX_BAD_LINES_SHOWN else "")

    encode = chat.estimate if tokenizer is None else _encoder(tokenizer)
    try:
        with _open(path) as lines:
            pieces = iter(partial(lines.readline, MAX_PIECE_CHARS), "")
            trace = read_trace(
                path.name, pieces, tokens_per_block=block_tokens, encode=encode, keep=RequestSpool, report=report
            )
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    for line in bad[:MAX_BAD_LINES_SHOWN]:
        print(line, file=sys.stderr)
    if bad and not skip_bad_lines:
        raise TraceError(f"{path} has {len(bad)} bad lines: mend them, or leave them out with --skip-bad-lines")
    if bad:
        print(f"{path}: {len(bad)} bad lines left out", file=sys.stderr)
    if trace.note:
        print(f"{path}: {trace.note}", file=sys.stderr)
    return trace


def find_hardware(name: str) -> Hardware:
    """The profile of that name, or in the TOML file of that path. Raises ``ConfigError``."""
    if name in HARDWARE:
        return HARDWARE[name]
    try:
        text = Path(name).read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(f"there is no hardware {name!r}: give a TOML file or one of {', '.join(HARDWARE)}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name} is no hardware profile: {error}") from error
    return parse_hardware(Path(name).stem, text)


def save_page(path: Path, content: str) -> None:
    """Write a report. Raises ``ConfigError`` if it cannot be written."""
    try:
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}") from error
    print(f"wrote {path}", file=sys.stderr)


def _encoder(path: Path) -> chat.Encode:
    try:
        from tokenizers import Tokenizer  # noqa: PLC0415 - an extra, and only chats need it
    except ImportError as error:
        raise ConfigError("--tokenizer needs the package tokenizers: pip install tokenizers") from error
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # it raises nothing more special, whatever is wrong with the file
        raise ConfigError(f"{path} is no tokenizer.json: {error}") from error
    return lambda text: array("I", tokenizer.encode(text, add_special_tokens=False).ids).tobytes()


def _open(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8", errors="replace")
    return path.open(encoding="utf-8", errors="replace")
