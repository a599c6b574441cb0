"""AIBrix: the L1 cache of its cache manager, in this process."""

import functools
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from bench.pages import noise
from bench.peers.side import INDEX_BLOCK_BYTES, TOKENS_PER_BLOCK, Task, Ways, counted, require_equal, serve


@contextmanager
def memory(task: Task) -> Iterator[Mapping[str, Ways]]:
    """Allocate, copy in, put; acquire, copy out, release. Deleting what was there does not count."""
    manager, cache = _open(task, task.block_bytes)
    computed = noise(task.num_blocks, task.block_bytes)
    loaded = np.zeros_like(computed)
    chain = _Chain(cache, task)

    def store() -> None:
        handle = manager.allocate_for(None, chain.tokens).get()
        for block, row in zip(handle.to_tensors(), computed, strict=True):
            np.copyto(block.numpy().reshape(-1).view(np.uint8), row)
        _require(manager.put(None, chain.tokens, handle), task)

    def load() -> None:
        num_tokens, handle = manager.acquire(None, chain.tokens).get()
        if num_tokens != len(chain.tokens):
            raise SystemExit(f"AIBrix has only {num_tokens} of {len(chain.tokens)} tokens")
        for row, block in zip(loaded, handle.to_tensors(), strict=True):
            np.copyto(row, block.numpy().reshape(-1).view(np.uint8))
        handle.release()

    def renew() -> None:
        manager.delete(None, chain.tokens)
        chain.renew()

    store_again = counted(store, renew)
    store_again()
    yield {
        "store": {"allocate_for, copy, put": store_again},
        "load": {"acquire, copy": counted(load, lambda: loaded.fill(0), lambda: require_equal(loaded, computed))},
    }
    manager.close()


@contextmanager
def tables(task: Task) -> Iterator[Mapping[str, Ways]]:
    """It is asked with token ids; what it remembers of a list of them is not used again."""
    manager, cache = _open(task, INDEX_BLOCK_BYTES)
    chain = _Chain(cache, task)
    _require(manager.put(None, chain.tokens, manager.allocate_for(None, chain.tokens).get()), task)
    yield {
        "hash and look up": {
            "exists": counted(lambda: _require(manager.exists(None, chain.tokens), task), chain.remake),
        }
    }
    manager.close()


class _Chain:
    """The token ids of a chain as it wants them."""

    def __init__(self, cache: Any, task: Task) -> None:
        self._make = cache.TokenListView
        self._ids = list(range(task.num_blocks * TOKENS_PER_BLOCK))
        self.remake()

    def renew(self) -> None:
        """Tokens that nobody had before."""
        self._ids[0] += 1_000_000
        self.remake()

    def remake(self) -> None:
        self.tokens = self._make(self._ids)


def _open(task: Task, block_bytes: int) -> tuple[Any, Any]:
    os.environ["AIBRIX_KV_CACHE_OL_L1_CACHE_CAPACITY_GB"] = str(4 * task.num_blocks * block_bytes / (1 << 30))
    # It pins memory whether there is an accelerator or not.
    torch.empty = functools.wraps(torch.empty)(_unpinned(torch.empty))
    import aibrix_kvcache as cache  # noqa: PLC0415 - it reads its settings when it is imported

    spec = cache.KVCacheTensorSpec(heads=[0], layers=[0], head_size=block_bytes // TOKENS_PER_BLOCK // 4)
    layout = cache.KVCacheBlockLayout.LCND
    config = cache.KVCacheConfig(
        cache.KVCacheBlockSpec(TOKENS_PER_BLOCK, torch.float16, layout, spec),
        cache.ModelSpec(task.num_blocks * TOKENS_PER_BLOCK),
    )
    return cache.BaseKVCacheManager(config), cache


def _unpinned(empty: Any) -> Any:
    return lambda *sizes, **options: empty(*sizes, **{**options, "pin_memory": False})


def _require(status: Any, task: Task) -> None:
    if status.get() != task.num_blocks * TOKENS_PER_BLOCK:
        raise SystemExit(f"AIBrix answered {status}")


if __name__ == "__main__":
    serve({"memory": memory, "tables": tables})
