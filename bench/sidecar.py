"""A sidecar beside memmove, and what its answers take; prints two tables and writes build/bench-sidecar.json.

    make bench-sidecar               about a minute
    make bench-sidecar ARGS=--quick    seconds, for a look at whether it runs; the numbers say nothing

Everything is seen from an engine's process: the sidecar is another one. Ours and the limit take turns.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path

from bench.costs import Cost
from bench.engine_side import layout_of
from bench.memory_rows import WANTED, config_for, rows_of
from bench.report import build_folder, provenance, save
from bench.scale import FULL, QUICK, Scale
from bench.tiers import shown, shown_costs
from bench.turns import Row
from kvstore.client.store_client import StoreClient
from kvstore.hashing import Identity
from kvstore.namespace import Namespace
from kvstore.testing.sidecar import Sidecar
from kvstore.types import BlockKey

RATIO = 0.8
SHORT_BLOCKS = 256
"""4K tokens."""
BLOCK_BYTES = 4096
"""Of the blocks that are only looked up."""
LOOKUPS_PER_REPEAT = 40
IDENTITY = Identity("bench", b"weights")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="hardly any work")
    parser.add_argument("--output", type=Path, default=build_folder() / "bench-sidecar.json")
    arguments = parser.parse_args()
    scale = QUICK if arguments.quick else FULL
    head = provenance()
    rows = list(shown(_rows(scale)))
    costs = list(shown_costs(_costs(scale)))
    save(arguments.output, {**head, "rows": [asdict(row) for row in rows], "costs": [asdict(cost) for cost in costs]})


def _rows(scale: Scale) -> Iterator[Row]:
    for block_bytes in WANTED:
        capacity_bytes = 2 * config_for(block_bytes, scale).memory.capacity_bytes  # one client writes to half at most
        with Sidecar(MEMORY_CAPACITY=f"{capacity_bytes}B") as served, closing(served.client()) as client:
            yield from rows_of("sidecar", client, block_bytes, RATIO, scale)


def _costs(scale: Scale) -> Iterator[Cost]:
    yield from _starts(scale)
    with Sidecar(MEMORY_CAPACITY=f"{2 * (scale.prefix_blocks + SHORT_BLOCKS) * BLOCK_BYTES}B") as served:
        with closing(served.client()) as client:
            ns = client.open_namespace(IDENTITY, layout_of(BLOCK_BYTES))
            chain = _filled(client, ns, scale.prefix_blocks)
            repeats = LOOKUPS_PER_REPEAT * scale.repeats
            for length, wanted_ms in ((scale.prefix_blocks, 5.0), (SHORT_BLOCKS, None)):
                part = chain[:length]
                yield from _latencies(
                    f"look up {len(part)} blocks", partial(_look_up, client, part), repeats, wanted_ms
                )
                yield from _latencies(f"pin and release {len(part)} blocks", partial(_pin, client, part), repeats, None)
        yield _throughput(served, scale)


def _starts(scale: Scale) -> Iterator[Cost]:
    """From the command to the first answer, at a capacity that takes long to touch; and the memory it takes then."""
    took_s, idle_bytes = [], []
    for _ in range(scale.processes):
        began_s = time.perf_counter()
        with Sidecar(MEMORY_CAPACITY="4GiB") as served, closing(served.client()):
            took_s.append(time.perf_counter() - began_s)
            idle_bytes.append(_own_bytes(served.process.pid))
    yield Cost("cold start to the first session, 4 GiB", _percentile(took_s, 0.5), "s", 1.5, None, scale.processes)
    yield Cost(
        "memory of the idle sidecar above the arena",
        _percentile(idle_bytes, 0.5) / 1e6,
        "MB",
        120,
        None,
        scale.processes,
    )


def _own_bytes(pid: int) -> float:
    """Resident memory of a process that is not shared memory."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssFile"))


def _filled(client: StoreClient, ns: Namespace, num_blocks: int) -> Sequence[BlockKey]:
    chain = ns.keys(range(16 * num_blocks))
    with client.reserve(ns, num_blocks) as lease:
        client.commit(lease, chain[: lease.num_blocks], None)
    return chain


def _look_up(client: StoreClient, chain: Sequence[BlockKey]) -> None:
    while (found := client.lookup(chain)).pending:
        client.wait(1.0)
        client.poll()
    if found.ready != len(chain):
        raise SystemExit(f"only {found.ready} of {len(chain)} blocks are here")


def _pin(client: StoreClient, chain: Sequence[BlockKey]) -> None:
    with client.pin(chain):
        pass


def _latencies(what: str, work: Callable[[], None], repeats: int, wanted_ms: float | None) -> Iterator[Cost]:
    took_s = []
    for _ in range(repeats):
        began_s = time.perf_counter()
        work()
        took_s.append(time.perf_counter() - began_s)
    yield Cost(f"{what}, p50", _percentile(took_s, 0.5) * 1000, "ms", wanted_ms, None, repeats)
    yield Cost(f"{what}, p99", _percentile(took_s, 0.99) * 1000, "ms", None, None, repeats)


def _throughput(served: Sidecar, scale: Scale) -> Cost:
    """Several engine processes look up prompts of 4K tokens as fast as each can."""
    count = LOOKUPS_PER_REPEAT * scale.repeats
    command = [sys.executable, "-m", "bench.sidecar_client", str(served.socket), str(count)]
    clients = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)
        for _ in range(scale.clients)
    ]
    for client in clients:
        assert client.stdout is not None
        client.stdout.readline()  # it is ready
    began_s = time.perf_counter()
    for client in clients:
        assert client.stdin is not None
        client.stdin.write("go\n")
        client.stdin.flush()
    for client in clients:
        client.communicate()
    per_s = scale.clients * count / (time.perf_counter() - began_s)
    return Cost(
        f"{scale.clients} clients that look up {SHORT_BLOCKS} blocks each, time per lookup in all",
        1000 / per_s,
        "ms",
        1.0,
        None,
        scale.clients * count,
    )


def _percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


if __name__ == "__main__":
    main()
