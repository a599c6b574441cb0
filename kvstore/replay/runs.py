"""Policies by name, and one row of numbers for each of them at each capacity. Pure."""

from collections.abc import Callable

from kvstore.errors import ConfigError
from kvstore.policy import POLICIES
from kvstore.replay.bounds import replay_belady, replay_infinite
from kvstore.replay.simulator import Result, replay
from kvstore.replay.trace import Trace

Run = Callable[[Trace, int], Result]

BOUNDS: dict[str, Run] = {"infinite": lambda trace, _: replay_infinite(trace), "belady": replay_belady}


def run_of(policy: str, default: str) -> Run:
    """How to replay a trace against ``policy``; ``default`` names the store's own. Raises ``ConfigError``."""
    name = default if policy == "default" else policy
    if name in BOUNDS:
        return BOUNDS[name]
    if name not in POLICIES:
        raise ConfigError(f"there is no policy {policy!r}: choose among {', '.join([*BOUNDS, 'default', *POLICIES])}")
    factory = POLICIES[name]
    return lambda trace, capacity_blocks: replay(trace, factory(), capacity_blocks)
