"""A sidecar in a process of its own, in a directory short enough for a socket's path."""

import gc
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc

from kvstore.api.v1.admin_pb2 import SidecarStats
from kvstore.client.admin import Admin
from kvstore.client.store_client import StoreClient
from kvstore.wire import admin_socket

PATIENCE_S = 20.0


class Sidecar:
    """``kvstore serve``, as a context manager. Settings are as in the environment: ``MEMORY_CAPACITY="1GiB"``."""

    def __init__(self, command: Sequence[str] = (sys.executable, "-m", "kvstore", "serve"), **settings: str) -> None:
        """``command`` starts it; another one than the product's may have faults."""
        self._command = command
        self._directory = TemporaryDirectory(prefix="kv-")
        self.socket = Path(self._directory.name) / "kv.sock"
        self.log = Path(self._directory.name) / "log"
        self._settings = {"MEMORY_CAPACITY": "4MiB", "SERVER_SOCKET": str(self.socket), **settings}
        self.process = self._start()

    def __enter__(self) -> "Sidecar":
        self.wait_ready()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._directory.cleanup()

    def wait_ready(self) -> None:
        """Until it listens, or has ended."""
        eventually(lambda: self._listens() or self.process.poll() is not None)

    def send(self, number: signal.Signals) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL."""
        with suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()

    def terminate(self) -> int:
        """SIGTERM; returns the exit status."""
        self.process.terminate()
        return self.process.wait(PATIENCE_S)

    def restart(self) -> None:
        """Kill it and start another one at the same place; does not wait for it."""
        self.kill()
        self.process = self._start()

    def client(self, budget_s: float = 5.0, token: str = "") -> StoreClient:
        """Connected."""
        client = StoreClient(self.socket, budget_s=budget_s, token=token)
        assert client.wait_connected(PATIENCE_S), self.log.read_text()
        return client

    def admin(self) -> Admin:
        """The operator's line."""
        return Admin(self.socket)

    def stats(self) -> SidecarStats:
        """What it says of itself."""
        with self.admin() as admin:
            return admin.stats()

    def metric(self, name: str, *labels: str) -> float:
        """A value as the sidecar counts it; 0 where nothing was counted."""
        return next((s.value for s in self.stats().samples if s.metric == name and tuple(s.labels) == labels), 0.0)

    def _listens(self) -> bool:
        with socket.socket(socket.AF_UNIX) as line:
            return line.connect_ex(str(admin_socket(self.socket))) == 0

    def _start(self) -> subprocess.Popen[bytes]:
        environ = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}
        environ |= {f"KVSTORE_{name}": value for name, value in self._settings.items()}
        with self.log.open("ab") as log:
            return subprocess.Popen(self._command, env=environ, stdout=log, stderr=log)


def eventually(is_so: Callable[[], bool], patience_s: float = PATIENCE_S) -> None:
    """Wait until it is so; AssertionError if that takes too long."""
    give_up_s = time.monotonic() + patience_s
    while not is_so():
        assert time.monotonic() < give_up_s, "it never came about"
        time.sleep(0.01)


def streams() -> set[int]:
    """Which of grpc's streams this process has not let go of, by their addresses."""
    # By its type: isinstance would ask objects that answer for others, such as torch's deprecated names, which warn.
    return {id(made) for made in gc.get_objects() if issubclass(type(made), grpc.Call)}
