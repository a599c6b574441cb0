"""What the store counts: a declared catalogue of metrics and their values. Owner thread only; costs a dict add.

Names follow Prometheus: units in the name, ``_total`` for what only grows. ``kvstore.exposition`` writes them out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Labels = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Metric:
    """One thing that is counted, and the names of the labels that split it."""

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    labels: tuple[str, ...] = ()


CATALOGUE = (
    Metric("kvstore_requests_total", "counter", "Requests that arrived, each counted once."),
    Metric("kvstore_request_tokens_total", "counter", "Input tokens of the requests that arrived."),
    Metric("kvstore_lookups_total", "counter", "Lookups, repeated ones for the same request included."),
    Metric("kvstore_prefetches_total", "counter", "Prefetches started; those that joined another one included."),
    Metric("kvstore_stored_blocks_total", "counter", "Blocks that engines committed."),
    Metric("kvstore_stored_bytes_total", "counter", "Bytes of the blocks that engines committed."),
    Metric("kvstore_loaded_blocks_total", "counter", "Blocks pinned for engines, by where they came from.", ("tier",)),
    Metric("kvstore_loaded_bytes_total", "counter", "Bytes of the blocks pinned for engines.", ("tier",)),
    Metric(
        "kvstore_hit_blocks_total", "counter", "Blocks found of requests as they arrived, by the first tier.", ("tier",)
    ),
    Metric(
        "kvstore_hit_tokens_total", "counter", "Tokens found of requests as they arrived, by the first tier.", ("tier",)
    ),
    Metric("kvstore_declined_blocks_total", "counter", "Blocks not promoted: they are faster to compute.", ("tier",)),
    Metric("kvstore_evicted_blocks_total", "counter", "Blocks forgotten to make room.", ("tier",)),
    Metric("kvstore_accepted_blocks_total", "counter", "Blocks accepted for copy-down to a tier.", ("tier",)),
    Metric(
        "kvstore_not_accepted_blocks_total",
        "counter",
        "Blocks not accepted for copy-down to a tier, by why.",
        ("tier", "reason"),
    ),
    Metric(
        "kvstore_copies_total",
        "counter",
        "Blocks whose copy between RAM and a tier has ended.",
        ("tier", "op", "outcome"),
    ),
    Metric("kvstore_copied_bytes_total", "counter", "Bytes copied between RAM and a tier.", ("tier", "op")),
    Metric("kvstore_copy_seconds_total", "counter", "Time that copies took in their threads.", ("tier",)),
    Metric("kvstore_read_bytes_per_second", "gauge", "What reading from a tier gives, as estimated.", ("tier",)),
    Metric("kvstore_read_latency_seconds", "gauge", "What a read from a tier takes besides.", ("tier",)),
    Metric("kvstore_breaker_openings_total", "counter", "How often a tier was given up for a while.", ("tier",)),
    Metric("kvstore_tier_state", "gauge", "1 for the state of the tier's breaker, else 0.", ("tier", "state")),
    Metric("kvstore_tickets_in_flight", "gauge", "Copies that have not returned.", ("tier",)),
    Metric("kvstore_in_flight_bytes", "gauge", "Bytes of the copies that have not returned.", ("tier",)),
    Metric("kvstore_quarantined_slots", "gauge", "Slots that a late copy may still touch.", ("tier",)),
    Metric("kvstore_pinned_blocks", "gauge", "Blocks that may not leave because someone reads them.", ("tier",)),
    Metric("kvstore_blocks", "gauge", "Blocks that can be found.", ("tier",)),
    Metric("kvstore_capacity_bytes", "gauge", "The tier's budget.", ("tier",)),
    Metric("kvstore_usable_bytes", "gauge", "What of RAM has its pages and may be lent.", ("tier",)),
    Metric("kvstore_used_bytes", "gauge", "What of the tier's budget is in use.", ("tier",)),
    Metric("kvstore_unrecorded_requests_total", "counter", "Requests that the recording had no room or no time for."),
    Metric("kvstore_expired_sessions_total", "counter", "Sessions of clients that had been silent for too long."),
    Metric("kvstore_errors_total", "counter", "Errors that an edge turned into a miss.", ("where",)),
)


class Stats:
    """The values. One thread changes them; any thread may take a ``snapshot``."""

    def __init__(self, catalogue: tuple[Metric, ...] = CATALOGUE) -> None:
        self.catalogue = catalogue
        self._num_labels = {metric.name: len(metric.labels) for metric in catalogue}
        self._series: dict[str, dict[Labels, float]] = {
            metric.name: {} if metric.labels else {(): 0} for metric in catalogue
        }

    def inc(self, name: str, n: float = 1, *labels: str) -> None:
        """Add ``n``. Raises ``KeyError`` or ``ValueError`` for a name or labels that the catalogue does not have."""
        series = self._series[name]
        if labels not in series:
            self._check(name, labels)
            series[labels] = 0
        series[labels] += n

    def set(self, name: str, value: float, *labels: str) -> None:
        """The value is now ``value``; of a counter, its total, kept elsewhere. Raises as ``inc`` does."""
        series = self._series[name]
        if labels not in series:
            self._check(name, labels)
        series[labels] = value

    def get(self, name: str, *labels: str) -> float:
        """The value; 0 where nothing was counted. Raises as ``inc`` does."""
        self._check(name, labels)
        return self._series[name].get(labels, 0)

    def snapshot(self) -> Mapping[str, Mapping[Labels, float]]:
        """Every metric's values by its label values, as a copy."""
        # dict.copy is one step under the interpreter's lock, so the owner may count meanwhile
        return {name: series.copy() for name, series in self._series.items()}

    def _check(self, name: str, labels: Labels) -> None:
        if len(labels) != self._num_labels[name]:
            raise ValueError(f"{name} takes {self._num_labels[name]} labels, got {labels}")
