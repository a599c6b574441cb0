"""Real sidecars for tests: a process of their own, in a directory short enough for a socket's path."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from kvstore.api.v1.admin_pb2 import SidecarStats
from kvstore.client.admin import Admin
from kvstore.client.store_client import StoreClient
from kvstore.wire import admin_socket

PATIENCE_S = 20.0


class Sidecar:
    """``kvstore serve`` in a process; ``settings`` are its environment, ``{"MEMORY_CAPACITY": "4MiB"}``."""

    def __init__(self, directory: Path, settings: Mapping[str, str]) -> None:
        self.socket = directory / "kv.sock"
        self.log = directory / "log"
        self._settings = {"SERVER_SOCKET": str(self.socket), **settings}
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        environ = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}
        environ |= {f"KVSTORE_{name}": value for name, value in self._settings.items()}
        with self.log.open("ab") as log:
            return subprocess.Popen([sys.executable, "-m", "kvstore", "serve"], env=environ, stdout=log, stderr=log)

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()

    def terminate(self) -> int:
        """SIGTERM; returns the exit status."""
        self.process.terminate()
        return self.process.wait(PATIENCE_S)

    def restart(self) -> None:
        self.kill()
        self.process = self._start()

    def client(self, budget_s: float = 5.0) -> StoreClient:
        """Connected."""
        client = StoreClient(self.socket, budget_s=budget_s)
        assert client.wait_connected(PATIENCE_S), self.log.read_text()
        return client

    def admin(self) -> Admin:
        return Admin(self.socket)

    def stats(self) -> SidecarStats:
        with self.admin() as admin:
            return admin.stats()

    def metric(self, name: str, *labels: str) -> float:
        """A value as the sidecar counts it; 0 where nothing was counted."""
        return next((s.value for s in self.stats().samples if s.metric == name and tuple(s.labels) == labels), 0.0)


@contextmanager
def sidecar(**settings: str) -> Iterator[Sidecar]:
    with tempfile.TemporaryDirectory(prefix="kv-") as name:
        served = Sidecar(Path(name), {"MEMORY_CAPACITY": "4MiB", **settings})
        try:
            eventually(lambda: admin_socket(served.socket).exists() or served.process.poll() is not None)
            yield served
        finally:
            served.kill()


def eventually(is_so: Callable[[], bool], patience_s: float = PATIENCE_S) -> None:
    """Wait until it is so."""
    give_up_s = time.monotonic() + patience_s
    while not is_so():
        assert time.monotonic() < give_up_s, "it never came about"
        time.sleep(0.01)
