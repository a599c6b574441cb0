"""The store when real tiers break: damaged files and values, a hung and a killed server, a full disk, kill -9."""

import os
import shutil
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import cast

import pytest

from kvstore.breaker import FAILURES_TO_OPEN, BreakerState
from kvstore.namespace import Namespace
from kvstore.store import Store
from kvstore.testing.valkey import ValkeyServer, wait_until
from kvstore.tiers.file import FileTier
from kvstore.tiers.file_directory import BLOCKS, SLOTS
from kvstore.tiers.file_geometry import ENTRY_BYTES, file_slot_bytes
from tests.real_stores import LAYOUT, chain_of, config_of, get, opened, put


def wait_until_used(store: Store, ns: Namespace, tier: str) -> None:
    """Let the store ask the tier until that is in use again; till then nothing would be written to it."""

    def is_used() -> bool:
        get(store, chain_of(ns, 1, number=999), seconds=0.5)
        return store.health()[tier] is BreakerState.CLOSED

    wait_until(is_used, f"the {tier} tier to be used again")


@pytest.mark.parametrize("damage", ["bit", "random", "zeros", "header"])
def test_a_damaged_file_costs_its_block_and_serves_the_prefix(tmp_path: Path, damage: str) -> None:
    """WK-052, CR-045: a flipped bit, random bytes of the right length, a hole; never a wrong byte."""
    with opened(config_of(tmp_path / "kv")) as (store, ns):
        chain = chain_of(ns, 20)
        put(store, ns, chain)
    name, slot_bytes = (SLOTS, ENTRY_BYTES) if damage == "header" else (BLOCKS, LAYOUT.block_bytes)
    with (tmp_path / "kv" / name).open("r+b") as file:
        for slot in range(12, 20):
            start = slot * slot_bytes
            file.seek(start + 77)
            was = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            if damage in ("bit", "header"):
                file.write(bytes([was[0] ^ 4]))
            else:
                file.seek(start)
                file.write(os.urandom(LAYOUT.block_bytes) if damage == "random" else bytes(LAYOUT.block_bytes))
    with opened(config_of(tmp_path / "kv")) as (store, ns):
        served = get(store, chain)
        assert 0 < served < 20
        put(store, ns, chain)
        assert store.drain(10)
    with opened(config_of(tmp_path / "kv")) as (store, _):
        assert get(store, chain) == 20, "what was damaged was not stored anew"


def test_a_damaged_value_costs_its_block_and_serves_the_prefix() -> None:
    with ValkeyServer() as server:
        with opened(config_of(redis=server.url)) as (store, ns):
            chain = chain_of(ns, 10)
            put(store, ns, chain)
        names = [f"tkv1:{key[:16].hex()}:{{{key[16:].hex()}}}" for key in chain]
        with server.client() as client:
            value = bytearray(cast(bytes, client.get(names[6])))
            value[5000] ^= 1
            client.set(names[6], bytes(value))
            client.set(names[8], cast(bytes, client.get(names[9])))
        with opened(config_of(redis=server.url)) as (store, _):
            assert get(store, chain) == 6


def test_a_hung_server_costs_its_deadline_and_ram_and_files_go_on(tmp_path: Path) -> None:
    """Redis stopped with SIGSTOP: RAM answers in its own time, files serve, health tells, and it is used again."""
    with ValkeyServer() as server, opened(config_of(tmp_path / "kv", redis=server.url), 2.0) as (store, ns):
        chain, there = chain_of(ns, 10), chain_of(ns, 10, number=1)
        put(store, ns, chain)
        put(store, ns, there)
        assert store.drain(10)
        server.pause()
        longer = chain_of(ns, 12)
        assert get(store, longer, seconds=0.3) == 10  # the rest may be on the server, which cannot say
        for _ in range(FAILURES_TO_OPEN):
            get(store, longer, seconds=0.1)
        assert store.health()["redis"] is BreakerState.OPEN
        assert get(store, there) == 10  # RAM
        store.evict(1000)
        assert get(store, there) == 10  # files
        server.resume()
        wait_until_used(store, ns, "redis")


def test_a_killed_server_is_used_again_when_it_is_back(tmp_path: Path) -> None:
    with ValkeyServer() as server, opened(config_of(redis=server.url), 2.0) as (store, ns):
        put(store, ns, chain_of(ns, 4))
        assert store.drain(10)
        server.kill()
        for number in range(1, 8):
            put(store, ns, chain_of(ns, 4, number))
            assert get(store, chain_of(ns, 4, number)) == 4
            store.drain(1)
        assert store.health()["redis"] is not BreakerState.CLOSED
        server.start()
        wait_until_used(store, ns, "redis")
        assert store.drain(10)
        chain = chain_of(ns, 4, 1000)
        put(store, ns, chain)
        assert store.drain(10)
        store.evict(1000)
        assert get(store, chain) == 4


def test_a_store_starts_while_its_server_is_absent() -> None:
    with opened(config_of(redis="redis://127.0.0.1:1"), 2.0) as (store, ns):
        chain = chain_of(ns, 4)
        put(store, ns, chain)
        assert get(store, chain) == 4


def write_until_killed(directory: Path, start: int) -> None:
    """In a child process: store chains, and say which are below for good."""
    with opened(config_of(directory)) as (store, ns):
        for number in range(start, start + 100_000):
            accepted = put(store, ns, chain_of(ns, 6, number))
            store.drain(10)
            print(number, len(accepted), flush=True)  # noqa: T201 - the parent reads it


def test_kill_9_while_writing_loses_no_block_that_was_below(tmp_path: Path) -> None:
    """LK-019: kill, open again, several times: no wrong byte, and what an earlier run had stored is there."""
    directory = tmp_path / "kv"
    stored: list[int] = []
    for round_number in range(4):
        call = f"write_until_killed(Path({str(directory)!r}), {1000 * round_number})"
        program = f"from tests.fault.test_store_tiers import *; {call}"
        child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        for _ in range(8 + 5 * round_number):
            number, accepted = map(int, child.stdout.readline().split())
            if accepted == 6:
                stored.append(number)
        child.send_signal(signal.SIGKILL)
        child.stdout.close()
        child.wait()
        with closing(FileTier([directory], 64 << 20)) as tier:
            num_on_file = sum(1 for _ in tier.scan())
        with opened(config_of(directory)) as (store, ns):
            used_bytes = num_on_file * (file_slot_bytes(LAYOUT.block_bytes) + ENTRY_BYTES)
            assert store.snapshot()["kvstore_used_bytes"]["file",] == used_bytes
            assert stored
            for number in stored:
                assert get(store, chain_of(ns, 6, number)) == 6


def fill_a_small_disk(mount: Path) -> None:
    """CR-015: serving goes on while the disk is full, and writing goes on in place of old blocks."""
    with opened(config_of(mount / "kv", file="120MiB")) as (store, ns):
        (mount / "stranger").write_bytes(bytes(90 << 20))
        chains = [chain_of(ns, 40, number) for number in range(100)]
        for chain in chains:
            put(store, ns, chain)
            assert store.drain(10)
            assert get(store, chain) == 40
        assert store.health()["file"] is BreakerState.CLOSED
    with opened(config_of(mount / "kv", file="120MiB")) as (store, _):
        served = [get(store, chain) for chain in chains]
        assert served[-1] == 40, "the newest chain was not written"


def test_a_full_disk_is_no_failure(tmp_path: Path) -> None:
    unshare = shutil.which("unshare")
    prefix = [unshare or "", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]
    if unshare is None or subprocess.run([*prefix, "true"], check=False, capture_output=True).returncode != 0:
        pytest.skip("no mount namespace can be made here: needs unshare, and root or user namespaces")
    script = f'mount -t tmpfs -o size=180m,mode=700 kvstore-test "{tmp_path}" && exec "$@"'
    program = f"from tests.fault.test_store_tiers import *; fill_a_small_disk(Path({str(tmp_path)!r}))"
    command = [*prefix, "sh", "-c", script, "sh", sys.executable, "-c", program]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("how", ["hung", "killed"])
def test_a_namespace_cleared_while_its_server_is_away_is_gone_when_it_is_back(how: str) -> None:
    """WK-019: nothing of it is served meanwhile, and nothing is left in the end."""
    with ValkeyServer() as server, opened(config_of(redis=server.url), 1.0) as (store, ns):
        chain = chain_of(ns, 20)
        put(store, ns, chain)
        assert store.drain(10)
        if how == "hung":
            server.pause()
        else:
            server.kill()
        for number in range(FAILURES_TO_OPEN):
            get(store, chain_of(ns, 5, number + 1), seconds=0.1)
        assert store.clear(ns) == 20
        assert get(store, chain, seconds=0.1) == 0
        if how == "hung":
            server.resume()
            assert store.lookup(chain).found == 0
        else:
            server.start()
            with opened(config_of(redis=server.url)) as (other, _):  # as if its blocks had been saved
                put(other, ns, chain)
        assert store.drain(20)
        assert server.command("DBSIZE") == 0
        wait_until_used(store, ns, "redis")  # or that nothing is found would say nothing of the server
        assert get(store, chain, seconds=0.5) == 0
        put(store, ns, chain)
        assert store.drain(10)
        assert server.command("DBSIZE") == 20
