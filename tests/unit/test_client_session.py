"""A client's stream against a sidecar that says exactly what the test wants, over a real socket."""

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from queue import SimpleQueue

import grpc
import pytest

from kvstore.api.v1 import kvstore_pb2 as api
from kvstore.api.v1.kvstore_pb2_grpc import KVStoreServicer, add_KVStoreServicer_to_server
from kvstore.client.session import Inbox, Session
from kvstore.client.tether import Tether
from kvstore.tiers.memory import Arena

LEASE_S = 0.3


class Script(KVStoreServicer):
    """Registers whoever comes, and from then on says what it is told to."""

    def __init__(self) -> None:
        self.says: SimpleQueue[api.SessionReply | None] = SimpleQueue()
        self.heard: SimpleQueue[api.SessionRequest] = SimpleQueue()

    def Session(  # noqa: N802 - the name is grpc's
        self, requests: Iterator[api.SessionRequest], context: grpc.ServicerContext
    ) -> Iterator[api.SessionReply]:
        next(requests)
        threading.Thread(target=self._hear, args=(requests,), daemon=True).start()
        yield api.SessionReply(registered=api.Registered(server=b"s", lease_ms=int(LEASE_S * 1000)))
        yield from iter(self.says.get, None)

    def _hear(self, requests: Iterator[api.SessionRequest]) -> None:
        for request in requests:
            self.heard.put(request)

    def ping(self, number: int, last_pong: int) -> int:
        """Ping, and wait for the pong; its number."""
        self.says.put(api.SessionReply(ping=api.Ping(number=number, last_pong=last_pong)))
        return self.heard.get(timeout=20.0).pong.number


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Script]:
    script = Script()
    with ThreadPoolExecutor(4) as threads:
        server = grpc.server(threads)
        add_KVStoreServicer_to_server(script, server)
        server.add_insecure_port(f"unix:{tmp_path}/socket")
        server.start()
        yield script
        script.says.put(None)
        server.stop(None).wait()


@pytest.fixture
def session(script: Script, tmp_path: Path) -> Iterator[Session]:
    near, far = socket.socketpair()
    with (
        near,
        far,
        closing(Arena(4096, prefault=False)) as arena,
        grpc.insecure_channel(f"unix:{tmp_path}/socket") as way,
    ):
        session = Session(Tether(near, b"c", arena), way, api.Register(), Inbox())
        session.register()
        reader = threading.Thread(target=session.read)
        reader.start()
        yield session
        script.says.put(None)
        reader.join()
        session.close()


def test_only_a_pong_that_the_sidecar_has_seen_prolongs_leases(session: Session, script: Script) -> None:
    """A ping may have lain in a buffer while the client slept, and its leases were given to others meanwhile."""
    held_until_s = session.held_until_s
    assert script.ping(1, 0) == 1
    assert session.held_until_s == held_until_s
    time.sleep(LEASE_S)
    assert script.ping(2, 0) == 2
    assert not session.holds
    assert script.ping(3, 2) == 3
    assert held_until_s < session.held_until_s <= time.monotonic() + LEASE_S
