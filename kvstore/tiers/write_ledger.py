"""How many bytes may yet be written today. Pure; flash wears out by what is written to it.

A token bucket: a quarter of the day's bytes may be written at once, the rest trickles over the day, so that no 24 hours
see more than the cap. What is left is kept in a file, since a restart must not begin a new day.
"""

import struct

import xxhash

LEDGER_BYTES = 32

_MAGIC = b"TKVLEDGR"
_FIELDS = struct.Struct("<8sdd")
_CHECKSUM = struct.Struct("<Q")
_DAY_S = 86_400
_BURST_SHARE = 0.25


class WriteLedger:
    """The bytes that may be written now. One thread at a time."""

    def __init__(self, bytes_per_day: int, now_unix_s: float, saved: bytes = b"") -> None:
        """``saved`` is what ``pack`` gave before the restart, empty for a new store; if broken, nothing is left."""
        self._burst_bytes = bytes_per_day * _BURST_SHARE
        self._bytes_per_s = bytes_per_day * (1 - _BURST_SHARE) / _DAY_S
        self._left_bytes, self._as_of_unix_s = self._burst_bytes, now_unix_s
        if saved:
            left_bytes, self._as_of_unix_s = _parse(saved) or (0.0, now_unix_s)
            self._left_bytes = min(left_bytes, self._burst_bytes)

    def take(self, block_bytes: int, num_blocks: int, now_unix_s: float) -> int:
        """How many of ``num_blocks`` may be written now; they count as written."""
        passed_s = max(0.0, now_unix_s - self._as_of_unix_s)  # a clock that was set back gives nothing
        self._as_of_unix_s = now_unix_s
        self._left_bytes = min(self._burst_bytes, self._left_bytes + passed_s * self._bytes_per_s)
        granted = min(num_blocks, int(self._left_bytes // block_bytes))
        self._left_bytes -= granted * block_bytes
        return granted

    def pack(self) -> bytes:
        """What a restart needs to know."""
        body = _FIELDS.pack(_MAGIC, self._left_bytes, self._as_of_unix_s)
        return body + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body))


def _parse(saved: bytes) -> tuple[float, float] | None:
    if len(saved) != LEDGER_BYTES:
        return None
    body, checksum = saved[: _FIELDS.size], saved[_FIELDS.size :]
    magic, left_bytes, as_of_unix_s = _FIELDS.unpack(body)
    if magic != _MAGIC or checksum != _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body)):
        return None
    return left_bytes, as_of_unix_s
