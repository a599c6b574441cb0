"""Token hit rates of every policy at every size on every trace: build/bench-replay.json."""

import gzip
import time
from pathlib import Path

from bench.report import ROOT, build_folder, provenance, save
from kvstore.replay.capacity import parse_capacity
from kvstore.replay.formats import read_trace
from kvstore.replay.rows import Row
from kvstore.replay.runs import all_runs
from kvstore.replay.trace import Trace

SIZES = ("0.5%", "1%", "2%", "5%", "10%", "20%")


def main() -> None:
    rows = [row.as_json() for path in sorted((ROOT / "bench" / "traces").glob("*.gz")) for row in _rows(_load(path))]
    save(build_folder() / "bench-replay.json", provenance() | {"repeats": 1, "sizes": SIZES, "rows": rows})


def _load(path: Path) -> Trace:
    with gzip.open(path, "rt") as lines:
        return read_trace(path.name, lines)


def _rows(trace: Trace) -> list[Row]:
    rows = []
    for policy, run in all_runs().items():
        for size in SIZES:
            capacity_blocks = parse_capacity(size, trace.num_unique_blocks, 1)
            start_s = time.perf_counter()
            result = run(trace, capacity_blocks)
            rows.append(Row(trace, policy, capacity_blocks, result, time.perf_counter() - start_s))
        print(trace.name, policy, *[f"{row.result.token_hit_rate:.2%}" for row in rows[-len(SIZES) :]])
    return rows


if __name__ == "__main__":
    main()
