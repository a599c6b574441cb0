"""Every store passes the suite: over RAM alone, over every tier, when each answer comes late, and in a sidecar."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvstore.client.store_client import StoreClient
from kvstore.config import Config
from kvstore.opening import open_store
from kvstore.store import Store
from kvstore.testing.sidecar import Sidecar
from kvstore.testing.store_contract import LateStore, StoreContract
from kvstore.testing.valkey import ValkeyServer
from kvstore.tiers.memory import Arena, MemoryTier
from tests.real_stores import config_of


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyServer]:
    with ValkeyServer() as server:
        yield server


class TestStoreInRam(StoreContract):
    @pytest.fixture
    def store(self) -> Iterator[Store]:
        store = open_store(config_of(memory="4MiB"))
        yield store
        store.close()


class TestStoreOverFiles(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        store = open_store(config_of(tmp_path / "kv", memory="4MiB"))
        yield store
        store.close()


class TestStoreOverEverything(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path, server: ValkeyServer) -> Iterator[Store]:
        server.command("FLUSHALL")
        store = open_store(config_of(tmp_path / "kv", memory="4MiB", redis=server.url))
        yield store
        store.close()


class TestStoreThatIsAlwaysLate(StoreContract):
    @pytest.fixture
    def store(self) -> Iterator[Store]:
        config = Config.from_mapping({"memory": {"capacity": "4MiB"}})
        store = LateStore(memory=MemoryTier(Arena(4 << 20)), config=config)
        yield store
        store.close()


@pytest.fixture(scope="module")
def served() -> Iterator[Sidecar]:
    with Sidecar() as served:
        yield served


class TestStoreInASidecar(StoreContract):
    @pytest.fixture
    def store(self, served: Sidecar) -> Iterator[StoreClient]:
        client = served.client()
        yield client
        client.close()
        with closing(served.client()) as cleaner:
            cleaner.evict(10**6)
