"""Rows as tables for a terminal."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from kvstore.quantity import format_size
from kvstore.replay.rows import Row, TieredRow, distribution


def print_rows(console: Console, rows: Sequence[Row]) -> None:
    """A line for each policy and capacity; among those of a capacity, the best token hit rate stands out."""
    best = {(row.trace.name, row.capacity_blocks): 0.0 for row in rows}
    for row in rows:
        if row.policy not in ("belady", "infinite"):
            cell = row.trace.name, row.capacity_blocks
            best[cell] = max(best[cell], row.result.token_hit_rate)
    table = _table("trace", "policy", "blocks", "share", "tokens hit", "compute spared", "written", "seconds")
    shown = ("", "")
    for row in rows:
        is_best = row.result.token_hit_rate == best[row.trace.name, row.capacity_blocks]
        name, policy = row.trace.name, row.policy
        table.add_row(
            name if name != shown[0] else "",
            policy if (name, policy) != shown else "",
            f"{row.capacity_blocks:,}",
            f"{row.capacity_share:.2%}",
            f"[bold green]{row.result.token_hit_rate:.2%}[/]" if is_best else f"{row.result.token_hit_rate:.2%}",
            f"{row.result.compute_weighted_hit_rate:.2%}",
            f"{row.result.blocks_written_per_referenced:.3f}",
            f"{row.seconds:.2f}",
        )
        shown = (name, policy)
    console.print(table)


def print_tiered(console: Console, rows: Sequence[TieredRow]) -> None:
    """A line for each tier of each policy, then one for all of them."""
    columns = ("trace", "policy", "tier", "blocks", "tokens hit", "compute spared", "written")
    table = _table(*columns, "TTFT p50", "p90", "p99", "busy")
    for row in rows:
        total = row.result.total
        shown = row.trace.name, row.policy
        for name, tier in row.result.tiers.items():
            rate = tier.hit_tokens / max(1, total.input_tokens)
            table.add_row(*shown, name, f"{tier.capacity_blocks:,}", f"{rate:.2%}", "", format_size(tier.written_bytes))
            shown = "", ""
        first_token = distribution(row.result.service_s)
        table.add_row(
            *("", "", "all", ""),
            f"[bold]{total.token_hit_rate:.2%}[/]",
            f"{total.compute_weighted_hit_rate:.2%}",
            "",
            *[f"{first_token.get(name, 0.0) * 1000:,.0f} ms" for name in ("p50", "p90", "p99")],
            f"{row.result.busy_share:.0%}",
        )
    console.print(table)


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        is_text = column in ("trace", "policy", "tier")
        table.add_column(column, justify="left" if is_text else "right", overflow="fold")
    return table
