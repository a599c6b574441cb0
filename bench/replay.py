"""Token hit rates of every policy at every size on every trace, published or made up: build/bench-replay.json.

What is done is kept after each policy, so that a run that is cut short has not been for nothing.
"""

import gzip
import itertools
import time
from collections.abc import Iterator
from pathlib import Path

from bench.made_traces import made_traces
from bench.report import ROOT, build_folder, keep, provenance, save
from kvstore.replay.capacity import parse_capacity
from kvstore.replay.formats import read_trace
from kvstore.replay.rows import Row
from kvstore.replay.runs import all_runs
from kvstore.replay.trace import Trace

SIZES = ("0.5%", "1%", "2%", "5%", "10%", "20%")


def main() -> None:
    path = build_folder() / "bench-replay.json"
    content = provenance() | {"repeats": 1, "sizes": SIZES}
    rows: list[dict[str, object]] = []
    published = map(_load, sorted((ROOT / "bench" / "traces").glob("*.gz")))
    for trace in itertools.chain(published, made_traces()):
        for of_policy in _rows(trace):
            rows += [row.as_json() for row in of_policy]
            keep(path, content | {"rows": rows})
    save(path, content | {"rows": rows})


def _load(path: Path) -> Trace:
    with gzip.open(path, "rt") as lines:
        return read_trace(path.name, lines)


def _rows(trace: Trace) -> Iterator[list[Row]]:
    """Of one policy after another, at every size."""
    for policy, run in all_runs().items():
        rows = []
        for size in SIZES:
            capacity_blocks = parse_capacity(size, trace.num_unique_blocks, 1)
            start_s = time.perf_counter()
            result = run(trace, capacity_blocks)
            rows.append(Row(trace, policy, capacity_blocks, result, time.perf_counter() - start_s))
        print(trace.name, policy, *[f"{row.result.token_hit_rate:.2%}" for row in rows])
        yield rows


if __name__ == "__main__":
    main()
