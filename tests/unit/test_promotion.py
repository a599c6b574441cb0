"""What comes up from lower levels: exact prefixes, joined reads, deadlines."""

from collections.abc import Sequence

import pytest

from kvstore.breaker import BreakerState
from kvstore.promotion import Prefetch
from kvstore.testing.dict_tiers import DictSharedTier, DictSlotTier
from kvstore.tiers.base import BlockMove
from kvstore.types import BlockKey, Outcome
from tests.worlds import LAYOUT, World, world


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


# ---- load or recompute: the engine computes a block in a millisecond


def reading_takes(w: World, tier: DictSlotTier | DictSharedTier | None, seconds: float) -> None:
    """Each block of ``tier`` from now on."""
    assert tier is not None

    def slowly(op: str, _move: BlockMove) -> None:
        if op == "read":
            w.clock.advance(seconds)

    tier.fault = slowly


def brought_up(w: World, chain: Sequence[BlockKey]) -> Prefetch:
    """Of a chain that lies below RAM alone."""
    w.store.evict(100)
    prefetch = w.store.prefetch(chain, w.clock() + 5)
    w.settle()
    assert prefetch.done
    return prefetch


def learned_slow(w: World) -> list[BlockKey]:
    """A chain of four on a file tier that takes ten milliseconds for each, of which all of that is known."""
    chain = w.chain(4)
    w.put(chain)
    w.settle()
    reading_takes(w, w.file, 0.010)
    assert brought_up(w, chain).ready == 4, "nothing was known of it yet"
    assert brought_up(w, chain).ready == 4, "a first trial"
    return chain


def declined(w: World, tier: str = "file") -> float:
    return w.store.stats.get("kvstore_declined_blocks_total", tier)


def test_what_is_faster_to_compute_is_not_read() -> None:
    """PF-022: a slow disk makes no request slower than without it."""
    with world(4, file=8, prefill_tokens_per_s=4000) as w:
        chain = learned_slow(w)
        w.store.evict(100)
        prefetch = w.store.prefetch(chain, w.clock() + 5)
        assert (prefetch.done, prefetch.ready) == (True, 0), "it waits for nothing"
        assert w.steps.lanes["file"].num_waiting == 0
        assert declined(w) == 4
        assert w.get(chain) == 0
        w.put(chain)
        assert w.get(chain) == 4, "computed once more, it is in RAM like any other"
        assert w.store.snapshot()["kvstore_read_bytes_per_second"]["file",] == pytest.approx(4096 / 0.010, rel=0.1)
        w.assert_idle()


@pytest.mark.parametrize(("tokens_per_s", "seconds"), [(0, 0.010), (4000, 0.0001), (300, 0.010)])
def test_what_is_faster_to_read_is_read_and_all_is_where_no_rate_is_known(tokens_per_s: int, seconds: float) -> None:
    with world(4, file=8, prefill_tokens_per_s=tokens_per_s) as w:
        chain = w.chain(4)
        w.put(chain)
        w.settle()
        reading_takes(w, w.file, seconds)
        for _ in range(6):
            assert brought_up(w, chain).ready == 4
        assert declined(w) == 0
        w.assert_idle()


def test_a_disk_that_is_fast_again_is_found_out() -> None:
    """By a small read now and then, and then by as many as surprise."""
    with world(4, file=8, prefill_tokens_per_s=4000) as w:
        chain = learned_slow(w)
        reading_takes(w, w.file, 0.00001)
        assert brought_up(w, chain).ready == 0
        w.clock.advance(10.0)
        for _ in range(6):
            assert brought_up(w, chain).ready == 4
        assert declined(w) == 4
        w.assert_idle()


def test_a_trial_of_a_disk_that_is_still_slow_costs_one_request_in_a_while() -> None:
    with world(4, file=8, prefill_tokens_per_s=4000) as w:
        chain = learned_slow(w)
        w.clock.advance(10.0)
        assert [brought_up(w, chain).ready for _ in range(4)] == [4, 0, 0, 0]
        w.assert_idle()


def test_a_level_that_is_faster_is_read_instead() -> None:
    with world(4, file=8, shared=DictSharedTier(), prefill_tokens_per_s=4000) as w:
        chain = w.chain(4)
        w.put(chain)
        w.settle()
        reading_takes(w, w.file, 0.010)
        reading_takes(w, w.shared, 0.0001)
        assert brought_up(w, chain).blocks_from == {"file": 4}
        assert brought_up(w, chain).blocks_from == {"file": 4}
        assert brought_up(w, chain).blocks_from == {"redis": 4}
        assert declined(w) == declined(w, "redis") == 0, "none of them was computed"
        w.assert_idle()


class MeasuredTier(DictSlotTier):
    """A disk that was tried out when it was opened: ten milliseconds a block."""

    def read_bytes_per_s(self) -> float:
        return 4096 / 0.010


def test_what_was_measured_at_start_counts_from_the_first_read_on() -> None:
    with world(4, file_tier=MeasuredTier(8, LAYOUT.block_bytes), prefill_tokens_per_s=4000) as w:
        chain = w.chain(4)
        w.put(chain)
        w.settle()
        reading_takes(w, w.file, 0.010)
        assert [brought_up(w, chain).ready for _ in range(3)] == [4, 0, 0], "a trial, and no more"


def test_only_blocks_that_came_tell_how_fast_a_tier_is() -> None:
    with world(4, file=8) as w:
        chain = w.chain(4)
        w.put(chain)
        w.settle()
        assert w.file is not None

        def fault(op: str, move: BlockMove) -> Outcome | None:
            w.clock.advance(0.040 if op == "read" and move.key == chain[0] else 0.0)
            return Outcome.ABSENT if op == "read" and move.key != chain[0] else None

        w.file.fault = fault
        assert brought_up(w, chain).ready == 1
        assert w.store.snapshot()["kvstore_read_bytes_per_second"]["file",] == pytest.approx(4096 / 0.040, rel=0.1)


def test_what_is_being_read_for_others_counts_and_what_is_waited_for_anyway_does_not() -> None:
    """A block in 0.6 ms, where computing it takes 1: not with twice as many before it."""
    with world(16, file=16, prefill_tokens_per_s=4000) as w:
        long, short = w.chain(10), w.chain(4, first_token=1000)
        for chain in (long, short):
            w.put(chain)
            w.settle()
        reading_takes(w, w.file, 0.0006)
        for _ in range(8):
            assert brought_up(w, long).ready == 10
        for num_ready in (4, 0):  # the first time it is a trial
            w.store.evict(100)
            first = w.store.prefetch(long[:8], w.clock() + 5)
            joined = w.store.prefetch(long, w.clock() + 5)
            second = w.store.prefetch(short, w.clock() + 5)
            assert (first.waiting, second.done, joined.waiting) == (8, num_ready == 0, 10)
            w.settle()
            assert (first.ready, second.ready, joined.ready) == (8, num_ready, 10)
        assert declined(w) == 4
        w.assert_idle()
