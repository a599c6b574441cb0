"""Configuration: file and environment, errors that name key, value, source and remedy, secrets that stay secret."""

import os
from pathlib import Path

import pytest

from kvstore.config import SETTINGS, Config, FileConfig, MemoryConfig, RedisConfig, effective, gather
from kvstore.errors import ConfigError
from kvstore.machine import by_file_system, disk_bytes, memory_bytes, memory_limit_bytes, room_bytes

COMPLETE = """
policy = "lru"
max_age = "24h"
prefetch_deadline = "250ms"
prefill_tokens_per_s = 20000

[memory]
capacity = "8GiB"

[file]
directories = ["/mnt/nvme0/kv", "/mnt/nvme1/kv"]
capacity = "1.5TiB"
write_per_day = "2TB"
admission = "second_touch"

[redis]
url = "rediss://valkey:6380/3"
ttl = "30m"
codec = "zstd"
admission = "on_evict"
username = "kv"
password = "hunter2"
tls_ca_file = "/etc/ca.pem"
tls_cert_file = "/etc/cert.pem"
tls_key_file = "/etc/key.pem"
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "kvstore.toml"
    path.write_text(COMPLETE)
    return path


def test_every_setting_of_the_file_arrives(path: Path) -> None:
    assert Config.load(path, {}) == Config(
        memory=MemoryConfig(capacity_bytes=8 << 30),
        file=FileConfig(
            directories=(Path("/mnt/nvme0/kv"), Path("/mnt/nvme1/kv")),
            capacity_bytes=3 << 39,
            write_bytes_per_day=2 * 10**12,
            admission="second_touch",
        ),
        redis=RedisConfig(
            url="rediss://valkey:6380/3",
            ttl_s=1800,
            codec="zstd",
            admission="on_evict",
            username="kv",
            password="hunter2",
            tls_ca_file="/etc/ca.pem",
            tls_cert_file="/etc/cert.pem",
            tls_key_file="/etc/key.pem",
        ),
        policy="lru",
        max_age_s=86400,
        prefetch_deadline_ms=250,
        prefill_tokens_per_s=20000,
    )


def test_defaults_are_ram_alone() -> None:
    config = Config.load(None, {})
    assert config.memory.capacity_bytes == 4 << 30
    assert (config.file, config.redis, config.max_age_s) == (None, None, 0)


def test_the_environment_wins_over_the_file(path: Path) -> None:
    environ = {
        "KVSTORE_MEMORY_CAPACITY": "0",
        "KVSTORE_FILE_DIRECTORIES": "/a:/b",
        "KVSTORE_REDIS_URL": "",
        "HOME": "/root",
    }
    config = Config.load(path, environ)
    assert config.memory.capacity_bytes == 0
    assert config.file is not None
    assert config.file.directories == (Path("/a"), Path("/b"))
    assert config.file.capacity_bytes == 3 << 39
    assert config.redis is None


def test_a_rate_is_a_number_in_the_file_and_its_digits_in_the_environment(path: Path) -> None:
    assert Config.load(path, {"KVSTORE_PREFILL_TOKENS_PER_S": "52000"}).prefill_tokens_per_s == 52000
    assert Config.load(None, {}).prefill_tokens_per_s == 0


def test_the_environment_names_the_file(path: Path) -> None:
    assert Config.load(None, {"KVSTORE_CONFIG": str(path)}) == Config.load(path, {})


def test_one_directory_needs_no_list() -> None:
    config = Config.from_mapping({"file": {"directories": "/kv", "capacity": "1GB"}})
    assert config.file is not None
    assert config.file.directories == (Path("/kv"),)


def test_variables_that_kubernetes_sets_for_a_service_called_kvstore_are_left_alone() -> None:
    environ = {
        "KVSTORE_SERVICE_HOST": "10.0.0.7",
        "KVSTORE_SERVICE_PORT": "50051",
        "KVSTORE_SERVICE_PORT_GRPC": "50051",
        "KVSTORE_PORT": "tcp://10.0.0.7:50051",
        "KVSTORE_PORT_50051_TCP": "tcp://10.0.0.7:50051",
        "KVSTORE_PORT_50051_TCP_ADDR": "10.0.0.7",
    }
    assert Config.load(None, environ) == Config.load(None, {})


@pytest.mark.parametrize(
    ("mapping", "words"),
    [
        ({"memroy": {"capacity": "8GiB"}}, ["memroy.capacity", "memory.capacity"]),
        ({"memory": {"capasity": "8GiB"}}, ["memory.capasity", "memory.capacity"]),
        ({"polcy": "lru"}, ["polcy", "policy"]),
        ({"memory": "8GiB"}, ["memory is no setting", "memory.capacity"]),
        ({"redis": {"tls": {"ca_file": "x"}}}, ["redis.tls is no setting"]),
    ],
)
def test_an_unknown_key_names_the_nearest_one(mapping: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.from_mapping(mapping)
    assert all(word in str(caught.value) for word in words)


def test_an_unknown_variable_names_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match=r"KVSTORE_MEM_CAPACITY .* KVSTORE_MEMORY_CAPACITY"):
        Config.load(None, {"KVSTORE_MEM_CAPACITY": "8GiB"})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("memory.capacity", 8),
        ("memory.capacity", "lots"),
        ("memory.capacity", "-8GiB"),
        ("memory.capacity", "8Gb"),
        ("memory.capacity", True),
        ("max_age", "1.5ms"),
        ("max_age", "250ms"),
        ("prefill_tokens_per_s", -1),
        ("prefill_tokens_per_s", 1.5),
        ("prefill_tokens_per_s", True),
        ("prefill_tokens_per_s", "fast"),
        ("prefill_tokens_per_s", 1 << 32),
        ("policy", 3),
        ("file.directories", ["relative/kv"]),
        ("file.directories", ["/kv", "/kv"]),
        ("file.directories", [3]),
        ("file.admission", "sometimes"),
        ("redis.url", "http://valkey"),
        ("redis.codec", "zip"),
        ("policy", "fancy"),
    ],
)
def test_a_bad_value_is_told_with_key_value_source_and_an_example(tmp_path: Path, key: str, value: object) -> None:
    table, _, name = key.rpartition(".")
    path = tmp_path / "bad.toml"
    literal = {True: "true"}.get(value) if isinstance(value, bool) else repr(value).replace("'", '"')
    path.write_text((f"[{table}]\n" if table else "") + f"{name} = {literal}\n")
    with pytest.raises(ConfigError) as caught:
        Config.load(path, {})
    example = next(setting.example for setting in SETTINGS if setting.key == key)
    assert str(path) in str(caught.value)
    assert f"{key} = {literal}" in str(caught.value)
    assert f"write for example {name} = {example}" in str(caught.value)


def test_a_bad_variable_is_told_by_its_name() -> None:
    with pytest.raises(ConfigError, match=r'environment KVSTORE_MEMORY_CAPACITY: memory.capacity = "much"'):
        Config.load(None, {"KVSTORE_MEMORY_CAPACITY": "much"})


def test_the_examples_together_are_a_configuration(tmp_path: Path) -> None:
    path = tmp_path / "example.toml"
    path.write_text("\n".join(f"{setting.key} = {setting.example}" for setting in SETTINGS))
    config = Config.load(path, {})
    assert config.file is not None
    assert config.redis is not None


@pytest.mark.parametrize(
    ("mapping", "words"),
    [
        ({"file": {"directories": ["/kv"]}}, "without a file.capacity"),
        ({"file": {"directories": ["/kv"], "capacity": "0"}}, "without a file.capacity"),
        ({"file": {"capacity": "1TB"}}, "file.directories is not"),
        ({"redis": {"ttl": "1h"}}, "redis.url is not"),
    ],
)
def test_half_a_tier_is_an_error(mapping: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Config.from_mapping(mapping)


@pytest.mark.parametrize("content", [b"policy = lru", b"\xff\xfe"])
def test_a_broken_file_is_told_by_its_path(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"broken\.toml is no valid TOML"):
        Config.load(path, {})


def test_a_missing_file_is_told_by_its_path() -> None:
    with pytest.raises(ConfigError, match=r"/nowhere/kvstore.toml: No such file"):
        Config.load(Path("/nowhere/kvstore.toml"), {})


def test_the_effective_configuration_tells_where_each_value_is_from(path: Path) -> None:
    rows = {row.key: row for row in effective(gather(path, {"KVSTORE_POLICY": "lru"}))}
    assert set(rows) == {setting.key for setting in SETTINGS}
    assert (rows["policy"].value, rows["policy"].source) == ('"lru"', "environment KVSTORE_POLICY")
    assert (rows["file.capacity"].value, rows["file.capacity"].source) == ('"1.5TiB"', str(path))
    assert rows["file.directories"].value == '["/mnt/nvme0/kv", "/mnt/nvme1/kv"]'
    bare = {row.key: row for row in effective({})}
    assert (bare["memory.capacity"].value, bare["memory.capacity"].source) == ('"4GiB"', "default")


def test_secrets_are_never_shown() -> None:
    environ = {"KVSTORE_REDIS_URL": "redis://kv:hunter2@valkey:6379", "KVSTORE_REDIS_PASSWORD": "hunter3"}
    given = gather(None, environ)
    shown = repr(Config.from_given(given)) + repr(effective(given))
    assert "hunter" not in shown
    with pytest.raises(ConfigError) as caught:
        Config.load(None, {"KVSTORE_REDIS_URL": "http://kv:hunter2@valkey"})
    assert "hunter" not in str(caught.value)


# ---- against the machine


def test_memory_beyond_the_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"memory.capacity is 8PiB.*lower it"):
        Config(MemoryConfig(8 << 50)).validate_against_machine()
    Config(MemoryConfig(1 << 20)).validate_against_machine()


def test_disk_beyond_the_machine_is_refused_also_before_the_directory_exists(tmp_path: Path) -> None:
    directory = tmp_path / "not" / "yet"
    with pytest.raises(ConfigError, match=r"file.capacity needs 8PiB in .*lower file.capacity"):
        Config(MemoryConfig(0), FileConfig((directory,), 8 << 50)).validate_against_machine()
    Config(MemoryConfig(0), FileConfig((directory,), 1 << 20)).validate_against_machine()


def test_directories_on_one_file_system_share_its_room(tmp_path: Path) -> None:
    whole_bytes = disk_bytes(tmp_path)
    directories = (tmp_path / "a", tmp_path / "b")
    with pytest.raises(ConfigError, match=str(directories[1])):
        Config(MemoryConfig(0), FileConfig(directories, whole_bytes * 3 // 2)).validate_against_machine()
    assert by_file_system(directories) == [list(directories)]


def test_what_our_own_files_hold_counts_as_room(tmp_path: Path) -> None:
    empty, held = tmp_path / "empty", tmp_path / "held"
    empty.mkdir()
    held.mkdir()
    (held / "slots").write_bytes(bytes(64 << 20))
    os.sync()
    # others may write meanwhile, by less than the 64 MiB that it is about
    assert room_bytes([held]) - room_bytes([empty]) > 32 << 20


def test_a_file_that_goes_while_it_is_looked_at_has_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CR-004: of many that start at once, one renames its files while others look."""
    (tmp_path / "superblock.new").write_bytes(b"1")

    def listed_then_renamed(directory: Path) -> list[os.DirEntry[str]]:
        entries = list(scandir(directory))
        (tmp_path / "superblock.new").unlink()
        return entries

    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", listed_then_renamed)
    assert room_bytes([tmp_path]) > 0


def machine_root(tmp_path: Path, cgroup: str, limits: dict[str, str]) -> Path:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal:       16777216 kB\nMemFree: 1 kB\n")
    (tmp_path / "proc/self/cgroup").write_text(cgroup)
    for name, limit in limits.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(limit)
    return tmp_path


@pytest.mark.parametrize(
    ("cgroup", "limits", "expected_bytes"),
    [
        ("0::/\n", {}, 16 << 30),
        ("0::/a/b\n", {"a/b/memory.max": "max\n", "a/memory.max": "4294967296\n", "memory.max": "max\n"}, 4 << 30),
        ("0::/not/visible\n", {"memory.max": "2147483648\n"}, 2 << 30),
        ("4:memory:/x\n0::/\n", {"memory/x/memory.limit_in_bytes": "1073741824\n"}, 1 << 30),
        ("4:cpu,memory:/x\n", {"memory/x/memory.limit_in_bytes": "9223372036854771712\n"}, 16 << 30),
    ],
    ids=["none", "v2, set above", "v2, in a container", "v1", "v1, unlimited"],
)
def test_memory_is_what_the_tightest_control_group_allows(
    tmp_path: Path, cgroup: str, limits: dict[str, str], expected_bytes: int
) -> None:
    root = machine_root(tmp_path, cgroup, limits)
    assert memory_bytes(root) == expected_bytes
    assert memory_limit_bytes(root) == (None if expected_bytes == 16 << 30 else expected_bytes)
