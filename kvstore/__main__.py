"""The command line: ``kvstore stats | check | evict | doctor | config``."""

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
from kvstore.errors import KVStoreError

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
