"""The whole store with RAM over files: storing until all of it is on file, and loading what lies there alone."""

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

import numpy as np

from bench.engine_side import PATIENCE_S, Engine
from bench.file_rows import BareFile, bare_loops
from bench.lane import Lane
from bench.memory_rows import copy_into_arena, copy_out_of_arena
from bench.report import build_folder
from bench.scale import MIB, Scale
from bench.turns import Row, rows
from kvstore.config import Config
from kvstore.layout import slot_bytes
from kvstore.opening import open_store
from kvstore.tiers.memory import Arena

WANTED = {2 * MIB: 0.85, 360 << 10: 0.85}


def end_to_end_rows(scale: Scale) -> Iterator[Row]:
    for block_bytes, ratio in WANTED.items():
        yield from _rows_of(block_bytes, ratio, scale)


class Levels:
    """An engine on a store of RAM and files, with room for two chains in each."""

    def __init__(self, folder: Path, block_bytes: int, num_blocks: int, stack: ExitStack) -> None:
        slots_bytes = (2 * num_blocks + 2) * slot_bytes(block_bytes)
        tables = {
            "memory": {"capacity": f"{slots_bytes}B"},
            "file": {"directories": [str(folder)], "capacity": f"{slots_bytes + 2 * num_blocks * 8192 + 64 * MIB}B"},
        }
        self.store = stack.enter_context(closing(open_store(Config.from_mapping(tables))))
        self.engine = Engine(self.store, block_bytes, num_blocks)

    def renew(self) -> None:
        self.engine.renew_chain()

    def store_chain(self) -> None:
        """Until the files have it."""
        self.engine.store_chain()
        self._drain()

    def store_from(self) -> None:
        """The same out of lent buffers."""
        self.engine.store_chain_from_lent()
        self._drain()

    def leave_on_file(self) -> None:
        """RAM forgets everything."""
        self.store.evict(1 << 30)
        found = self.store.lookup(self.engine.chain)
        if found.ready or found.found != len(self.engine.chain):
            raise SystemExit(
                f"of {len(self.engine.chain)} blocks {found.found} are found, {found.ready} of them in RAM"
            )

    def _drain(self) -> None:
        if not self.store.drain(PATIENCE_S):
            raise SystemExit("the files did not take what the store accepted")


def _rows_of(block_bytes: int, ratio: float, scale: Scale) -> list[Row]:
    num_blocks = max(1, scale.file_bytes // 2 // block_bytes)
    num_bytes = num_blocks * block_bytes
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir=build_folder())))
        levels = Levels(folder / "tier", block_bytes, num_blocks, stack)
        engine = levels.engine
        lane = stack.enter_context(closing(Lane("file")))
        arena = stack.enter_context(closing(Arena(num_bytes)))
        np.frombuffer(arena.view(0, num_bytes), dtype=np.uint8)[:] = engine.computed.reshape(-1)
        bare = stack.enter_context(closing(BareFile(folder / "bare", arena.view(0, num_bytes), lane)))
        writes, reads = bare_loops(bare, block_bytes, num_bytes)
        levels.renew()
        levels.store_chain()
        into = {"memmove in": partial(copy_into_arena, engine)}
        out_of = {"memmove out": partial(copy_out_of_arena, engine)}
        result = rows(
            "memory+file",
            block_bytes,
            num_bytes,
            {
                "store": levels.store_chain,
                "load": engine.load_chain_from_below,
                "store_from": levels.store_from,
                "load_into": engine.load_chain_into_lent,
            },
            {"store": [into, writes], "load": [out_of, reads], "store_from": [into, writes], "load_into": [reads]},
            scale.repeats,
            {"store": ratio, "load": ratio},
            prepare={
                "store": levels.renew,
                "store_from": levels.renew,
                "load": levels.leave_on_file,
                "load_into": levels.leave_on_file,
                "memmove in": engine.load_chain_from_below,
                "memmove out": engine.load_chain_from_below,
            },
        )
        engine.require_whole()
    return result
