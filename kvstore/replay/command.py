"""``kvstore replay``: the edge where files are opened, progress is shown and numbers are printed."""

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TaskID, TimeRemainingColumn
from rich.table import Table

from kvstore.config import Config
from kvstore.quantity import parse_size
from kvstore.replay.capacity import parse_capacity, split_list
from kvstore.replay.loading import load
from kvstore.replay.runs import run_of
from kvstore.replay.simulator import Result
from kvstore.replay.trace import Requests, Trace, TraceRequest


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
        int | None,
        typer.Option(min=1, help="Tokens per block: of hashes, where it is not the usual size; of chats, 16 without."),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="A tokenizer.json, for chats; without it four bytes of text are taken as a token."),
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
        trace = load(path, block_tokens, tokenizer, skip_bad_lines=skip_bad_lines)
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
