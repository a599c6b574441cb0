"""A trace against tiers: where blocks are found, what is written, and how long a first token takes. Pure."""

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvstore.policy.base import Policy
from kvstore.replay.fleet import build_engines, cost_of
from kvstore.replay.hardware import Hardware
from kvstore.replay.routing import Router
from kvstore.replay.simulator import Result, Tally
from kvstore.replay.trace import Trace


@dataclass(frozen=True, slots=True)
class TierResult:
    """What one tier did, over all engines."""

    capacity_blocks: int
    hit_tokens: int
    written_bytes: int


@dataclass(frozen=True, slots=True)
class TieredResult:
    """What came of a tiered replay. ``service_s``: from when a request's turn has come to its first token, for each."""

    total: Result
    tiers: Mapping[str, TierResult]
    service_s: Sequence[float]
    wait_s: Sequence[float]
    """How long each request waited for its turn, when an engine computes one prompt at a time."""
    declined_tokens: int
    """Found in some tier, but faster to compute than to load."""
    busy_share: float
    """Of the time of all engines, how much went to first tokens; near 1 and above, waits grow without end."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """What a trace is replayed on. ``capacities`` are in blocks: of each engine's own tiers, and of common ones."""

    capacities: Mapping[str, int]
    num_engines: int
    common: Sequence[str]
    router: Callable[[Trace, Hardware], Router]
    hardware: Hardware


def replay_tiered(trace: Trace, policy: Callable[[], Policy[Any]], fleet: Fleet) -> TieredResult:
    """Every request of ``trace`` in order on ``fleet``, whose RAM and files evict by ``policy``."""
    hardware = fleet.hardware
    engines = build_engines(fleet.num_engines, fleet.capacities, fleet.common, policy)
    route = fleet.router(trace, hardware)
    tally = Tally(trace, hardware.attention_tokens)
    hit_tokens = dict.fromkeys(engines[0].tiers, 0)
    written = dict.fromkeys(engines[0].tiers, 0)
    num_declined = 0
    services, waits = array("d"), array("d")
    first_s = last_s = None
    for number, request in enumerate(trace.requests):
        engine = engines[route(request, engines)]
        cost = cost_of(trace, request, engine, hardware)
        start_s = max(request.now_s, engine.free_at_s)
        engine.free_at_s = start_s + cost.service_s
        services.append(cost.service_s)
        waits.append(start_s - request.now_s)
        num_written = 0
        for name, cache in engine.tiers.items():
            num_tier = cache.serve(request.announced(number), request.chain, request.output_tokens)
            written[name] += num_tier
            num_written += num_tier
        for name, tokens in cost.loaded_tokens.items():
            hit_tokens[name] += tokens
        tally.count_tokens(request, cost.hit_tokens, num_written)
        num_declined += cost.found_tokens - cost.hit_tokens
        first_s = request.now_s if first_s is None else first_s
        last_s = request.now_s
    block_bytes = trace.tokens_per_block * hardware.kv_bytes_per_token
    tiers = {
        name: TierResult(
            fleet.capacities[name] * len({id(engine.tiers[name]) for engine in engines}),
            hit_tokens[name],
            written[name] * block_bytes,
        )
        for name in engines[0].tiers
    }
    span_s = (last_s or 0.0) - (first_s or 0.0)
    busy = float(np.sum(services)) / (span_s * len(engines)) if span_s > 0 else 0.0
    return TieredResult(tally.result(), tiers, services, waits, num_declined, busy)
