"""Files: what the tier writes and reads, beside a bare O_DIRECT loop from and into the same arena at the same depth."""

import json
import mmap
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

import numpy as np

from bench.engine_side import layout_of
from bench.lane import Job, Lane
from bench.pages import Bytes, noise
from bench.report import build_folder
from bench.scale import MIB, Scale
from bench.turns import Row, Work, rows
from kvstore.layout import slot_bytes
from kvstore.mover import LANE_SHAPES
from kvstore.testing.blocks import key_of
from kvstore.tiers.base import BlockMove
from kvstore.tiers.file import FileTier
from kvstore.tiers.memory import Arena
from kvstore.types import Outcome

WANTED = {2 * MIB: 0.95, MIB: 0.95, 64 << 10: 0.8}
OPERATION_BYTES = (MIB, 2 * MIB, 4 * MIB)
"""Sizes of operation that the bare loop tries beside that of a block."""
SHAPE = LANE_SHAPES["file"]


def file_rows(scale: Scale) -> Iterator[Row]:
    for block_bytes, ratio in WANTED.items():
        yield from _rows_of(block_bytes, ratio, scale)
    yield from _fio_rows(scale)


class BareFile:
    """A file that owns its space, and loops over the whole of it."""

    def __init__(self, path: Path, memory: memoryview, lane: Lane) -> None:
        self._memory = memory
        self._lane = lane
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(self._fd, 0, len(memory))
        self.write(MIB)()

    def close(self) -> None:
        os.close(self._fd)

    def write(self, operation_bytes: int) -> Work:
        return partial(self._lane.run, self._jobs(os.pwritev, operation_bytes))

    def read(self, operation_bytes: int) -> Work:
        return partial(self._lane.run, self._jobs(os.preadv, operation_bytes))

    def _jobs(self, call: Callable[[int, list[memoryview], int], int], operation_bytes: int) -> list[Job]:
        return [
            partial(call, self._fd, [self._memory[start : start + operation_bytes]], start)
            for start in range(0, len(self._memory), operation_bytes)
        ]


def bare_loops(bare: BareFile, block_bytes: int, num_bytes: int) -> tuple[dict[str, Work], dict[str, Work]]:
    """Ways to write and to read the file, by block and by larger operations."""
    sizes = [size for size in sorted({block_bytes, *OPERATION_BYTES}) if block_bytes <= size <= num_bytes]
    return (
        {f"pwritev of {size >> 10} KiB": bare.write(size) for size in sizes},
        {f"preadv of {size >> 10} KiB": bare.read(size) for size in sizes},
    )


class TierFiles:
    """Blocks in an arena and their slots in the file tier: all of them written, or read, by the threads of its lane."""

    def __init__(self, folder: Path, block_bytes: int, num_blocks: int, lane: Lane, stack: ExitStack) -> None:
        stride, num_bytes = slot_bytes(block_bytes), num_blocks * block_bytes
        arena = stack.enter_context(closing(Arena(num_blocks * stride)))
        self.memory = arena.view(0, num_blocks * stride)
        self.blocks: Bytes = np.frombuffer(self.memory, dtype=np.uint8).reshape(num_blocks, stride)[:, :block_bytes]
        self.blocks[:] = noise(num_blocks, block_bytes)
        tier = stack.enter_context(closing(FileTier([folder], 2 * num_bytes + 64 * MIB)))
        layout = layout_of(block_bytes)
        moves = [
            BlockMove(
                key=key_of(number),
                parent=key_of(number - 1) if number else None,
                layout=layout,
                buffer=arena.view(number * stride, stride),
                offset_bytes=_offset_bytes(tier, block_bytes, number),
                created_unix_s=int(time.time()),
            )
            for number in range(num_blocks)
        ]
        size = max(1, SHAPE.ticket_bytes // block_bytes)
        tickets = [moves[start : start + size] for start in range(0, num_blocks, size)]
        self.write: Work = partial(lane.run, [partial(_whole, tier.write, ticket) for ticket in tickets])
        self.read: Work = partial(lane.run, [partial(_whole, tier.read, ticket) for ticket in tickets])


def _rows_of(block_bytes: int, ratio: float, scale: Scale) -> list[Row]:
    num_blocks = max(1, scale.file_bytes // block_bytes)
    num_bytes = num_blocks * block_bytes
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir=build_folder())))
        lane = stack.enter_context(closing(Lane("file")))
        tier = TierFiles(folder / "tier", block_bytes, num_blocks, lane, stack)
        bare = stack.enter_context(closing(BareFile(folder / "bare", tier.memory[:num_bytes], lane)))
        tier.write()
        writes, reads = bare_loops(bare, block_bytes, num_bytes)
        return rows(
            "file",
            block_bytes,
            num_bytes,
            {"write": tier.write, "read": tier.read},
            {"write": [writes], "read": [reads]},
            scale.repeats,
            {"write": ratio, "read": ratio},
        )


def _offset_bytes(tier: FileTier, block_bytes: int, number: int) -> int:
    """Of the slot of this number, extent after extent."""
    extent, index = divmod(number, tier.extent_bytes // tier.slot_bytes(block_bytes))
    return extent * tier.extent_bytes + index * tier.slot_bytes(block_bytes)


def _whole(call: Callable[[Sequence[BlockMove], float], list[Outcome]], ticket: Sequence[BlockMove]) -> None:
    outcomes = call(ticket, time.monotonic() + 60)
    if set(outcomes) != {Outcome.OK}:
        raise RuntimeError(f"the file tier answered {[outcome.value for outcome in outcomes]}")


def _fio_rows(scale: Scale) -> Iterator[Row]:
    """What fio reaches with threads and huge pages, where it is installed; no goal."""
    program = shutil.which("fio")
    if program is None:
        return
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir=build_folder()) as folder:
        for op in ("write", "read"):
            command = [
                program,
                f"--name={op}",
                f"--rw={op}",
                f"--directory={folder}",
                f"--size={scale.file_bytes}",
                f"--bs={2 * MIB}",
                f"--iodepth={SHAPE.num_threads}",
                "--filename=fio",
                "--ioengine=libaio",
                "--direct=1",
                f"--iomem_align={mmap.PAGESIZE}",
                "--overwrite=1",
                f"--loops={scale.repeats}",
                "--output-format=json",
            ]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            gbps = json.loads(done.stdout)["jobs"][0][op]["bw_bytes"] / 1e9
            yield Row("fio", op, 2 * MIB, round(gbps, 3), round(gbps, 3), 1.0, scale.repeats, "fio", None)
