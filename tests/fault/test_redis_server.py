"""Servers that hang, die, come back, fill up or turn read-only, and processes that fork."""

import logging
import multiprocessing
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Protocol

import pytest

from kvstore.testing.valkey import ValkeyServer, free_port, wait_until
from kvstore.tiers.redis import RedisTier
from kvstore.types import Outcome
from tests.redis_blocks import NAMESPACE, WHOLE, are_right, empty, full, key, keys, probed, soon

OK, ABSENT, LATE, FULL, FAILED = Outcome.OK, Outcome.ABSENT, Outcome.LATE, Outcome.FULL, Outcome.FAILED
SHORT_S = 0.4
GRACE_S = 0.3
"""How much later than its deadline a call may return before its mover calls it stuck."""


@pytest.fixture
def server() -> Iterator[ValkeyServer]:
    with ValkeyServer() as running:
        yield running


class OpenTier(Protocol):
    def __call__(self, server: ValkeyServer, *, unix: bool = False, ttl_s: int = 0) -> RedisTier: ...


@pytest.fixture
def tier_of() -> Iterator[OpenTier]:
    with ExitStack() as stack:

        def open_one(server: ValkeyServer, *, unix: bool = False, ttl_s: int = 0) -> RedisTier:
            tier = RedisTier(server.unix_url if unix else server.url, ttl_s=ttl_s)
            stack.callback(tier.close)
            return tier

        yield open_one


@pytest.mark.parametrize("unix", [True, False], ids=["unix", "tcp"])
def test_a_stopped_server_costs_each_call_its_deadline_and_no_more(
    server: ValkeyServer, tier_of: OpenTier, unix: bool
) -> None:
    tier = tier_of(server, unix=unix, ttl_s=100)
    assert tier.write(full(keys(2)), soon()) == [OK, OK]
    large = full([key(5)], WHOLE)  # more than the socket buffers take
    server.pause()

    for expected, call in (
        ([LATE, LATE], lambda: tier.read(empty(keys(2)), soon(SHORT_S))),
        ([LATE, LATE], lambda: tier.write(full(keys(2)), soon(SHORT_S))),
        ([LATE], lambda: tier.write(large, soon(SHORT_S))),
        ([LATE], lambda: tier.probe([key(0)], soon(SHORT_S))),
        ([LATE], lambda: tier.renew([key(0)], soon(SHORT_S))),
        (None, lambda: tier.clear(NAMESPACE, soon(SHORT_S))),
    ):
        began_s = time.monotonic()
        assert call() == expected
        assert time.monotonic() < began_s + SHORT_S + GRACE_S

    server.resume()
    moves = empty(keys(2))
    assert tier.read(moves, soon()) == [OK, OK]
    assert are_right(moves)


def test_a_server_may_come_after_its_tier(tier_of: OpenTier) -> None:
    """CR-025: construction connects to nothing; the first call that finds a server uses it."""
    server = ValkeyServer()
    tier = tier_of(server)
    assert tier.read(empty([key(0)]), soon()) == [FAILED]
    assert tier.write(full([key(0)]), soon()) == [FAILED]
    assert tier.probe([key(0)], soon()) == [FAILED]
    with server:
        assert tier.write(full([key(0)]), soon()) == [OK]
        assert tier.read(empty([key(0)]), soon()) == [OK]


def test_a_killed_server_is_back_in_use_as_soon_as_it_is_back(server: ValkeyServer, tier_of: OpenTier) -> None:
    """PF-027: a dead server costs no deadline, a server that is back no second call."""
    tier = tier_of(server)
    assert tier.write(full([key(0)]), soon()) == [OK]
    server.kill()
    assert tier.read(empty([key(0)]), soon(60)) == [FAILED]
    assert tier.write(full([key(0)]), soon(60)) == [FAILED]
    server.start()
    assert tier.read(empty([key(0)]), soon()) == [ABSENT]
    assert tier.write(full([key(0)]), soon()) == [OK]
    assert tier.read(empty([key(0)]), soon()) == [OK]


def test_a_server_killed_while_it_is_written_to_loses_only_what_was_not_acknowledged(
    server: ValkeyServer, tier_of: OpenTier
) -> None:
    tier = tier_of(server, unix=True)
    started = threading.Event()
    answers: list[Outcome] = []

    def write() -> None:
        for number in range(10_000):
            started.set()
            answers.extend(tier.write(full([key(number % 4)]), soon(60)))
            if answers[-1] is not OK:
                return

    writer = threading.Thread(target=write)
    writer.start()
    started.wait()
    wait_until(lambda: len(answers) > 5, "some writes")
    server.kill()
    writer.join()
    assert answers[-1] is FAILED
    assert set(answers[:-1]) == {OK}


def test_a_full_server_refuses_writes_and_serves_reads(tier_of: OpenTier) -> None:
    """CR-023: out of memory is FULL, not a failure, and ends when room is made."""
    with ValkeyServer(maxmemory="6mb", maxmemory_policy="noeviction") as server:
        tier = tier_of(server)
        many = keys(1024)
        answers = tier.write(full(many), soon(20))
        assert set(answers) == {OK, FULL}
        moves = empty([one for one, answer in zip(many, answers, strict=True) if answer is OK])
        assert tier.read(moves, soon()) == [OK] * len(moves)
        assert are_right(moves)
        tier.erase(moves[: len(moves) // 2])
        assert tier.write(full([key(1000)]), soon()) == [OK]


def test_a_server_that_evicts_gives_misses(server: ValkeyServer, tier_of: OpenTier) -> None:
    """CR-022: what the server threw out is absent, whatever was said of it before."""
    server.command("CONFIG", "SET", "maxmemory", "6mb")
    tier = tier_of(server)
    many = keys(1024)
    assert tier.write(full(many), soon(20)) == [OK] * 1024
    moves = empty(many)
    answers = tier.read(moves, soon(20))
    assert set(answers) == {OK, ABSENT}
    assert are_right([move for move, answer in zip(moves, answers, strict=True) if answer is OK])


def test_a_replica_serves_reads_and_refuses_writes(server: ValkeyServer, tier_of: OpenTier) -> None:
    """CR-025."""
    primary = tier_of(server)
    assert primary.write(full([key(0)]), soon()) == [OK]
    with ValkeyServer(replicaof=f"127.0.0.1 {server.port}", repl_diskless_sync_delay="0") as replica:
        server.command("CONFIG", "SET", "repl-diskless-sync-delay", "0")
        tier = tier_of(replica)
        wait_until(lambda: probed(tier, [key(0)], soon()) == [True], "the replica to be in step")
        assert tier.read(empty([key(0)]), soon()) == [OK]
        assert tier.write(full([key(1)]), soon()) == [FAILED]
        assert tier.clear(NAMESPACE, soon()) is None
        assert tier.read(empty([key(0)]), soon()) == [OK]


def _child(tier: RedisTier, pipe: Connection) -> None:
    moves = empty(keys(2))
    pipe.send([outcome.value for outcome in tier.read(moves, soon())] + [are_right(moves)])
    pipe.recv()
    tier.close()
    pipe.close()


def _num_connections_ever(server: ValkeyServer) -> int:
    stats = bytes(server.command("INFO", "stats")).decode()
    return int(stats.split("total_connections_received:")[1].split()[0])


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_opens_connections_of_its_own(server: ValkeyServer, tier_of: OpenTier) -> None:
    """PK-006: replies meant for the parent are never read by the child, nor the other way round."""
    tier = tier_of(server)
    assert tier.write(full(keys(2)), soon()) == [OK, OK]
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=_child, args=(tier, theirs))
    before = _num_connections_ever(server)
    child.start()
    theirs.close()
    assert ours.recv() == ["ok", "ok", True]
    assert tier.read(empty(keys(2)), soon()) == [OK, OK]
    assert _num_connections_ever(server) == before + 2  # the child's, and the one that asks
    ours.send("enough")
    child.join()
    assert tier.read(empty(keys(2)), soon()) == [OK, OK]
    ours.close()


def test_threads_share_a_tier(server: ValkeyServer, tier_of: OpenTier) -> None:
    tier = tier_of(server)
    assert tier.write(full(keys(16)), soon()) == [OK] * 16
    wrong: list[object] = []

    def work(seed: int) -> None:
        for turn in range(30):
            moves = empty([key((seed + turn) % 16), key(99), key((seed * 5 + turn) % 16)])
            answers = tier.read(moves, soon(20))
            if answers != [OK, ABSENT, OK] or not are_right([moves[0], moves[2]]):
                wrong.append(answers)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_connections_are_kept_and_not_piled_up(server: ValkeyServer, tier_of: OpenTier) -> None:
    """LK-018: hundreds of calls, failed ones among them, leave one connection."""
    tier = tier_of(server)
    for _ in range(100):
        tier.read(empty([key(0)]), soon())
        tier.read(empty([key(0)]), time.monotonic() - 1)
    names = [line for line in server.command("CLIENT", "LIST").splitlines() if b"cmd=get" in line]
    assert len(names) == 1


def test_an_idle_connection_that_died_is_replaced_before_it_is_used(server: ValkeyServer, tier_of: OpenTier) -> None:
    """CR-028."""
    tier = tier_of(server)
    assert tier.write(full([key(0)]), soon()) == [OK]
    server.command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    assert tier.read(empty([key(0)]), soon()) == [OK]


def test_a_port_nobody_listens_on_fails_at_once() -> None:
    tier = RedisTier(f"redis://127.0.0.1:{free_port()}")
    assert tier.read(empty([key(0)]), soon(60)) == [FAILED]


@pytest.mark.parametrize(
    ("settings", "ttl_s", "says"),
    [
        (("8mb", "noeviction"), 100, "noeviction"),
        (("8mb", "volatile-lru"), 0, "volatile-lru"),
        (("8mb", "volatile-lru"), 100, ""),
        (("8mb", "allkeys-lru"), 0, ""),
        (("0", "noeviction"), 0, "maxmemory is not set"),
    ],
)
def test_memory_settings_that_do_not_suit_a_cache_are_said_once(
    caplog: pytest.LogCaptureFixture, tier_of: OpenTier, settings: tuple[str, str], ttl_s: int, says: str
) -> None:
    """CR-023."""
    maxmemory, policy = settings
    with ValkeyServer(maxmemory=maxmemory, maxmemory_policy=policy) as server, caplog.at_level(logging.WARNING):
        tier = tier_of(server, ttl_s=ttl_s)
        for _ in range(3):
            assert tier.write(full([key(0)]), soon()) == [OK]
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == (1 if says else 0)
    assert says in "".join(told)
