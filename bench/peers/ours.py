"""Our side: the same work as the peers beside it."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path

import numpy as np

from bench.engine_side import Engine, layout_of
from bench.file_rows import TierFiles
from bench.lane import Lane
from bench.pages import Bytes, noise
from bench.peers.side import INDEX_BLOCK_BYTES, TOKENS_PER_BLOCK, Task, Ways, counted, serve
from bench.redis_rows import TierValues
from bench.turns import Work
from kvstore.block_store import BlockStore
from kvstore.config import Config
from kvstore.hashing import Identity, block_keys
from kvstore.layout import slot_bytes
from kvstore.namespace import Namespace
from kvstore.opening import open_store
from kvstore.testing.sidecar import Sidecar
from kvstore.types import BlockKey


@contextmanager
def memory(task: Task) -> Iterator[Mapping[str, Ways]]:
    """In an arena with room for one chain, so that storing a new one evicts the one before, which counts."""
    with closing(open_store(_config(task.num_blocks + 2, task.block_bytes))) as store:
        yield _chains(store, task)


@contextmanager
def daemon(task: Task) -> Iterator[Mapping[str, Ways]]:
    """The same through a sidecar; one client may fill half of its arena."""
    capacity_bytes = 2 * (task.num_blocks + 2) * slot_bytes(task.block_bytes)
    with Sidecar(MEMORY_CAPACITY=f"{capacity_bytes}B") as served, closing(served.client()) as client:
        yield _chains(client, task)


@contextmanager
def file(task: Task) -> Iterator[Mapping[str, Ways]]:
    """From and into an arena, with O_DIRECT, header and checksum."""
    with ExitStack() as stack:
        lane = stack.enter_context(closing(Lane("file")))
        tier = TierFiles(Path(task.folder), task.block_bytes, task.num_blocks, lane, stack)
        yield _tier(tier.write, tier.read, tier.blocks)


@contextmanager
def redis(task: Task) -> Iterator[Mapping[str, Ways]]:
    """From and into an arena, with header and checksum."""
    with ExitStack() as stack:
        lane = stack.enter_context(closing(Lane("redis")))
        tier = TierValues(task.redis_url, task.block_bytes, task.num_blocks, lane, stack)
        yield _tier(tier.write, tier.read, tier.blocks)


@contextmanager
def tables(task: Task) -> Iterator[Mapping[str, Ways]]:
    """Keys from token ids, and how much of a chain is here."""
    with closing(open_store(_config(task.num_blocks, INDEX_BLOCK_BYTES))) as store:
        ns, tokens, chain = _indexed(store, task)
        yield {
            "hash": {"sha256": partial(_void, block_keys, bytes(16), tokens, TOKENS_PER_BLOCK)},
            "look up": {"lookup": lambda: _require(store.lookup(chain).ready, task)},
            "hash and look up": {"keys, lookup": lambda: _require(store.lookup(ns.keys(tokens)).ready, task)},
        }


@contextmanager
def daemon_tables(task: Task) -> Iterator[Mapping[str, Ways]]:
    """The same of a sidecar, which is asked anew each time."""
    capacity_bytes = 2 * (task.num_blocks + 2) * slot_bytes(INDEX_BLOCK_BYTES)
    with Sidecar(MEMORY_CAPACITY=f"{capacity_bytes}B") as served, closing(served.client()) as client:
        ns, tokens, chain = _indexed(client, task)

        def look_up(chain: list[BlockKey]) -> None:
            while (found := client.lookup(chain)).pending:
                client.wait(1.0)
                client.poll()
            _require(found.ready, task)

        yield {
            "look up": {"lookup": lambda: look_up(chain)},
            "hash and look up": {"keys, lookup": lambda: look_up(ns.keys(tokens))},
        }


def _config(num_blocks: int, block_bytes: int) -> Config:
    return Config.from_mapping({"memory": {"capacity": f"{num_blocks * slot_bytes(block_bytes)}B"}})


def _chains(store: BlockStore, task: Task) -> Mapping[str, Ways]:
    engine = Engine(store, task.block_bytes, task.num_blocks)
    engine.renew_chain()
    engine.store_chain()
    return {
        "store": {
            "reserve, copy, commit": counted(engine.store_chain, engine.renew_chain),
            "store_from": counted(engine.store_chain_from_lent, engine.renew_chain),
        },
        "load": {
            "pin, copy": counted(engine.load_chain, partial(engine.loaded.fill, 0), engine.require_whole),
            "load_into": counted(engine.load_chain_into_lent, partial(engine.loaded.fill, 0), engine.require_whole),
        },
    }


def _tier(write: Work, read: Work, blocks: Bytes) -> Mapping[str, Ways]:
    wanted = noise(*blocks.shape)

    def require_whole() -> None:
        if not np.array_equal(blocks, wanted):
            raise SystemExit("the tier gave back other bytes than it was given")

    write()
    return {
        "write": {"tier": write},
        "read": {"tier": counted(read, partial(blocks.fill, 0), require_whole)},
    }


def _indexed(store: BlockStore, task: Task) -> tuple[Namespace, list[int], list[BlockKey]]:
    ns = store.open_namespace(Identity("bench", b"weights"), layout_of(INDEX_BLOCK_BYTES))
    tokens = list(range(task.num_blocks * TOKENS_PER_BLOCK))
    chain = ns.keys(tokens)
    with store.reserve(ns, len(chain)) as lease:
        store.commit(lease, chain, None)
    return ns, tokens, chain


def _require(num_ready: int, task: Task) -> None:
    if num_ready != task.num_blocks:
        raise SystemExit(f"only {num_ready} of {task.num_blocks} blocks are here")


def _void(call: object, *arguments: object) -> None:
    assert callable(call)
    call(*arguments)


if __name__ == "__main__":
    serve(
        {
            "memory": memory,
            "daemon": daemon,
            "file": file,
            "redis": redis,
            "tables": tables,
            "daemon tables": daemon_tables,
        }
    )
