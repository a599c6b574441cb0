"""The doctor on this very machine, with a real server: what it finds, and what it says to do."""

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore import doctor
from kvstore.config import Config, FileConfig, MemoryConfig, RedisConfig
from kvstore.doctor import Finding, Verdict, examine
from kvstore.servers import survey
from kvstore.testing.valkey import ValkeyServer, valkey_cluster
from kvstore.tiers import disk_speed

MEMORY = MemoryConfig(64 << 20)


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyServer]:
    with ValkeyServer() as server:
        yield server


def findings(config: Config) -> dict[str, Finding]:
    return {finding.name: finding for finding in examine(config)}


def test_everything_is_looked_at(tmp_path: Path, server: ValkeyServer) -> None:
    config = Config(MEMORY, FileConfig((tmp_path,), 1 << 20), RedisConfig(server.url))
    found = findings(config)
    assert set(found) == {
        "versions",
        "memory",
        "huge pages",
        "/dev/shm",
        "memlock",
        "file descriptors",
        f"disk of {tmp_path}",
        "disk space",
        f"redis at 127.0.0.1:{server.port}",
        "NUMA",
        "accelerator",
    }
    assert not [finding for finding in found.values() if finding.verdict is Verdict.FAIL]
    assert all((finding.verdict is Verdict.OK) == (not finding.advice) for finding in found.values())
    assert not list(tmp_path.iterdir())


def test_memory_that_is_not_there_is_a_failure() -> None:
    finding = findings(Config(MemoryConfig(8 << 50)))["memory"]
    assert finding.verdict is Verdict.FAIL
    assert "lower memory.capacity" in finding.advice


@pytest.mark.parametrize("num_nodes", [0, 1, 2])
def test_several_numa_nodes_are_said_with_how_to_stay_on_one(
    num_nodes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PF-020: pinned memory on another node than the accelerator's is slower to reach."""
    monkeypatch.setattr(doctor, "NUMA_NODES", tmp_path)
    for name in ["online", "possible", *(f"node{number}" for number in range(num_nodes))]:
        (tmp_path / name).touch()
    finding = findings(Config(MEMORY))["NUMA"]
    assert finding.verdict is (Verdict.WARN if num_nodes > 1 else Verdict.OK)
    assert ("numactl --cpunodebind" in finding.advice) == (num_nodes > 1)


def test_a_directory_that_is_not_there_yet_is_tried_above(tmp_path: Path) -> None:
    directory = tmp_path / "not" / "yet"
    found = findings(Config(MEMORY, FileConfig((directory,), 1 << 20)))
    assert found[f"disk of {directory}"].verdict is not Verdict.FAIL
    assert not directory.exists()


def test_a_directory_that_takes_no_files_is_a_failure() -> None:
    directory = Path("/proc/kv")
    found = findings(Config(MEMORY, FileConfig((directory,), 1 << 20)))
    assert found[f"disk of {directory}"].verdict is Verdict.FAIL


def test_a_slow_disk_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PF-022. This disk is as fast as it is; what counts as slow is raised beyond it."""
    monkeypatch.setattr(disk_speed, "SLOW_BYTES_PER_S", 1 << 50)
    finding = findings(Config(MEMORY, FileConfig((tmp_path,), 1 << 20)))[f"disk of {tmp_path}"]
    assert finding.verdict is Verdict.WARN
    assert "recomputing is likely to be faster" in finding.advice


def test_disk_space_that_is_not_there_is_a_failure(tmp_path: Path) -> None:
    found = findings(Config(MEMORY, FileConfig((tmp_path,), 8 << 50)))
    assert found["disk space"].verdict is Verdict.FAIL
    assert "lower file.capacity" in found["disk space"].advice


def test_few_file_descriptors_are_a_warning(tmp_path: Path) -> None:
    def few() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))

    output = subprocess.run(
        [sys.executable, "-m", "kvstore", "doctor", "--json"],
        env={"PATH": os.environ["PATH"], "KVSTORE_MEMORY_CAPACITY": "64MiB"},
        preexec_fn=few,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    finding = next(row for row in json.loads(output) if row["name"] == "file descriptors")
    assert finding == {"name": "file descriptors", "verdict": "warn", "found": "256", "advice": "ulimit -n 1024"}


# ---- servers


def test_a_server_is_asked_what_it_is_and_holds() -> None:
    with ValkeyServer(maxmemory="64mb") as server:
        server.command("SET", "x", "y")
        (report,) = survey(RedisConfig(server.url))
    assert report.version.startswith("valkey 9.")
    assert report.max_bytes == 64 << 20
    assert 0 < report.used_bytes < 64 << 20
    assert report.num_keys == 1
    assert (report.eviction, report.advice, report.error) == ("allkeys-lru", "", "")


def test_a_server_that_evicts_nothing_is_a_warning() -> None:
    with ValkeyServer(maxmemory_policy="noeviction") as server:
        finding = findings(Config(MEMORY, redis=RedisConfig(server.url)))[f"redis at 127.0.0.1:{server.port}"]
    assert finding.verdict is Verdict.WARN
    assert "allkeys-lru" in finding.advice


def test_a_server_that_hangs_or_is_gone_is_a_failure() -> None:
    with ValkeyServer() as server:
        config = RedisConfig(server.url)
        server.pause()
        (hung,) = survey(config)
        server.resume()
        server.kill()
        (gone,) = survey(config)
    assert "deadline" in hung.error or "timed out" in hung.error
    assert "refused" in gone.error


def test_a_login_that_is_refused_is_a_failure_that_does_not_tell_the_password() -> None:
    with ValkeyServer(requirepass="right") as server:
        (report,) = survey(RedisConfig(server.url, password="hunter2"))
        assert "refuses" in report.error
        assert "hunter2" not in repr(report)
        (report,) = survey(RedisConfig(server.url, password="right"))
        assert not report.error


def test_every_server_of_a_cluster_is_asked() -> None:
    with valkey_cluster() as servers:
        hosts = ",".join(f"127.0.0.1:{server.port}" for server in servers)
        reports = survey(RedisConfig(f"redis+cluster://{hosts}"))
    assert {report.address for report in reports} == {f"127.0.0.1:{server.port}" for server in servers}
    assert not any(report.error for report in reports)
