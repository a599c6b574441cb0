"""The store over real files and a real Valkey: what it keeps, for whom, and who else can reach its RAM."""

import gc
import mmap
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.errors import ConfigError, KVStoreError, LayoutError, OwnershipError
from kvstore.layout import Layout
from kvstore.opening import open_store
from kvstore.testing.valkey import ValkeyServer
from kvstore.tiers.memory import Arena
from kvstore.types import BlockKey
from tests.real_stores import IDENTITY, LAYOUT, chain_of, config_of, content, get, opened, put


def test_a_restart_serves_from_file(tmp_path: Path) -> None:
    with opened(config_of(tmp_path / "kv")) as (store, ns):
        chain = chain_of(ns, 40)
        assert put(store, ns, chain) == set(chain)
        assert get(store, chain) == 40
    with opened(config_of(tmp_path / "kv")) as (store, _):
        assert store.lookup(chain).found == 40
        assert get(store, chain) == 40


def test_a_new_host_serves_from_redis(tmp_path: Path) -> None:
    with ValkeyServer() as server:
        with opened(config_of(tmp_path / "one", redis=server.url)) as (store, ns):
            chain = chain_of(ns, 40)
            put(store, ns, chain)
        with opened(config_of(tmp_path / "two", redis=server.url)) as (store, _):
            assert get(store, chain) == 40


def test_every_accepted_block_is_readable_though_ram_is_a_third_of_them(tmp_path: Path) -> None:
    """600 blocks through RAM that holds 200: what commit reported as accepted is there afterwards."""
    with opened(config_of(tmp_path / "kv", memory="6400KiB")) as (store, ns):
        chains = [chain_of(ns, 10, number) for number in range(60)]
        accepted: set[BlockKey] = set()
        for chain in chains:
            accepted |= put(store, ns, chain)
            store.poll()
        assert store.drain(30)
        assert accepted
        for chain in chains:
            prefix = next((index for index, key in enumerate(chain) if key not in accepted), len(chain))
            assert get(store, chain) >= prefix


def test_a_hung_tier_holds_no_more_than_a_share_of_ram() -> None:
    """Blocks on their way to a server that does not answer are pinned; most of RAM goes on without them."""
    with ValkeyServer() as server, opened(config_of(memory="32MiB", redis=server.url), 0.5) as (store, ns):
        put(store, ns, chain_of(ns, 1))
        assert store.drain(10)
        server.pause()
        for number in range(1, 5):
            put(store, ns, chain_of(ns, 200, number))
        pinned = sum(store.snapshot()["kvstore_pinned_blocks"].values())
        assert 0 < pinned * LAYOUT.block_bytes <= 16 << 20
        with store.reserve(ns, 1000) as lease:
            assert lease.num_blocks * LAYOUT.block_bytes >= 15 << 20
        server.resume()


def test_a_new_host_without_ram_loads_into_lent_buffers_from_redis() -> None:
    with ValkeyServer() as server:
        with opened(config_of(redis=server.url)) as (store, ns):
            put(store, ns, chain_of(ns, 40))
        with opened(config_of(memory="0", redis=server.url)) as (store, ns):
            chain = chain_of(ns, 50)
            prefetch = store.prefetch(chain, time.monotonic() + 5)
            while not prefetch.done:
                store.wait(0.02)
                store.poll()
            assert store.lookup(chain).found == 40
            lent = [memoryview(bytearray(LAYOUT.block_bytes)) for _ in chain]
            transfer = store.load_into(ns, chain, lent, time.monotonic() + 5)
            while transfer.busy:
                store.wait(0.02)
                store.poll()
            assert transfer.num_blocks == 40
            assert [bytes(buffer) for buffer in lent[:40]] == [content(key) for key in chain[:40]]


@pytest.mark.parametrize(
    "change",
    [
        {"weights": b"other weights"},
        {"salt": "another tenant"},
        {"epoch": 1},
        {"adapter": "lora"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_other_weights_tenants_epochs_and_adapters_are_a_miss(tmp_path: Path, change: dict[str, object]) -> None:
    """WK-012, WK-016, WK-017: the same tokens under the same model name."""
    with opened(config_of(tmp_path / "kv")) as (store, ns):
        put(store, ns, chain_of(ns, 4))
        other = store.open_namespace(replace(IDENTITY, **change), LAYOUT)  # type: ignore[arg-type]  # any field
        assert store.lookup(chain_of(other, 4)).found == 0
        assert get(store, chain_of(other, 4)) == 0


def test_bf16_stored_and_fp16_asked_is_a_miss(tmp_path: Path) -> None:
    """WK-012: as many bytes, another meaning."""
    with opened(config_of(tmp_path / "kv")) as (store, ns):
        put(store, ns, chain_of(ns, 4))
    with opened(config_of(tmp_path / "kv")) as (store, ns):
        half = store.open_namespace(IDENTITY, replace(LAYOUT, dtype="float16"))
        assert get(store, chain_of(half, 4)) == 0
        assert get(store, chain_of(ns, 4)) == 4


def test_another_process_can_map_the_arena() -> None:
    """By its descriptor, as a sidecar's client does; the very bytes, no copy."""
    with opened(config_of()) as (store, ns):
        (key,) = chain = chain_of(ns, 1)
        put(store, ns, chain)
        assert isinstance(store.arena, Arena)
        program = (
            "import mmap, sys; m = mmap.mmap(int(sys.argv[1]), int(sys.argv[2]));"
            "sys.stdout.buffer.write(m[: int(sys.argv[3])]); m[0:4] = b'seen'"
        )
        arguments = [str(store.arena.fd), str(mmap.PAGESIZE * 16), str(LAYOUT.block_bytes)]
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments], pass_fds=[store.arena.fd], capture_output=True, check=True
        )
        assert done.stdout == content(key)
        with store.pin(chain) as lease:
            assert bytes(lease.views[0][:4]) == b"seen"


def test_adjacent_slots_are_adjacent_in_memory() -> None:
    with opened(config_of()) as (store, ns), store.reserve(ns, 8) as lease:
        assert lease.slots == list(range(8))
        assert isinstance(store.arena, Arena)
        whole = store.arena.view(0, 8 * LAYOUT.block_bytes)
        for index, view in enumerate(lease.views):
            view[:] = bytes([index]) * LAYOUT.block_bytes
        assert [whole[index * LAYOUT.block_bytes] for index in range(8)] == list(range(8))


def test_opening_and_closing_leaves_nothing_behind(tmp_path: Path) -> None:
    """LK-018: no descriptor and no thread."""
    with ValkeyServer() as server:
        config = config_of(tmp_path / "kv", redis=server.url)

        def cycle() -> None:
            with opened(config) as (store, ns):
                put(store, ns, chain_of(ns, 4))
                get(store, chain_of(ns, 6))

        def held() -> tuple[int, int]:
            gc.collect()
            for thread in threading.enumerate():
                if thread.name.startswith("kvstore-"):
                    thread.join(10)  # they were told to end; give them the time
            return len(os.listdir("/proc/self/fd")), threading.active_count()

        cycle()
        num_fds, num_threads = held()
        for _ in range(5):
            cycle()
        after = held()
        assert after[0] <= num_fds
        assert after[1] <= num_threads


def test_two_stores_cannot_own_one_directory(tmp_path: Path) -> None:
    with opened(config_of(tmp_path / "kv")), pytest.raises(OwnershipError, match="kvstore serve"):
        open_store(config_of(tmp_path / "kv"))


def test_a_capacity_above_the_machine_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"memory\.capacity"):
        open_store(config_of(memory="1000TiB"))


def test_a_layout_larger_than_a_tier_is_an_error() -> None:
    with opened(config_of(memory="64KiB")) as (store, _), pytest.raises(LayoutError, match="raise"):
        store.open_namespace(IDENTITY, Layout("float32", 32, 8, (128, 128), 16))


def test_a_failed_opening_gives_the_directory_back(tmp_path: Path) -> None:
    bad = config_of(tmp_path / "kv", redis="rediss://127.0.0.1:1")
    assert bad.redis is not None
    bad = replace(bad, redis=replace(bad.redis, tls_ca_file=str(tmp_path / "missing.pem")))
    with pytest.raises(KVStoreError):
        open_store(bad)
    with opened(config_of(tmp_path / "kv")):
        pass
