"""Copies between an accelerator's pages and host RAM beside one plain pinned copy, which is the limit of the link.

    make bench-gpu                 writes build/bench-gpu.json; without an accelerator it says so there, and no number
    make bench-gpu ARGS=--dry-run  every measurement with hardly any bytes on the CPU: shows that it runs, and no number

Blocks of 16 tokens of an 8B model and of one rank of a 70B model over eight, in pages that lie scattered and in such
that are one run already (cross-layer). Ways: a copy for each run, the runs in the driver's batches, the pipeline with
slots that are registered and with such that are not, and how much a matmul beside it slows down.
"""

import argparse
import mmap
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bench.report import build_folder, provenance, save
from gpu_io.copier import Copier, Ticket
from gpu_io.device import copier_for
from gpu_io.direct_path import BATCH_COPIES
from gpu_io.driver_batch import DriverBatch
from gpu_io.pages import PagedKV
from gpu_io.pipeline import PipelineCopier
from gpu_io.streams import Batch
from gpu_io.testing import FakeDriver
from gpu_io.torch_device import TorchDevice
from kvstore.tiers.memory import Arena

NOT_RUN = (
    "The accelerator benchmark has not run: torch finds no accelerator on this machine. Nothing is known yet of the"
    " pipeline's speed on real hardware; its order and its bytes are proven on a simulated device."
)
NO_BATCHES = "the driver has no batched memcpy, so it is not compared"
GOALS = {"one way": 0.90, "both ways": 0.85, "slowdown of compute": 0.02}
TOKENS = 16
MODELS = {"8B": (32, 8, 128), "70B/TP8": (80, 1, 128)}
"""Layers, KV heads of a rank, elements of a head; bfloat16."""
AXES = {"staged pipeline": "plane page token head dim", "cross-layer blocks": "page layer plane token head dim"}
"""Of scattered pages, and of such that are one run."""
BOUNCED = "slots not registered"
NUM_BLOCKS = 512
REPEATS = 9
MATMUL_SIZE = 4096
MATMULS = 50
REGISTER_S = 60.0


def main(args: Sequence[str] | None = None) -> None:
    """Measure what this machine can, and write it down."""
    parser = argparse.ArgumentParser(prog="make bench-gpu", description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, with hardly any bytes, and no number")
    parser.add_argument("--out", type=Path, default=None, help="default: build/bench-gpu.json")
    options = parser.parse_args(args)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    out = options.out or build_folder() / "bench-gpu.json"
    report: dict[str, object] = {**provenance(), "goals": GOALS}
    if options.dry_run:
        for name in MODELS:
            measure(name, torch.device("cpu"), num_blocks=2, repeats=1, matmul_size=8)
        print("every measurement runs; a dry run has no numbers")
        return
    if accelerator is None:
        report |= {"has_run": False, "statement": NOT_RUN, "rows": []}
        print(NOT_RUN)
    else:
        device = torch.device(accelerator.type, torch.accelerator.current_device_index())
        rows = [row for name in MODELS for row in measure(name, device, NUM_BLOCKS, REPEATS, MATMUL_SIZE)]
        missing = [] if batch_of(device) else [NO_BATCHES]
        report |= {"has_run": True, "device": device_name(device), "missing": missing, "rows": rows}
        for row in rows:
            print(row)
    save(out, report)


@dataclass
class Watch:
    """Times copies of ``num_bytes`` in each direction, ``repeats`` times."""

    num_bytes: int
    repeats: int
    found: dict[tuple[str, str], float] = field(default_factory=dict)
    """GB/s by way and direction; slowdowns of a matmul as parts of one."""

    def time(self, way: str, direction: str, copy: Callable[[], object]) -> None:
        """Measure this one."""
        moved = self.num_bytes * (2 if direction == "both ways" else 1)
        self.found[way, direction] = moved / median_s(copy, self.repeats) / 1e9


def measure(
    model: str, device: torch.device, num_blocks: int, repeats: int, matmul_size: int
) -> list[dict[str, object]]:
    """Rows of one model: GB/s, and as a part of the limit in that direction; slowdowns of a matmul."""
    num_layers, num_heads, dim = MODELS[model]
    block_bytes = num_layers * 2 * TOKENS * num_heads * dim * 2
    watch = Watch(num_blocks * block_bytes, repeats)
    host = torch.zeros(2, watch.num_bytes, dtype=torch.uint8, pin_memory=device.type != "cpu")
    flat = torch.zeros(2, watch.num_bytes, dtype=torch.uint8, device=device)
    plain = {
        "offload": lambda: host[0].copy_(flat[0], non_blocking=True),
        "onboard": lambda: flat[1].copy_(host[1], non_blocking=True),
    }
    for direction in plain:
        watch.time("plain pinned copy", direction, partial(plainly, plain, [direction], device))
    watch.time("plain pinned copy", "both ways", partial(plainly, plain, list(plain), device))
    order = torch.randperm(2 * num_blocks, generator=torch.Generator().manual_seed(1)).tolist()
    ids = order[:num_blocks], order[num_blocks:]
    for way, axes in AXES.items():
        kv = pages(axes, model, 2 * num_blocks, device)
        for direction, those, memory in zip(plain, ids, host, strict=True):
            measure_runs(watch, way, direction, kv, those, memory)
        measure_copier(watch, way, kv, ids, matmul_size)
    return rows_of(model, block_bytes, watch.found)


def measure_runs(watch: Watch, way: str, direction: str, kv: PagedKV, ids: Sequence[int], host: Tensor) -> None:
    """The runs of pages without the pipeline: a copy each, and in batches."""
    starts = range(host.data_ptr(), host.data_ptr() + host.numel(), kv.layout.block_bytes)
    runs = kv.runs(ids, starts)
    in_pages = [kv.bytes_at(page, size) for page, _, size in runs]
    in_slots = [host[slot - starts.start :][:size] for _, slot, size in runs]
    targets, sources = (in_slots, in_pages) if direction == "offload" else (in_pages, in_slots)

    def one_by_one() -> None:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source, non_blocking=True)

    watch.time(f"{way}: a copy for each run", direction, lambda: in_a_stream(one_by_one, kv.device))
    batch = batch_of(kv.device)
    if batch is not None:
        rows = np.array(runs, dtype=np.int64)[:, [1, 0, 2] if direction == "offload" else [0, 1, 2]]
        batches = [rows[start : start + BATCH_COPIES] for start in range(0, len(rows), BATCH_COPIES)]

        def batched(batch: Batch = batch) -> None:
            for some in batches:
                batch.copy(*some.T)

        watch.time(f"{way}: runs in batches", direction, lambda: in_a_stream(batched, kv.device))


def measure_copier(watch: Watch, way: str, kv: PagedKV, ids: tuple[list[int], list[int]], matmul_size: int) -> None:
    """The copier of an engine: before it knows the arena, and when all of that is registered."""
    out, back = ids
    block_bytes = kv.layout.block_bytes
    arena_bytes = -(-2 * watch.num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    with closing(Arena(arena_bytes, may_be_huge=False)) as arena, closing(copier_for(kv)) as copier:
        slots = [
            arena.views(range(side * watch.num_bytes, (side + 1) * watch.num_bytes, block_bytes), block_bytes)
            for side in range(2)
        ]

        def offload() -> Ticket:
            return begun(lambda: copier.offload(out, slots[0]))

        def onboard() -> Ticket:
            return begun(lambda: copier.onboard(slots[1], back))

        for name in (f"{way}, {BOUNCED}", way):
            if name == way:
                reach(copier, arena.view(0, arena_bytes))
            watch.time(name, "offload", lambda: waited(offload()))
            watch.time(name, "onboard", lambda: waited(onboard()))
            watch.time(name, "both ways", lambda: waited(offload(), onboard()))
            for direction, begin in (("offload", offload), ("onboard", onboard)):
                part = slowdown([begin], kv.device, watch.repeats, matmul_size)
                watch.found[f"{name}: slowdown of a matmul", direction] = part
        slots.clear()  # an arena is unmapped when nobody has a view of it


def rows_of(model: str, block_bytes: int, found: Mapping[tuple[str, str], float]) -> list[dict[str, object]]:
    """A row for each way and direction."""
    return [
        {
            "model": model,
            "block_bytes": block_bytes,
            "way": way,
            "direction": direction,
            **(
                {"slowdown": round(value, 4)}
                if "slowdown" in way
                else {"gbps": round(value, 3), "ratio": round(value / found["plain pinned copy", direction], 3)}
            ),
        }
        for (way, direction), value in found.items()
    ]


def pages(axes: str, model: str, num_pages: int, device: torch.device) -> PagedKV:
    """Pages of a model in one arrangement."""
    num_layers, num_heads, dim = MODELS[model]
    sizes = {"page": num_pages, "layer": num_layers, "plane": 2, "token": TOKENS, "head": num_heads, "dim": dim}
    shape = [sizes[name] for name in axes.split()]
    num_tensors = 1 if "layer" in axes.split() else num_layers
    return PagedKV([torch.zeros(shape, dtype=torch.bfloat16, device=device) for _ in range(num_tensors)], axes)


def batch_of(device: torch.device) -> Batch | None:
    """The driver's, or a fake in a dry run."""
    return DriverBatch(FakeDriver(), lambda: 0) if device.type == "cpu" else TorchDevice(device).batch()


def reach(copier: Copier, memory: memoryview) -> None:
    """Until the driver knows all of it. Raises ``RuntimeError`` if it does not want to: there is a warning why."""
    copier.reach(memory)
    if isinstance(copier, PipelineCopier):
        deadline_s = time.monotonic() + REGISTER_S
        while copier.registered_bytes < memory.nbytes:
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"{copier.registered_bytes} of {memory.nbytes} bytes were registered")
            time.sleep(0.01)


def in_a_stream(copy: Callable[[], None], device: torch.device) -> None:
    """In one of its own, and until it is done."""
    if device.type == "cpu":
        copy()
        return
    current = torch.accelerator.current_stream(device)
    torch.accelerator.set_stream(torch.Stream(device))
    copy()
    torch.accelerator.set_stream(current)
    synchronise(device)


def plainly(plain: Mapping[str, Callable[[], object]], directions: Sequence[str], device: torch.device) -> None:
    """One large copy in each direction, at once: a stream each."""
    if device.type == "cpu":
        for direction in directions:
            plain[direction]()
        return
    current = torch.accelerator.current_stream(device)
    for direction in directions:
        torch.accelerator.set_stream(torch.Stream(device))
        plain[direction]()
    torch.accelerator.set_stream(current)
    synchronise(device)


def slowdown(begin: Sequence[Callable[[], Ticket]], device: torch.device, repeats: int, matmul_size: int) -> float:
    """By what part a stream of matmuls takes longer while copies run beside it."""
    one, result = (torch.ones(matmul_size, matmul_size, device=device, dtype=torch.bfloat16) for _ in range(2))

    def compute() -> None:
        for _ in range(MATMULS):
            torch.mm(one, one, out=result)
        synchronise(device)

    taken_s = []
    alone_s = median_s(compute, repeats)
    for _ in range(repeats + 1):
        tickets = [start() for start in begin]
        started_s = time.perf_counter()
        compute()
        taken_s.append(time.perf_counter() - started_s)
        waited(*tickets)
    return statistics.median(taken_s[1:]) / alone_s - 1


def median_s(work: Callable[[], object], repeats: int) -> float:
    """Seconds, after one that does not count."""
    work()
    taken_s = []
    for _ in range(repeats):
        started_s = time.perf_counter()
        work()
        taken_s.append(time.perf_counter() - started_s)
    return statistics.median(taken_s)


def begun(start: Callable[[], Ticket | None]) -> Ticket:
    """A copy that was begun, however busy the copier was."""
    while (ticket := start()) is None:
        time.sleep(0.0001)
    return ticket


def waited(*tickets: Ticket) -> None:
    """Until all have arrived. Raises ``RuntimeError`` for one that did not: its time says nothing."""
    for ticket in tickets:
        ticket.wait()
        if ticket.failed:
            raise RuntimeError("a copy failed while it was measured")


def synchronise(device: torch.device) -> None:
    """Wait for the device."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def device_name(device: torch.device) -> str:
    """What it calls itself."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


if __name__ == "__main__":
    main()
