"""Clients and a sidecar that live while what they say to each other does not arrive, or one of them is busy."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvstore.client.store_client import StoreClient
from kvstore.testing.sidecar import Sidecar, eventually
from kvstore.testing.valkey import ValkeyServer
from kvstore.wire import arena_socket
from tests.real_stores import IDENTITY, LAYOUT, chain_of, get, put

LEASE_S = 0.5
BUDGET_S = 0.2


class Gate:
    """A way to a sidecar that can be shut: what is said meanwhile arrives when it is open again."""

    def __init__(self, target: Path, directory: Path) -> None:
        self.path = directory / "gate.sock"
        arena_socket(self.path).symlink_to(arena_socket(target))  # by which the arena's descriptor comes
        self._target = str(target)
        self._open = threading.Event()
        self._open.set()
        self._ends: list[socket.socket] = []
        self._door = socket.socket(socket.AF_UNIX)
        self._door.bind(str(self.path))
        self._door.listen()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def __enter__(self) -> "Gate":
        return self

    def __exit__(self, *_: object) -> None:
        self._open.set()
        self._hang_up(self._door)
        self._threads[0].join()
        for end in self._ends:
            self._hang_up(end)
        for thread in self._threads:
            thread.join()
        for end in (self._door, *self._ends):
            end.close()

    def shut(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._door.accept()
                far = socket.socket(socket.AF_UNIX)
                self._ends += [near, far]
                far.connect(self._target)
                for source, sink in ((near, far), (far, near)):
                    self._threads.append(threading.Thread(target=self._pass_on, args=(source, sink)))
                    self._threads[-1].start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while said := source.recv(65536):
                self._open.wait()
                sink.sendall(said)
        self._hang_up(sink)

    def _hang_up(self, end: socket.socket) -> None:
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


@pytest.fixture(scope="module")
def served() -> Iterator[Sidecar]:
    with Sidecar(SERVER_LEASE=f"{int(LEASE_S * 1000)}ms") as served:
        yield served


def test_a_parted_client_loses_its_leases_misses_fast_and_comes_back(served: Sidecar, tmp_path: Path) -> None:
    with (
        Gate(served.socket, tmp_path) as gate,
        closing(StoreClient(gate.path, budget_s=BUDGET_S)) as parted,
        closing(served.client()) as other,
    ):
        assert parted.wait_connected(20.0)
        ns = parted.open_namespace(IDENTITY, LAYOUT)
        other.open_namespace(IDENTITY, LAYOUT)
        chain = chain_of(ns, 4)
        put(parted, ns, chain)
        read, write = parted.pin(chain), parted.reserve(ns, 8)
        assert (read.num_blocks, write.num_blocks) == (4, 8)
        gate.shut()
        began_s = time.monotonic()
        for _ in range(100):
            assert parted.lookup(chain).ready == 0
            assert parted.pin(chain).num_blocks == 0
        assert time.monotonic() - began_s < 100 * BUDGET_S / 2

        eventually(lambda: served.metric("kvstore_quarantined_slots", "memory") == 8)
        assert not read.still_held()  # as its own clock says: nobody can have told it
        assert served.metric("kvstore_pinned_blocks", "memory") == 0
        assert get(other, chain) == 4  # to whom nothing happened
        put(other, ns, chain_of(ns, 6, 1))
        assert get(other, chain_of(ns, 6, 1)) == 6

        gate.open()
        eventually(lambda: any(client.incarnation > 1 for client in served.stats().clients))
        assert parted.commit(write, chain_of(ns, 8, 2), None).slots == []
        assert served.metric("kvstore_quarantined_slots", "memory") == 8  # until it says that it writes there no more
        parted.abort(write)
        parted.release(read)
        eventually(lambda: served.metric("kvstore_quarantined_slots", "memory") == 0)
        eventually(lambda: get(parted, chain) == 4)
    with served.admin() as admin:
        assert admin.check() == ""


def test_an_engine_that_is_busy_for_longer_than_its_lease_keeps_it(served: Sidecar) -> None:
    """MN-005, UX-014: a thread of its own answers pings, and their interval follows from the lease."""
    with closing(served.client()) as client:
        ns = client.open_namespace(IDENTITY, LAYOUT)
        put(client, ns, chain_of(ns, 4))
        expired = served.metric("kvstore_expired_sessions_total")
        with client.pin(chain_of(ns, 4)) as lease:
            time.sleep(2 * LEASE_S)  # a long step of the model, say
            assert lease.still_held()
        assert served.metric("kvstore_expired_sessions_total") == expired


def test_health_and_ram_answer_while_a_tier_hangs() -> None:
    """HG-005: calls that may block are in threads of their own."""
    with ValkeyServer() as server, Sidecar(REDIS_URL=server.url) as served, closing(served.client()) as client:
        ns = client.open_namespace(IDENTITY, LAYOUT)
        put(client, ns, chain_of(ns, 4))
        server.pause()
        hung = client.prefetch(chain_of(ns, 8, 1), time.monotonic() + 5.0)
        with grpc.insecure_channel(f"unix:{served.socket}") as channel:
            health: Any = health_pb2_grpc.HealthStub(channel)
            answer = health.Check(health_pb2.HealthCheckRequest(), timeout=5)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        with client.pin(chain_of(ns, 4)) as lease:
            assert lease.num_blocks == 4
        assert not hung.done
        server.resume()
