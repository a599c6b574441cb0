"""The command line as a person meets it: in a process of its own."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvstore.errors import OwnershipError
from kvstore.layout import Layout
from kvstore.testing.blocks import full_move, key_of, layout_of
from kvstore.testing.valkey import ValkeyServer
from kvstore.tiers.base import BlockMove
from kvstore.tiers.file import FileTier
from kvstore.tiers.file_blocks import open_existing
from kvstore.tiers.file_directory import BLOCKS, LOCK, Access
from kvstore.tiers.redis import RedisTier
from kvstore.types import BlockKey, Outcome

ENVIRONMENT = {"PATH": os.environ["PATH"], "HOME": "/", "COLUMNS": "100"}


def kvstore(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvstore", *words],
        env=ENVIRONMENT | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def assert_error(result: subprocess.CompletedProcess[str], *words: str) -> None:
    """Exit code 2, one line, no traceback."""
    assert result.returncode == 2
    assert result.stderr.startswith("kvstore: ")
    assert result.stderr.count("\n") == 1
    assert all(word in result.stderr for word in words), result.stderr


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "kvstore.toml"
    path.write_text('[memory]\ncapacity = "64MiB"\n')
    return path


COMMANDS = ("serve", "top", "stats", "check", "evict", "doctor", "config")


def test_help_lists_the_commands() -> None:
    result = kvstore("--help")
    assert result.returncode == 0
    assert all(f"  {command} " in result.stdout for command in COMMANDS)
    assert "..." not in result.stdout.partition("Commands:")[2]  # each is told in a line


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str) -> None:
    result = kvstore(command, "--help")
    assert result.returncode == 0
    assert "--config" in result.stdout


def test_no_command_at_all_shows_the_help() -> None:
    assert "Commands:" in kvstore().stderr + kvstore().stdout


def test_an_unknown_command_is_an_error() -> None:
    result = kvstore("frobnicate")
    assert result.returncode == 2
    assert "frobnicate" in result.stderr


def test_version() -> None:
    assert kvstore("--version").stdout.startswith("kvstore 0.")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_mistake_in_the_configuration_is_one_line_on_stderr(path: Path, command: str) -> None:
    path.write_text('[memory]\ncapasity = "64MiB"\n')
    words = ["--namespace", "00" * 16] if command == "evict" else []
    assert_error(kvstore(command, "-c", str(path), *words), str(path), "memory.capasity", "memory.capacity")


# ---- config


def test_config_prints_values_with_their_sources(path: Path) -> None:
    result = kvstore("config", "--config", str(path), KVSTORE_MAX_AGE="24h")
    assert result.returncode == 0
    rows = {line.split()[0]: line for line in result.stdout.splitlines() if line.strip()}
    assert '"64MiB"' in rows["memory.capacity"]
    assert str(path) in rows["memory.capacity"]
    assert '"24h"' in rows["max_age"]
    assert "environment KVSTORE_MAX_AGE" in rows["max_age"]
    assert "default" in rows["policy"]


def test_config_prints_addresses_in_brackets_as_they_are() -> None:
    result = kvstore("config", KVSTORE_REDIS_URL="redis://[fe80::1]:6379", KVSTORE_MEMORY_CAPACITY="1MiB")
    assert '"redis://[fe80::1]:6379"' in result.stdout


def test_config_as_json_masks_secrets(path: Path) -> None:
    result = kvstore(
        "config", "--json", KVSTORE_CONFIG=str(path), KVSTORE_REDIS_URL="redis://h", KVSTORE_REDIS_PASSWORD="hunter2"
    )
    rows = {row["key"]: row for row in json.loads(result.stdout)}
    assert rows["memory.capacity"] == {"key": "memory.capacity", "value": '"64MiB"', "source": str(path)}
    assert rows["redis.password"]["value"] == '"***"'
    assert "hunter2" not in result.stdout


def test_config_beyond_the_machine_is_shown_and_then_an_error(path: Path) -> None:
    path.write_text('[memory]\ncapacity = "8PiB"\n')
    result = kvstore("config", "-c", str(path))
    assert '"8PiB"' in result.stdout
    assert_error(result, "memory.capacity is 8PiB", "lower it")


# ---- doctor


def test_doctor_exits_with_1_where_something_fails(path: Path) -> None:
    path.write_text('[memory]\ncapacity = "1MiB"\n[redis]\nurl = "redis://127.0.0.1:1"\n')
    result = kvstore("doctor", "-c", str(path))
    assert result.returncode == 1
    assert "fail" in result.stdout
    assert "redis at 127.0.0.1:1" in result.stdout
    assert "to do: check redis.url" in result.stdout


def test_doctor_as_json_is_one_document(path: Path) -> None:
    result = kvstore("doctor", "-c", str(path), "--json")
    assert result.returncode == 0
    rows = json.loads(result.stdout)
    assert {"name", "verdict", "found", "advice"} == set(rows[0])
    assert {row["verdict"] for row in rows} <= {"ok", "warn"}


# ---- Redis


NAMESPACE, OTHER = bytes(range(16)), bytes(16)


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyServer]:
    with ValkeyServer() as server:
        yield server


def test_stats_tells_what_the_servers_hold(server: ValkeyServer) -> None:
    server.command("FLUSHALL")
    store_on_redis(server.url, NAMESPACE, 3)
    result = kvstore("stats", "--json", KVSTORE_REDIS_URL=server.url, KVSTORE_MEMORY_CAPACITY="64MiB")
    assert result.returncode == 0
    document = json.loads(result.stdout)
    assert document["memory"] == {"capacity_bytes": 64 << 20}
    assert document["redis"][0]["num_keys"] == 3
    table = kvstore("stats", KVSTORE_REDIS_URL=server.url).stdout
    assert f"127.0.0.1:{server.port}" in table
    assert "allkeys-lru" in table


def test_stats_tells_of_a_server_that_is_gone() -> None:
    result = kvstore("stats", KVSTORE_REDIS_URL="redis://127.0.0.1:1")
    assert result.returncode == 0
    assert "refused" in result.stdout


def test_evict_clears_a_namespace_and_no_other(server: ValkeyServer) -> None:
    server.command("FLUSHALL")
    store_on_redis(server.url, NAMESPACE, 3)
    store_on_redis(server.url, OTHER, 2)
    result = kvstore("evict", "--namespace", NAMESPACE.hex(), KVSTORE_REDIS_URL=server.url)
    assert (result.returncode, result.stdout) == (0, "redis: 3 blocks freed\n")
    assert server.command("DBSIZE") == 2


def test_evict_without_its_server_is_an_error_and_not_nothing_freed() -> None:
    result = kvstore("evict", "--namespace", NAMESPACE.hex(), KVSTORE_REDIS_URL="redis://127.0.0.1:1")
    assert_error(result, "127.0.0.1:1", "refused")


def test_evict_without_a_lower_tier_is_an_error() -> None:
    assert_error(kvstore("evict", "--namespace", NAMESPACE.hex()), "KVSTORE_REDIS_URL")


@pytest.mark.parametrize("text", ["", "abc", "zz" * 16, "00" * 15])
def test_evict_takes_whole_namespaces_only(text: str) -> None:
    result = kvstore("evict", "--namespace", text, KVSTORE_REDIS_URL="redis://127.0.0.1:1")
    assert result.returncode == 2
    assert "not 32 hex digits" in result.stderr


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A file tier with three blocks of one namespace and two of another."""
    directory = tmp_path / "kv"
    with closing(FileTier([directory], 64 << 20)) as tier:
        for number in range(5):
            namespace = NAMESPACE if number < 3 else OTHER
            move = full_move(tier, number, layout_of(4096))
            move.key = key_of(number, namespace)
            assert tier.write([move], time.monotonic() + 10) == [Outcome.OK]
    return directory


def on_file(directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return kvstore(*words, KVSTORE_FILE_DIRECTORIES=str(directory), KVSTORE_FILE_CAPACITY="64MiB")


def test_stats_tells_what_lies_on_file(directory: Path) -> None:
    held = json.loads(on_file(directory, "stats", "--json").stdout)["file"]
    assert {(holding["namespace"], holding["num_blocks"]) for holding in held} == {
        (NAMESPACE.hex(), 3),
        (OTHER.hex(), 2),
    }
    assert NAMESPACE.hex() in on_file(directory, "stats").stdout


def test_stats_names_the_process_that_has_the_files_open(directory: Path) -> None:
    with closing(FileTier([directory], 64 << 20)):
        result = on_file(directory, "stats")
    assert result.returncode == 0
    assert str(os.getpid()) in result.stdout


def test_check_finds_a_flipped_bit_and_repair_erases_the_block(directory: Path) -> None:
    assert on_file(directory, "check").returncode == 0
    with (directory / BLOCKS).open("r+b") as file:
        file.seek(4096 + 7)  # the payload of the second block
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    result = on_file(directory, "check")
    assert result.returncode == 1
    assert "1 damaged" in result.stdout
    assert on_file(directory, "check", "--repair").returncode == 0
    assert "5 blocks" not in on_file(directory, "check").stdout


def test_check_names_the_process_that_has_the_files_open(directory: Path) -> None:
    with closing(FileTier([directory], 64 << 20)):
        assert_error(on_file(directory, "check"), str(os.getpid()))


def test_check_makes_no_store_where_none_is(tmp_path: Path) -> None:
    assert_error(on_file(tmp_path / "nothing", "check"), "not there")
    assert not (tmp_path / "nothing").exists()


def files_in(directory: Path) -> dict[str, tuple[int, int, bytes]]:
    """Everything that a look may not change."""
    return {
        found.name: (found.stat().st_mtime_ns, found.stat().st_blocks, found.read_bytes())
        for found in sorted(directory.iterdir())
    }


@pytest.mark.parametrize("words", [("stats",), ("check",)])
@pytest.mark.parametrize("capacity", ["128KiB", "1GiB"])
def test_looking_changes_nothing_whatever_the_capacity(directory: Path, words: tuple[str, ...], capacity: str) -> None:
    """A shell that has another configuration than the engine: what is looked at is what is there."""
    before = files_in(directory)
    environment = {"KVSTORE_FILE_DIRECTORIES": str(directory), "KVSTORE_FILE_CAPACITY": capacity}
    result = kvstore(*words, **environment)
    assert result.returncode == 0, result.stderr
    if "check" in words:
        assert "5" in result.stdout
    else:
        assert NAMESPACE.hex() in result.stdout
        assert OTHER.hex() in result.stdout
    assert files_in(directory) == before


def test_repair_and_evict_cut_nothing_off(directory: Path) -> None:
    """They erase blocks, and leave the size of the store to its owner."""
    environment = {"KVSTORE_FILE_DIRECTORIES": str(directory), "KVSTORE_FILE_CAPACITY": "128KiB"}
    sizes = {name: len(data) for name, (_, _, data) in files_in(directory).items() if name != LOCK}
    assert kvstore("check", "--repair", **environment).returncode == 0
    assert kvstore("evict", "--namespace", OTHER.hex(), **environment).stdout == "file: 2 blocks freed\n"
    assert {name: len(data) for name, (_, _, data) in files_in(directory).items() if name != LOCK} == sizes
    assert "3 blocks" in on_file(directory, "check").stdout


@pytest.mark.parametrize("command", ["stats", "check"])
def test_looking_into_an_empty_directory_makes_nothing(tmp_path: Path, command: str) -> None:
    tmp_path.chmod(0o755)
    result = on_file(tmp_path, command)
    if command == "stats":
        assert "no blocks" in result.stdout
    else:
        assert_error(result, "not there")
    assert list(tmp_path.iterdir()) == []
    assert tmp_path.stat().st_mode & 0o777 == 0o755


def test_two_may_look_at_once_and_an_owner_waits_for_them(directory: Path) -> None:
    with closing(open_existing([directory], access=Access.LOOK)):
        assert on_file(directory, "check").returncode == 0
        with pytest.raises(OwnershipError, match="looked at"):
            FileTier([directory], 64 << 20)
    with closing(FileTier([directory], 64 << 20)) as tier:
        assert len(list(tier.scan())) == 5


def test_evict_frees_a_namespace_or_a_size_on_file(directory: Path) -> None:
    assert on_file(directory, "evict", "--namespace", OTHER.hex()).stdout == "file: 2 blocks freed\n"
    assert on_file(directory, "evict", "--size", "8KiB").stdout == "file: 2 blocks freed\n"
    assert "1 blocks" in on_file(directory, "check").stdout


def test_evict_wants_to_know_what(directory: Path) -> None:
    assert on_file(directory, "evict").returncode == 2
    assert on_file(directory, "evict", "--size", "much").returncode == 2


def store_on_redis(url: str, namespace: bytes, num_blocks: int) -> None:
    layout = Layout("uint8", 1, 1, (4096,), 1)
    moves = [
        BlockMove(
            key=BlockKey(namespace + index.to_bytes(32, "big")),
            parent=None,
            layout=layout,
            buffer=memoryview(bytearray(layout.block_bytes)),
            offset_bytes=0,
            created_unix_s=int(time.time()),
        )
        for index in range(num_blocks)
    ]
    tier = RedisTier(url)
    assert tier.write(moves, time.monotonic() + 10) == [Outcome.OK] * num_blocks
    tier.close()
