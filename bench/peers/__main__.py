"""The same work as ours, done by the peers beside us in one run; prints a table and writes build/bench-peers.json.

    make bench-peers                         about a quarter of an hour; the first time it installs the peers
    make bench-peers ARGS="--only memory"    one kind of work

Each side is a process of its own, and they take turns: one round of each, again and again, every other time backwards.
All numbers are medians. Bytes that come back are compared with those that were given, which does not count. Of the ways
that a side has to do something the fastest counts.
"""

import argparse
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO

from bench.peers.environments import PEERS, python_of, version_of
from bench.peers.side import OUR_PYTHON, Side, SideError, Task
from bench.report import build_folder, provenance, save
from bench.scale import FULL, MIB, QUICK, Scale
from bench.turns import in_turns
from kvstore.testing.valkey import ValkeyServer

OURS, LIMIT = "this store", "limit"
BLOCKS_BYTES = (2 * MIB, 360 << 10, 64 << 10)
NOTE = "other programs ran on the machine at the same time; sides alternate, and only their ratios say anything"
Module = tuple[Path, str]


@dataclass(frozen=True, slots=True)
class Row:
    """How fast one side does something."""

    work: str
    op: str
    block_bytes: int
    side: str
    way: str
    value: float
    unit: str
    ours_over: float
    """How many times as fast this store is."""
    repeats: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="hardly any work")
    parser.add_argument("--ours", action="store_true", help="no peers, and nothing to install")
    parser.add_argument("--only", choices=["memory", "daemon", "file", "redis", "tables", "daemon tables"])
    parser.add_argument("--output", type=Path, default=build_folder() / "bench-peers.json")
    arguments = parser.parse_args()
    scale = QUICK if arguments.quick else FULL
    head = provenance()
    skipped: dict[str, str] = {}
    modules = _modules(skipped, with_peers=not arguments.ours)
    rows: list[Row] = []
    with ExitStack() as stack:
        log = stack.enter_context((build_folder() / "bench-peers.log").open("w"))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir=build_folder())))
        server = stack.enter_context(ValkeyServer(maxmemory=f"{8 * scale.redis_bytes + 256 * MIB}b"))
        for number, task in enumerate(_tasks(scale, server.url)):
            if arguments.only in (None, task.work):
                place = folder / str(number)
                place.mkdir()
                rows += _shown(_compare(replace(task, folder=str(place)), modules[task.work], scale, skipped, log))
                server.command("FLUSHALL")
    sides = {peer.name: version_of(peer) for peer in PEERS}
    save(
        arguments.output,
        {**head, "note": NOTE, "versions": sides, "skipped": skipped, "rows": [asdict(row) for row in rows]},
    )


def _modules(skipped: dict[str, str], with_peers: bool) -> dict[str, dict[str, Module]]:
    """For each kind of work the sides that do it."""
    kinds = ("memory", "daemon", "file", "redis", "tables", "daemon tables")
    modules = {work: {OURS: (OUR_PYTHON, "bench.peers.ours")} for work in kinds}
    for work in ("memory", "daemon", "file", "redis"):
        modules[work][LIMIT] = (OUR_PYTHON, "bench.peers.limits")
    for peer in PEERS if with_peers else ():
        try:
            python = python_of(peer)
        except SideError as error:
            skipped[peer.name] = str(error)
            print(f"{peer.name}: {error}", flush=True)
            continue
        for work, module in peer.modules.items():
            modules[work][peer.name] = (python, module)
    return modules


def _tasks(scale: Scale, redis_url: str) -> Iterator[Task]:
    num_bytes = {
        "memory": scale.memory_bytes,
        "daemon": scale.memory_bytes,
        "file": scale.file_bytes // 4,
        "redis": scale.redis_bytes // 2,
    }
    for work, work_bytes in num_bytes.items():
        for block_bytes in BLOCKS_BYTES:
            yield Task(work, block_bytes, max(1, work_bytes // block_bytes), "", redis_url)
    for work in ("tables", "daemon tables"):
        yield Task(work, 0, scale.prefix_blocks, "", redis_url)


def _compare(
    task: Task, modules: Mapping[str, Module], scale: Scale, skipped: dict[str, str], log: IO[str]
) -> list[Row]:
    """All sides beside each other; one that fails is left out, and it is said why."""
    with ExitStack() as stack:
        sides: dict[str, Side] = {}
        for name, (python, module) in modules.items():
            try:
                own = replace(task, folder=str(Path(task.folder) / name.replace(" ", "-")))
                sides[name] = stack.enter_context(closing(Side(python, module, own, log)))
            except SideError as error:
                _skip(skipped, name, task, str(error))
        works = {
            (op, name, way): partial(side.round, op, way)
            for op in ("store", "write", "load", "read", "hash", "look up", "hash and look up")
            for name, side in sides.items()
            for way in side.ways.get(op, ())
        }
        seconds = in_turns({" | ".join(names): work for names, work in works.items()}, scale.repeats)
        for name, side in sides.items():
            if side.failure:
                _skip(skipped, name, task, side.failure)
        return list(_rows(task, {tuple(names.split(" | ")): took_s for names, took_s in seconds.items()}, scale))


def _rows(task: Task, seconds: Mapping[Sequence[str], float], scale: Scale) -> Iterator[Row]:
    """The fastest way of each side."""
    best: dict[tuple[str, str], tuple[float, str]] = {}
    for (op, name, way), took_s in seconds.items():
        if not math.isnan(took_s):
            best[op, name] = min(best.get((op, name), (math.inf, "")), (took_s, way))
    for (op, name), (took_s, way) in best.items():
        gbps = task.num_blocks * task.block_bytes / took_s / 1e9
        value, unit = (gbps, "GB/s") if task.block_bytes else (took_s * 1e3, "ms")
        over = round(took_s / best[op, OURS][0], 2) if (op, OURS) in best else math.nan
        yield Row(task.work, op, task.block_bytes, name, way, float(f"{value:.4g}"), unit, over, scale.repeats)


def _skip(skipped: dict[str, str], name: str, task: Task, why: str) -> None:
    what = f"{name}, {task.work}" + (f", {task.block_bytes >> 10} KiB" if task.block_bytes else "")
    skipped[what] = why
    print(f"{what}: {why}", flush=True)


def _shown(rows: Sequence[Row]) -> Sequence[Row]:
    for row in rows:
        size = f"{row.block_bytes >> 10} KiB" if row.block_bytes else ""
        print(
            f"{row.work:13} {row.op:16} {size:>9} {row.side:15} {row.value:8.4g} {row.unit:4}"
            f" {row.ours_over:6.2f}  ({row.way})",
            flush=True,
        )
    return rows


if __name__ == "__main__":
    main()
