"""The sidecar as a process: who may use it, what it says of itself, how it ends, and clients that find it gone."""

import gc
import grp
import itertools
import os
import random
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, Mock

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from kvstore.api.v1 import kvstore_pb2 as api
from kvstore.client.admin import Admin
from kvstore.client.session import Session
from kvstore.client.store_client import StoreClient
from kvstore.client.watching import Watching
from kvstore.errors import LayoutError, SidecarError
from kvstore.layout import Layout
from kvstore.lease import Lookup
from kvstore.namespace import MAX_TOKENS_PER_S
from kvstore.testing.sidecar import Sidecar, eventually, streams
from kvstore.types import BlockKey
from kvstore.wire import MAX_HANDSHAKE_BYTES, admin_socket, arena_socket
from tests.real_stores import IDENTITY, LAYOUT, chain_of, content, get, put

NOBODY = 65534


@pytest.fixture(scope="module")
def served() -> Iterator[Sidecar]:
    with Sidecar() as served:
        yield served


def test_what_one_process_computed_another_loads(served: Sidecar) -> None:
    with closing(served.client()) as one, closing(served.client()) as other:
        ns = one.open_namespace(IDENTITY, LAYOUT)
        put(one, ns, chain_of(ns, 8))
        assert other.open_namespace(IDENTITY, LAYOUT) == ns
        assert get(other, chain_of(ns, 8)) == 8


def test_a_long_chain_is_looked_up_in_one_piece(served: Sidecar) -> None:
    with closing(served.client()) as client:
        ns = client.open_namespace(IDENTITY, LAYOUT)
        put(client, ns, chain_of(ns, 5, 9))
        assert get(client, chain_of(ns, 8192, 9)) == 5


def test_a_layout_that_does_not_fit_is_refused(served: Sidecar) -> None:
    with closing(served.client()) as client, pytest.raises(LayoutError, match="extents"):
        client.open_namespace(IDENTITY, Layout("float32", 64, 64, (128, 128), 64))


def test_the_standard_services_answer(served: Sidecar) -> None:
    for path, service in ((served.socket, "KVStore"), (admin_socket(served.socket), "Admin")):
        with grpc.insecure_channel(f"unix:{path}") as channel:
            health: Any = health_pb2_grpc.HealthStub(channel)
            answer = health.Check(health_pb2.HealthCheckRequest(service=f"kvstore.api.v1.{service}"), timeout=5)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
            assert f"kvstore.api.v1.{service}" in ProtoReflectionDescriptorDatabase(channel).get_services()


def test_only_its_own_user_can_reach_it(served: Sidecar) -> None:
    assert stat.S_IMODE(served.socket.parent.stat().st_mode) == 0o700
    for path in (served.socket, arena_socket(served.socket), admin_socket(served.socket)):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_members_of_its_group_can_reach_it_and_nobody_else() -> None:
    group = next(group for group in grp.getgrall() if group.gr_gid not in (0, NOBODY))
    with Sidecar(SERVER_SOCKET_MODE="0660", SERVER_SOCKET_GROUP=group.gr_name) as served:
        served.socket.parent.chmod(0o755)  # the test's own, made for root alone
        paths = [served.socket, arena_socket(served.socket), admin_socket(served.socket)]
        assert [can_reach(path, group.gr_gid) for path in paths] == [True, True, False]
        assert [can_reach(path, NOBODY) for path in paths] == [False, False, False]


def can_reach(path: Path, group: int) -> bool:
    """Whether a process of another user, in ``group`` alone, can connect."""
    program = """
import os, socket, sys
os.setgroups([])
os.setgid(int(sys.argv[2]))
os.setuid(int(sys.argv[3]))
socket.socket(socket.AF_UNIX).connect(sys.argv[1])
"""
    command = [sys.executable, "-c", program, str(path), str(group), str(NOBODY)]
    result = subprocess.run(command, cwd="/", capture_output=True, text=True, check=False)
    assert result.returncode == 0 or "PermissionError" in result.stderr, result.stderr
    return result.returncode == 0


def test_a_second_sidecar_at_the_same_place_is_refused(served: Sidecar) -> None:
    environ = {"KVSTORE_SERVER_SOCKET": str(served.socket), "KVSTORE_MEMORY_CAPACITY": "4MiB"}
    command = [sys.executable, "-m", "kvstore", "serve"]
    result = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=30, check=False)
    assert result.returncode == 2
    assert f"process {served.process.pid}" in result.stderr


@pytest.mark.parametrize(
    "said", [b"", b"\x05\x00\x00\x00", b"\x03\x00\x00\x00\xff\xff\xff", b"\xff" * 64, b"GET / HTTP/1.1\r\n"]
)
def test_whatever_is_said_at_the_arenas_door_the_sidecar_lives(served: Sidecar, said: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(str(arena_socket(served.socket)))
        stranger.sendall(said)
        stranger.shutdown(socket.SHUT_WR)
        stranger.settimeout(10.0)
        with suppress(ConnectionResetError):
            answer, fds, _, _ = socket.recv_fds(stranger, MAX_HANDSHAKE_BYTES, 4)
            assert (answer, fds) == (b"", [])
    with closing(served.client()) as client:
        assert client.wait_connected(10.0)


def test_whatever_is_sent_to_its_services_the_sidecar_lives(served: Sidecar) -> None:
    noise = random.Random(0)
    for path in (served.socket, admin_socket(served.socket)):
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(str(path))
            stranger.sendall(noise.randbytes(5000))
    with grpc.insecure_channel(f"unix:{served.socket}") as channel:
        session: Any = channel.stream_stream("/kvstore.api.v1.KVStore/Session")
        for size in (0, 1, 50, 5000, 9 << 20):
            with pytest.raises(grpc.RpcError):
                list(session(iter([noise.randbytes(size)]), timeout=10))
    with closing(served.client()) as client:
        ns = client.open_namespace(IDENTITY, LAYOUT)
        put(client, ns, chain_of(ns, 2, 77))
        assert get(client, chain_of(ns, 2, 77)) == 2


def test_it_takes_a_token() -> None:
    with Sidecar(SERVER_TOKEN="right") as served:
        with closing(StoreClient(served.socket, token="right")) as client:
            assert client.wait_connected(10.0)
            assert client.reserve(client.open_namespace(IDENTITY, LAYOUT), 1).num_blocks == 1
        for token in ("", "wrong", "righ", "right "):
            with closing(StoreClient(served.socket, token=token)) as client:
                assert not client.wait_connected(0.2)
        assert "right" not in served.log.read_text()


def test_sigterm_ends_it_and_what_was_accepted_is_on_file(tmp_path: Path) -> None:
    with Sidecar(FILE_DIRECTORIES=str(tmp_path), FILE_CAPACITY="64MiB") as served:
        with closing(served.client()) as client:
            ns = client.open_namespace(IDENTITY, LAYOUT)
            put(client, ns, chain_of(ns, 20))
            assert served.terminate() == 0
        assert not served.socket.exists()
        served.restart()
        with closing(served.client()) as client:
            ns = client.open_namespace(IDENTITY, LAYOUT)
            assert get(client, chain_of(ns, 20)) == 20


def test_an_engines_prefill_rate_holds_for_its_own_namespace(tmp_path: Path) -> None:
    """PF-022: no disk loads as fast as an engine computes that says so; another engine's blocks are loaded."""

    def reloaded(client: StoreClient, chain: list[BlockKey]) -> int:
        client.evict(100)
        return get(client, chain)

    with (
        Sidecar(FILE_DIRECTORIES=str(tmp_path), FILE_CAPACITY="64MiB") as served,
        closing(StoreClient(served.socket, budget_s=5.0, prefill_tokens_per_s=MAX_TOKENS_PER_S)) as fast,
        closing(served.client()) as unknown,
    ):
        assert fast.wait_connected(10.0)
        chains = []
        for client, salt in ((fast, "fast"), (unknown, "unknown")):
            ns = client.open_namespace(replace(IDENTITY, salt=salt), LAYOUT)
            chains.append(chain_of(ns, 20))
            put(client, ns, chains[-1])
            eventually(lambda: served.metric("kvstore_copies_total", "file", "write", "ok") == 20 * len(chains))
        eventually(lambda: reloaded(fast, chains[0]) == 0)  # after some trials
        assert served.metric("kvstore_declined_blocks_total", "file") == 20
        assert [reloaded(unknown, chains[1]) for _ in range(3)] == [20, 20, 20]


@pytest.mark.parametrize("fault", ["a stream that ends before its first word", "a bug"])
def test_whatever_ends_a_connection_another_one_is_opened(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sidecar that leaves ends streams like that."""
    register, attempts = Session.register, itertools.count()

    def failing(session: Session) -> api.Registered:
        if next(attempts) < 2:
            if fault == "a bug":
                raise RuntimeError(fault)
            monkeypatch.setattr(session, "_replies", MagicMock(__next__=Mock(side_effect=StopIteration)))
        return register(session)

    monkeypatch.setattr(Session, "register", failing)
    with Sidecar() as served, closing(served.client()) as client:
        ns = client.open_namespace(IDENTITY, LAYOUT)
        put(client, ns, chain_of(ns, 4))
        assert get(client, chain_of(ns, 4)) == 4


@pytest.mark.parametrize("how", ["it closes", "the sidecar dies", "it closes at once", "it watches"])
def test_nothing_of_a_stream_is_left_for_the_interpreters_exit(how: str) -> None:
    """Its destructor takes a lock, which a thread that the exit has frozen may hold: the process would never end."""
    before = streams()
    gc.disable()
    try:
        with Sidecar() as served:
            client = StoreClient(served.socket)
            if how != "it closes at once":
                assert client.wait_connected(20.0)
            if how == "the sidecar dies":
                served.kill()
                eventually(lambda: not client.wait_connected(0.0))
            client.close()
            if how == "it watches":
                with Watching(served.socket) as watching:
                    changes = watching.changes()
                    next(changes)
                    served.kill()
                    with pytest.raises(SidecarError):
                        list(changes)
                del changes
        assert streams() <= before
    finally:
        gc.enable()


def test_a_session_that_opens_at_once_finds_its_client_made(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begin = threading.Thread.start

    def begin_and_let_it_run(thread: threading.Thread) -> None:
        begin(thread)
        if thread.name == "kvstore-client":
            time.sleep(0.5)

    with Sidecar() as served:
        monkeypatch.setattr(threading.Thread, "start", begin_and_let_it_run)
        with closing(StoreClient(served.socket)) as client:
            assert client.wait_connected(20.0)
    assert "a bug" not in caplog.text


def test_clients_find_a_restarted_sidecar_and_miss_meanwhile() -> None:
    with Sidecar() as served, closing(served.client(budget_s=1.0)) as client:
        ns = client.open_namespace(IDENTITY, LAYOUT)
        chain = chain_of(ns, 4)
        put(client, ns, chain)
        lease = client.pin(chain)
        write = client.reserve(ns, 1)
        served.kill()
        eventually(lambda: not lease.still_held())
        began_s = time.monotonic()
        for _ in range(100):
            assert client.lookup(chain) == Lookup(0, 0, pending=False)
            assert client.pin(chain).num_blocks == client.reserve(ns, 4).num_blocks == 0
            assert client.prefetch(chain, time.monotonic() + 5.0).done
        assert time.monotonic() - began_s < 10.0  # each of 300 calls could have waited for one second
        assert client.commit(write, chain[:1], None).slots == []
        assert [
            bytes(view) for view in lease.views
        ] != []  # the old memory is there for as long as somebody looks at it
        client.release(lease)
        client.abort(write)
        served.restart()
        assert client.wait_connected(20.0)
        assert get(client, chain) == 0
        put(client, ns, chain)
        assert get(client, chain) == 4


def test_leases_of_a_sidecar_that_died_can_be_looked_at_and_ended_after_another_has_come() -> None:
    """Views are made when first asked for, which may be after the client is in touch with the new one."""
    with Sidecar() as served, closing(served.client(budget_s=1.0)) as client:
        ns = client.open_namespace(IDENTITY, LAYOUT)
        chain = chain_of(ns, 2)
        put(client, ns, chain)
        lease, writes = client.pin(chain), [client.reserve(ns, 1) for _ in range(2)]
        served.kill()
        eventually(lambda: not lease.still_held())
        served.restart()
        eventually(lambda: client.reserve(ns, 1).num_blocks == 1)
        assert [bytes(view) for view in lease.views] == [content(key) for key in chain]
        assert not lease.still_held()
        for write in writes:
            assert client.locate(write) is None
            write.views[0][:] = b"x" * LAYOUT.block_bytes
        client.release(lease)
        client.abort(writes[0])
        client.quarantine(writes[1])
        client.reclaim(writes[1])
        assert get(client, chain) == 0


def test_a_silent_sidecar_costs_one_budget() -> None:
    with Sidecar() as served, closing(served.client(budget_s=0.3)) as client:
        ns = client.open_namespace(IDENTITY, LAYOUT)
        chain = chain_of(ns, 4)
        put(client, ns, chain)
        served.send(signal.SIGSTOP)
        began_s = time.monotonic()
        for _ in range(100):
            assert client.pin(chain).num_blocks == 0
            assert client.lookup(chain) == Lookup(0, 0, pending=False)
            assert client.prefetch(chain, time.monotonic() + 5.0).done
        assert time.monotonic() - began_s < 100 * 0.3 / 2
        served.send(signal.SIGCONT)
        eventually(lambda: get(client, chain) == 4)
        eventually(lambda: served.metric("kvstore_pinned_blocks", "memory") == 0)  # what it pinned too late is not kept
        assert client.stats.get("kvstore_errors_total", "client.pin") > 0


def test_a_client_can_be_made_in_a_forked_child(served: Sidecar) -> None:
    program = """
import os, sys
from pathlib import Path
from typing import Any
from kvstore.client.admin import Admin
from kvstore.client.store_client import StoreClient
from tests.real_stores import IDENTITY, LAYOUT, chain_of, get, put
path = Path(sys.argv[1])
parent = StoreClient(path, budget_s=5.0)
assert parent.wait_connected(20.0)
ns = parent.open_namespace(IDENTITY, LAYOUT)
put(parent, ns, chain_of(ns, 3, 5))
pid = os.fork()
client = parent if pid else StoreClient(path, budget_s=5.0)
assert client.wait_connected(20.0)
ns = client.open_namespace(IDENTITY, LAYOUT)
got = get(client, chain_of(ns, 3, 5))
if not pid:
    os._exit(got)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
assert get(client, chain_of(ns, 3, 5)) == 3
client.close()
"""
    subprocess.run([sys.executable, "-c", program, str(served.socket)], timeout=60, check=True)


def test_an_operator_is_told_that_nobody_answers(tmp_path: Path) -> None:
    with Admin(tmp_path / "kv.sock") as admin, pytest.raises(SidecarError, match="is it running"):
        admin.stats()


def test_threads_end_with_the_client(served: Sidecar) -> None:
    before = threading.active_count()
    for _ in range(3):
        served.client().close()
    eventually(lambda: threading.active_count() <= before)
