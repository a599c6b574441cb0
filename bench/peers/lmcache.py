"""LMCache's storage manager, in this process: what its server is made of."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from lmcache.v1.distributed.api import GroupedObjectKeys, MemoryLayoutDesc, ObjectKey, PrefetchTaskSpec
from lmcache.v1.distributed.config import EvictionConfig, L1ManagerConfig, L1MemoryManagerConfig, StorageManagerConfig
from lmcache.v1.distributed.storage_manager import StorageManager
from lmcache.v1.multiprocess.token_hasher import TokenHasher

from bench.pages import noise
from bench.peers.side import INDEX_BLOCK_BYTES, TOKENS_PER_BLOCK, Task, Ways, counted, require_equal, serve

MODEL = "bench"
PATIENCE_S = 60.0


@contextmanager
def memory(task: Task) -> Iterator[Mapping[str, Ways]]:
    """Reserve, copy in, finish; prefetch from RAM alone, copy out, finish. Deleting what was there does not count."""
    with closing(_manager(4 * task.num_blocks * task.block_bytes)) as manager:
        layout = MemoryLayoutDesc([torch.Size([task.block_bytes])], [torch.uint8])
        computed = noise(task.num_blocks, task.block_bytes)
        loaded = np.zeros_like(computed)
        numbers, keys = itertools.count(), list[Any]()

        def renew() -> None:
            manager.delete_l1_keys(keys)
            keys[:] = keys_for(next(numbers), task.num_blocks)

        def store() -> None:
            reserved = manager.reserve_write(keys, layout)
            for key, row in zip(keys, computed, strict=True):
                np.copyto(np.frombuffer(reserved[key].byte_array, dtype=np.uint8), row)
            manager.finish_write(keys)

        def load() -> None:
            _prefetch(manager, keys, layout)
            with manager.read_prefetched_results(keys) as found:
                for row, block in zip(loaded, found, strict=True):
                    np.copyto(row, np.frombuffer(block.byte_array, dtype=np.uint8))
            manager.finish_read_prefetched(keys)

        store_again = counted(store, renew)
        store_again()
        yield {
            "store": {"StorageManager": store_again},
            "load": {"StorageManager": counted(load, lambda: loaded.fill(0), lambda: require_equal(loaded, computed))},
        }


@contextmanager
def tables(task: Task) -> Iterator[Mapping[str, Ways]]:
    """Keys from token ids, and a prefetch that finds everything in RAM, which is how its manager looks up."""
    with closing(_manager(2 * task.num_blocks * INDEX_BLOCK_BYTES)) as manager:
        layout = MemoryLayoutDesc([torch.Size([INDEX_BLOCK_BYTES])], [torch.uint8])
        hasher, tokens = TokenHasher(TOKENS_PER_BLOCK), list(range(task.num_blocks * TOKENS_PER_BLOCK))
        keys = keys_of(hasher.compute_chunk_hashes(tokens))
        manager.reserve_write(keys, layout)
        manager.finish_write(keys)
        release = lambda: manager.finish_read_prefetched(keys)  # noqa: E731 - one line is all that it is
        yield {
            "hash": {"blake3": partial(_discard, hasher.compute_chunk_hashes, tokens)},
            "look up": {"prefetch of RAM": counted(lambda: _prefetch(manager, keys, layout), bool, release)},
            "hash and look up": {
                "hash, prefetch of RAM": counted(
                    lambda: _prefetch(manager, keys_of(hasher.compute_chunk_hashes(tokens)), layout), bool, release
                )
            },
        }


def keys_for(number: int, num_blocks: int) -> list[Any]:
    return keys_of([f"{number} {index}".encode().ljust(32) for index in range(num_blocks)])


def keys_of(hashes: list[bytes]) -> list[Any]:
    return [ObjectKey(chunk_hash=digest, model_name=MODEL, kv_rank=0) for digest in hashes]


def _manager(capacity_bytes: int) -> Any:
    memory_config = L1MemoryManagerConfig(capacity_bytes, use_lazy=False, shm_name="")
    return StorageManager(StorageManagerConfig(L1ManagerConfig(memory_config), EvictionConfig("LRU")))


def _prefetch(manager: Any, keys: list[Any], layout: Any) -> None:
    spec = PrefetchTaskSpec([GroupedObjectKeys(keys, 0, layout)])
    handle = manager.submit_prefetch_task(spec, skip_l2=True)
    while (result := manager.query_prefetch_status(handle)) is None:
        manager.wait_prefetch_status(handle, PATIENCE_S)
    if result.l1_hit_count != len(keys):
        raise SystemExit(f"LMCache has only {result.l1_hit_count} of {len(keys)} blocks")


def _discard(call: Callable[..., object], *arguments: object) -> None:
    call(*arguments)


if __name__ == "__main__":
    serve({"memory": memory, "tables": tables})
