"""``kvstore replay``: the edge where a person's words become replays, progress is shown and numbers are printed."""

import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TaskID, TimeRemainingColumn

from kvstore import __version__
from kvstore.config import Config
from kvstore.errors import ConfigError
from kvstore.replay.capacity import parse_capacity, split_list
from kvstore.replay.fleet import COMMON, TIERS
from kvstore.replay.hardware import DEFAULT, HARDWARE, Hardware
from kvstore.replay.loading import find_hardware, load, save_page
from kvstore.replay.report.page import REFERENCES, Origin, page
from kvstore.replay.routing import ROUTERS
from kvstore.replay.rows import Row, TieredRow
from kvstore.replay.runs import policy_of, run_of
from kvstore.replay.tables import print_rows, print_tiered
from kvstore.replay.tiered import Fleet, replay_tiered
from kvstore.replay.trace import Requests, Trace, TraceRequest

T = TypeVar("T")

BlockTokens = Annotated[
    int | None,
    typer.Option(min=1, help="Tokens per block: of hashes, where it is not the usual size; of chats, 16 without."),
]
Tokenizer = Annotated[
    Path | None, typer.Option(help="A tokenizer.json, for chats; without it four bytes of text are taken as a token.")
]
ReportPath = Annotated[
    Path | None, typer.Option(help="Write a report with charts to this file; adds lru, belady and infinite.")
]


@dataclass(frozen=True, slots=True)
class _Layout:
    """How tiers and engines are arranged, as it was said."""

    tiers: Mapping[str, str]
    num_engines: int
    share: str
    routing: str

    def fleet(self, trace: Trace, hardware: Hardware) -> Fleet:
        block_bytes = trace.tokens_per_block * hardware.kv_bytes_per_token
        capacities = {
            name: parse_capacity(text, trace.num_unique_blocks, block_bytes) for name, text in self.tiers.items()
        }
        return Fleet(capacities, self.num_engines, COMMON[self.share], ROUTERS[self.routing], hardware)


@dataclass(slots=True)
class _Lab:
    """Replays, one after another, and what came of them."""

    policies: Sequence[str]
    default: str
    """The store's own policy."""
    hardware: Hardware
    progress: Progress
    as_json: bool
    rows: list[Row] = field(default_factory=list)
    tiered_rows: list[TieredRow] = field(default_factory=list)

    def replay(self, trace: Trace, capacities: Sequence[str]) -> None:
        """Each policy at each capacity."""
        block_bytes = self.hardware.kv_bytes_per_token * trace.tokens_per_block
        sizes = [parse_capacity(text, trace.num_unique_blocks, block_bytes) for text in capacities]
        for policy in self.policies:
            run = run_of(policy, self.default)
            for size in sizes:
                result, seconds = self._timed(trace, f"{policy} {size}", run, size)
                self.rows.append(Row(trace, policy, size, result, seconds))
                self._show(self.rows[-1])

    def replay_tiers(self, trace: Trace, layout: _Layout) -> None:
        """Each policy on one fleet."""
        fleet = layout.fleet(trace, self.hardware)
        for policy in self.policies:
            factory = policy_of(policy, self.default)
            result, seconds = self._timed(trace, policy, replay_tiered, factory, fleet)
            self.tiered_rows.append(TieredRow(trace, policy, fleet, layout.routing, result, seconds))
            self._show(self.tiered_rows[-1])

    def _timed(self, trace: Trace, label: str, run: Callable[..., T], *arguments: object) -> tuple[T, float]:
        task = self.progress.add_task(f"{trace.name} {label}", total=len(trace.requests))
        watched = replace(trace, requests=_Watched(trace.requests, self.progress, task))
        start_s = time.perf_counter()
        result = run(watched, *arguments)
        self.progress.remove_task(task)
        return result, time.perf_counter() - start_s

    def _show(self, row: Row | TieredRow) -> None:
        if self.as_json:
            print(json.dumps(row.as_json()), flush=True)


def replay(
    paths: Annotated[list[Path], typer.Argument(metavar="TRACE...", help="Traces, as they are or as .gz.")],
    policy: Annotated[
        str | None,
        typer.Option(
            help="Which ones, with commas; default is the store's own.  [default: lru,default,belady,infinite]"
        ),
    ] = None,
    capacity: Annotated[
        str, typer.Option(help="How much is kept: 1% of the trace's blocks, 5000 blocks, or 64GiB; with commas.")
    ] = "1%,2%,5%,10%,20%",
    tiers: Annotated[
        str | None,
        typer.Option(help=f"Replay tiers instead, such as hbm=20GiB,memory=5%,file=1TB; of {', '.join(TIERS)}."),
    ] = None,
    engines: Annotated[int, typer.Option(min=1, help="With --tiers: how many engines there are.")] = 1,
    share: Annotated[
        str, typer.Option(help="Which tiers they share: nothing, remote (shared) or sidecar (memory and below).")
    ] = "remote",
    routing: Annotated[str, typer.Option(help=f"Who gets a request: {', '.join(ROUTERS)}.")] = "round-robin",
    hardware: Annotated[
        str, typer.Option(help=f"Rates and sizes: a TOML file or one of {', '.join(HARDWARE)}.")
    ] = DEFAULT,
    block_tokens: BlockTokens = None,
    tokenizer: Tokenizer = None,
    skip_bad_lines: Annotated[
        bool, typer.Option("--skip-bad-lines", help="Report lines that are no requests and go on without them.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per policy and capacity.")] = False,
    html: ReportPath = None,
) -> None:
    """Replay traces of requests against eviction policies.

    Says how many tokens each policy would have spared, beside what no policy can beat.
    """
    profile = find_hardware(hardware)
    layout = None if tiers is None else _layout(tiers, engines, share, routing)
    names = split_list(policy or ("lru,default" if layout else "lru,default,belady,infinite"))
    if html and layout is None:
        names = list(dict.fromkeys([*names, *REFERENCES]))
    with _progress() as progress:
        lab = _Lab(names, Config.load(None, os.environ).policy, profile, progress, as_json)
        for path in paths:
            trace = load(path, block_tokens, tokenizer, skip_bad_lines=skip_bad_lines)
            if layout is None:
                lab.replay(trace, split_list(capacity))
            else:
                lab.replay_tiers(trace, layout)
    if html:
        origin = Origin(__version__, time.strftime("%-d %B %Y"), shlex.join(["kvstore", *sys.argv[1:]]))
        save_page(html, page(lab.rows, lab.tiered_rows, origin))
    if not as_json:
        console = Console() if sys.stdout.isatty() else Console(width=160)
        print_rows(console, lab.rows) if layout is None else print_tiered(console, lab.tiered_rows)


def _layout(tiers: str, num_engines: int, share: str, routing: str) -> _Layout:
    said = {}
    for word in split_list(tiers):
        name, _, size = word.partition("=")
        if name not in TIERS or not size:
            raise ConfigError(f"--tiers {word!r} is no tier: write for example memory=64GiB, of {', '.join(TIERS)}")
        said[name] = size
    if not said:
        raise ConfigError("--tiers names no tier: write for example memory=64GiB")
    for option, value, choices in (("--share", share, COMMON), ("--routing", routing, ROUTERS)):
        if value not in choices:
            raise ConfigError(f"{option} {value!r} is none of {', '.join(choices)}")
    return _Layout(said, num_engines, share, routing)


@contextmanager
def _progress() -> Iterator[Progress]:
    """On stderr, if a person is there to see it."""
    console = Console(stderr=True)
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield progress


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
