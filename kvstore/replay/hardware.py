"""What a machine and a model make of tokens and bytes: a profile, built in or from a TOML file. Pure.

    kv_bytes_per_token = "128KiB"
    prefill_tokens_per_s = 52000        # of the first tokens of a prompt
    attention_tokens = 30600            # position at which attention has doubled a token's cost
    [memory]
    bandwidth = "50GB"                  # a second, into the accelerator
    latency = "1ms"

and likewise ``[file]`` and ``[shared]``; accelerator memory is free. What is missing is as in the default.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from kvstore.errors import ConfigError
from kvstore.quantity import parse_duration, parse_size
from kvstore.replay.prefill import ATTENTION_TOKENS, prefill_cost

LOADED_TIERS = ("memory", "file", "shared")
"""Those from which loading takes time."""


@dataclass(frozen=True, slots=True)
class Link:
    """The way from a tier to the accelerator."""

    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, slots=True)
class Hardware:
    """A model on an engine, and the tiers beside it."""

    name: str
    kv_bytes_per_token: int
    prefill_tokens_per_s: float
    attention_tokens: float
    links: Mapping[str, Link] = field(default_factory=dict)

    def prefill_s(self, begin: int, end: int) -> float:
        """To compute tokens ``begin`` to ``end`` of a prompt when those before are there."""
        work = prefill_cost(end, self.attention_tokens) - prefill_cost(begin, self.attention_tokens)
        return work / self.prefill_tokens_per_s

    def load_s(self, tier: str, num_tokens: int) -> float:
        """To load the KV of so many tokens."""
        link = self.links.get(tier)
        if link is None or not num_tokens:
            return 0.0
        return link.latency_s + num_tokens * self.kv_bytes_per_token / link.bytes_per_s


LINKS = MappingProxyType(
    {
        "memory": Link(50e9, 0.2e-3),  # PCIe 5.0 x16, of its 64 GB/s what large copies get
        "file": Link(6e9, 0.5e-3),  # one PCIe 4.0 NVMe drive
        "shared": Link(3e9, 2e-3),  # 25 Gbit/s Ethernet
    }
)

# Prefill rates put the break-even of loading 8,192 tokens at 6.0, 2.8 and 5.2 GB/s.
HARDWARE = {
    profile.name: profile
    for profile in (
        Hardware("h100-8b", 131_072, 52_000, ATTENTION_TOKENS, LINKS),  # Llama 3 8B
        Hardware("h100-32b", 262_144, 11_600, 50_000, LINKS),  # Qwen2.5 32B
        Hardware("4xh100-70b", 327_680, 17_000, 53_900, LINKS),  # Llama 3 70B
    )
}
DEFAULT = "h100-8b"


def parse_hardware(name: str, text: str) -> Hardware:
    """The profile in a TOML file's ``text``. Raises ``ConfigError`` that says what is wrong with it."""
    try:
        return _parse(name, tomllib.loads(text))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{name} is no hardware profile: {error}") from error


def _parse(name: str, tables: dict[str, Any]) -> Hardware:
    base = HARDWARE[DEFAULT]
    links = dict(base.links)
    for tier in LOADED_TIERS:
        if tier in tables:
            table = tables.pop(tier)
            links[tier] = Link(parse_size(table["bandwidth"]), parse_duration(table["latency"]) / 1000)
    if "kv_bytes_per_token" in tables:
        tables["kv_bytes_per_token"] = parse_size(tables["kv_bytes_per_token"])
    profile = replace(base, name=name, links=links, **tables)
    numbers = [profile.kv_bytes_per_token, profile.prefill_tokens_per_s, profile.attention_tokens]
    numbers += [link.bytes_per_s for link in links.values()]
    if not all(isinstance(number, int | float) and number > 0 for number in numbers):
        raise ValueError("a rate or size is not above 0")
    return profile
