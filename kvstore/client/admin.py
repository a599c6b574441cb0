"""An operator's line to a running sidecar. Raises ``SidecarError`` where none answers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc

from kvstore.api.v1 import admin_pb2 as api
from kvstore.api.v1.admin_pb2_grpc import AdminStub
from kvstore.client.stream import reason
from kvstore.errors import SidecarError
from kvstore.wire import admin_socket

TIMEOUT_S = 10.0


class Admin:
    """A context manager around one channel."""

    def __init__(self, path: Path) -> None:
        """``path`` is the sidecar's socket."""
        self._path = path
        self._channel = grpc.insecure_channel(f"unix:{admin_socket(path)}")
        self._stub = AdminStub(self._channel)

    def __enter__(self) -> "Admin":
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def stats(self) -> api.SidecarStats:
        """Every metric, client and namespace."""
        stats: api.SidecarStats = self._ask(self._stub.GetStats, api.GetStatsRequest())
        return stats

    def evict(self, num_bytes: int) -> int:
        """Forget about so much in RAM; returns how many blocks that was."""
        return int(self._ask(self._stub.EvictBlocks, api.EvictBlocksRequest(num_bytes=num_bytes)).num_blocks)

    def clear(self, digest: bytes) -> int:
        """Forget a namespace in every tier; returns how many blocks."""
        return int(self._ask(self._stub.ClearNamespace, api.ClearNamespaceRequest(digest=digest)).num_blocks)

    def check(self) -> str:
        """What of the tables' invariants does not hold; empty: all do."""
        return str(self._ask(self._stub.CheckTables, api.CheckTablesRequest()).broken)

    def _ask(self, method: Callable[..., Any], request: object) -> Any:
        try:
            return method(request, timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            raise SidecarError(f"the sidecar at {self._path}: {reason(error)}; is it running?") from error
