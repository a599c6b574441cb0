"""``kvstore replay``: the edge where files are opened, progress is shown and numbers are printed."""

import gzip
import json
import os
import sys
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Annotated

import typer
from rich import box
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TaskID, TimeRemainingColumn
from rich.table import Table

from kvstore.config import Config
from kvstore.errors import ConfigError
from kvstore.quantity import parse_size
from kvstore.replay.capacity import parse_capacity, split_list
from kvstore.replay.formats import TraceError, read_trace
from kvstore.replay.runs import run_of
from kvstore.replay.simulator import Result
from kvstore.replay.spool import RequestSpool
from kvstore.replay.trace import Requests, Trace, TraceRequest

MAX_BAD_LINES_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Row:
    """One policy at one capacity."""

    trace: Trace
    policy: str
    capacity_blocks: int
    result: Result
    seconds: float

    def as_json(self) -> dict[str, object]:
        """The contract for scripts."""
        return {
            "trace": self.trace.name,
            "policy": self.policy,
            "capacity_blocks": self.capacity_blocks,
            "capacity_share": round(self.capacity_blocks / max(1, self.trace.num_unique_blocks), 6),
            "token_hit_rate": round(self.result.token_hit_rate, 6),
            "compute_weighted_hit_rate": round(self.result.compute_weighted_hit_rate, 6),
            "blocks_written_per_referenced": round(self.result.blocks_written_per_referenced, 6),
            "seconds": round(self.seconds, 3),
        }


def replay(
    path: Annotated[Path, typer.Argument(metavar="TRACE", help="A trace, as it is or as .gz.")],
    policy: Annotated[
        str, typer.Option(help="Which ones, with commas; default is the store's own.")
    ] = "lru,default,belady,infinite",
    capacity: Annotated[
        str, typer.Option(help="How much is kept: 1% of the trace's blocks, 5000 blocks, or 64GiB; with commas.")
    ] = "1%,2%,5%,10%,20%",
    block_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens per block of a file of hashes, where it is not the usual size.")
    ] = None,
    kv_bytes_per_token: Annotated[
        str, typer.Option(help="What a token takes, for capacities in bytes. The default is Llama 3 8B's in bfloat16.")
    ] = "128KiB",
    skip_bad_lines: Annotated[
        bool, typer.Option("--skip-bad-lines", help="Report lines that are no requests and go on without them.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per policy and capacity.")] = False,
) -> None:
    """Replay a trace of requests against eviction policies: how many tokens each would have spared."""
    names = split_list(policy)
    default = Config.load(None, os.environ).policy
    runs = [run_of(name, default) for name in names]
    try:
        token_bytes = parse_size(kv_bytes_per_token)
    except ValueError as error:
        raise typer.BadParameter(f"--kv-bytes-per-token {kv_bytes_per_token}: {error}") from error
    console = Console(stderr=True)
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        trace = _load(path, block_tokens, skip_bad_lines)
        block_bytes = max(1, token_bytes) * trace.tokens_per_block
        capacities = [parse_capacity(text, trace.num_unique_blocks, block_bytes) for text in split_list(capacity)]
        rows = []
        for name, run in zip(names, runs, strict=True):
            for capacity_blocks in capacities:
                task = progress.add_task(f"{name} {capacity_blocks}", total=len(trace.requests))
                watched = replace(trace, requests=_Watched(trace.requests, progress, task))
                start_s = time.perf_counter()
                result = run(watched, capacity_blocks)
                rows.append(Row(trace, name, capacity_blocks, result, time.perf_counter() - start_s))
                progress.remove_task(task)
                if as_json:
                    print(json.dumps(rows[-1].as_json()), flush=True)
    if not as_json:
        _print_table(rows)


class _Watched:
    """Requests whose going by is shown."""

    def __init__(self, requests: Requests, progress: Progress, task: TaskID) -> None:
        self._requests = requests
        self._progress = progress
        self._task = task

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[TraceRequest]:
        for index, request in enumerate(self._requests):
            if index % 256 == 0:
                self._progress.update(self._task, completed=index)
            yield request


def _load(path: Path, block_tokens: int | None, skip_bad_lines: bool) -> Trace:
    bad: list[str] = []

    def report(number: int, why: str) -> None:
        bad.append(f"{path}: line {number}: {why}" if len(bad) < MAX_BAD_LINES_SHOWN else "")

    try:
        with _open(path) as lines:
            trace = read_trace(path.name, lines, tokens_per_block=block_tokens, keep=RequestSpool, report=report)
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    for line in bad[:MAX_BAD_LINES_SHOWN]:
        print(line, file=sys.stderr)
    if bad and not skip_bad_lines:
        raise TraceError(f"{path} has {len(bad)} bad lines: mend them, or leave them out with --skip-bad-lines")
    if bad:
        print(f"{path}: {len(bad)} bad lines left out", file=sys.stderr)
    return trace


def _open(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8", errors="replace")
    return path.open(encoding="utf-8", errors="replace")


def _print_table(rows: list[Row]) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("policy", "blocks", "share", "tokens hit", "compute spared", "written", "seconds"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for row in rows:
        values = row.as_json()
        table.add_row(
            row.policy,
            str(row.capacity_blocks),
            f"{100 * row.capacity_blocks / max(1, row.trace.num_unique_blocks):.2f} %",
            f"{100 * row.result.token_hit_rate:.2f} %",
            f"{100 * row.result.compute_weighted_hit_rate:.2f} %",
            f"{row.result.blocks_written_per_referenced:.3f}",
            f"{values['seconds']}",
        )
    Console().print(table)
