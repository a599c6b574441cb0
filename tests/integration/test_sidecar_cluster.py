"""Two hosts, a sidecar each, on one Valkey Cluster of three: what one stored, the other finds."""

from collections.abc import Iterator
from contextlib import closing

import pytest

from kvstore.client.store_client import StoreClient
from kvstore.namespace import Namespace
from kvstore.testing.sidecar import Sidecar, eventually
from kvstore.testing.valkey import ValkeyServer, free_port, sees_all_slots, valkey_cluster, wait_until
from kvstore.tiers.redis_topology import key_slot
from kvstore.tiers.redis_value import name
from tests.real_stores import IDENTITY, LAYOUT, chain_of, get, put

NS = Namespace(IDENTITY, LAYOUT)
CHAINS = [chain_of(NS, 1, number) for number in range(24)]
"""Of one block each, so that every server has some."""


@pytest.fixture(scope="module")
def servers() -> Iterator[list[ValkeyServer]]:
    with valkey_cluster() as running:
        yield running


@pytest.fixture(scope="module")
def hosts(servers: list[ValkeyServer]) -> Iterator[tuple[Sidecar, Sidecar]]:
    url = "redis+cluster://" + ",".join(f"127.0.0.1:{server.port}" for server in servers)
    with Sidecar(REDIS_URL=url) as one, Sidecar(REDIS_URL=url) as other:
        yield one, other


@pytest.fixture
def engines(hosts: tuple[Sidecar, Sidecar]) -> Iterator[tuple[StoreClient, StoreClient]]:
    with closing(hosts[0].client()) as one, closing(hosts[1].client()) as other:
        for engine in (one, other):
            engine.open_namespace(IDENTITY, LAYOUT)
            engine.evict(10**6)
        yield one, other


def store_again(engine: StoreClient) -> None:
    engine.evict(10**6)
    for chain in CHAINS:
        put(engine, NS, chain)


def store_all(host: Sidecar, engine: StoreClient) -> None:
    """Store every block, and wait until it is on the servers."""

    def stored() -> float:
        return host.metric("kvstore_copies_total", "redis", "write", "ok")

    before = stored()
    store_again(engine)
    eventually(lambda: stored() - before >= len(CHAINS))


def found(engine: StoreClient) -> list[bool]:
    return [get(engine, chain, seconds=1.0) == 1 for chain in CHAINS]


def test_a_block_stored_by_one_host_is_found_by_the_other(
    hosts: tuple[Sidecar, Sidecar], servers: list[ValkeyServer], engines: tuple[StoreClient, StoreClient]
) -> None:
    store_all(hosts[0], engines[0])
    assert min(int(server.command("DBSIZE")) for server in servers) > 0
    assert all(found(engines[1]))


def test_a_slot_that_moves_is_found_where_it_went(
    servers: list[ValkeyServer], engines: tuple[StoreClient, StoreClient]
) -> None:
    key = CHAINS[0][0]
    slot = key_slot(key)
    index = slot * len(servers) // 16384  # as slots were first dealt out
    source, target = servers[index], servers[index - 1]
    source_id, target_id = (str(server.command("CLUSTER", "MYID"), "ascii") for server in (source, target))
    target.command("CLUSTER", "SETSLOT", slot, "IMPORTING", source_id)
    source.command("CLUSTER", "SETSLOT", slot, "MIGRATING", target_id)
    source.command("MIGRATE", "127.0.0.1", target.port, name(key), 0, 5000)
    for server in (target, source):
        server.command("CLUSTER", "SETSLOT", slot, "NODE", target_id)
    assert all(found(engines[1]))


def test_a_server_that_dies_costs_its_blocks_until_it_is_back(
    hosts: tuple[Sidecar, Sidecar], servers: list[ValkeyServer], engines: tuple[StoreClient, StoreClient]
) -> None:
    servers[0].kill()
    assert not all(found(engines[1]))
    eventually(lambda: any(found(engines[1])))  # now and then the breaker lets a read through
    eventually(lambda: hosts[1].metric("kvstore_pinned_blocks", "memory") == 0)
    servers[0].start()
    wait_until(lambda: all(map(sees_all_slots, servers)), "the cluster to be whole")

    def is_whole() -> bool:
        found(engines[0])  # as an engine does: only who looks for a block learns that it is gone
        store_again(engines[0])
        engines[1].evict(10**6)
        return all(found(engines[1]))

    eventually(is_whole)


def test_after_a_failover_blocks_are_found_at_the_replica(
    hosts: tuple[Sidecar, Sidecar], servers: list[ValkeyServer], engines: tuple[StoreClient, StoreClient]
) -> None:
    bus_port = free_port()
    settings = {"cluster_enabled": "yes", "cluster_node_timeout": "2000", "repl_diskless_sync_delay": "0"}
    with ValkeyServer(cluster_port=str(bus_port), **settings) as replica:
        primary_id = str(servers[1].command("CLUSTER", "MYID"), "ascii")
        servers[1].command("CLUSTER", "MEET", "127.0.0.1", replica.port, bus_port)
        wait_until(lambda: primary_id.encode() in bytes(replica.command("CLUSTER", "NODES")), "them to meet")
        replica.command("CLUSTER", "REPLICATE", primary_id)
        wait_until(lambda: b"master_link_status:up" in bytes(replica.command("INFO", "replication")), "the replica")

        store_again(engines[0])  # what is on the servers already is not sent again
        engines[1].evict(10**6)
        eventually(lambda: all(found(engines[1])))
        num_copies = int(servers[1].command("DBSIZE"))
        assert num_copies > 0
        wait_until(lambda: int(replica.command("DBSIZE")) == num_copies, "the replica to be in step")
        servers[1].kill()
        replica.command("CLUSTER", "FAILOVER", "TAKEOVER")
        engines[1].evict(10**6)
        eventually(lambda: all(found(engines[1])))
        eventually(lambda: hosts[1].metric("kvstore_pinned_blocks", "memory") == 0)  # releases are told, not asked
        servers[1].start()
