"""Engines with tiers of their own or in common, and what a request costs on one of them. Pure.

Every tier holds what was computed above it, as the store does when it copies down all that it accepts: so the tier that
a block is loaded from is the highest that has it. Accelerator memory and the shared tier evict as engines and Redis do,
least recently used first; RAM and files by the policy in question.

A prefix is loaded as far as that brings the first token nearer, and computed from there on.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvstore.policy.base import Policy
from kvstore.policy.lru import LRU
from kvstore.replay.hardware import Hardware
from kvstore.replay.simulator import Cache
from kvstore.replay.trace import Trace, TraceRequest

TIERS = ("hbm", "memory", "file", "shared")
"""From the nearest to the farthest."""
COMMON = {"nothing": (), "remote": ("shared",), "sidecar": ("memory", "file", "shared")}
"""Which tiers engines have in common, by what they share."""


@dataclass(slots=True)
class Engine:
    """Its tiers, from the nearest on; and when it will have computed all prompts that it has been given."""

    tiers: dict[str, Cache]
    free_at_s: float = float("-inf")


@dataclass(frozen=True, slots=True)
class Cost:
    """What a request takes on an engine: the tokens it loads from each tier, and the time to its first token."""

    loaded_tokens: Mapping[str, int]
    service_s: float
    found_tokens: int = 0
    """Those that some tier has; it may be faster to compute them."""

    @property
    def hit_tokens(self) -> int:
        """Those that are not computed."""
        return sum(self.loaded_tokens.values())


def build_engines(
    num_engines: int, capacities: Mapping[str, int], shared: Sequence[str], policy: Callable[[], Policy[Any]]
) -> list[Engine]:
    """Engines with a tier of each of ``capacities``, in blocks; those ``shared`` are one for all."""

    def tier(name: str) -> Cache:
        return Cache(policy() if name in ("memory", "file") else LRU(), capacities[name])

    names = [name for name in TIERS if capacities.get(name)]
    common = {name: tier(name) for name in names if name in shared}
    return [Engine({name: common.get(name) or tier(name) for name in names}) for _ in range(num_engines)]


def cost_of(trace: Trace, request: TraceRequest, engine: Engine, hardware: Hardware) -> Cost:
    """What ``request`` would take on ``engine`` now."""
    loaded: dict[str, int] = {}
    load_s = 0.0
    covered = 0
    best = Cost({}, hardware.prefill_s(0, request.input_tokens))
    for name, cache in engine.tiers.items():
        tokens = trace.hit_tokens(request, cache.hit_blocks(request.chain))
        if tokens <= covered:
            continue
        loaded[name] = tokens - covered
        load_s += hardware.load_s(name, tokens - covered)
        covered = tokens
        # The last token is always computed: its output is what is asked for.
        service_s = load_s + hardware.prefill_s(min(covered, max(0, request.input_tokens - 1)), request.input_tokens)
        if service_s < best.service_s:
            best = Cost(dict(loaded), service_s)
    return replace(best, found_tokens=covered)
