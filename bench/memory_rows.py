"""RAM: what an engine stores and loads, beside bare copies of the same bytes between the same places."""

import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from functools import partial

import numpy as np

from bench.engine_side import Engine
from bench.pages import Bytes
from bench.scale import Scale
from bench.turns import Row, rows
from kvstore.block_store import BlockStore
from kvstore.config import Config
from kvstore.layout import slot_bytes
from kvstore.opening import open_store

WANTED = {2 << 20: 0.9, 360 << 10: 0.8}
LENT = ("store_from", "load_into")


def memory_rows(scale: Scale) -> Iterator[Row]:
    for block_bytes, ratio in WANTED.items():
        with closing(open_store(config_for(block_bytes, scale))) as store:
            yield from rows_of("memory", store, block_bytes, ratio, scale)


def config_for(block_bytes: int, scale: Scale) -> Config:
    """An arena with room for one chain and a little, so that a new one takes the places of the one before."""
    num_blocks = max(1, scale.memory_bytes // block_bytes)
    return Config.from_mapping({"memory": {"capacity": f"{(num_blocks + 2) * slot_bytes(block_bytes)}B"}})


def rows_of(tier: str, store: BlockStore, block_bytes: int, ratio: float, scale: Scale) -> list[Row]:
    """What an engine stores into ``store`` and loads from it."""
    num_blocks = max(1, scale.memory_bytes // block_bytes)
    engine = Engine(store, block_bytes, num_blocks)
    engine.renew_chain()
    engine.store_chain()
    into, out_of = partial(copy_into_arena, engine), partial(copy_out_of_arena, engine)
    result = rows(
        tier,
        block_bytes,
        num_blocks * block_bytes,
        {
            "store": engine.store_chain,
            "load": engine.load_chain,
            "store_from": engine.store_chain_from_lent,
            "load_into": engine.load_chain_into_lent,
        },
        {
            "store": [{"memmove in": into}],
            "load": [{"memmove out": out_of}],
            "store_from": [{"memmove in": into}],
            "load_into": [{"memmove out": out_of}],
        },
        scale.repeats,
        {"store": ratio, "load": ratio},
        prepare={"store": engine.renew_chain, "store_from": engine.renew_chain},
    )
    engine.require_whole()
    return result


def copy_into_arena(engine: Engine) -> float:
    """What lies there already, so that the blocks stay what they are; returns the seconds of the copies alone."""
    with engine.store.pin(engine.chain) as lease:
        return copy([np.frombuffer(view, dtype=np.uint8) for view in lease.views], engine.computed)


def copy_out_of_arena(engine: Engine) -> float:
    """Returns the seconds of the copies alone."""
    with engine.store.pin(engine.chain) as lease:
        return copy(engine.loaded, [np.frombuffer(view, dtype=np.uint8) for view in lease.views])


def copy(targets: Iterable[Bytes], sources: Iterable[Bytes]) -> float:
    """One memmove a block; returns seconds."""
    pairs = list(zip(targets, sources, strict=True))
    began_s = time.perf_counter()
    for target, source in pairs:
        np.copyto(target, source)
    return time.perf_counter() - began_s
