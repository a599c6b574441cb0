"""What a store counts of what it does: each thing once, on every path, and nothing while nothing happens."""

from pathlib import Path

import pytest

from kvstore.stats import CATALOGUE
from kvstore.types import Outcome
from tests.worlds import REQUEST, World, world

PRODUCT = [
    path for package in ("kvstore", "connectors") for path in (Path(__file__).parents[2] / package).rglob("*.py")
]


def counted(w: World, name: str, *labels: str) -> float:
    return w.store.snapshot()[name].get(labels, 0)


def test_nothing_is_declared_that_nobody_counts() -> None:
    sources = "".join(path.read_text() for path in PRODUCT if path.name != "stats.py")
    assert [metric.name for metric in CATALOGUE if f'"{metric.name}"' not in sources] == []


def test_a_request_is_counted_as_it_arrives_and_not_each_time_it_asks() -> None:
    """OB-001, OB-003: retries of a look-up, and a request that starts over, find what it stored itself."""
    with world(8) as w:
        w.put(w.chain(2))
        chain = w.chain(4)
        w.store.arrive(REQUEST, chain)
        for _ in range(5):
            w.store.lookup(chain)
            w.get(chain)
        assert counted(w, "kvstore_requests_total") == 2
        assert counted(w, "kvstore_hit_blocks_total", "memory") == 2
        assert counted(w, "kvstore_hit_tokens_total", "memory") == 8
        assert counted(w, "kvstore_lookups_total") == 6


def test_a_hit_counts_for_the_first_tier_that_has_the_block() -> None:
    """OB-012: how much of what was asked for lay where."""
    with world(4, file=8) as w:
        chain = w.chain(4)
        w.put(chain)
        w.settle()
        w.store.evict(2)
        w.store.arrive(REQUEST, w.chain(6))
        hits = [counted(w, "kvstore_hit_blocks_total", tier) for tier in ("memory", "file")]
        assert hits == [2, 2]
        assert counted(w, "kvstore_request_tokens_total") == 2 * REQUEST.input_tokens


def test_hits_of_requests_and_the_fate_of_copies_are_counted_apart() -> None:
    """OB-004: loads that succeed say nothing of how many requests found something."""
    with world(4, file=8) as w:
        w.put(w.chain(2))
        w.settle()
        w.store.evict(2)
        w.store.arrive(REQUEST, w.chain(1, first_token=100))  # a miss
        assert w.get(w.chain(2)) == 2
        assert counted(w, "kvstore_hit_blocks_total", "file") == 0
        assert counted(w, "kvstore_copies_total", "file", "read", "ok") == 2


@pytest.mark.parametrize("outcome", [outcome for outcome in Outcome if outcome is not Outcome.OK])
@pytest.mark.parametrize("op", ["read", "write"])
def test_every_way_to_fail_is_counted_and_served_as_a_miss(outcome: Outcome, op: str) -> None:
    """OB-006, OB-010: what counts must not fail where it is needed most."""
    with world(4, file=8) as w:
        assert w.file is not None
        w.file.fault = lambda of, _move: outcome if of == op else None
        w.put(w.chain(2))
        w.settle()
        w.store.evict(2)
        assert w.get(w.chain(2)) == 0
        assert counted(w, "kvstore_copies_total", "file", op, outcome.value) >= 1
        w.assert_idle()


def test_a_tier_that_is_given_up_is_counted() -> None:
    with world(4, file=8) as w:
        assert w.file is not None
        w.file.fault = lambda *_: Outcome.FAILED
        for number in range(4):
            w.put(w.chain(1, first_token=100 * number))
            w.settle()
        assert counted(w, "kvstore_breaker_openings_total", "file") == 1


def test_nothing_grows_while_nothing_happens() -> None:
    """OB-005, OB-011: and what is held when idle shows."""
    with world(4, file=8) as w:
        w.put(w.chain(2))
        w.settle()
        before = w.store.snapshot()
        for _ in range(10):
            w.clock.advance(1.0)
            w.settle()
        assert w.store.snapshot() == before
        lease = w.store.pin(w.chain(2))
        assert counted(w, "kvstore_pinned_blocks", "memory") == 2
        w.store.release(lease)


def test_copies_are_timed() -> None:
    with world(4, file=8) as w:
        assert w.file is not None

        def slow(*_: object) -> None:
            w.clock.advance(0.25)

        w.file.fault = slow
        w.put(w.chain(1))
        w.settle()
        assert counted(w, "kvstore_copy_seconds_total", "file") == 0.25


@pytest.mark.parametrize("stores", [False, True])
def test_a_store_that_nobody_stores_to_says_so_once(stores: bool, caplog: pytest.LogCaptureFixture) -> None:
    """UX-019: a set-up that looks well and does nothing."""
    with world(4) as w:
        if stores:
            w.put(w.chain(1))
        for _ in range(250):
            w.store.arrive(REQUEST, w.chain(1, first_token=100))
    warnings = [record.getMessage() for record in caplog.records if "nobody tried to store" in record.getMessage()]
    assert len(warnings) == (0 if stores else 1)
