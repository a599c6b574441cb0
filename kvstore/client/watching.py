"""Following what comes and goes in a sidecar: which blocks are in which tier, kept up to date."""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from struct import iter_unpack
from typing import Any

import grpc

from kvstore.api.v1 import kvstore_pb2 as api
from kvstore.api.v1.kvstore_pb2_grpc import KVStoreStub
from kvstore.client.stream import Stream, StreamEndedError
from kvstore.errors import SidecarError
from kvstore.types import BlockKey
from kvstore.wire import MAX_MESSAGE_BYTES, bearer


class Watching:
    """What is where, as far as the sidecar has told; a context manager.

    ``position`` of one that ended lets another go on from there, if that is not too long ago.
    """

    def __init__(self, path: Path, *, token: str = "", position: tuple[bytes, int] = (b"", 0)) -> None:
        """Of the sidecar at the socket ``path``."""
        self.blocks: defaultdict[str, set[BlockKey]] = defaultdict(set)
        """By tier."""
        self.position = position
        self.num_beginnings = 0
        """How often everything was told anew."""
        self._path = path
        options = (("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),)
        self._channel = grpc.insecure_channel(f"unix:{path}", options)
        stub: Any = KVStoreStub(self._channel)
        server, last = position
        self._stream = Stream(stub.Watch(api.WatchRequest(server=server, last=last), metadata=bearer(token)))

    def __enter__(self) -> "Watching":
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()
        self._channel.close()

    def changes(self) -> Iterator[api.Changes]:
        """Each message as it comes, when ``blocks`` are up to date with it. Raises ``SidecarError`` at the end."""
        try:
            for changes in self._stream:
                self._apply(changes)
                yield changes
        except StreamEndedError as error:
            raise SidecarError(f"the sidecar at {self._path} says no more: {error}; watch it anew") from error

    def _apply(self, changes: api.Changes) -> None:
        if changes.is_new_beginning:
            self.blocks.clear()
            self.num_beginnings += 1
        for run in changes.runs:
            keys = [BlockKey(run.namespace + digest) for (digest,) in iter_unpack(f"{run.digest_bytes}s", run.digests)]
            if run.is_here:
                self.blocks[run.tier].update(keys)
            else:
                self.blocks[run.tier].difference_update(keys)
        self.position = changes.server, changes.last
