"""A Cluster of three: blocks spread, slots move, servers die and hang."""

import time
from collections import Counter
from collections.abc import Iterator

import pytest

from kvstore.testing.valkey import ValkeyServer, free_port, sees_all_slots, valkey_cluster, wait_until
from kvstore.tiers.redis import RedisTier
from kvstore.tiers.redis_topology import key_slot
from kvstore.tiers.redis_value import name
from kvstore.types import BlockKey, Outcome
from tests.redis_blocks import NAMESPACE, WHOLE, are_right, content, empty, full, key, keys, probed, soon

OK, ABSENT, LATE, FAILED = Outcome.OK, Outcome.ABSENT, Outcome.LATE, Outcome.FAILED
SHORT_S = 1.0
GRACE_S = 0.5


@pytest.fixture(scope="module")
def servers() -> Iterator[list[ValkeyServer]]:
    with valkey_cluster() as running:
        yield running


@pytest.fixture
def tier(servers: list[ValkeyServer]) -> Iterator[RedisTier]:
    for server in servers:
        server.command("FLUSHALL")
    tier = RedisTier(cluster_url(servers))
    yield tier
    tier.close()


def cluster_url(servers: list[ValkeyServer]) -> str:
    return "redis+cluster://" + ",".join(f"127.0.0.1:{server.port}" for server in servers)


def owner(servers: list[ValkeyServer], of: BlockKey) -> int:
    """Which server a key belongs to, as slots were first dealt out."""
    return key_slot(of) * len(servers) // 16384


def test_blocks_spread_over_all_servers(servers: list[ValkeyServer], tier: RedisTier) -> None:
    some = keys(300)
    assert tier.write(full(some), soon()) == [OK] * 300
    sizes = [int(server.command("DBSIZE")) for server in servers]
    assert sizes == [Counter(owner(servers, one) for one in some)[index] for index in range(3)]
    assert min(sizes) > 50
    moves = empty([*some, key(999)])
    assert tier.read(moves, soon()) == [OK] * 300 + [ABSENT]
    assert are_right(moves[:300])
    assert probed(tier, [*some, key(999)], soon()) == [True] * 300 + [False]
    tier.erase(empty(some[:10]))
    assert tier.clear(NAMESPACE, soon()) == 290
    assert [int(server.command("DBSIZE")) for server in servers] == [0, 0, 0]


def test_the_slot_is_the_servers_own_idea_of_it(servers: list[ValkeyServer]) -> None:
    for one in keys(20):
        assert servers[0].command("CLUSTER", "KEYSLOT", name(one)) == key_slot(one)
        assert servers[0].command("CLUSTER", "KEYSLOT", name(one, 3)) == key_slot(one)


def test_parts_of_a_block_share_a_server(servers: list[ValkeyServer], tier: RedisTier) -> None:
    assert tier.write(full([key(1)], WHOLE), soon()) == [OK]
    assert sorted(int(server.command("DBSIZE")) for server in servers) == [0, 0, 3]
    (got,) = empty([key(1)], WHOLE)
    assert tier.read([got], soon()) == [OK]
    assert got.buffer == content(key(1), WHOLE)


def test_one_living_seed_is_enough(servers: list[ValkeyServer]) -> None:
    tier = RedisTier(f"redis+cluster://127.0.0.1:{free_port()},127.0.0.1:{servers[2].port}")
    assert tier.write(full(keys(30)), soon()) == [OK] * 30
    tier.close()


def test_a_single_servers_url_misses_what_lies_elsewhere(servers: list[ValkeyServer], tier: RedisTier) -> None:
    some = keys(30)
    assert tier.write(full(some), soon()) == [OK] * 30
    alone = RedisTier(servers[0].url)
    expected = [OK if owner(servers, one) == 0 else FAILED for one in some]
    assert alone.read(empty(some), soon()) == expected
    alone.close()


def test_a_moved_slot_is_found_again_in_the_same_call(servers: list[ValkeyServer], tier: RedisTier) -> None:
    """CR-024, CR-025: MOVED is followed once, by learning the slots from the server that said so; ASK is a miss."""
    one = key(5)
    slot, source = key_slot(one), servers[owner(servers, one)]
    target = servers[(owner(servers, one) + 1) % 3]
    assert tier.write(full([one, key(6)]), soon()) == [OK, OK]
    source_id, target_id = (str(server.command("CLUSTER", "MYID"), "ascii") for server in (source, target))

    target.command("CLUSTER", "SETSLOT", slot, "IMPORTING", source_id)
    source.command("CLUSTER", "SETSLOT", slot, "MIGRATING", target_id)
    source.command("MIGRATE", "127.0.0.1", target.port, name(one), 0, 5000)
    assert tier.read(empty([one, key(6)]), soon()) == [ABSENT, OK]
    assert tier.write(full([one, key(6)]), soon()) == [ABSENT, OK]
    for server in (target, source):
        server.command("CLUSTER", "SETSLOT", slot, "NODE", target_id)

    moves = empty([one, key(6)])
    assert tier.read(moves, soon()) == [OK, OK]
    assert are_right(moves)
    assert tier.write(full([one]), soon()) == [OK]
    for server in (source, target):  # back again
        server.command("CLUSTER", "SETSLOT", slot, *(("IMPORTING", target_id) if server is source else ("STABLE",)))
    target.command("MIGRATE", "127.0.0.1", source.port, name(one), 0, 5000)
    for server in (source, target):
        server.command("CLUSTER", "SETSLOT", slot, "NODE", source_id)


def test_a_slot_that_nobody_holds_fails_alone(servers: list[ValkeyServer], tier: RedisTier) -> None:
    some = keys(60)
    assert tier.write(full(some), soon()) == [OK] * 60
    slot, holder = key_slot(some[7]), servers[owner(servers, some[7])]
    for server in servers:
        server.command("CLUSTER", "DELSLOTS", slot)
    newcomer = RedisTier(cluster_url(servers))
    expected = [FAILED if key_slot(one) == slot else OK for one in some]
    assert newcomer.read(empty(some), soon()) == expected
    assert newcomer.read(empty(some), soon()) == expected
    holder.command("CLUSTER", "ADDSLOTS", slot)
    wait_until(lambda: newcomer.write(full(some), soon()) == [OK] * 60, "the slot to be found")
    wait_until(lambda: all(map(sees_all_slots, servers)), "word to get around")
    newcomer.close()


def test_a_hung_server_costs_its_own_blocks_alone(servers: list[ValkeyServer], tier: RedisTier) -> None:
    some = keys(60)
    assert tier.write(full(some), soon()) == [OK] * 60
    hung = owner(servers, some[0])  # asked first
    servers[hung].pause()
    try:
        for _ in range(2):  # the second time with the slots learnt anew
            began_s = time.monotonic()
            moves = empty(some)
            answers = tier.read(moves, soon(SHORT_S))
            assert time.monotonic() < began_s + SHORT_S + GRACE_S
            assert answers == [LATE if owner(servers, one) == hung else OK for one in some]
            assert are_right([move for move, answer in zip(moves, answers, strict=True) if answer is OK])
    finally:
        servers[hung].resume()
    wait_until(lambda: tier.read(empty(some), soon()) == [OK] * 60, "the server to be back in use")


def test_a_cluster_is_down_when_none_of_its_servers_answers(servers: list[ValkeyServer], tier: RedisTier) -> None:
    """One that is dead costs its own blocks, though a copy may have no others."""
    some = keys(60)
    assert tier.write(full(some), soon()) == [OK] * 60
    assert not tier.is_down()
    of_the_dead = [one for one in some if owner(servers, one) == 0]
    servers[0].kill()
    assert tier.read(empty(of_the_dead), soon()) == [FAILED] * len(of_the_dead)
    assert not tier.is_down()
    assert OK in tier.read(empty(some), soon())
    for server in servers[1:]:
        server.pause()
    try:
        assert OK not in tier.read(empty(some), soon(SHORT_S))
        assert tier.is_down()
    finally:
        for server in servers[1:]:
            server.resume()
        servers[0].start()
    wait_until(lambda: tier.write(full(some), soon()) == [OK] * 60, "the servers to be back in use")
    assert not tier.is_down()


def test_a_dead_server_does_not_keep_the_others_from_being_cleared(
    servers: list[ValkeyServer], tier: RedisTier
) -> None:
    """And the answer is not that all was erased."""
    assert tier.write(full(keys(60)), soon()) == [OK] * 60
    servers[0].kill()
    assert tier.clear(NAMESPACE, soon()) is None
    assert [int(server.command("DBSIZE")) for server in servers[1:]] == [0, 0]
    servers[0].start()
    wait_until(lambda: tier.write(full(keys(60)), soon()) == [OK] * 60, "the server to be back in use")
    assert tier.clear(NAMESPACE, soon()) == 60


def test_a_killed_server_costs_its_own_blocks_and_comes_back(servers: list[ValkeyServer], tier: RedisTier) -> None:
    """CR-024."""
    some = keys(60)
    assert tier.write(full(some), soon()) == [OK] * 60
    servers[0].kill()
    for _ in range(2):
        assert tier.read(empty(some), soon()) == [FAILED if owner(servers, one) == 0 else OK for one in some]
    servers[0].start()
    wait_until(lambda: tier.write(full(some), soon()) == [OK] * 60, "the server to be back in use")
    moves = empty(some)
    assert tier.read(moves, soon()) == [OK] * 60
    assert are_right(moves)
