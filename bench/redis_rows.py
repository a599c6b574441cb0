"""Redis: what the tier writes and reads, beside raw pipelined redis-py with hiredis, without header or checksum."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial

import numpy as np
import redis

from bench.engine_side import layout_of, noise
from bench.scale import MIB, Scale
from bench.turns import Row, rows
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


def _rows_of(server: ValkeyServer, block_bytes: int, ratio: float, scale: Scale) -> list[Row]:
    num_blocks = max(1, scale.redis_bytes // block_bytes)
    layout = layout_of(block_bytes)
    with ExitStack() as stack:
        arena = stack.enter_context(closing(Arena(num_blocks * slot_bytes(block_bytes))))
        tier = stack.enter_context(closing(RedisTier(server.url)))
        client = stack.enter_context(server.client())
        moves = []
        for number, content in enumerate(noise(num_blocks, block_bytes)):
            buffer = arena.view(number * slot_bytes(block_bytes), slot_bytes(block_bytes))
            np.frombuffer(buffer, dtype=np.uint8)[:block_bytes] = content
            moves.append(BlockMove(key_of(number), None, layout, buffer, 0, int(time.time())))
        size = max(1, TICKET_BYTES // block_bytes)
        tickets = [moves[start : start + size] for start in range(0, num_blocks, size)]
        works = {
            "write": partial(_each, tickets, partial(_whole, tier.write)),
            "read": partial(_each, tickets, partial(_whole, tier.read)),
            "pipelined SET": partial(_each, tickets, partial(_set, client)),
            "pipelined GET": partial(_each, tickets, partial(_get, client)),
        }
        for name in ("write", "pipelined SET"):
            works[name]()
        return rows(
            "redis",
            block_bytes,
            num_blocks * block_bytes,
            {op: works[op] for op in ("write", "read")},
            {
                "write": [{"pipelined SET": works["pipelined SET"]}],
                "read": [{"pipelined GET": works["pipelined GET"]}],
            },
            scale.repeats,
            {"write": ratio, "read": ratio},
        )


def _each(tickets: Sequence[Sequence[BlockMove]], move_all: Callable[[Sequence[BlockMove]], None]) -> None:
    for ticket in tickets:
        move_all(ticket)


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
