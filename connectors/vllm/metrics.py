"""What the store did for an engine, in vLLM's log line and on its Prometheus page."""

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import metrics

TOKENS = "tokens_from_"


@dataclass
class ServedStats(metrics.KVConnectorStats):
    """Counts by name, see ``connectors.vllm.served``."""

    def reset(self) -> None:
        """Start again."""
        self.data: dict[str, int] = {}

    def aggregate(self, other: Any) -> "ServedStats":
        """Both together."""
        names = self.data.keys() | other.data.keys()
        return ServedStats(data={name: self.data.get(name, 0) + other.data.get(name, 0) for name in sorted(names)})

    def reduce(self) -> dict[str, int]:
        """As they are logged."""
        return dict(self.data)

    def is_empty(self) -> bool:
        """Whether nothing happened."""
        return not self.data


class ServedMetrics(metrics.KVConnectorPromMetrics):
    """Counters ``vllm:kvstore_*``."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._tokens = self._counter_cls(
            name="vllm:kvstore_loaded_tokens",
            documentation="Tokens whose KV was loaded, by the tier it came from.",
            labelnames=[*labelnames, "tier"],
        )
        self._others = {
            name: self._counter_cls(name=f"vllm:kvstore_{name}", documentation=text, labelnames=labelnames)
            for name, text in (
                ("failed_loads", "Loads that did not arrive; the request computed instead."),
                ("stored_blocks", "Blocks that were stored."),
                ("unstored_blocks", "Blocks that the store had no room for, or whose copy failed."),
            )
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add counts."""
        labels = self.per_engine_labelvalues[engine_idx]
        for name, count in transfer_stats_data.items():
            if name.startswith(TOKENS):
                self._tokens.labels(*labels, name.removeprefix(TOKENS)).inc(count)
            else:
                self._others[name].labels(*labels).inc(count)
