"""What requests asked for, written to a file that ``kvstore replay`` reads: hashes and lengths, never tokens.

One JSON object a line, as in Mooncake's traces: ``timestamp`` ms, ``input_length``, ``output_length``, ``hash_ids``;
also ``tokens_per_block``, ``namespace``, ``hints`` and ``index``, the order of arrival. A line is written when its
request has finished, or when too many wait to.

A hash is the block key's under a secret that is made at start and kept nowhere: equal blocks have equal hashes within a
file, and nobody can find out from it whether some prompt was asked.

The owner thread hands over and never waits; a thread hashes and writes. What it cannot keep up with is left out and
counted, and so is everything after a failed write or a full budget.
"""

import contextlib
import json
import logging
import os
import queue
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from kvstore.errors import ConfigError
from kvstore.types import BlockKey, Request

MAX_PENDING = 4096
"""Requests that may wait for their end; readers put lines back in order within as many."""
MAX_HELD_BYTES = 64 << 20
"""Keys that may wait for the end of their requests, and as many for the thread."""
CLOSE_TIMEOUT_S = 2.0

_HASH_BYTES = 8
_HASHES_PER_TURN = 256  # then others may have the interpreter: a quarter of a millisecond

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Entry:
    """A request on its way to the file."""

    index: int
    request: Request
    keys: bytes
    num_blocks: int
    tokens_per_block: int
    output_tokens: int = 0


class Recording:
    """A file of its own for each start of a store. Owner thread, but for what is said to be the thread's."""

    def __init__(self, directory: Path, capacity_bytes: int) -> None:
        """Begin ``requests-TIME-PID.jsonl`` in ``directory``. Raises ``ConfigError`` if that cannot be."""
        self.path = directory / f"requests-{time.time_ns() // 1_000_000}-{os.getpid()}.jsonl"
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"record.directory: {self.path} cannot be written: {error}") from error
        self._file = os.fdopen(fd, "w", encoding="ascii")
        self._capacity_bytes = capacity_bytes
        self._secret = secrets.token_bytes(16)
        self._pending: OrderedDict[tuple[bytes, str], _Entry] = OrderedDict()
        self._pending_bytes = 0
        self._queue: queue.SimpleQueue[_Entry | None] = queue.SimpleQueue()
        self._put_bytes = self._taken_bytes = 0  # each has one thread that changes it
        self._written_bytes = 0
        self._num_arrived = 0
        self._is_over = False
        self.num_left_out = 0
        """Requests that the file has no line of."""
        self._thread = threading.Thread(target=self._write_all, name="kvstore-recording", daemon=True)
        self._thread.start()

    def arrive(self, request: Request, chain: Sequence[BlockKey], tokens_per_block: int) -> None:
        """A request came; its line waits for ``finish``."""
        if self._is_over:
            self.num_left_out += 1
            return
        self.finish(request, 0)  # an earlier one of the same name
        keys = b"".join(chain)
        self._pending[request.namespace, request.request_id] = _Entry(
            self._num_arrived, request, keys, len(chain), tokens_per_block
        )
        self._num_arrived += 1
        self._pending_bytes += len(keys)
        while len(self._pending) > MAX_PENDING or self._pending_bytes > MAX_HELD_BYTES:
            self._hand_over(self._pending.popitem(last=False)[1])

    def finish(self, request: Request, output_tokens: int) -> None:
        """The request ended; one that never came, or waited too long, is passed over."""
        entry = self._pending.pop((request.namespace, request.request_id), None)
        if entry is not None:
            entry.output_tokens = output_tokens
            self._hand_over(entry)

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Write what waits, for up to ``timeout_s``; a stuck disk is not waited for."""
        while self._pending:
            self._hand_over(self._pending.popitem(last=False)[1])
        self._queue.put(None)
        self._thread.join(timeout_s)

    def _hand_over(self, entry: _Entry) -> None:
        self._pending_bytes -= len(entry.keys)
        if self._is_over or self._put_bytes - self._taken_bytes + len(entry.keys) > MAX_HELD_BYTES:
            self.num_left_out += 1
            return
        self._put_bytes += len(entry.keys)
        self._queue.put(entry)

    # ---- the thread

    def _write_all(self) -> None:
        while (entry := self._queue.get()) is not None:
            if not self._is_over:
                self._write(entry)
            self._taken_bytes += len(entry.keys)
        with contextlib.suppress(OSError):  # a write that failed before may fail again
            self._file.close()

    def _write(self, entry: _Entry) -> None:
        line = self._line(entry)
        if self._written_bytes + len(line) > self._capacity_bytes:
            self._is_over = True
            _log.warning("%s has reached record.capacity: nothing more is recorded until the next start", self.path)
            return
        try:
            self._file.write(line)
            self._file.flush()
        except OSError as error:
            self._is_over = True
            _log.warning("%s: %s: nothing more is recorded until the next start", self.path, error)
            return
        self._written_bytes += len(line)

    def _line(self, entry: _Entry) -> str:
        request = entry.request
        whole, size = entry.num_blocks, entry.tokens_per_block
        fits = whole * size <= request.input_tokens < (whole + 1) * size
        record = {
            "timestamp": round(request.now_s * 1000),
            "input_length": request.input_tokens if fits else whole * size,
            "output_length": entry.output_tokens,
            "hash_ids": self._hashes(entry),
            "tokens_per_block": size,
            "namespace": self._hash(request.namespace),
            "hints": {name: hint for name, hint in request.hints.items() if isinstance(hint, str | int | float)},
            "index": entry.index,
        }
        return json.dumps(record, separators=(",", ":")) + "\n"

    def _hashes(self, entry: _Entry) -> list[str]:
        if not entry.num_blocks:
            return []
        key_bytes = len(entry.keys) // entry.num_blocks
        hashes = []
        for number in range(entry.num_blocks):
            hashes.append(self._hash(entry.keys[number * key_bytes : (number + 1) * key_bytes]))
            if number % _HASHES_PER_TURN == 0:
                time.sleep(0)
        return hashes

    def _hash(self, content: bytes) -> str:
        return blake2b(content, digest_size=_HASH_BYTES, key=self._secret).hexdigest()
