"""The Redis tier's servers from an operator's side: what they say of themselves, and clearing a namespace."""

import time
from dataclasses import dataclass

from kvstore.config import RedisConfig
from kvstore.errors import TierUnavailableError
from kvstore.tiers.redis import RedisTier
from kvstore.tiers.redis_log import memory_advice
from kvstore.tiers.redis_node import Dialer, Node, tls_of
from kvstore.tiers.redis_topology import open_topology
from kvstore.tiers.redis_url import parse_url

TIMEOUT_S = 1.0
CLEAR_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class ServerReport:
    """One server: what INFO said, or the ``error`` that was met instead."""

    address: str
    version: str = ""
    used_bytes: int = 0
    max_bytes: int = 0
    """0: no limit is set."""
    eviction: str = ""
    num_keys: int = 0
    advice: str = ""
    """What is amiss for a cache, or nothing."""
    error: str = ""


def survey(config: RedisConfig) -> list[ServerReport]:
    """Every primary, each asked for a second at most. Raises ``ConfigError`` where the TLS files cannot be used."""
    where = parse_url(config.url)
    dialer = Dialer(
        tls=tls_of(where, config.tls_ca_file, config.tls_cert_file, config.tls_key_file),
        username=config.username or where.username,
        password=config.password or where.password,
        db=where.db,
    )
    topology = open_topology(where, dialer)
    try:
        nodes = topology.primaries(time.monotonic() + TIMEOUT_S)
        return [_report(node, where.db, config.ttl_s) for node in nodes]
    except OSError as error:
        return [ServerReport(", ".join(map(str, where.endpoints)), error=_reason(error))]
    finally:
        topology.close()


def clear(config: RedisConfig, namespace: bytes) -> int:
    """Erase a namespace on every server; returns how many blocks that was. All servers must be reachable.

    Raises ``TierUnavailableError`` where one is not.
    """
    for report in survey(config):
        if report.error:
            raise TierUnavailableError(f"redis at {report.address}: {report.error}; nothing was freed, try again")
    tier = RedisTier(
        config.url,
        username=config.username,
        password=config.password,
        tls_ca_file=config.tls_ca_file,
        tls_cert_file=config.tls_cert_file,
        tls_key_file=config.tls_key_file,
    )
    try:
        num_erased = tier.clear(namespace, time.monotonic() + CLEAR_TIMEOUT_S)
    finally:
        tier.close()
    if num_erased is None:
        raise TierUnavailableError("redis: clearing the namespace ended early, and blocks may be left; try again")
    return num_erased


def _report(node: Node, db: int, ttl_s: int) -> ServerReport:
    address = str(node.endpoint)
    deadline_s = time.monotonic() + TIMEOUT_S
    try:
        with node.wire(deadline_s) as wire:
            (info,) = wire.ask([(b"INFO",)], deadline_s)
    except OSError as error:
        return ServerReport(address, error=_reason(error))
    if not isinstance(info, bytes):
        return ServerReport(address, error=f"INFO was answered with: {info}")
    fields = dict(line.split(":", 1) for line in info.decode(errors="replace").splitlines() if ":" in line)
    keyspace = dict(pair.split("=", 1) for pair in fields.get(f"db{db}", "").split(",") if "=" in pair)
    name = fields.get("server_name", "redis")
    return ServerReport(
        address=address,
        version=f"{name} {fields.get(f'{name}_version', fields.get('redis_version', '?'))}",
        used_bytes=int(fields.get("used_memory", 0)),
        max_bytes=int(fields.get("maxmemory", 0)),
        eviction=fields.get("maxmemory_policy", ""),
        num_keys=int(keyspace.get("keys", 0)),
        advice=memory_advice(info, ttl_s),
    )


def _reason(error: OSError) -> str:
    return str(error) or type(error).__name__
