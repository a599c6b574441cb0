"""Copies between an accelerator's pages and host RAM beside one plain pinned copy, which is the limit of the link.

    make bench-gpu                 writes build/bench-gpu.json; without an accelerator it says so there, and no number
    make bench-gpu ARGS=--dry-run  every measurement with hardly any bytes on the CPU: shows that it runs, and no number

Blocks of 16 tokens of an 8B model and of one rank of a 70B model over eight. Ways: a copy for each fragment, the staged
pipeline, pages that are one run of bytes already (cross-layer), and how much a matmul beside them slows down.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from bench.report import build_folder, provenance, save
from gpu_io.copier import Copier, Ticket
from gpu_io.device import copier_for
from gpu_io.pages import PagedKV

NOT_RUN = (
    "The accelerator benchmark has not run: torch finds no accelerator on this machine. Nothing is known yet of the"
    " pipeline's speed on real hardware; its order and its bytes are proven on a simulated device."
)
MISSING = "batched memcpy by the driver is not implemented, so it is not compared"
GOALS = {"one way": 0.90, "both ways": 0.85, "slowdown of compute": 0.02}
TOKENS = 16
MODELS = {"8B": (32, 8, 128), "70B/TP8": (80, 1, 128)}
"""Layers, KV heads of a rank, elements of a head; bfloat16."""
AXES = {"scattered": "plane page token head dim", "cross-layer": "page layer plane token head dim"}
NUM_BLOCKS = 512
REPEATS = 9
MATMUL_SIZE = 4096
MATMULS = 50


def main(args: Sequence[str] | None = None) -> None:
    """Measure what this machine can, and write it down."""
    parser = argparse.ArgumentParser(prog="make bench-gpu", description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, with hardly any bytes, and no number")
    parser.add_argument("--out", type=Path, default=None, help="default: build/bench-gpu.json")
    options = parser.parse_args(args)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    out = options.out or build_folder() / "bench-gpu.json"
    report: dict[str, object] = {**provenance(), "goals": GOALS, "missing": MISSING}
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
        report |= {"has_run": True, "device": device_name(device), "rows": rows}
        for row in rows:
            print(row)
    save(out, report)


def measure(
    model: str, device: torch.device, num_blocks: int, repeats: int, matmul_size: int
) -> list[dict[str, object]]:
    """Rows of one model: GB/s, and as a part of the limit in that direction; slowdowns of a matmul."""
    num_layers, num_heads, dim = MODELS[model]
    block_bytes = num_layers * 2 * TOKENS * num_heads * dim * 2
    num_bytes = num_blocks * block_bytes
    pin = device.type != "cpu"
    host = torch.zeros(2, num_bytes, dtype=torch.uint8, pin_memory=pin)
    flat = torch.zeros(2, num_bytes, dtype=torch.uint8, device=device)
    views = [memoryview(side.numpy()) for side in host]
    slots = [[view[at : at + block_bytes] for at in range(0, num_bytes, block_bytes)] for view in views]
    order = torch.randperm(2 * num_blocks, generator=torch.Generator().manual_seed(1)).tolist()
    out, back = order[:num_blocks], order[num_blocks:]
    found: dict[tuple[str, str], float] = {}

    def timed(way: str, direction: str, copy: Callable[[], object]) -> None:
        moved = num_bytes * (2 if direction == "both ways" else 1)
        found[way, direction] = moved / median_s(copy, repeats) / 1e9

    plain = {
        "offload": lambda: host[0].copy_(flat[0], non_blocking=True),
        "onboard": lambda: flat[1].copy_(host[1], non_blocking=True),
    }
    for direction in plain:
        timed("plain pinned copy", direction, partial(plainly, plain, [direction], device))
    timed("plain pinned copy", "both ways", partial(plainly, plain, list(plain), device))
    for arrangement, axes in AXES.items():
        kv = pages(axes, model, 2 * num_blocks, device)
        way = "staged pipeline" if arrangement == "scattered" else "cross-layer blocks"
        if arrangement == "scattered":
            fragments = fragments_of(kv, out, host[0], block_bytes)
            timed("a copy for each fragment", "offload", partial(fragment_by_fragment, fragments, device, out=True))
            timed("a copy for each fragment", "onboard", partial(fragment_by_fragment, fragments, device, out=False))
        with closing(copier_for(kv)) as copier:

            def offload(copier: Copier = copier) -> Ticket:
                return begun(lambda: copier.offload(out, slots[0]))

            def onboard(copier: Copier = copier) -> Ticket:
                return begun(lambda: copier.onboard(slots[1], back))

            timed(way, "offload", lambda: waited(offload()))
            timed(way, "onboard", lambda: waited(onboard()))
            timed(way, "both ways", lambda: waited(offload(), onboard()))
            slowdowns = {
                direction: slowdown(copies, device, repeats, matmul_size)
                for direction, copies in (("offload", [offload]), ("onboard", [onboard]))
            }
        found.update({(f"{way}: slowdown of a matmul", direction): part for direction, part in slowdowns.items()})
    return rows_of(model, block_bytes, found)


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


def fragments_of(kv: PagedKV, ids: Sequence[int], host: Tensor, block_bytes: int) -> list[tuple[Tensor, Tensor]]:
    """What a block is in pieces: on the device and on the host, a pair for each layer and plane of each page."""
    size = kv.piece_bytes
    return [
        (
            layer[page, plane].reshape(-1).view(torch.uint8),
            host[number * block_bytes + (index * kv.num_planes + plane) * size :][:size],
        )
        for number, page in enumerate(ids)
        for index, layer in enumerate(kv.layers)
        for plane in range(kv.num_planes)
    ]


def fragment_by_fragment(fragments: Sequence[tuple[Tensor, Tensor]], device: torch.device, *, out: bool) -> None:
    """One copy each, in the current stream."""
    for in_page, in_slot in fragments:
        target, source = (in_slot, in_page) if out else (in_page, in_slot)
        target.copy_(source, non_blocking=True)
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
