"""What the machine gives without any store: memmove, a bare O_DIRECT loop, pipelined redis-py."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path

import numpy as np
from redis import Redis

from bench.file_rows import BareFile, bare_loops
from bench.lane import Lane
from bench.memory_rows import copy
from bench.pages import noise, on_pages
from bench.peers.side import Task, Ways, serve
from bench.redis_rows import TierValues, raw_loops
from kvstore.tiers.memory import Arena


@contextmanager
def memory(task: Task) -> Iterator[Mapping[str, Ways]]:
    """One memmove a block, between memory like an engine's and an arena."""
    computed = noise(task.num_blocks, task.block_bytes)
    loaded = on_pages(task.num_blocks, task.block_bytes)
    with closing(Arena(computed.nbytes)) as arena:
        shared = np.frombuffer(arena.view(0, computed.nbytes), dtype=np.uint8).reshape(computed.shape)
        yield {
            "store": {"memmove": partial(copy, shared, computed)},
            "load": {"memmove": partial(copy, loaded, shared)},
        }


@contextmanager
def file(task: Task) -> Iterator[Mapping[str, Ways]]:
    """As many threads as our lane has, in operations of a block or larger."""
    with ExitStack() as stack:
        lane = stack.enter_context(closing(Lane("file")))
        computed = noise(task.num_blocks, task.block_bytes)
        arena = stack.enter_context(closing(Arena(computed.nbytes)))
        memory = arena.view(0, computed.nbytes)
        np.frombuffer(memory, dtype=np.uint8)[:] = computed.reshape(-1)
        Path(task.folder).mkdir()
        bare = stack.enter_context(closing(BareFile(Path(task.folder) / "bare", memory, lane)))
        writes, reads = bare_loops(bare, task.block_bytes, computed.nbytes)
        yield {"write": writes, "read": reads}


@contextmanager
def redis(task: Task) -> Iterator[Mapping[str, Ways]]:
    """Plain values; no limit to a client that does without redis-py."""
    with ExitStack() as stack:
        lane = stack.enter_context(closing(Lane("redis")))
        tickets = TierValues(task.redis_url, task.block_bytes, task.num_blocks, lane, stack).tickets
        sets, gets = raw_loops(stack.enter_context(Redis.from_url(task.redis_url)), tickets, lane)
        for write in sets.values():
            write()
        yield {"write": sets, "read": gets}


if __name__ == "__main__":
    serve({"memory": memory, "daemon": memory, "file": file, "redis": redis})
