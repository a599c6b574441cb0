"""Counts of what the store did for an engine, as they travel to vLLM's log line and its Prometheus metrics."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class Served:
    """Since the last ``take``."""

    tokens_from: Counter[str] = field(default_factory=Counter)
    num_failed_loads: int = 0
    num_stored_blocks: int = 0
    num_unstored_blocks: int = 0

    def add(self, tokens_from: Mapping[str, int]) -> None:
        """A load has arrived: its tokens, by tier."""
        self.tokens_from.update(tokens_from)

    def take(self) -> dict[str, int]:
        """The counts by name, and start again; empty if nothing happened."""
        counts = {f"tokens_from_{tier}": count for tier, count in self.tokens_from.items()}
        counts |= {
            "failed_loads": self.num_failed_loads,
            "stored_blocks": self.num_stored_blocks,
            "unstored_blocks": self.num_unstored_blocks,
        }
        self.tokens_from.clear()
        self.num_failed_loads = self.num_stored_blocks = self.num_unstored_blocks = 0
        return {name: count for name, count in counts.items() if count}
