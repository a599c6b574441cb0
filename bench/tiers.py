"""Every tier beside its limit, and what the tables cost; prints two tables and writes build/bench-tiers.json.

    make bench-tiers            a few minutes
    make bench-tiers ARGS=--quick    seconds, for a look at whether it runs; the numbers say nothing

Ours and the limit take turns, and all numbers are medians. Only ratios count: the machine is nobody's alone.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from bench.costs import Cost, costs
from bench.end_to_end_rows import end_to_end_rows
from bench.file_rows import file_rows
from bench.memory_rows import memory_rows
from bench.redis_rows import redis_rows
from bench.report import build_folder, provenance, save
from bench.scale import FULL, QUICK, Scale
from bench.turns import Row

PARTS: dict[str, Callable[[Scale], Iterator[Row]]] = {
    "memory": memory_rows,
    "file": file_rows,
    "redis": redis_rows,
    "end-to-end": end_to_end_rows,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="hardly any work")
    parser.add_argument("--only", choices=[*PARTS, "costs"], help="one part")
    parser.add_argument("--output", type=Path, default=build_folder() / "bench-tiers.json")
    arguments = parser.parse_args()
    scale = QUICK if arguments.quick else FULL
    head = provenance()
    rows = [row for name, part in PARTS.items() if arguments.only in (None, name) for row in shown(part(scale))]
    found = list(shown_costs(costs(scale))) if arguments.only in (None, "costs") else []
    save(arguments.output, {**head, "rows": [asdict(row) for row in rows], "costs": [asdict(cost) for cost in found]})


def shown(rows: Iterator[Row]) -> Iterator[Row]:
    for row in rows:
        goal = "" if row.wanted is None else f"{row.wanted:5.2f} {'met' if row.ratio >= row.wanted else 'MISSED'}"
        print(
            f"{row.tier:12} {row.op:10} {row.block_bytes >> 10:5} KiB {row.gbps:7.2f} GB/s of {row.limit_gbps:6.2f}"
            f" = {row.ratio:5.2f}  {goal:13} ({row.limit})",
            flush=True,
        )
        yield row


def shown_costs(found: Iterator[Cost]) -> Iterator[Cost]:
    for cost in found:
        goal = "" if cost.wanted is None else f"<= {cost.wanted:g} {'met' if cost.value <= cost.wanted else 'MISSED'}"
        print(f"{cost.what:90} {cost.value:8g} {cost.unit:2} {goal}", flush=True)
        yield cost


if __name__ == "__main__":
    main()
