"""What a server or the network does to single replies, done by a proxy: each costs its block and nothing else."""

import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from kvstore.header import HEADER_BYTES
from kvstore.testing import redis_proxy as proxies
from kvstore.testing.redis_proxy import Alter, Answer, Cut, Fault, Hold, RedisProxy
from kvstore.testing.valkey import ValkeyServer, wait_until
from kvstore.tiers.redis import RedisTier
from kvstore.tiers.redis_value import name
from kvstore.types import Outcome
from tests.redis_blocks import LAYOUT, NAMESPACE, WHOLE, are_right, empty, full, key, keys, probed, soon

OK, ABSENT, DAMAGED, LATE, FULL, FAILED = (
    Outcome.OK,
    Outcome.ABSENT,
    Outcome.DAMAGED,
    Outcome.LATE,
    Outcome.FULL,
    Outcome.FAILED,
)
SHORT_S = 0.5


@dataclass
class World:
    server: ValkeyServer
    proxy: RedisProxy
    tier: RedisTier


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyServer]:
    with ValkeyServer() as running:
        yield running


@pytest.fixture
def world(server: ValkeyServer) -> Iterator[World]:
    """Blocks 0 to 3 are on the server; block 9 is not."""
    server.command("FLUSHALL")
    with RedisProxy(server.port) as proxy:
        tier = RedisTier(proxy.url)
        assert tier.write(full(keys(4)), soon()) == [OK] * 4
        yield World(server, proxy, tier)
        tier.close()


ERRORS: dict[str, tuple[Fault, Outcome, Outcome]] = {
    "OOM": (proxies.OOM, FULL, FULL),
    "LOADING": (proxies.LOADING, FAILED, FAILED),
    "READONLY": (proxies.READONLY, FAILED, FAILED),
    "MOVED": (proxies.MOVED, FAILED, FAILED),
    "ASK": (proxies.ASK, ABSENT, ABSENT),
    "TRYAGAIN": (proxies.TRYAGAIN, FAILED, FAILED),
    "CLUSTERDOWN": (proxies.CLUSTERDOWN, FAILED, FAILED),
    "NOPERM": (proxies.NOPERM, FAILED, FAILED),
    "MISCONF": (proxies.MISCONF, FAILED, FAILED),
    "unheard of": (Answer(b"-ZZZ \xff\xfe what\r\n"), FAILED, FAILED),
    "bare": (Answer(b"-\r\n"), FAILED, FAILED),
}


@pytest.mark.parametrize("kind", ERRORS)
def test_an_error_reply_is_an_outcome_of_its_block(world: World, kind: str) -> None:
    """CR-023, CR-025: the error costs one block; the connection, being in step, serves the others and goes on."""
    fault, read_outcome, write_outcome = ERRORS[kind]
    moves = empty(keys(4))
    world.proxy.inject(fault, b"GET")
    assert world.tier.read(moves, soon()) == [read_outcome, OK, OK, OK]
    world.proxy.inject(fault, b"SET")
    assert world.tier.write(full([key(9)]), soon()) == [write_outcome]
    assert world.tier.read(moves, soon()) == [OK] * 4
    assert are_right(moves)
    assert world.proxy.num_connections == 1


@pytest.mark.parametrize("fault", [error for error, _, _ in ERRORS.values()], ids=list(ERRORS))
def test_error_replies_never_leave_the_other_calls_as_exceptions(world: World, fault: Fault) -> None:
    for command in (b"EXISTS", b"UNLINK", b"SCAN", b"INFO", b"GETRANGE", b"PEXPIRE"):
        world.proxy.inject(fault, command, 2)
    with_ttl = RedisTier(world.proxy.url, ttl_s=100)
    assert probed(with_ttl, [key(0), key(1), key(2), key(3)], soon()).count(True) == 2
    assert OK not in with_ttl.renew([key(0), key(1), key(2)], soon())
    with_ttl.erase(empty([key(0)]))
    assert with_ttl.clear(NAMESPACE, soon()) is None
    with_ttl.close()


def test_after_out_of_memory_nothing_more_is_sent(world: World) -> None:
    """CR-023: a server that has no memory is not sent the rest of a large batch."""
    num_blocks = 3 * (8 << 20) // LAYOUT.block_bytes
    world.proxy.inject(proxies.OOM, b"SET", 1)
    world.proxy.commands.clear()
    answers = world.tier.write(full(keys(num_blocks)), soon())
    assert answers.count(FULL) == 2 * num_blocks // 3 + 1
    assert answers[0] is FULL
    assert world.proxy.commands.count(b"SET") == num_blocks // 3


@pytest.mark.parametrize("num_bytes", [0, 1, 4, 9, 100, HEADER_BYTES + 500, HEADER_BYTES + LAYOUT.block_bytes + 8])
def test_a_reply_cut_short_costs_its_block_and_those_behind_it(world: World, num_bytes: int) -> None:
    """CR-028: the next call connects afresh."""
    world.tier.read(empty([key(0)]), soon())
    world.proxy.inject(Cut(num_bytes), b"GET")
    moves = empty(keys(4))
    assert world.tier.read(moves, soon()) == [FAILED] * 4
    assert world.tier.read(moves, soon()) == [OK] * 4
    assert are_right(moves)
    assert world.proxy.num_connections == 2


def test_a_connection_that_breaks_halfway_keeps_what_came_before(world: World) -> None:
    """WK-002: blocks that arrived and verified count; buffers of the others are not served."""
    world.proxy.inject(Alter(lambda reply: reply), b"GET", 2)
    world.proxy.inject(Cut(1000), b"GET")
    moves = empty(keys(4))
    assert world.tier.read(moves, soon()) == [OK, OK, FAILED, FAILED]
    assert are_right(moves[:2])


WRONG_REPLIES: dict[str, Fault] = {
    "another type": Answer(b":1\r\n"),
    "a status": Answer(b"+OK\r\n"),
    "not RESP": Answer(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
    "noise": Answer(bytes(range(256)) * 8),
    "a negative length": Answer(b"$-7\r\n"),
    "an endless line": Answer(b"$" + b"1" * 5000 + b"\r\n"),
    "a list": Answer(b"*1\r\n$1\r\nx\r\n"),
    "no end mark": Alter(lambda reply: reply[:-2] + b"xx"),
}


@pytest.mark.parametrize("kind", WRONG_REPLIES)
def test_a_reply_that_makes_no_sense_ends_the_connection(world: World, kind: str) -> None:
    """CR-042, WK-049: after nonsense nothing more is believed from there."""
    world.proxy.inject(WRONG_REPLIES[kind], b"GET")
    (first,) = empty([key(0)])
    assert world.tier.read([first], soon(1)) == [FAILED]
    moves = empty(keys(4))
    assert world.tier.read(moves, soon()) == [OK] * 4
    assert are_right(moves)
    assert world.proxy.num_connections == 2


def test_a_reply_too_many_is_not_the_next_requests(world: World) -> None:
    """WK-049: whether it is noticed at once or before the next call, the connection is not used again."""
    surplus = bytes(world.server.command("GET", name(key(1))))
    world.proxy.inject(Alter(lambda reply: reply + b"$%d\r\n%b\r\n" % (len(surplus), surplus)), b"GET")
    assert world.tier.read(empty([key(0)]), soon())[0] in (OK, FAILED)
    moves = empty([key(2)])
    assert world.tier.read(moves, soon()) == [OK]
    assert are_right(moves)
    assert world.proxy.num_connections == 2


@pytest.mark.parametrize("reply", [b":1\r\n", b"$-1\r\n", b"+QUEUED\r\n", b"*0\r\n", b"junk\r\n", b"+OK\r\n+OK\r\n"])
def test_a_write_that_is_answered_with_anything_but_ok_did_not_happen(world: World, reply: bytes) -> None:
    world.proxy.inject(Answer(reply), b"SET")
    assert world.tier.write(full([key(9)]), soon()) == [FAILED]
    assert world.tier.write(full([key(9)]), soon()) == [OK]
    assert world.proxy.num_connections == 2


def test_a_block_whose_last_part_did_not_arrive_is_not_there(world: World) -> None:
    """WK-003, WK-033: the head is published last, so whoever looks in between sees nothing."""
    world.proxy.inject(Alter(lambda reply: reply), b"SET")
    world.proxy.inject(Cut(0), b"SET")
    assert world.tier.write(full([key(9)], WHOLE), soon()) == [FAILED]
    assert probed(world.tier, [key(9)], soon()) == [False]
    assert world.server.command("EXISTS", name(key(9), 2)) == 1


def test_another_keys_value_in_reply_is_damage(world: World) -> None:
    """WK-049: even were replies to slip by one, the key in the header gives it away."""
    value = bytes(world.server.command("GET", name(key(1))))
    world.proxy.inject(Answer(b"$%d\r\n%b\r\n" % (len(value), value)), b"GET")
    assert world.tier.read(empty([key(0)]), soon()) == [DAMAGED]


def test_a_flipped_bit_on_the_way_is_damage(world: World) -> None:
    """WK-052."""

    def flip(reply: bytes) -> bytes:
        changed = bytearray(reply)
        changed[len(changed) // 2] ^= 1
        return bytes(changed)

    world.proxy.inject(Alter(flip), b"GET")
    assert world.tier.read(empty(keys(2)), soon()) == [DAMAGED, OK]


def test_a_late_reply_is_never_taken_for_the_next_ones(world: World) -> None:
    """WK-049, CR-028: the reply to A arrives after A was given up, while B waits for its own."""
    release = threading.Event()
    world.proxy.inject(Hold(release), b"GET")
    (late,) = empty([key(0)])
    assert world.tier.read([late], soon(SHORT_S)) == [LATE]
    release.set()
    moves = empty([key(1), key(9), key(2)])
    assert world.tier.read(moves, soon()) == [OK, ABSENT, OK]
    assert are_right([moves[0], moves[2]])


def test_late_replies_of_every_call_stay_with_their_connection(world: World) -> None:
    release = threading.Event()
    for command in (b"SET", b"EXISTS", b"UNLINK", b"GETRANGE", b"SCAN"):
        world.proxy.inject(Hold(release), command)
    tier = RedisTier(world.proxy.url, ttl_s=100)
    assert tier.write(full([key(9)]), soon(SHORT_S)) == [LATE]
    assert tier.probe([key(0)], soon(SHORT_S)) == [LATE]
    assert tier.renew([key(0)], soon(SHORT_S)) == [LATE]
    assert tier.clear(NAMESPACE, soon(SHORT_S)) is None
    tier.erase(empty([key(0)]))
    release.set()
    moves = empty(keys(4)[1:])
    assert tier.read(moves, soon()) == [OK] * 3
    assert are_right(moves)
    assert probed(tier, [key(1), key(99)], soon()) == [True, False]
    tier.close()


def test_a_hang_costs_the_deadline_and_what_arrived_before_counts(world: World) -> None:
    world.proxy.inject(Alter(lambda reply: reply), b"GET", 2)
    world.proxy.inject(Hold(threading.Event()), b"GET")
    moves = empty(keys(4))
    began_s = time.monotonic()
    assert world.tier.read(moves, soon(SHORT_S)) == [OK, OK, LATE, LATE]
    assert time.monotonic() - began_s >= SHORT_S
    assert are_right(moves[:2])


@pytest.mark.parametrize("command", [b"EXISTS", b"GETRANGE", b"UNLINK", b"SCAN"])
def test_small_replies_of_the_wrong_type_end_the_connection(world: World, command: bytes) -> None:
    world.proxy.inject(Answer(b":7\r\n" if command == b"GETRANGE" else b"+what?\r\n"), command)
    tier = RedisTier(world.proxy.url, ttl_s=100)
    assert probed(tier, [key(0)], soon()) == [command != b"EXISTS"]
    tier.renew([key(0)], soon())
    assert tier.clear(NAMESPACE, soon()) == (None if command in (b"SCAN", b"UNLINK") else 4)
    probed(tier, [key(0)], soon())
    assert world.proxy.num_connections == 1 + 2  # that of the world's own tier is the first
    tier.close()


def test_closing_waits_for_nobody_and_takes_nothing_away(world: World) -> None:
    """A call in flight ends as it would have, and takes its connection with it."""
    release = threading.Event()
    world.proxy.inject(Hold(release), b"GET")
    moves = empty(keys(2))
    answers: list[Outcome] = []
    reader = threading.Thread(target=lambda: answers.extend(world.tier.read(moves, soon())))
    reader.start()
    wait_until(lambda: b"GET" in world.proxy.commands, "the request to be out")
    world.tier.close()
    assert not answers
    release.set()
    reader.join()
    assert answers == [OK, OK]
    assert are_right(moves)
    assert world.tier.read(moves, soon()) == [FAILED, FAILED]


def test_nothing_is_asked_twice(world: World) -> None:
    """A retry within the tier would hide a failure from the breaker and double its cost."""
    world.proxy.commands.clear()
    world.proxy.inject(Cut(0), b"GET", 1)
    world.proxy.inject(Cut(0), b"SET", 1)
    assert world.tier.read(empty([key(0)]), soon()) == [FAILED]
    assert world.tier.write(full([key(0)]), soon()) == [FAILED]
    assert world.proxy.commands.count(b"GET") == 1
    assert world.proxy.commands.count(b"SET") == 1


def test_trouble_is_logged_once_and_not_per_block(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.proxy.inject(proxies.LOADING, b"GET", 40)
    with caplog.at_level(logging.WARNING):
        for _ in range(10):
            world.tier.read(empty(keys(4)), soon())
    told = [record.getMessage() for record in caplog.records if "LOADING" in record.getMessage()]
    assert len(told) == 1
    assert str(world.proxy.port) in told[0]
