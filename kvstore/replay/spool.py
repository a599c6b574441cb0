"""Requests of a trace on file once they are many: a trace may be longer than memory is large."""

import json
import struct
import tempfile
import weakref
from array import array
from collections.abc import Iterable, Iterator

from kvstore.replay.trace import TraceRequest

MEMORY_BYTES = 64 * 2**20
"""What is kept in memory; more goes to a temporary file without a name, 8 bytes for each block referred to."""

_HEAD = struct.Struct("=dqqqq")


class RequestSpool:
    """Takes requests once, gives them again and again."""

    def __init__(self, requests: Iterable[TraceRequest], memory_bytes: int = MEMORY_BYTES) -> None:
        self._file = tempfile.SpooledTemporaryFile(max_size=memory_bytes)  # noqa: SIM115 - closed with the spool
        weakref.finalize(self, self._file.close)
        self._num_requests = 0
        for request in requests:
            rest = json.dumps([request.namespace.hex(), dict(request.hints)]).encode() if _has_rest(request) else b""
            lengths = request.input_tokens, request.output_tokens, len(request.chain), len(rest)
            self._file.write(_HEAD.pack(request.now_s, *lengths) + array("q", request.chain).tobytes() + rest)
            self._num_requests += 1

    @property
    def is_on_file(self) -> bool:
        """Whether they were too many for memory."""
        return self._file.name is not None

    def __len__(self) -> int:
        """How many there are."""
        return self._num_requests

    def __iter__(self) -> Iterator[TraceRequest]:
        """In order, from the first; several walks may be under way."""
        offset = 0
        for _ in range(self._num_requests):
            self._file.seek(offset)
            now_s, input_tokens, output_tokens, num_blocks, rest_bytes = _HEAD.unpack(self._file.read(_HEAD.size))
            chain = array("q")
            chain.frombytes(self._file.read(num_blocks * chain.itemsize))
            offset += _HEAD.size + num_blocks * chain.itemsize + rest_bytes
            namespace, hints = json.loads(self._file.read(rest_bytes)) if rest_bytes else ("", {})
            yield TraceRequest(now_s, input_tokens, output_tokens, chain.tolist(), bytes.fromhex(namespace), hints)


def _has_rest(request: TraceRequest) -> bool:
    return bool(request.namespace or request.hints)
