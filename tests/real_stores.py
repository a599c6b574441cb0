"""Stores over real tiers, for tests: blocks whose bytes follow from their key, and every byte checked when read."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from kvstore.block_store import BlockStore
from kvstore.config import Config
from kvstore.hashing import Identity
from kvstore.layout import Layout
from kvstore.namespace import Namespace
from kvstore.opening import open_store
from kvstore.store import Store
from kvstore.types import BlockKey, Request

LAYOUT = Layout("bfloat16", 4, 2, (64, 64), 16)  # 32 KiB a block
IDENTITY = Identity("real", b"weights")


def config_of(directory: Path | None = None, *, memory: str = "16MiB", file: str = "64MiB", redis: str = "") -> Config:
    tables: dict[str, object] = {"memory": {"capacity": memory}}
    if directory is not None:
        tables["file"] = {"directories": [str(directory)], "capacity": file}
    if redis:
        tables["redis"] = {"url": redis}
    return Config.from_mapping(tables)


@contextmanager
def opened(config: Config, timeout_s: float = 10.0) -> Iterator[tuple[Store, Namespace]]:
    """A store, its tables proved at the end."""
    store = open_store(config)
    try:
        yield store, store.open_namespace(IDENTITY, LAYOUT)
        store.check()
    finally:
        store.close(timeout_s)


def chain_of(ns: Namespace, num_blocks: int, number: int = 0) -> list[BlockKey]:
    """A chain of its own for each ``number``."""
    return ns.keys([number] + [7] * (16 * num_blocks - 1))


def content(key: BlockKey) -> bytes:
    return np.random.default_rng(list(key)).bytes(LAYOUT.block_bytes)


def put(store: BlockStore, ns: Namespace, chain: Sequence[BlockKey]) -> frozenset[BlockKey]:
    """Compute and commit what is missing in RAM; returns what was accepted for copy-down."""
    store.arrive(Request("r", time.time(), ns.digest, 0), chain)
    while (found := store.lookup(chain)).pending:
        store.wait(0.01)
        store.poll()
    ready = found.ready
    if ready == len(chain):
        return frozenset()
    with store.reserve(ns, len(chain) - ready) as lease:
        keys = chain[ready : ready + lease.num_blocks]
        for key, view in zip(keys, lease.views, strict=True):
            view[:] = content(key)
        return store.commit(lease, keys, chain[ready - 1] if ready else None).accepted


def get(store: BlockStore, chain: Sequence[BlockKey], seconds: float = 5.0) -> int:
    """Prefetch, pin and check every byte; returns how many blocks were served."""
    prefetch = store.prefetch(chain, time.monotonic() + seconds)
    while not prefetch.done:
        store.wait(0.02)
        store.poll()
    with store.pin(chain) as lease:
        for key, view in zip(lease.keys, lease.views, strict=True):
            assert view == content(key), "wrong bytes"
        return lease.num_blocks
