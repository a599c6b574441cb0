"""Two hosts, as network namespaces joined by a cable: they share a server, and the cable is pulled."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest

from kvstore.testing.sidecar import Sidecar, eventually
from kvstore.testing.valkey import find_binary
from tests.real_stores import IDENTITY, LAYOUT, chain_of, get, put

PORT = 7379
SERVER = "10.213.0.1"
"""The address of the first host, on which the shared server runs."""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@contextmanager
def joined_hosts() -> Iterator[tuple[str, str]]:
    """The names of two network namespaces, each with one end of a cable. Skips where this user may make none."""
    one, other = (f"kvstore-{os.getpid()}-{number}" for number in (1, 2))
    with ExitStack() as undo:
        try:
            for name in (one, other):
                ip("netns", "add", name)
                undo.callback(ip, "netns", "delete", name)
            ip("-n", one, "link", "add", "name", "cable", "type", "veth", "peer", "name", "cable", "netns", other)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no network namespaces here: {getattr(error, 'stderr', '') or error}")
        for number, name in enumerate((one, other), 1):
            ip("-n", name, "address", "add", f"10.213.0.{number}/24", "dev", "cable")
            for device in ("lo", "cable"):
                ip("-n", name, "link", "set", device, "up")
        yield one, other


@contextmanager
def server_on(host: str, directory: Path) -> Iterator[None]:
    command = [
        *("ip", "netns", "exec", host, str(find_binary()), "--port", str(PORT), "--bind", SERVER),
        *("--protected-mode", "no", "--save", "", "--dir", str(directory), "--unixsocket", str(directory / "socket")),
    ]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        try:
            eventually((directory / "socket").exists)
            yield
        finally:
            server.kill()


def sidecar_on(host: str) -> Sidecar:
    command = ["ip", "netns", "exec", host, sys.executable, "-m", "kvstore", "serve"]
    return Sidecar(command, REDIS_URL=f"redis://{SERVER}:{PORT}")


def test_what_one_host_stored_another_finds_unless_the_cable_is_pulled(tmp_path: Path) -> None:
    with ExitStack() as stack:
        hosts = stack.enter_context(joined_hosts())
        stack.enter_context(server_on(hosts[0], tmp_path))
        sidecars = [stack.enter_context(sidecar_on(host)) for host in hosts]
        near, far = (stack.enter_context(closing(served.client())) for served in sidecars)
        ns = near.open_namespace(IDENTITY, LAYOUT)
        far.open_namespace(IDENTITY, LAYOUT)
        shared, alone = chain_of(ns, 4), chain_of(ns, 4, 1)
        put(near, ns, shared)
        eventually(lambda: sidecars[0].metric("kvstore_copies_total", "redis", "write", "ok") >= 4)
        assert get(far, shared) == 4

        ip("-n", hosts[1], "link", "set", "cable", "down")
        far.evict(10**6)
        put(far, ns, alone)
        began_s = time.monotonic()
        assert get(far, shared, seconds=0.5) == 0
        assert time.monotonic() - began_s < 5.0
        assert get(far, alone) == 4
        assert get(near, shared) == 4
        assert sidecars[1].metric("kvstore_quarantined_slots", "memory") <= 4  # of reads that have not returned

        ip("-n", hosts[1], "link", "set", "cable", "up")
        eventually(lambda: get(far, shared, seconds=1.0) == 4)
        eventually(lambda: sidecars[1].metric("kvstore_quarantined_slots", "memory") == 0)
        for served in sidecars:
            with served.admin() as admin:
                assert admin.check() == ""
