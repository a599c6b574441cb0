"""Policies by name, and one row of numbers for each of them at each capacity. Pure."""

from collections.abc import Callable
from typing import Any

from kvstore.errors import ConfigError
from kvstore.policy import POLICIES
from kvstore.policy.base import Policy
from kvstore.replay.baselines import BLOCK_CACHES, CHAIN_POLICIES
from kvstore.replay.baselines.base import BlockCache
from kvstore.replay.bounds import replay_belady, replay_infinite
from kvstore.replay.simulator import Result, replay, replay_blocks
from kvstore.replay.trace import Trace

Run = Callable[[Trace, int], Result]

BOUNDS: dict[str, Run] = {"infinite": lambda trace, _: replay_infinite(trace), "belady": replay_belady}


def run_of(policy: str, default: str) -> Run:
    """How to replay a trace against ``policy``; ``default`` names the store's own. Raises ``ConfigError``."""
    runs = all_runs()
    name = default if policy == "default" else policy
    if name not in runs:
        raise ConfigError(f"there is no policy {policy!r}: choose among default, {', '.join(runs)}")
    return runs[name]


def policy_of(policy: str, default: str) -> Callable[[], Policy[Any]]:
    """What evicts in tiers under ``policy``. Raises ``ConfigError`` for one that knows blocks only."""
    factories = POLICIES | CHAIN_POLICIES
    name = default if policy == "default" else policy
    if name not in factories:
        raise ConfigError(f"{policy!r} cannot evict in tiers: choose among default, {', '.join(factories)}")
    return factories[name]


def all_runs() -> dict[str, Run]:
    """By name: the bounds, the store's own, the published ones."""
    chains = {name: _by_chain(factory) for name, factory in (POLICIES | CHAIN_POLICIES).items()}
    return BOUNDS | chains | {name: _by_block(factory) for name, factory in BLOCK_CACHES.items()}


def _by_chain(factory: Callable[[], Policy[Any]]) -> Run:
    return lambda trace, capacity_blocks: replay(trace, factory(), capacity_blocks)


def _by_block(factory: Callable[[int], BlockCache]) -> Run:
    return lambda trace, capacity_blocks: replay_blocks(trace, factory(capacity_blocks) if capacity_blocks else None)
