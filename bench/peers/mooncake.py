"""Mooncake Store: its client in this process over TCP, and a client of another process over shared memory."""

import ctypes
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from mooncake.store import MooncakeDistributedStore

from bench.pages import Bytes, noise, on_pages
from bench.peers.side import INDEX_BLOCK_BYTES, Task, Ways, counted, free_port, require_equal, serve

START_TIMEOUT_S = 20.0
MIB = 1 << 20
SEGMENT_UNIT_BYTES = 16 * MIB


@contextmanager
def memory(task: Task) -> Iterator[Mapping[str, Ways]]:
    """Puts from and gets into registered buffers; the segment lies in this process, where its metadata does not."""
    with _embedded(_segment_bytes(4 * task.num_blocks * task.block_bytes)) as store:
        pages = [on_pages(task.num_blocks, task.block_bytes) for _ in range(2)]
        for memory in pages:
            _require(store.register_buffer(memory.ctypes.data, memory.nbytes), 0)
        yield _blocks(store, task, pages)


@contextmanager
def daemon(task: Task) -> Iterator[Mapping[str, Ways]]:
    """The same from and into the pool of memory that is shared with the process that has the segment."""
    num_bytes = task.num_blocks * task.block_bytes
    with ExitStack() as stack:
        master = stack.enter_context(_master())
        port = free_port()
        command = [
            f"--port={port}",
            f"--master_server_address={master}",
            f"--global_segment_size={_segment_bytes(4 * num_bytes)}",
        ]
        stack.enter_context(
            _started(
                "mooncake_client", "--host=127.0.0.1", "--metadata_server=P2PHANDSHAKE", "--protocol=tcp", *command
            )
        )
        store = MooncakeDistributedStore()
        stack.callback(store.close)
        _eventually(lambda: store.setup_dummy(3 * num_bytes, 16 * MIB, f"127.0.0.1:{port}") == 0)
        pages = []
        for _ in range(2):
            address = store.alloc_from_mem_pool(num_bytes)
            _require(store.register_buffer(address, num_bytes), 0)
            memory = np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(address))
            pages.append(memory.reshape(task.num_blocks, task.block_bytes))
        yield _blocks(store, task, pages)


@contextmanager
def tables(task: Task) -> Iterator[Mapping[str, Ways]]:
    """How many of some known keys exist; its keys come from the engine, and its master is another process anyway."""
    with _embedded(_segment_bytes(2 * task.num_blocks * INDEX_BLOCK_BYTES)) as store:
        blocks = noise(task.num_blocks, INDEX_BLOCK_BYTES)
        _require(store.register_buffer(blocks.ctypes.data, blocks.nbytes), 0)
        keys = _keys(0, task.num_blocks)
        _put(store, keys, blocks)
        yield {"look up": {"batch_is_exist": lambda: _require(store.batch_is_exist(keys), 1)}}


def _blocks(store: Any, task: Task, pages: list[Bytes]) -> Mapping[str, Ways]:
    """Removing what was there does not count."""
    computed, loaded = pages
    computed[:] = noise(*computed.shape)
    numbers, keys = itertools.count(), list[str]()

    def renew() -> None:
        store.batch_remove(keys, True)
        keys[:] = _keys(next(numbers), task.num_blocks)

    def load() -> None:
        _require(store.batch_get_into(keys, _addresses(loaded), [task.block_bytes] * len(keys)), task.block_bytes)

    store_again = counted(lambda: _put(store, keys, computed), renew)
    store_again()
    return {
        "store": {"batch_put_from": store_again},
        "load": {"batch_get_into": counted(load, lambda: loaded.fill(0), lambda: require_equal(loaded, computed))},
    }


def _segment_bytes(num_bytes: int) -> int:
    """It takes whole multiples of its own unit."""
    return -(-num_bytes // SEGMENT_UNIT_BYTES) * SEGMENT_UNIT_BYTES


def _keys(number: int, num_blocks: int) -> list[str]:
    return [f"{number}-{index:032x}" for index in range(num_blocks)]


def _put(store: Any, keys: list[str], blocks: Bytes) -> None:
    _require(store.batch_put_from(keys, _addresses(blocks), [blocks.shape[1]] * len(keys)), 0)


def _addresses(blocks: Bytes) -> list[int]:
    first, stride = blocks.ctypes.data, blocks.shape[1]
    return [first + index * stride for index in range(len(blocks))]


def _require(answers: int | list[int], wanted: int) -> None:
    found = set(answers) if isinstance(answers, list) else {answers}
    if found != {wanted}:
        raise SystemExit(f"Mooncake answered {found} where {wanted} was right")


@contextmanager
def _embedded(segment_bytes: int) -> Iterator[Any]:
    with _master() as master:
        store = MooncakeDistributedStore()
        _require(store.setup("127.0.0.1", "P2PHANDSHAKE", segment_bytes, 16 * MIB, "tcp", "", master), 0)
        try:
            yield store
        finally:
            store.close()


@contextmanager
def _master() -> Iterator[str]:
    port = free_port()
    flags = [f"--rpc_port={port}", f"--metrics_port={free_port()}", "--enable_metric_reporting=false"]
    with _started("mooncake_master", "--rpc_address=127.0.0.1", "--metrics_host=127.0.0.1", *flags):
        yield f"127.0.0.1:{port}"


@contextmanager
def _started(program: str, *flags: str) -> Iterator[None]:
    process = subprocess.Popen([Path(sys.executable).with_name(program), *flags])
    try:
        time.sleep(1.0)
        yield
    finally:
        process.kill()
        process.wait()


def _eventually(attempt: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while not attempt():
        if time.monotonic() > deadline_s:
            raise SystemExit("Mooncake's client did not start")
        time.sleep(0.5)


if __name__ == "__main__":
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    serve({"memory": memory, "daemon": daemon, "tables": tables})
