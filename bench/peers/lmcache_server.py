"""LMCache's server over shared memory, used through its own transfer context as an engine's worker does."""

import itertools
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zmq
from lmcache.utils import EngineType
from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey
from lmcache.v1.multiprocess.group_view import EngineGroupInfo
from lmcache.v1.multiprocess.transfer_context import create_transfer_context
from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

from bench.pages import noise
from bench.peers.side import (
    INDEX_BLOCK_BYTES,
    TOKENS_PER_BLOCK,
    Task,
    Ways,
    counted,
    free_port,
    require_equal,
    serve,
)

MODEL = "bench"
PATIENCE_S = 60.0


@contextmanager
def daemon(task: Task) -> Iterator[Mapping[str, Ways]]:
    """A paged KV cache of one layer, a page a block, through its own transfer context; nothing has to be evicted."""
    with _server(24 * task.num_blocks * task.block_bytes) as client:
        width = task.block_bytes // TOKENS_PER_BLOCK // 2
        pages = torch.empty((2 * task.num_blocks, TOKENS_PER_BLOCK, width), dtype=torch.float16)
        content = pages.numpy().view(np.uint8).reshape(2 * task.num_blocks, task.block_bytes)
        content[: task.num_blocks] = noise(task.num_blocks, task.block_bytes)
        caches, numbers, stored = {"layer.0": pages}, itertools.count(), list[Any]()
        computed, loaded = content[: task.num_blocks], content[task.num_blocks :]
        context = create_transfer_context(caches, mode="engine_driven", instance_id=1000, req_client=client)
        context.register(
            caches,
            MODEL,
            1,
            1,
            PATIENCE_S,
            layout_hints={"kv_layout": "NHD"},
            engine_group_infos=[EngineGroupInfo(0, (0,), TOKENS_PER_BLOCK)],
            engine_type=EngineType.VLLM,
        )

        def renew() -> None:
            tokens = (next(numbers), *range(1, task.num_blocks * TOKENS_PER_BLOCK))
            stored[:] = [_server_key(tokens, f"store {tokens[0]}", worker=0)]

        def store() -> None:
            page_ids = list(range(task.num_blocks))
            event = context.create_recorded_event()
            done = context.submit_store(stored[0].request_id, stored[0], caches, [page_ids], event, 1)
            if not done.result(timeout=PATIENCE_S):
                raise SystemExit("LMCache's server did not store")

        def load() -> None:
            request = f"load {next(numbers)}"
            _look_up(client, stored[0].token_ids, request, task)
            page_ids = list(range(task.num_blocks, 2 * task.num_blocks))
            key, event = _server_key(stored[0].token_ids, request, worker=0), context.create_recorded_event()
            done = context.submit_retrieve(request, key, caches, [page_ids], event, 1, skip_first_n_tokens=0)
            if not done.result(timeout=PATIENCE_S):
                raise SystemExit("LMCache's server did not load")

        store_again = counted(store, renew)
        store_again()
        yield {
            "store": {"engine-driven": store_again},
            "load": {"engine-driven": counted(load, lambda: loaded.fill(0), lambda: require_equal(loaded, computed))},
        }


@contextmanager
def daemon_tables(task: Task) -> Iterator[Mapping[str, Ways]]:
    """Its server is asked with token ids, and hashes them itself."""
    with _server(2 * task.num_blocks * INDEX_BLOCK_BYTES) as client:
        pages = torch.zeros((task.num_blocks, TOKENS_PER_BLOCK, 128), dtype=torch.float16)
        caches, numbers = {"layer.0": pages}, itertools.count()
        context = create_transfer_context(caches, mode="engine_driven", instance_id=1000, req_client=client)
        infos = [EngineGroupInfo(0, (0,), TOKENS_PER_BLOCK)]
        context.register(caches, MODEL, 1, 1, PATIENCE_S, layout_hints={"kv_layout": "NHD"}, engine_group_infos=infos)
        tokens = tuple(range(task.num_blocks * TOKENS_PER_BLOCK))
        key = _server_key(tokens, "store", worker=0)
        context.submit_store("store", key, caches, [list(range(task.num_blocks))], None, 1).result(timeout=PATIENCE_S)

        def look_up() -> float:
            request = f"look up {next(numbers)}"
            began_s = time.perf_counter()
            _look_up(client, tokens, request, task)
            took_s = time.perf_counter() - began_s
            client.end_session(request).result(timeout=PATIENCE_S)
            return took_s

        yield {"hash and look up": {"lookup over ZeroMQ": look_up}}


@contextmanager
def _server(capacity_bytes: int) -> Iterator[Any]:
    """Its server with blocks of 16 tokens and shared memory, and a client of it."""
    port = free_port()
    command = [
        *(str(Path(sys.executable).with_name("lmcache")), "server", "--host=127.0.0.1", f"--port={port}"),
        *(
            f"--http-port={free_port()}",
            f"--chunk-size={TOKENS_PER_BLOCK}",
            f"--l1-size-gb={capacity_bytes / (1 << 30)}",
        ),
        *(
            "--no-l1-use-lazy",
            "--supported-transfer-mode=engine_driven",
            f"--shm-name=bench-peers-{os.getpid()}",
            "--eviction-policy=LRU",
        ),
    ]
    process = subprocess.Popen(command)
    try:
        deadline_s = time.monotonic() + PATIENCE_S
        while socket.socket().connect_ex(("127.0.0.1", port)):
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise SystemExit("LMCache's server did not start")
            time.sleep(0.2)
        yield RequestClientFactory.create(f"tcp://127.0.0.1:{port}", context=zmq.Context())
    finally:
        process.terminate()


def _server_key(tokens: tuple[int, ...], request: str, worker: int | None) -> Any:
    return IPCCacheServerKey(MODEL, 1, worker, tokens, 0, len(tokens), request, num_kv_readers=1)


def _look_up(client: Any, tokens: tuple[int, ...], request: str, task: Task) -> None:
    client.lookup(_server_key(tokens, request, worker=None), 1).result(timeout=PATIENCE_S)
    while (found := client.query_prefetch_status(request).result(timeout=PATIENCE_S)) is None:
        time.sleep(0.0005)
    if found != task.num_blocks:
        raise SystemExit(f"LMCache's server has only {found} of {task.num_blocks} blocks")


if __name__ == "__main__":
    serve({"daemon": daemon, "daemon tables": daemon_tables})
