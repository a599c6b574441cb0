"""What vLLM publishes of the store's blocks, as a router hears it that asks for all that there has been."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import zmq
from vllm.distributed.kv_events import AllBlocksCleared, BlockStored, KVEventBatch
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from kvstore.testing.sidecar import eventually
from tests.vllm.prompts import PAGE_TOKENS
from tests.vllm.runner import Runner

PROMPT = list(range(1, 6 * PAGE_TOKENS + 1))
Hash = bytes | int


class Router:
    """Which blocks are where, as it was told."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._batches = msgspec.msgpack.Decoder(KVEventBatch)
        self.blocks: dict[str, set[Hash]] = {}
        self.parents: dict[Hash, Hash | None] = {}
        self.groups: set[int | None] = set()
        """That there are blocks of in RAM."""

    def hear(self) -> None:
        """Everything there has been, from the beginning."""
        self.blocks = {"GPU": set(), "CPU": set(), "STORAGE": set()}
        self._socket.send_multipart((b"", bytes(8)))
        while True:
            *_, number, payload = self._socket.recv_multipart()
            if int.from_bytes(number, "big", signed=True) < 0:
                return
            for event in self._batches.decode(payload).events:
                self._take(event)

    def _take(self, event: Any) -> None:
        if isinstance(event, AllBlocksCleared):  # vLLM says so of its own pages
            self.blocks["GPU"] = set()
        elif isinstance(event, BlockStored):
            assert event.block_size == PAGE_TOKENS
            self.blocks[event.medium or ""].update(event.block_hashes)
            if event.medium == "CPU":
                self.groups.add(event.group_idx)
            self.parents.update(zip(event.block_hashes, [event.parent_block_hash, *event.block_hashes], strict=False))
        else:
            self.blocks[event.medium] -= set(event.block_hashes)


@contextmanager
def engine_and_router(
    model: Path, folder: Path, store: dict[str, Any], windows: tuple[int | None, ...] = (None,)
) -> Iterator[tuple[Runner, Router]]:
    endpoint = f"ipc://{folder}/replay"
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.RCVTIMEO, 20_000)
        runner = Runner(model, store, num_pages=64, events=(f"ipc://{folder}/events", endpoint), windows=windows)
        socket.connect(endpoint)
        try:
            yield runner, Router(socket)
        finally:
            runner.close()
            runner.scheduler.kv_event_publisher.shutdown()


def hears(runner: Runner, router: Router, is_so: Callable[[], bool]) -> None:
    """Copies return, and events go out with a step."""

    def look() -> bool:
        runner.half.store.drain(10.0)
        runner.add("step", [480])
        runner.run()
        router.hear()
        return is_so()

    eventually(look)


def test_a_router_hears_of_ram_and_files(model: Path, tmp_path: Path) -> None:
    store = {
        "memory": {"capacity": "16MiB"},
        "file": {"directories": [str(tmp_path / "kv")], "capacity": "64MiB", "admission": "always"},
    }
    with engine_and_router(model, tmp_path, store) as (runner, router):
        runner.add("cold", PROMPT)
        prompt = {maybe_convert_block_hash(one) for one in runner.scheduler.requests["cold"].block_hashes}
        runner.run()
        assert len(prompt) == 6
        hears(runner, router, lambda: all(there >= prompt for there in router.blocks.values()))
        assert {router.parents[block] for block in prompt} - prompt == {None}
        runner.half.store.evict(10**6)
        hears(runner, router, lambda: not router.blocks["CPU"] & prompt)
        assert router.blocks["GPU"] & router.blocks["STORAGE"] >= prompt
        assert runner.scheduler.reset_prefix_cache()
        runner.add("warm", PROMPT)
        runner.run()
        hears(runner, router, lambda: router.blocks["CPU"] >= prompt)
    with engine_and_router(model, tmp_path, store) as (runner, router):
        hears(runner, router, lambda: router.blocks["STORAGE"] >= prompt)
    with engine_and_router(model, tmp_path, store | {"salt": "another model's"}) as (runner, router):
        runner.add("own", PROMPT[PAGE_TOKENS:])
        runner.run()
        hears(runner, router, lambda: len(router.blocks["STORAGE"]) >= 5)
        assert not router.blocks["STORAGE"] & prompt


def test_a_router_hears_of_every_group(model: Path, tmp_path: Path) -> None:
    with engine_and_router(model, tmp_path, {"memory": {"capacity": "16MiB"}}, (None, 65)) as (runner, router):
        runner.add("cold", PROMPT)
        runner.run()
        hears(runner, router, lambda: router.groups == {0, 1})
