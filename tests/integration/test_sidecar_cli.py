"""The commands of an operator against a running sidecar."""

import json
import logging
import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvstore.client.store_client import StoreClient
from kvstore.errors import SidecarError
from kvstore.server.logs import INTERVAL_S, JsonLines, OnePerInterval
from kvstore.testing.sidecar import Sidecar
from tests.real_stores import IDENTITY, LAYOUT, chain_of, put


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


PORT = free_port()


@pytest.fixture(scope="module")
def served() -> Iterator[Sidecar]:
    with Sidecar(SERVER_METRICS=f"127.0.0.1:{PORT}") as served:
        yield served


@pytest.fixture
def client(served: Sidecar) -> Iterator[StoreClient]:
    with closing(served.client()) as client:
        ns = client.open_namespace(IDENTITY, LAYOUT)
        put(client, ns, chain_of(ns, 5))
        yield client
        client.clear(ns)


def kvstore(served: Sidecar, *words: str) -> subprocess.CompletedProcess[str]:
    environ = {"PATH": os.environ["PATH"], "KVSTORE_SERVER_SOCKET": str(served.socket), "COLUMNS": "160"}
    command = [sys.executable, "-m", "kvstore", *words]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)


def test_stats_show_what_a_running_sidecar_holds(served: Sidecar, client: StoreClient) -> None:
    stats = json.loads(kvstore(served, "stats", "--json").stdout)
    blocks = [sample["value"] for sample in stats["samples"] if sample["metric"] == "kvstore_blocks"]
    assert blocks == [5.0]
    assert [found["name"] for found in stats["clients"]] == [f"process {os.getpid()}"]
    assert [found["model"] for found in stats["namespaces"]] == [IDENTITY.model]


def test_evict_frees_memory_or_a_namespace(served: Sidecar, client: StoreClient) -> None:
    assert "5 blocks freed" in kvstore(served, "evict", "--size", "1MiB").stdout
    ns = client.open_namespace(IDENTITY, LAYOUT)
    put(client, ns, chain_of(ns, 3))
    assert "3 blocks freed" in kvstore(served, "evict", "--namespace", ns.digest.hex()).stdout


def test_a_namespace_that_nobody_opened_is_an_error(served: Sidecar) -> None:
    with served.admin() as admin, pytest.raises(SidecarError, match="no client opened this namespace"):
        admin.clear(bytes(16))


def test_check_proves_the_tables(served: Sidecar, client: StoreClient) -> None:
    result = kvstore(served, "check")
    assert result.returncode == 0
    assert "every invariant" in result.stdout


def test_top_shows_frames_and_ends(served: Sidecar, client: StoreClient) -> None:
    result = kvstore(served, "top", "--count", "2", "--interval", "0.1")
    assert result.returncode == 0
    assert "lookups" in result.stdout
    assert f"process {os.getpid()}" in result.stdout
    assert "160KiB" in result.stdout  # five blocks


def test_prometheus_is_answered(served: Sidecar, client: StoreClient) -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/metrics", timeout=10) as page:
        text = page.read().decode()
    assert 'kvstore_capacity_bytes{tier="memory"}' in text
    assert "kvstore_stored_blocks_total" in text


def test_without_a_sidecar_commands_say_so(tmp_path: Path) -> None:
    environ = {"PATH": os.environ["PATH"], "KVSTORE_SERVER_SOCKET": str(tmp_path / "kv.sock")}
    result = subprocess.run(
        [sys.executable, "-m", "kvstore", "top"], env=environ, capture_output=True, text=True, check=False
    )
    assert result.returncode == 2
    assert "kvstore serve" in result.stderr


def test_the_log_is_one_object_a_line(served: Sidecar, client: StoreClient) -> None:
    lines = [json.loads(line) for line in served.log.read_text().splitlines()]
    assert {"time", "level", "logger", "message"} <= lines[0].keys()
    assert any(line["message"].startswith("ready") for line in lines)


def test_of_a_kind_of_event_one_line_is_written_per_interval() -> None:
    now_s = 100.0
    events = OnePerInterval(clock=lambda: now_s)

    def said(template: str, number: int) -> dict[str, object] | None:
        record = logging.LogRecord("kvstore", logging.WARNING, "", 0, template, (number,), None)
        return json.loads(JsonLines().format(record)) if events.filter(record) else None

    first = said("lost %d", 1)
    assert first is not None
    assert first["message"] == "lost 1"
    assert [said("lost %d", number) for number in range(2, 50)] == [None] * 48
    assert said("found %d", 1) is not None
    now_s += INTERVAL_S
    later = said("lost %d", 50)
    assert later is not None
    assert (later["message"], later["suppressed"]) == ("lost 50", 48)
