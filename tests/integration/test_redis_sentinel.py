"""A service that a Sentinel watches: the tier follows its primary."""

from collections.abc import Iterator

import pytest

from kvstore.testing.valkey import ValkeyServer, free_port, valkey_sentinel, wait_until
from kvstore.tiers.redis import RedisTier
from kvstore.types import Outcome
from tests.redis_blocks import NAMESPACE, are_right, empty, full, key, keys, soon

OK, FAILED = Outcome.OK, Outcome.FAILED


@pytest.fixture(scope="module")
def service() -> Iterator[list[ValkeyServer]]:
    with valkey_sentinel(password="sesame") as running:
        yield running


@pytest.fixture
def url(service: list[ValkeyServer]) -> str:
    """The first Sentinel is dead."""
    return f"redis+sentinel://:sesame@127.0.0.1:{free_port()},127.0.0.1:{service[2].port}/kv"


def test_the_primary_is_found_through_a_sentinel(service: list[ValkeyServer], url: str) -> None:
    tier = RedisTier(url)
    assert tier.write(full(keys(4)), soon()) == [OK] * 4
    moves = empty(keys(4))
    assert tier.read(moves, soon()) == [OK] * 4
    assert are_right(moves)
    assert int(service[0].command("DBSIZE")) == 4
    assert tier.clear(NAMESPACE, soon()) == 4
    tier.close()


def test_a_service_nobody_knows_fails(service: list[ValkeyServer], url: str) -> None:
    for wrong in (url.replace("/kv", "/other"), url.replace("sesame", "wrong"), "redis+sentinel://127.0.0.1:1/kv"):
        tier = RedisTier(wrong)
        assert tier.write(full([key(0)]), soon()) == [FAILED]
        assert tier.clear(NAMESPACE, soon()) is None
        tier.close()


def test_a_hung_sentinel_leaves_time_for_the_next(service: list[ValkeyServer]) -> None:
    with ValkeyServer() as hung:
        hung.pause()
        tier = RedisTier(f"redis+sentinel://:sesame@127.0.0.1:{hung.port},127.0.0.1:{service[2].port}/kv")
        assert tier.write(full([key(0)]), soon(0.6)) == [OK]
        tier.close()
        hung.resume()


def test_a_failover_is_followed(service: list[ValkeyServer], url: str) -> None:
    """CR-025: what fails meanwhile is a miss; the new primary is in use as soon as the Sentinel names it."""
    primary, replica, _ = service
    tier = RedisTier(url)
    assert tier.write(full(keys(4)), soon()) == [OK] * 4
    wait_until(lambda: int(replica.command("DBSIZE")) == 4, "the replica to be in step")
    primary.kill()
    wait_until(lambda: tier.write(full([key(9)]), soon(0.5)) == [OK], "the replica to be promoted")
    moves = empty([*keys(4), key(9)])
    assert tier.read(moves, soon()) == [OK] * 5
    assert are_right(moves)
    tier.close()
