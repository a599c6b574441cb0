"""The command line: ``kvstore serve | top | stats | check | evict | doctor | config | replay``."""

import json
import os
import sys
from collections import Counter
from contextlib import closing, suppress
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvstore import __version__, offline
from kvstore.config import PATH_VARIABLE, Config, effective, gather
from kvstore.doctor import Finding, Verdict, examine
from kvstore.errors import ConfigError, KVStoreError, OwnershipError
from kvstore.machine import is_served
from kvstore.quantity import format_size, parse_size
from kvstore.replay.command import replay
from kvstore.servers import ServerReport, clear, survey
from kvstore.tiers.base import StoredBlock
from kvstore.tiers.file_blocks import FileBlocks, open_existing
from kvstore.tiers.file_directory import Access, has_store
from kvstore.types import NAMESPACE_DIGEST_BYTES

EXIT_BAD_NEWS = 1
"""The command ran and found something wrong."""
EXIT_ERROR = 2
"""The command could not run."""

app = typer.Typer(
    name="kvstore",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="A tiered KV cache store for LLM inference: what it holds, and whether this machine suits it.",
)

ConfigPath = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        help=f"The TOML file. Without it, what {PATH_VARIABLE} names, or defaults; KVSTORE_* variables win over both.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of a table.")]

_COLOURS = {Verdict.OK: "green", Verdict.WARN: "yellow", Verdict.FAIL: "red"}


@app.command()
def stats(path: ConfigPath = None, as_json: AsJson = False) -> None:
    """Print what each tier holds.

    Of a running sidecar what it says of itself. Without one, of files what lies there, of Redis what its servers say.
    Of a store in an engine's own process, scrape the metrics.
    """
    config = Config.load(path, os.environ)
    if is_served(config.server.socket):
        _live().print_stats(_console(), config.server.socket, as_json=as_json)
        return
    servers = [] if config.redis is None else survey(config.redis)
    held, owner = _file_holdings(config)
    if as_json:
        tiers = {
            "memory": {"capacity_bytes": config.memory.capacity_bytes},
            "file": [_as_hex(holding) for holding in held],
            "file_in_use": owner,
            "redis": [asdict(report) for report in servers],
        }
        print(json.dumps(tiers, indent=2))
        return
    print(f"memory: {format_size(config.memory.capacity_bytes)}, in the process that has the store open")
    if owner:
        print(f"file: {owner}")
    if held:
        _print_holdings(held)
    elif config.file is not None and not owner:
        print("file: no blocks")
    if servers:
        _print_servers(servers)


@app.command()
def check(
    path: ConfigPath = None,
    repair: Annotated[bool, typer.Option("--repair", help="Erase the blocks that are broken.")] = False,
    as_json: AsJson = False,
) -> None:
    """Read every block on file and verify it.

    Exits with 1 if one is broken and was not erased. Of a running sidecar, which reads and verifies its files itself,
    the tables are proved instead. No other process may have the store open.
    """
    config = Config.load(path, os.environ)
    if is_served(config.server.socket):
        if not _live().check(_console(), config.server.socket):
            raise typer.Exit(EXIT_BAD_NEWS)
        return
    with closing(_files(config, Access.ERASE if repair else Access.LOOK)) as files:
        counts: Counter[str] = Counter()
        broken: list[StoredBlock] = []
        for block, outcome in offline.verify(files):
            counts[outcome.value] += 1
            if outcome in offline.BROKEN:
                broken.append(block)
        num_erased = offline.erase(files, broken) if repair else 0
    if as_json:
        print(json.dumps({"outcomes": counts, "broken": len(broken), "erased": num_erased}, indent=2))
    else:
        print(f"{counts.total()} blocks: {', '.join(f'{n} {outcome}' for outcome, n in counts.items()) or 'none'}")
        if num_erased:
            print(f"{num_erased} broken blocks erased")
        elif broken:
            print("run it with --repair to erase the broken ones; until then each is a miss")
    if len(broken) > num_erased:
        raise typer.Exit(EXIT_BAD_NEWS)


@app.command()
def evict(
    path: ConfigPath = None,
    namespace: Annotated[
        str | None, typer.Option(help="Free this whole namespace, on file and Redis: 32 hex digits.")
    ] = None,
    size: Annotated[str | None, typer.Option(help='Free about so much on file, oldest first: "10GiB".')] = None,
) -> None:
    """Free blocks of the lower tiers, or of a running sidecar.

    Of a sidecar a namespace in every tier, or about so much of RAM. Without one, no other process may have the store
    open, unless only Redis is meant.
    """
    config = Config.load(path, os.environ)
    if (namespace is None) == (size is None):
        raise typer.BadParameter("give one of --namespace and --size")
    if is_served(config.server.socket):
        wanted = b"" if namespace is None else _digest(namespace)
        _live().evict(_console(), config.server.socket, namespace=wanted, size_bytes=_size(size) if size else 0)
        return
    if config.file is None and config.redis is None:
        raise ConfigError("no lower tier is configured: give the store's --config, or KVSTORE_REDIS_URL")
    digest = b"" if namespace is None else _digest(namespace)
    if size is not None and config.file is None:
        raise ConfigError("--size is for the file tier, and none is configured: give the store's --config")
    if config.file is not None:
        with closing(_files(config, Access.ERASE)) as files:
            leaving = offline.of_namespace(files.scan(), digest)
            if size is not None:
                leaving = offline.of_size(offline.oldest_leaves(files.scan()), files, _size(size))
            print(f"file: {offline.erase(files, list(leaving))} blocks freed")
    if config.redis is not None and namespace is not None:
        print(f"redis: {clear(config.redis, digest)} blocks freed")


@app.command()
def serve(path: ConfigPath = None) -> None:
    """Be the sidecar, the store of every engine on this host."""
    from kvstore.server.serve import run  # noqa: PLC0415 - the other commands need no gRPC, which takes a while to load

    run(Config.load(path, os.environ))


@app.command()
def top(
    path: ConfigPath = None,
    interval_s: Annotated[float, typer.Option("--interval", min=0.1, help="Seconds between two looks.")] = 1.0,
    num_frames: Annotated[int | None, typer.Option("--count", min=1, help="End after so many.")] = None,
) -> None:
    """Watch a running sidecar."""
    config = Config.load(path, os.environ)
    if not is_served(config.server.socket):
        raise ConfigError(f"no sidecar is running at {config.server.socket}: start one with kvstore serve")
    with suppress(KeyboardInterrupt):
        _live().top(_console(), config.server.socket, interval_s=interval_s, num_frames=num_frames)


@app.command()
def config(path: ConfigPath = None, as_json: AsJson = False) -> None:
    """Print every setting and where it is from.

    That is the file, the environment or a default; secrets are masked. Fails if the configuration has a mistake or asks
    for more than this machine has.
    """
    given = gather(path, os.environ)
    rows = effective(given)
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        table = _table("setting", "value", "source")
        for row in rows:
            table.add_row(row.key, Text(row.value or "unset"), Text(row.source), style=_dim(row.source == "default"))
        _console().print(table)
    Config.from_given(given).validate_against_machine()


@app.command()
def doctor(path: ConfigPath = None, as_json: AsJson = False) -> None:
    """Try out what this machine gives the store.

    Says what to do where it gives less than it could. Exits with 1 if something would keep the store from working.
    """
    findings = []
    for finding in examine(Config.load(path, os.environ)):
        findings.append(finding)
        if not as_json:
            _print_finding(finding)
    if as_json:
        print(json.dumps([asdict(finding) | {"verdict": finding.verdict.value} for finding in findings], indent=2))
    if any(finding.verdict is Verdict.FAIL for finding in findings):
        raise typer.Exit(EXIT_BAD_NEWS)


app.command()(replay)


def _live() -> ModuleType:
    from kvstore import live  # noqa: PLC0415 - gRPC takes a while to load, and only a running sidecar needs it

    return live


def _print_finding(finding: Finding) -> None:
    """As soon as it is made: some take a while."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(width=4)
    grid.add_column(min_width=22, no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row(Text(finding.verdict.value, _COLOURS[finding.verdict]), finding.name, Text(finding.found))
    if finding.advice:
        grid.add_row("", "", Text(f"to do: {finding.advice}", "bold"))
    _console().print(grid)


def _print_servers(servers: list[ServerReport]) -> None:
    table = _table("redis", "version", "used", "maxmemory", "policy", "keys", "")
    for report in servers:
        if report.error:
            table.add_row(Text(report.address), *[""] * 5, Text(report.error))
        else:
            limit = format_size(report.max_bytes) if report.max_bytes else "none"
            sizes = format_size(report.used_bytes), limit
            table.add_row(
                Text(report.address), report.version, *sizes, report.eviction, str(report.num_keys), Text(report.advice)
            )
    _console().print(table)


def _files(config: Config, access: Access) -> FileBlocks:
    """What lies in the configured directories, however large ``file.capacity`` is: looking at it changes nothing."""
    if config.file is None:
        raise ConfigError("no file tier is configured: give the store's --config, or KVSTORE_FILE_DIRECTORIES")
    return open_existing(config.file.directories, access=access)


def _file_holdings(config: Config) -> tuple[list[offline.Holding], str]:
    """What lies on file, or why it cannot be looked at now."""
    if config.file is None or not has_store(config.file.directories):
        return [], ""
    try:
        with closing(_files(config, Access.LOOK)) as files:
            return offline.holdings(files), ""
    except OwnershipError as error:
        return [], str(error)


def _as_hex(holding: offline.Holding) -> dict[str, object]:
    return asdict(holding) | {"namespace": holding.namespace.hex(), "fingerprint": holding.fingerprint.hex()}


def _print_holdings(held: list[offline.Holding]) -> None:
    table = _table("file: namespace", "layout", "block", "blocks", "used")
    for holding in held:
        sizes = format_size(holding.block_bytes), str(holding.num_blocks), format_size(holding.used_bytes)
        table.add_row(holding.namespace.hex(), holding.fingerprint.hex(), *sizes)
    _console().print(table)


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise typer.BadParameter(f"--size {text}: {error}") from error


def _digest(text: str) -> bytes:
    try:
        digest = bytes.fromhex(text)
    except ValueError:
        digest = b""
    if len(digest) != NAMESPACE_DIGEST_BYTES:
        raise typer.BadParameter(f"--namespace {text}: not 32 hex digits")
    return digest


def _version(asked: bool) -> None:
    if asked:
        print(f"kvstore {__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options of every command."""


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _dim(is_dim: bool) -> str:
    return "dim" if is_dim else ""


def _console() -> Console:
    """As wide as the terminal; in a pipe wide enough to fold few lines."""
    return Console() if sys.stdout.isatty() else Console(width=160)


def main() -> None:
    """Run a command; an error of ours is one line that says what to do."""
    try:
        app()
    except KVStoreError as error:
        print(f"kvstore: {error}", file=sys.stderr)
        sys.exit(EXIT_ERROR)


if __name__ == "__main__":
    main()
