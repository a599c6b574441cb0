"""A sidecar answers at once, however much memory it has to make, files to look at, or servers to wait for."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvstore.config import Config
from kvstore.namespace import Namespace
from kvstore.opening import open_shared_store
from kvstore.slot_level import SlotLevel
from kvstore.store import Store
from kvstore.testing.file_faults import Fault, FaultyFiles, stalls
from kvstore.testing.sidecar import Sidecar, eventually
from kvstore.tiers.domains import DomainMemoryTier
from kvstore.tiers.file import FileTier
from kvstore.tiers.file_directory import SLOTS
from tests.real_stores import IDENTITY, LAYOUT, chain_of, config_of, get, opened, put

NS = Namespace(IDENTITY, LAYOUT)


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    """A directory with twenty blocks from before."""
    with opened(config_of(tmp_path / "kv")) as (store, ns):
        put(store, ns, chain_of(ns, 20))
        assert store.drain(10)
    return tmp_path / "kv"


@pytest.fixture
def store() -> Iterator[Store]:
    store, _ = open_shared_store(Config.from_mapping({"memory": {"capacity": "4MiB"}}), 1)
    memory = store.memory_tier
    assert isinstance(memory, DomainMemoryTier)
    eventually(lambda: memory.usable_bytes == memory.capacity_bytes)
    yield store
    store.close()


def test_a_store_answers_while_its_files_are_scanned(store: Store, filled: Path) -> None:
    files, has_begun, may_go_on = FaultyFiles(), threading.Event(), threading.Event()
    tier = FileTier([filled], 64 << 20, files=files)
    files.inject(Fault("preadv", stalls(has_begun, may_go_on), file=SLOTS))
    levels: list[SlotLevel] = []
    thread = threading.Thread(target=lambda: levels.append(store.scanned(tier)))
    thread.start()
    assert has_begun.wait(10)
    ns = store.open_namespace(IDENTITY, LAYOUT)
    put(store, ns, chain_of(ns, 3, 1))
    assert get(store, chain_of(ns, 3, 1)) == 3
    assert get(store, chain_of(ns, 20)) == 0
    may_go_on.set()
    thread.join()
    store.join_file(levels[0])
    assert store.lookup(chain_of(ns, 20)).found == 20
    assert get(store, chain_of(ns, 20)) == 20
    put(store, ns, chain_of(ns, 5, 2))
    assert store.drain(10)
    assert store.snapshot()["kvstore_blocks"]["file",] == 25  # and what comes now is copied down
    store.check()


def test_a_restarted_sidecar_finds_its_files(filled: Path) -> None:
    with Sidecar(FILE_DIRECTORIES=str(filled), FILE_CAPACITY="64MiB") as served, closing(served.client()) as client:
        ns = client.open_namespace(IDENTITY, LAYOUT)
        eventually(lambda: "joined, with 20 blocks" in served.log.read_text())
        assert get(client, chain_of(ns, 20)) == 20


def test_slots_without_pages_are_not_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    may_go_on = threading.Event()
    populate = DomainMemoryTier._run
    monkeypatch.setattr(DomainMemoryTier, "_run", lambda tier: (may_go_on.wait(), populate(tier)))
    store, _ = open_shared_store(Config.from_mapping({"memory": {"capacity": "4MiB"}}), 1)
    ns = store.open_namespace(IDENTITY, LAYOUT)
    memory = store.memory_tier
    assert isinstance(memory, DomainMemoryTier)
    with store.reserve(ns, 4) as lease:
        assert (lease.num_blocks, memory.usable_bytes) == (0, 0)
    may_go_on.set()
    eventually(lambda: memory.usable_bytes == memory.capacity_bytes)
    with store.reserve(ns, 4) as lease:
        assert lease.num_blocks == 4
    store.close()


def test_it_starts_while_redis_is_absent() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        url = f"redis://127.0.0.1:{taken.getsockname()[1]}"
        with Sidecar(REDIS_URL=url) as served, closing(served.client()) as client:
            ns = client.open_namespace(IDENTITY, LAYOUT)
            put(client, ns, chain_of(ns, 4))
            assert get(client, chain_of(ns, 4)) == 4
            began_s = time.monotonic()
            assert get(client, chain_of(ns, 4, 9), seconds=1.0) == 0
            assert time.monotonic() - began_s < 10.0
