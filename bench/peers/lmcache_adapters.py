"""LMCache's native adapters for disk and Redis, driven as its own benchmark of them does."""

import itertools
import select
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any

from lmcache.cli.commands.bench.l2_adapter_bench.data import (
    create_l1_memory_desc,
    make_aligned_tensor,
    make_memory_objects,
)
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.fs_native_l2_adapter import FSNativeL2AdapterConfig
from lmcache.v1.distributed.l2_adapters.resp_l2_adapter import RESPL2AdapterConfig
from lmcache.v1.platform import consume_fd

from bench.pages import noise
from bench.peers.lmcache import PATIENCE_S, keys_for
from bench.peers.side import Task, Ways, counted, require_equal, serve

NUM_WORKERS = 4
"""Threads of an adapter: the default for files, and as many as our lane has."""
PAGE_BYTES = 4096


@contextmanager
def file(task: Task) -> Iterator[Mapping[str, Ways]]:
    """Its native file system adapter with O_DIRECT; a file for each block, and deleting it does not count."""
    config = FSNativeL2AdapterConfig(task.folder, num_workers=NUM_WORKERS, use_odirect=True)
    with _adapter(config, task) as works:
        yield works


@contextmanager
def redis(task: Task) -> Iterator[Mapping[str, Ways]]:
    """Its native adapter for RESP."""
    host, port = task.redis_url.removeprefix("redis://").partition("/")[0].split(":")
    with _adapter(RESPL2AdapterConfig(host, int(port)), task) as works:
        yield works


@contextmanager
def _adapter(config: Any, task: Task) -> Iterator[Mapping[str, Ways]]:
    num_bytes = task.num_blocks * task.block_bytes
    buffer = make_aligned_tensor(2 * num_bytes, PAGE_BYTES)
    adapter = create_l2_adapter(config, create_l1_memory_desc(buffer, PAGE_BYTES))
    sources = make_memory_objects(buffer, task.num_blocks, task.block_bytes, 0)
    targets = make_memory_objects(buffer, task.num_blocks, task.block_bytes, num_bytes)
    content = buffer.numpy().reshape(2 * task.num_blocks, task.block_bytes)
    content[: task.num_blocks] = noise(task.num_blocks, task.block_bytes)
    computed, loaded = content[: task.num_blocks], content[task.num_blocks :]
    numbers, keys = itertools.count(), list[Any]()

    def renew() -> None:
        if keys:
            adapter.delete(keys)
        keys[:] = keys_for(next(numbers), task.num_blocks)

    def write() -> None:
        adapter.submit_store_task(keys, sources)
        (result,) = _await(adapter.get_store_event_fd(), adapter.pop_completed_store_tasks).values()
        if not result.is_successful():
            raise SystemExit("LMCache's adapter did not store")

    def read() -> None:
        number = adapter.submit_load_task(keys, targets)
        found = _await(adapter.get_load_event_fd(), lambda: adapter.query_load_result(number))
        if found.popcount() != task.num_blocks:
            raise SystemExit(f"LMCache's adapter has only {found.popcount()} of {task.num_blocks} blocks")

    write_again = counted(write, renew)
    write_again()
    with closing(adapter):
        yield {
            "write": {type(config).__name__.removesuffix("L2AdapterConfig"): write_again},
            "read": {
                type(config).__name__.removesuffix("L2AdapterConfig"): counted(
                    read, lambda: loaded.fill(0), lambda: require_equal(loaded, computed)
                )
            },
        }


def _await(event_fd: int, result: Callable[[], Any]) -> Any:
    poller = select.poll()
    poller.register(event_fd, select.POLLIN)
    while not (found := result()):
        if not poller.poll(PATIENCE_S * 1000):
            raise SystemExit("LMCache's adapter did not answer")
        consume_fd(event_fd)
    return found


if __name__ == "__main__":
    serve({"file": file, "redis": redis})
