"""A sidecar on another host: its blocks by the bytes, over TLS. Calls block until their deadline at most.

For threads that may wait, such as those of a mover; an engine's own host has ``StoreClient``.
"""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc

from kvstore.api.v1 import remote_pb2 as api
from kvstore.api.v1.remote_pb2_grpc import RemoteStoreStub
from kvstore.client.stream import Stream, StreamEndedError
from kvstore.deadline import bounded
from kvstore.errors import ConfigError, LayoutError
from kvstore.header import checksum
from kvstore.lease import Lookup
from kvstore.lending import LentBuffer, readable_bytes, writable_bytes
from kvstore.namespace import Namespace
from kvstore.stats import Stats
from kvstore.types import NAMESPACE_DIGEST_BYTES, BlockKey
from kvstore.wire import MAX_MESSAGE_BYTES, PART_BYTES, bearer, pack_chain, pack_identity, pack_layout

CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
)
RECONNECT_OPTIONS = (("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 5_000))


class RemoteClient:
    """Thread-safe. Whatever goes wrong is a miss and a counter."""

    def __init__(
        self,
        address: str,
        *,
        token: str = "",
        tls_ca_file: Path | None = None,
        tls_cert_file: Path | None = None,
        tls_key_file: Path | None = None,
    ) -> None:
        """``address`` is host:port, which may be absent. Raises ``ConfigError`` for TLS files that cannot be read."""
        self.stats = Stats()
        self._metadata = bearer(token)
        try:
            certificates = [path.read_bytes() if path else None for path in (tls_ca_file, tls_key_file, tls_cert_file)]
        except OSError as error:
            raise ConfigError(f"cannot read {error.filename}: {error.strerror}") from error
        credentials = grpc.ssl_channel_credentials(*certificates)
        self._channel = grpc.secure_channel(address, credentials, CHANNEL_OPTIONS + RECONNECT_OPTIONS)
        self._stub = RemoteStoreStub(self._channel)

    def find(self, ns: Namespace, chain: Sequence[BlockKey], deadline_s: float) -> Lookup:
        """How much of ``chain`` is there."""
        request = api.FindBlocksRequest(of=_of(ns), chain=pack_chain(0, chain))
        try:
            found = self._stub.FindBlocks(request, timeout=_left_s(deadline_s), metadata=self._metadata)
        except grpc.RpcError:
            self._count("find")
            return Lookup(0, 0, pending=False)
        return Lookup(found.ready, found.found, found.pending)

    def load_into(
        self, ns: Namespace, chain: Sequence[BlockKey], buffers: Sequence[LentBuffer], deadline_s: float
    ) -> int:
        """Load the longest prefix of ``chain`` that is there; returns how many blocks arrived and verified.

        Buffers beyond those hold undefined bytes.
        """
        views = writable_bytes(ns, chain, buffers)
        request = api.LoadBlocksRequest(of=_of(ns), chain=pack_chain(0, chain))
        parts = Stream(self._stub.LoadBlocks(request, timeout=_left_s(deadline_s), metadata=self._metadata))
        try:
            return self._take(ns.layout.block_bytes, parts, views)
        finally:
            parts.close()

    def store_from(
        self,
        ns: Namespace,
        keys: Sequence[BlockKey],
        parent: BlockKey | None,
        buffers: Sequence[LentBuffer],
        deadline_s: float,
    ) -> int:
        """Store what is not there of ``keys``, in order; returns how many leading blocks are there now."""
        views = readable_bytes(ns, keys, buffers)
        if any(not key.startswith(ns.digest) for key in keys):
            raise LayoutError(f"a key is of another namespace than that of model {ns.identity.model!r}")
        start = self.find(ns, keys, deadline_s).ready
        if start == len(keys):
            return start
        above = keys[start - 1] if start else parent
        parts = _store_parts(ns, keys[start:], above, views[start:])
        try:
            reply = self._stub.StoreBlocks(parts, timeout=_left_s(deadline_s), metadata=self._metadata)
        except grpc.RpcError:
            self._count("store")
            return start
        return start + int(reply.num_blocks)

    def close(self) -> None:
        """Hang up."""
        self._channel.close()

    def _take(self, block_bytes: int, parts: Stream, buffers: Sequence[memoryview]) -> int:
        num_blocks = num_bytes = 0
        try:
            for part in parts:
                end = num_bytes + len(part.data)
                if num_blocks == len(buffers) or part.index != num_blocks or end > block_bytes:
                    break
                buffers[num_blocks][num_bytes:end] = part.data
                num_bytes = end
                if end == block_bytes:
                    if checksum(buffers[num_blocks][:block_bytes]) != part.checksum:
                        self._count("checksum")
                        break
                    num_blocks, num_bytes = num_blocks + 1, 0
        except StreamEndedError:
            self._count("load")
        return num_blocks

    def _count(self, what: str) -> None:
        self.stats.inc("kvstore_errors_total", 1, f"remote.{what}")


def _of(ns: Namespace) -> api.NamespaceOf:
    return api.NamespaceOf(identity=pack_identity(ns.identity), layout=pack_layout(ns.layout))


def _store_parts(
    ns: Namespace, keys: Sequence[BlockKey], parent: BlockKey | None, buffers: Sequence[memoryview]
) -> Iterator[api.StorePart]:
    block_bytes = ns.layout.block_bytes
    first = api.StorePart(
        of=_of(ns), chain=pack_chain(0, keys), parent=parent[NAMESPACE_DIGEST_BYTES:] if parent else b""
    )
    for index, _ in enumerate(keys):
        buffer = buffers[index][:block_bytes]
        for start in range(0, block_bytes, PART_BYTES):
            request = first if index == start == 0 else api.StorePart()
            request.part.index = index
            request.part.data = bytes(buffer[start : start + PART_BYTES])
            if start + PART_BYTES >= block_bytes:
                request.part.checksum = checksum(buffer)
            yield request


def _left_s(deadline_s: float) -> float:
    now_s = time.monotonic()
    return max(0.0, bounded(deadline_s, now_s) - now_s)
