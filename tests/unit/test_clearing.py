"""Clearing a namespace while the shared tier is busy, down or slow: it is gone at once, and in the end for good."""

import logging
from collections.abc import Sequence

import pytest

from kvstore.breaker import BreakerState
from kvstore.hashing import Identity
from kvstore.testing.dict_tiers import DictSharedTier, DictSlotTier, no_fault
from kvstore.tiers.base import BlockMove
from kvstore.types import Outcome
from tests.worlds import IDENTITY, LAYOUT, World, world

PAUSE_S = 1.5
"""More than lies between two tries."""


class MoodySharedTier(DictSharedTier):
    """Refuses to clear as often as it is told, and never gets round to erasing, which a tier may not."""

    num_refusals = 0
    num_tries = 0

    def erase(self, moves: Sequence[BlockMove]) -> None:
        pass

    def clear(self, namespace: bytes, deadline_s: float) -> int | None:
        self.num_tries += 1
        if self.num_refusals:
            self.num_refusals -= 1
            return None
        return super().clear(namespace, deadline_s)


def wait(w: World) -> None:
    w.clock.advance(PAUSE_S)
    w.settle()


def filled(w: World, shared: DictSharedTier) -> None:
    w.put(w.chain(2))
    w.settle()
    assert set(shared.kept) == set(w.chain(2))


def assert_shut(w: World) -> None:
    """The shared level answers nothing of the namespace, and takes nothing."""
    assert w.store.lookup(w.chain(2)).found == 0
    assert w.get(w.chain(2)) == 0
    assert w.put(w.chain(1, first_token=900)) == frozenset()


def test_a_clear_that_fails_is_tried_again_and_nothing_is_served_meanwhile() -> None:
    shared = MoodySharedTier()
    with world(4, shared=shared) as w:
        filled(w, shared)
        shared.num_refusals = 3
        w.store.clear(w.ns)
        for _ in range(3):
            w.settle()
            assert_shut(w)
            w.clock.advance(PAUSE_S)
        wait(w)
        wait(w)
        assert not shared.kept
        assert not w.store.lookup(w.chain(2)).found
        assert w.put(w.chain(1, first_token=1800))  # and the tier is in use again
        w.settle()
        assert len(shared.kept) == 1


def test_after_a_failure_one_good_try_is_not_enough() -> None:
    """A server that hung has yet to do what it was sent; that may come after the first try that is answered."""
    shared = MoodySharedTier()
    with world(4, shared=shared) as w:
        filled(w, shared)
        late = dict(shared.kept)
        shared.num_refusals = 1
        w.store.clear(w.ns)
        w.settle()
        wait(w)
        assert not shared.kept
        shared.kept |= late
        assert_shut(w)
        wait(w)
        assert not shared.kept
        assert shared.num_tries == 3
        wait(w)
        assert shared.num_tries == 3


def test_a_clear_waits_for_a_tier_that_is_down() -> None:
    shared = MoodySharedTier()
    with world(4, shared=shared) as w:
        filled(w, shared)
        shared.fault = lambda op, move: Outcome.FAILED
        for number in range(3):
            w.put(w.chain(1, first_token=4000 + 100 * number))
            w.settle()
        assert w.store.health()["redis"] is BreakerState.OPEN
        w.store.clear(w.ns)
        w.settle()
        assert shared.num_tries == 0
        assert_shut(w)
        shared.fault = no_fault
        wait(w)
        assert not shared.kept


def late(w: World, op: str, move: BlockMove) -> None:
    """What happens while a write hangs: it is given up, its namespace is cleared, and that is done."""
    w.clock.advance(11)
    w.store.poll()
    w.store.clear(w.ns)
    wait(w)
    wait(w)


def test_a_write_that_was_given_up_is_not_there_after_a_clear_though_it_arrives() -> None:
    shared = MoodySharedTier()
    with world(4, shared=shared) as w:
        w.put(w.chain(1))
        shared.fault = lambda op, move: late(w, op, move)
        w.steps.run_all()
        shared.fault = no_fault
        assert set(shared.kept) == set(w.chain(1))
        wait(w)
        wait(w)
        assert not shared.kept
        assert w.store.lookup(w.chain(1)).found == 0
        w.assert_idle()


def test_a_late_write_to_file_does_not_survive_its_namespace() -> None:
    """Nor a restart."""
    with world(4, file=4) as w:
        assert w.file is not None
        w.put(w.chain(1))
        w.file.fault = lambda op, move: late(w, op, move)
        w.steps.run_all()
        w.file.fault = no_fault
        assert w.file.kept
        wait(w)
        assert not w.file.kept
        w.assert_idle()


def test_other_namespaces_are_served_meanwhile() -> None:
    shared = MoodySharedTier()
    with world(8, shared=shared) as w:
        filled(w, shared)
        other = w.store.open_namespace(Identity("another", b"weights"), LAYOUT)
        chain = other.keys(range(8))
        lease = w.store.reserve(other, 2)
        w.store.commit(lease, chain, None)
        w.settle()
        shared.num_refusals = 100
        w.store.clear(w.ns)
        w.settle()
        w.store.evict(8)
        prefetch = w.store.prefetch(chain, w.clock() + 1)
        w.settle()
        assert prefetch.ready == 2


def test_a_store_that_closes_before_it_has_cleared_says_so(caplog: pytest.LogCaptureFixture) -> None:
    shared = MoodySharedTier()
    with world(4, shared=shared) as w:
        filled(w, shared)
        shared.num_refusals = 100
        w.store.clear(w.ns)
        w.settle()
        with caplog.at_level(logging.WARNING):
            w.close()
        assert w.ns.digest.hex() in caplog.text


def test_a_file_level_that_joins_late_has_nothing_of_what_was_cleared_before() -> None:
    """A sidecar answers while its files are still being scanned."""
    with world(4, file=4) as w:
        w.put(w.chain(2))
        w.settle()
        file = w.file
    assert isinstance(file, DictSlotTier)
    with world(4) as w:
        kept_ns = w.store.open_namespace(IDENTITY, LAYOUT)
        w.store.clear(kept_ns)
        w.store.join_file(w.store.scanned(file))
        w.settle()
        assert w.store.lookup(w.chain(2)).found == 0
        assert not file.kept
