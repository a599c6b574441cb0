"""One row of numbers for each policy at each capacity, as scripts and reports read them. Pure."""

from dataclasses import dataclass

import numpy as np

from kvstore.replay.simulator import Result
from kvstore.replay.tiered import Fleet, TieredResult
from kvstore.replay.trace import Trace

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Row:
    """One policy at one capacity."""

    trace: Trace
    policy: str
    capacity_blocks: int
    result: Result
    seconds: float

    @property
    def capacity_share(self) -> float:
        """Of the trace's distinct blocks."""
        return self.capacity_blocks / max(1, self.trace.num_unique_blocks)

    def as_json(self) -> dict[str, object]:
        """The contract for scripts."""
        return {
            "trace": self.trace.name,
            "policy": self.policy,
            "capacity_blocks": self.capacity_blocks,
            "capacity_share": round(self.capacity_share, 6),
            "token_hit_rate": round(self.result.token_hit_rate, 6),
            "compute_weighted_hit_rate": round(self.result.compute_weighted_hit_rate, 6),
            "blocks_written_per_referenced": round(self.result.blocks_written_per_referenced, 6),
            "seconds": round(self.seconds, 3),
        }


@dataclass(frozen=True, slots=True)
class TieredRow:
    """One policy on one fleet."""

    trace: Trace
    policy: str
    fleet: Fleet
    routing: str
    result: TieredResult
    seconds: float

    def as_json(self) -> dict[str, object]:
        """The contract for scripts."""
        total = self.result.total
        return {
            "trace": self.trace.name,
            "policy": self.policy,
            "hardware": self.fleet.hardware.name,
            "engines": self.fleet.num_engines,
            "routing": self.routing,
            "tiers": {
                name: {
                    "capacity_blocks": tier.capacity_blocks,
                    "token_hit_rate": round(tier.hit_tokens / max(1, total.input_tokens), 6),
                    "written_bytes": tier.written_bytes,
                }
                for name, tier in self.result.tiers.items()
            },
            "token_hit_rate": round(total.token_hit_rate, 6),
            "compute_weighted_hit_rate": round(total.compute_weighted_hit_rate, 6),
            "declined_token_rate": round(self.result.declined_tokens / max(1, total.input_tokens), 6),
            "ttft_s": distribution(self.result.service_s),
            "wait_s": distribution(self.result.wait_s),
            "busy_share": round(self.result.busy_share, 4),
            "seconds": round(self.seconds, 3),
        }


def distribution(values: object) -> dict[str, float]:
    """Mean and percentiles."""
    found = np.asarray(values, dtype=float)
    if not found.size:
        return {}
    percentiles = np.percentile(found, PERCENTILES)
    named = {f"p{share}": value for share, value in zip(PERCENTILES, percentiles, strict=True)}
    return {name: round(float(value), 6) for name, value in ({"mean": found.mean()} | named).items()}
