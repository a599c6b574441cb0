"""A running sidecar on a terminal: what it holds, who uses it, what it is doing, and making room in it."""

import json
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from google.protobuf.json_format import MessageToDict
from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvstore.api.v1.admin_pb2 import SidecarStats
from kvstore.client.admin import Admin
from kvstore.quantity import format_size
from kvstore.types import NAMESPACE_DIGEST_BYTES

RATES = (
    ("lookups", "kvstore_lookups_total", "", "/s"),
    ("stored", "kvstore_stored_bytes_total", "", "B/s"),
    ("loaded", "kvstore_loaded_bytes_total", "", "B/s"),
    ("copied down and up", "kvstore_copied_bytes_total", "", "B/s"),
    ("evicted", "kvstore_evicted_blocks_total", "memory", "/s"),
    ("not accepted", "kvstore_not_accepted_blocks_total", "", "/s"),
    ("errors", "kvstore_errors_total", "", "/s"),
)
"""What ``top`` shows of counters: a metric, of it the series with that first label or all, and its unit."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a sidecar said, by metric and labels."""

    stats: SidecarStats
    taken_s: float
    values: Mapping[str, Mapping[tuple[str, ...], float]] = field(default_factory=dict)

    @classmethod
    def of(cls, stats: SidecarStats) -> "Snapshot":
        """Sorted for look-ups."""
        values: defaultdict[str, dict[tuple[str, ...], float]] = defaultdict(dict)
        for sample in stats.samples:
            values[sample.metric][tuple(sample.labels)] = sample.value
        return cls(stats, time.monotonic(), values)

    def get(self, metric: str, *labels: str) -> float:
        """One value; 0 where nothing was counted."""
        return self.values.get(metric, {}).get(labels, 0.0)

    def total(self, metric: str, label: str = "") -> float:
        """Of all series, or of those whose first label it is."""
        series = self.values.get(metric, {})
        return sum(value for labels, value in series.items() if not label or labels[0] == label)


def print_stats(console: Console, socket: Path, *, as_json: bool) -> None:
    """What a sidecar holds and who uses it. Raises ``SidecarError``."""
    with Admin(socket) as admin:
        stats = admin.stats()
    if as_json:
        document = MessageToDict(stats, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
        for namespace, message in zip(document["namespaces"], stats.namespaces, strict=True):
            namespace["digest"] = message.digest.hex()
        console.print(json.dumps(document, indent=2), soft_wrap=True, highlight=False, markup=False)
    else:
        console.print(_overview(Snapshot.of(stats), socket))


def top(console: Console, socket: Path, *, interval_s: float, num_frames: int | None) -> None:
    """A view that renews itself until interrupted, or for ``num_frames``. Raises ``SidecarError``."""
    with Admin(socket) as admin, Live(console=console, screen=False, auto_refresh=False) as live:
        before = Snapshot.of(admin.stats())
        shown = 0
        while num_frames is None or shown < num_frames:
            time.sleep(interval_s)
            now = Snapshot.of(admin.stats())
            live.update(Group(_overview(now, socket), _rates(before, now)), refresh=True)
            before = now
            shown += 1


def check(console: Console, socket: Path) -> bool:
    """Prove the tables of a sidecar; whether they hold. Raises ``SidecarError``."""
    with Admin(socket) as admin:
        broken = admin.check()
    console.print(
        f"the tables do not hold: {broken}" if broken else "every invariant of the tables holds", markup=False
    )
    return not broken


def evict(console: Console, socket: Path, *, namespace: bytes, size_bytes: int) -> None:
    """Free a namespace in every tier, or about ``size_bytes`` of RAM. Raises ``SidecarError``."""
    with Admin(socket) as admin:
        num_blocks = admin.clear(namespace) if namespace else admin.evict(size_bytes)
    console.print(f"{num_blocks} blocks freed, in {'every tier' if namespace else 'RAM'}", highlight=False)


# ---- tables


def _overview(now: Snapshot, socket: Path) -> Group:
    head = f"sidecar {now.stats.version} at {socket}, up {_duration(now.stats.uptime_s)}"
    return Group(Text(head), _tiers(now), _clients(now), _namespaces(now))


def _tiers(now: Snapshot) -> Table:
    table = _table("tier", "capacity", "used", "blocks", "pinned", "quarantined", "in flight", "state")
    for labels, capacity_bytes in now.values.get("kvstore_capacity_bytes", {}).items():
        tier = labels[0]
        numbers = [now.get(f"kvstore_{name}", tier) for name in ("blocks", "pinned_blocks", "quarantined_slots")]
        sizes = [capacity_bytes, now.get("kvstore_used_bytes", tier)]
        in_flight = format_size(int(now.get("kvstore_in_flight_bytes", tier)))
        table.add_row(
            tier,
            *[format_size(int(size)) for size in sizes],
            *[f"{n:.0f}" for n in numbers],
            in_flight,
            _state(now, tier),
        )
    return table


def _state(now: Snapshot, tier: str) -> Text:
    states = now.values.get("kvstore_tier_state", {})
    state = next((labels[1] for labels, value in states.items() if labels[0] == tier and value), "")
    return Text(state, "" if state == "closed" else "bold red")


def _clients(now: Snapshot) -> Table:
    table = _table("client", "session", "reads", "writes", "quarantined", "silent for")
    for client in now.stats.clients:
        session = str(client.incarnation) if client.incarnation else "none"
        numbers = client.num_reads, client.num_writes, client.num_quarantined_slots
        table.add_row(Text(client.name), session, *map(str, numbers), f"{client.idle_ticks} pings")
    return table


def _namespaces(now: Snapshot) -> Table:
    table = _table("namespace", "model", "block")
    for namespace in now.stats.namespaces:
        digest = namespace.digest[:NAMESPACE_DIGEST_BYTES].hex()
        table.add_row(digest, Text(namespace.model), format_size(namespace.block_bytes))
    return table


def _rates(before: Snapshot, now: Snapshot) -> Table:
    table = _table(*(name for name, *_ in RATES))
    seconds = max(1e-3, now.taken_s - before.taken_s)
    cells = []
    for _, metric, label, unit in RATES:
        rate = (now.total(metric, label) - before.total(metric, label)) / seconds
        cells.append(f"{format_size(int(rate))}/s" if unit == "B/s" else f"{rate:,.0f}{unit}")
    table.add_row(*cells)
    return table


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"
