"""What comes up from lower levels: exact prefixes, joined reads, deadlines."""

import pytest

from kvstore.breaker import BreakerState
from kvstore.testing.dict_tiers import DictSharedTier
from kvstore.types import Outcome
from tests.worlds import world


def test_a_prefetch_brings_up_what_lies_below_and_joins_what_is_in_flight() -> None:
    """PF-009, SC-018: one read serves all who ask."""
    with world(4, file=8) as w:
        chain = w.chain(3)
        w.put(chain)
        w.settle()
        w.store.evict(3)
        first = w.store.prefetch(chain, w.clock() + 1)
        second = w.store.prefetch(chain, w.clock() + 1)
        assert w.store.lookup(chain).pending
        assert w.steps.lanes["file"].num_waiting == 1
        w.settle()
        assert (first.done, first.ready, second.done, second.ready) == (True, 3, True, 3)
        assert first.blocks_from == {"file": 3}
        assert not w.store.lookup(chain).pending
        w.assert_idle()


def test_a_block_in_flight_behind_a_gap_is_joined_and_not_read_again() -> None:
    with world(4, file=4) as w:
        chain = w.chain(2)
        w.put(chain)
        w.settle()
        w.store.evict(1)
        w.store.prefetch(chain, w.clock() + 1)  # reads the second block
        w.clock.advance(1.0)
        w.store.poll()  # it has ended, and let go of the first
        w.store.evict(1)
        prefetch = w.store.prefetch(chain, w.clock() + 1)
        assert w.steps.lanes["file"].num_waiting == 2
        w.settle()
        assert (prefetch.done, prefetch.ready) == (True, 2)
        w.assert_idle()


def test_a_prefetch_is_idempotent() -> None:
    with world(4, file=4) as w:
        w.put(w.chain(2))
        prefetch = w.store.prefetch(w.chain(2), w.clock() + 1)
        assert prefetch.done
        assert prefetch.ready == 2


def test_a_prefetch_ends_at_its_deadline_and_a_late_read_harms_nobody() -> None:
    """A read that returns after its deadline: its slot was quarantined, nobody else's block changes."""
    with world(2, file=4) as w:
        chain, other = w.chain(2), w.chain(1, first_token=70)
        w.put(chain)
        w.settle()
        w.store.evict(2)
        prefetch = w.store.prefetch(chain, w.clock() + 1)
        w.clock.advance(2)
        w.store.poll()
        assert prefetch.done
        assert prefetch.ready == 0
        assert w.store.health()["file"] is BreakerState.OPEN
        assert w.put(other) == set()  # both slots may still be written to
        assert w.store.lookup(other).ready == 0
        w.steps.lanes["file"].step()
        w.store.poll()
        w.put(other)
        assert w.get(other) == 1
        w.assert_idle()


def test_a_joined_prefetch_with_more_time_gets_a_second_chance() -> None:
    with world(4, file=4) as w:
        chain = w.chain(2)
        w.put(chain)
        w.settle()
        w.store.evict(2)
        hasty = w.store.prefetch(chain, w.clock() + 1)
        patient = w.store.prefetch(chain, w.clock() + 100)
        w.clock.advance(1.01)  # the deadline of the first passes while its read waits for a thread
        w.settle()
        assert (hasty.done, hasty.ready) == (True, 0)
        assert (patient.done, patient.ready) == (True, 2)
        w.assert_idle()


@pytest.mark.parametrize("outcome", [Outcome.ABSENT, Outcome.DAMAGED, Outcome.FAILED, Outcome.FOREIGN, Outcome.LATE])
def test_any_fault_is_an_exact_prefix(outcome: Outcome) -> None:
    """WK-002, WK-029, WK-030: blocks before the fault are served, the rest is a miss, no byte of the bad one is."""
    with world(4, file=4) as w:
        chain = w.chain(4)
        w.put(chain)
        w.settle()
        w.store.evict(4)
        assert w.file is not None
        w.file.fault = lambda op, move: outcome if op == "read" and move.key == chain[2] else None
        assert w.get(chain) == 2
        w.settle()
        w.assert_idle()


def test_a_damaged_block_is_erased_and_replaced() -> None:
    """VERIFY: the tier forgets what is broken, and the next commit stores it anew."""
    with world(4, file=4) as w:
        chain = w.chain(2)
        w.put(chain)
        w.settle()
        w.store.evict(4)
        assert w.file is not None
        w.file.fault = lambda op, move: Outcome.DAMAGED if op == "read" and move.key == chain[0] else None
        assert w.get(chain) == 0
        w.settle()
        assert {kept.move.key for kept in w.file.kept.values()} == {chain[1]}
        w.file.fault = lambda op, move: None
        w.put(chain)
        w.settle()
        assert {kept.move.key for kept in w.file.kept.values()} == set(chain)


def test_a_block_that_one_level_lost_is_read_from_the_next() -> None:
    with world(4, file=4, shared=DictSharedTier()) as w:
        chain = w.chain(2)
        w.put(chain)
        w.settle()
        w.store.evict(4)
        assert w.file is not None
        w.file.fault = lambda op, move: Outcome.DAMAGED if op == "read" and move.key == chain[1] else None
        assert w.get(chain) == 2
        w.settle()
        w.assert_idle()


def test_a_new_host_finds_what_another_stored() -> None:
    shared = DictSharedTier()
    with world(4, shared=shared) as w:
        w.put(w.chain(3))
        w.settle()
    with world(4, shared=shared) as w:
        assert w.store.lookup(w.chain(3)).found == 0  # tables only
        assert w.get(w.chain(4)) == 3  # the probe knows
        w.settle()
        w.assert_idle()


def test_what_is_nowhere_costs_no_slot_and_no_block_its_place() -> None:
    """PF-011: neither tables nor a server that is asked let RAM make room for blocks that do not come."""
    for shared in (None, DictSharedTier()):
        with world(4, file=8, shared=shared) as w:
            w.put(w.chain(4))
            w.settle()
            prefetch = w.store.prefetch(w.chain(4, first_token=100), w.clock() + 1.0)
            assert prefetch.done == (shared is None)
            assert w.store.lookup(w.chain(4)).ready == 4
            w.settle()
            assert prefetch.done
            assert w.store.lookup(w.chain(4)).ready == 4
            w.assert_idle()


def test_a_hint_that_proves_wrong_is_a_plain_miss() -> None:
    shared = DictSharedTier()
    with world(4, shared=shared) as w:
        chain = w.chain(2)
        w.put(chain)
        w.settle()
        w.store.evict(4)
        shared.kept.clear()
        assert w.store.lookup(chain).found == 2
        assert w.get(chain) == 0
        assert w.store.lookup(chain).found == 0
        w.assert_idle()
