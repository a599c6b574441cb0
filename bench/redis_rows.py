"""Redis: what the tier writes and reads, beside raw pipelined redis-py with hiredis, without header or checksum."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial

import numpy as np
import redis

from bench.engine_side import layout_of
from bench.lane import Lane
from bench.pages import Bytes, noise
from bench.scale import MIB, Scale
from bench.turns import Row, Work, rows
from kvstore.layout import slot_bytes
from kvstore.mover import LANE_SHAPES
from kvstore.testing.blocks import key_of
from kvstore.testing.valkey import ValkeyServer
from kvstore.tiers.base import BlockMove
from kvstore.tiers.memory import Arena
from kvstore.tiers.redis import RedisTier
from kvstore.types import Outcome

WANTED = {360 << 10: 0.85, 2 * MIB: 0.85}
TICKET_BYTES = LANE_SHAPES["redis"].ticket_bytes


def redis_rows(scale: Scale) -> Iterator[Row]:
    """Over TCP on loopback, one connection each."""
    with ValkeyServer(maxmemory=f"{4 * scale.redis_bytes + 64 * MIB}b") as server:
        for block_bytes, ratio in WANTED.items():
            yield from _rows_of(server, block_bytes, ratio, scale)
            server.command("FLUSHALL")


class TierValues:
    """Blocks in an arena and their values on a server: all of them written, or read, by the threads of its lane."""

    def __init__(self, url: str, block_bytes: int, num_blocks: int, lane: Lane, stack: ExitStack) -> None:
        stride = slot_bytes(block_bytes)
        arena = stack.enter_context(closing(Arena(num_blocks * stride)))
        memory = np.frombuffer(arena.view(0, num_blocks * stride), dtype=np.uint8)
        self.blocks: Bytes = memory.reshape(num_blocks, stride)[:, :block_bytes]
        self.blocks[:] = noise(num_blocks, block_bytes)
        tier = stack.enter_context(closing(RedisTier(url)))
        layout = layout_of(block_bytes)
        moves = [
            BlockMove(key_of(number), None, layout, arena.view(number * stride, stride), 0, int(time.time()))
            for number in range(num_blocks)
        ]
        size = max(1, TICKET_BYTES // block_bytes)
        self.tickets = [moves[start : start + size] for start in range(0, num_blocks, size)]
        self.write: Work = partial(lane.run, [partial(_whole, tier.write, ticket) for ticket in self.tickets])
        self.read: Work = partial(lane.run, [partial(_whole, tier.read, ticket) for ticket in self.tickets])


def raw_loops(
    client: "redis.Redis", tickets: Sequence[Sequence[BlockMove]], lane: Lane
) -> tuple[dict[str, Work], dict[str, Work]]:
    """The same blocks as plain values, without header or checksum."""
    return (
        {"pipelined SET": partial(lane.run, [partial(_set, client, ticket) for ticket in tickets])},
        {"pipelined GET": partial(lane.run, [partial(_get, client, ticket) for ticket in tickets])},
    )


def _rows_of(server: ValkeyServer, block_bytes: int, ratio: float, scale: Scale) -> list[Row]:
    num_blocks = max(1, scale.redis_bytes // block_bytes)
    with ExitStack() as stack:
        lane = stack.enter_context(closing(Lane("redis")))
        tier = TierValues(server.url, block_bytes, num_blocks, lane, stack)
        sets, gets = raw_loops(stack.enter_context(server.client()), tier.tickets, lane)
        for write in (tier.write, *sets.values()):
            write()
        return rows(
            "redis",
            block_bytes,
            num_blocks * block_bytes,
            {"write": tier.write, "read": tier.read},
            {"write": [sets], "read": [gets]},
            scale.repeats,
            {"write": ratio, "read": ratio},
        )


def _whole(call: Callable[[Sequence[BlockMove], float], list[Outcome]], ticket: Sequence[BlockMove]) -> None:
    outcomes = call(ticket, time.monotonic() + 60)
    if set(outcomes) != {Outcome.OK}:
        raise RuntimeError(f"the redis tier answered {[outcome.value for outcome in outcomes]}")


def _set(client: "redis.Redis", ticket: Sequence[BlockMove]) -> None:
    with client.pipeline(transaction=False) as pipe:
        for move in ticket:
            pipe.set(b"raw:" + move.key, move.buffer[: move.layout.block_bytes])
        pipe.execute()


def _get(client: "redis.Redis", ticket: Sequence[BlockMove]) -> None:
    with client.pipeline(transaction=False) as pipe:
        for move in ticket:
            pipe.get(b"raw:" + move.key)
        values = pipe.execute()
    if any(len(value) != move.layout.block_bytes for move, value in zip(ticket, values, strict=True)):
        raise RuntimeError("redis-py got other values than it set")
