"""The command line: ``kvstore stats | evict | doctor | config``."""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvstore import __version__
from kvstore.config import PATH_VARIABLE, Config, effective, gather
from kvstore.doctor import Finding, Verdict, examine
from kvstore.errors import ConfigError, KVStoreError
from kvstore.quantity import format_size
from kvstore.servers import ServerReport, clear, survey
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

    Of Redis what its servers say; of the store in a running process, scrape the metrics.
    """
    config = Config.load(path, os.environ)
    servers = [] if config.redis is None else survey(config.redis)
    if as_json:
        tiers = {
            "memory": {"capacity_bytes": config.memory.capacity_bytes},
            "redis": [asdict(report) for report in servers],
        }
        print(json.dumps(tiers, indent=2))
        return
    print(f"memory: {format_size(config.memory.capacity_bytes)}, in the process that has the store open")
    if servers:
        _print_servers(servers)


@app.command()
def evict(
    namespace: Annotated[str, typer.Option(help="Free this whole namespace on Redis: 32 hex digits.")],
    path: ConfigPath = None,
) -> None:
    """Free blocks of the lower tiers."""
    config = Config.load(path, os.environ)
    digest = _digest(namespace)
    if config.redis is None:
        raise ConfigError("no redis tier is configured: give the store's --config, or KVSTORE_REDIS_URL")
    print(f"redis: {clear(config.redis, digest)} blocks freed")


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
