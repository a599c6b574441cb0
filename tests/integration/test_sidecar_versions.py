"""A client and a sidecar that are a version apart work together, whatever one of them does not know yet."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvstore.api.v1 import kvstore_pb2 as api
from kvstore.client.store_client import StoreClient
from kvstore.testing.sidecar import Sidecar
from kvstore.testing.store_contract import StoreContract
from kvstore.wire import arena_socket

SESSION = "/kvstore.api.v1.KVStore/Session"
NEW_FIELD = b"\xfa\x7f\x03new"
"""Field 2047 with three bytes in it, which no message has yet."""
NEW_REPLY = NEW_FIELD
"""A reply of a kind that no client knows, to nobody."""


class Newer(grpc.GenericRpcHandler):
    """Between client and sidecar: makes either of them look newer to the other than it is."""

    def __init__(self, upstream: Path) -> None:
        self._channel = grpc.insecure_channel(f"unix:{upstream}")

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        return grpc.stream_stream_rpc_method_handler(self._relay) if handler_call_details.method == SESSION else None

    def _relay(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        session: Any = self._channel.stream_stream(SESSION)
        replies = session(_newer_request(request) for request in requests)
        context.add_callback(replies.cancel)
        for reply in replies:
            yield reply + NEW_FIELD
            yield NEW_REPLY

    def close(self) -> None:
        self._channel.close()


def _newer_request(serialized: bytes) -> bytes:
    """With new fields, inside as well."""
    request = api.SessionRequest.FromString(serialized)
    for name in ("lookup", "pin", "commit", "reserve", "open_namespace", "register"):
        if request.HasField(name):
            inner = getattr(request, name)
            inner.MergeFromString(NEW_FIELD)
            if name in ("lookup", "pin", "commit"):
                inner.chain.MergeFromString(NEW_FIELD)
    return request.SerializeToString() + NEW_FIELD


@pytest.fixture(scope="module")
def apart() -> Iterator[Path]:
    """The socket of what is newer than it is."""
    with Sidecar() as served:
        socket = served.socket.with_name("newer.sock")
        os.symlink(arena_socket(served.socket), arena_socket(socket))
        relay = Newer(served.socket)
        server = grpc.server(ThreadPoolExecutor(8), handlers=[relay])
        server.add_insecure_port(f"unix:{socket}")
        server.start()
        yield socket
        server.stop(0).wait()
        relay.close()


class TestStoreOfAnotherVersion(StoreContract):
    @pytest.fixture
    def store(self, apart: Path) -> Iterator[StoreClient]:
        client = StoreClient(apart, budget_s=5.0)
        assert client.wait_connected(20.0)
        client.evict(10**6)
        yield client
        client.close()


def test_a_request_that_the_sidecar_does_not_know_is_a_miss_and_a_counter(apart: Path) -> None:
    with closing(StoreClient(apart, budget_s=5.0)) as client:
        assert client.wait_connected(20.0)
        session = client._session()
        assert session is not None
        request = api.SessionRequest.FromString(b"\x08\x07" + NEW_FIELD)  # call 7
        reply = session.ask(request, 5.0)
        assert reply is not None
        assert "too far apart" in reply.refused.reason
