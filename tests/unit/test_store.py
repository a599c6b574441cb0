"""What the store promises of each call, over fakes. Real tiers: tests/integration/test_store.py."""

import pytest

from kvstore.breaker import BreakerState
from kvstore.errors import ClosedError, ConfigError, LayoutError, LeaseError
from kvstore.layout import Layout
from kvstore.testing.dict_tiers import DictSharedTier
from kvstore.tiers.base import BlockMove
from kvstore.types import BlockKey, Outcome
from tests.worlds import IDENTITY, LAYOUT, PAGE_BYTES, World, content, world


def test_what_was_committed_is_found_and_served() -> None:
    with world(4) as w:
        chain = w.chain(3)
        assert w.store.lookup(chain) == type(w.store.lookup(chain))(0, 0, pending=False)
        w.put(chain)
        assert w.store.lookup(chain).ready == 3
        assert w.get(chain) == 3
        w.assert_idle()


def test_a_longer_chain_is_served_up_to_what_is_there() -> None:
    """FAILMISS: a result is the longest prefix, never more."""
    with world(4) as w:
        w.put(w.chain(2))
        assert w.get(w.chain(4)) == 2
        assert w.get(w.chain(4, first_token=1)) == 0


def test_reserve_gives_fewer_when_the_rest_is_in_use() -> None:
    """CR-006: a pool smaller than a request is no error."""
    with world(2) as w:
        lease = w.store.reserve(w.ns, 5)
        assert lease.num_blocks == 2
        assert w.store.reserve(w.ns, 1).num_blocks == 0
        w.store.abort(lease)
        assert w.store.reserve(w.ns, 5).num_blocks == 2


def test_blocks_are_committed_one_by_one_while_decoding() -> None:
    with world(4) as w:
        chain = w.chain(3)
        lease = w.store.reserve(w.ns, 4)
        for index, key in enumerate(chain):
            lease.views[index][:] = content(key)
            w.store.commit(lease, [key], chain[index - 1] if index else None)
        assert w.get(chain) == 3
        w.store.abort(lease)
        w.assert_idle()


def test_leases_end_once() -> None:
    """WK-056, LK-006: double commit, double release, abort after commit."""
    with world(4, file=4) as w:
        chain = w.chain(2)
        lease = w.store.reserve(w.ns, 2)
        w.store.commit(lease, chain, None)
        for call in (lambda: w.store.commit(lease, chain, None), lambda: w.store.abort(lease)):
            with pytest.raises(LeaseError):
                call()
        read = w.store.pin(chain)
        w.store.release(read)
        with pytest.raises(LeaseError):
            w.store.release(read)
        w.settle()
        w.assert_idle()


def test_more_keys_than_slots_are_refused_and_nothing_changes() -> None:
    with world(4) as w:
        lease = w.store.reserve(w.ns, 1)
        with pytest.raises(LeaseError, match="2 keys for 1 slots"):
            w.store.commit(lease, w.chain(2), None)
        assert w.store.lookup(w.chain(2)).ready == 0
        w.store.abort(lease)
        w.assert_idle()


def test_keys_of_another_namespace_are_refused() -> None:
    with world(4) as w:
        other = w.store.open_namespace(IDENTITY, Layout("int8", 1, 1, (1024,), 4))
        lease = w.store.reserve(w.ns, 1)
        with pytest.raises(LayoutError, match="namespace"):
            w.store.commit(lease, other.keys(range(4)), None)
        w.store.abort(lease)


def test_pinned_blocks_stay_while_others_come() -> None:
    with world(3) as w:
        chain = w.chain(2)
        w.put(chain)
        lease = w.store.pin(chain)
        for first in (100, 200, 300):
            w.put(w.chain(2, first_token=first))
        assert [bytes(view) for view in lease.views] == [content(key) for key in chain]
        w.store.release(lease)


def test_accepted_blocks_survive_eviction_from_ram() -> None:
    """PF-003, CR: what commit reported as accepted is readable afterwards, though RAM is a third of it."""
    with world(4, file=12) as w:
        accepted: set[BlockKey] = set()
        chains = [w.chain(2, first_token=1000 * number) for number in range(6)]
        for chain in chains:
            accepted |= w.put(chain)
            w.settle()
        assert len(accepted) == 12
        assert [w.get(chain) for chain in chains] == [2] * 6
        w.settle()
        w.assert_idle()


def test_an_accepted_block_is_not_evicted_before_it_was_copied() -> None:
    with world(2, file=4) as w:
        chain = w.chain(2)
        assert w.put(chain) == set(chain)
        assert w.store.reserve(w.ns, 2).num_blocks == 0  # pinned until copied
        w.settle()
        assert w.store.reserve(w.ns, 2).num_blocks == 2
        assert w.store.lookup(chain).found == 2


def test_second_touch_copies_what_is_used_again_and_nothing_else() -> None:
    with world(4, file=4, admission="second_touch") as w:
        once, twice = w.chain(1), w.chain(1, first_token=50)
        w.put(once)
        w.put(twice)
        w.get(twice)
        w.settle()
        assert w.file is not None
        assert {kept.move.key for kept in w.file.kept.values()} == set(twice)


def test_on_evict_copies_what_leaves() -> None:
    with world(2, file=4, admission="on_evict") as w:
        chain = w.chain(2)
        w.put(chain)
        w.settle()
        assert w.file is not None
        assert not w.file.kept
        assert w.store.reserve(w.ns, 1).num_blocks == 0  # the victim's slot waits for its copy
        w.settle()
        assert {kept.move.key for kept in w.file.kept.values()} == {chain[1]}
        lease = w.store.reserve(w.ns, 1)
        assert lease.num_blocks == 1
        w.settle()
        assert {kept.move.key for kept in w.file.kept.values()} == set(chain)  # made room for the next
        w.store.abort(lease)
        w.assert_idle()


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


def test_a_touch_renews_the_time_to_live_of_the_prefix() -> None:
    shared = DictSharedTier()
    with world(4, shared=shared) as w:
        chain = w.chain(2)
        w.put(chain)
        w.settle()
        w.clock.advance(7 * 3600)  # a quarter of the 24 hours
        w.put(chain)
        w.settle()
        assert shared.renewed == chain


def test_a_stuck_tier_holds_no_pins_and_ram_answers_go_on() -> None:
    """A hung tier costs its deadline; blocks in RAM can leave, but their slots wait for the copy."""
    with world(4, file=4) as w:
        chain = w.chain(2)
        w.put(chain)
        w.clock.advance(60)
        w.store.poll()
        assert w.get(chain) == 2
        assert w.store.snapshot()["kvstore_pinned_blocks"]["memory",] == 0
        assert w.store.evict(2) == 1  # the bound of quarantine: a quarter of four slots
        w.settle()
        w.assert_idle()


def test_a_down_tier_is_not_asked_and_is_used_again_when_it_is_back() -> None:
    with world(8, file=8) as w:
        assert w.file is not None
        w.file.fault = lambda op, move: Outcome.FAILED
        for number in range(3):
            w.put(w.chain(1, first_token=100 * number))
            w.settle()
        assert w.store.health()["file"] is BreakerState.OPEN
        assert w.put(w.chain(1, first_token=900)) == set()
        w.file.fault = lambda op, move: None
        w.clock.advance(5)
        assert w.put(w.chain(1, first_token=950))
        w.settle()
        assert w.store.health()["file"] is BreakerState.CLOSED
        w.assert_idle()


def test_restart_adopts_what_is_on_file() -> None:
    with world(4, file=6) as w:
        chain = w.chain(3)
        w.put(chain)
        w.settle()
        file = w.file
    with world(4, file_tier=file) as w:
        assert w.store.lookup(chain).found == 3
        assert w.get(chain) == 3
        w.assert_idle()


def test_clear_forgets_a_namespace_in_every_tier_and_leaves_others() -> None:
    """WK-019: every tier, at once, and for good."""
    shared = DictSharedTier()
    with world(8, file=8, shared=shared, num_extents=2) as w:
        mine = w.chain(2)
        other = w.store.open_namespace(IDENTITY, Layout("int8", 1, 1, (1024,), 4))
        w.put(mine)
        lease = w.store.reserve(other, 1)
        w.store.commit(lease, other.keys(range(4)), None)
        w.settle()
        w.store.clear(w.ns)
        assert w.store.lookup(mine).found == 0
        assert w.store.lookup(other.keys(range(4))).ready == 1
        w.settle()
        assert w.file is not None
        assert {kept.move.key for kept in w.file.kept.values()} == set(other.keys(range(4))) == set(shared.kept)
        assert w.get(mine) == 0
        w.assert_idle()


def test_copies_in_flight_do_not_bring_a_cleared_namespace_back() -> None:
    shared = DictSharedTier()
    with world(4, file=4, shared=shared) as w:
        chain = w.chain(2)
        w.put(chain)  # the writes down are on their way
        w.store.clear(w.ns)
        w.settle()
        assert w.store.lookup(chain).found == 0
        assert w.file is not None
        assert not w.file.kept
        assert not shared.kept
        w.assert_idle()


def test_a_promotion_in_flight_does_not_bring_a_cleared_namespace_back() -> None:
    with world(4, file=4) as w:
        chain = w.chain(2)
        w.put(chain)
        w.settle()
        w.store.evict(4)
        prefetch = w.store.prefetch(chain, w.clock() + 1)
        w.store.clear(w.ns)
        w.settle()
        assert prefetch.done
        assert w.store.lookup(chain).found == 0
        w.assert_idle()


def test_blocks_past_their_age_are_neither_served_nor_kept() -> None:
    """KV is prompt data: ``max_age`` holds on every tier."""
    with world(4, file=4, max_age="1h") as w:
        chain = w.chain(2)
        w.put(chain)
        w.settle()
        w.clock.advance(3601)
        assert w.store.lookup(chain).found == 0
        assert w.get(chain) == 0
        w.settle()
        assert w.file is not None
        assert not w.file.kept
        w.assert_idle()


def test_age_counts_from_computing_not_from_promotion() -> None:
    shared = DictSharedTier()
    with world(4, shared=shared, max_age="1h") as w:
        chain = w.chain(1)
        w.put(chain)
        w.settle()
        w.store.evict(1)
        w.clock.advance(1800)
        assert w.get(chain) == 1
        w.clock.advance(1801)
        assert w.store.lookup(chain).ready == 0


def test_quarantined_slots_come_back_when_the_copy_has_returned() -> None:
    """A cancelled DMA may still write: nobody else gets the slot until it has returned."""
    with world(2) as w:
        lease = w.store.reserve(w.ns, 2)
        w.store.quarantine(lease)
        assert w.store.reserve(w.ns, 2).num_blocks == 0
        w.store.reclaim(lease)
        assert w.store.reserve(w.ns, 2).num_blocks == 2


def test_lent_buffers_are_stored_and_loaded() -> None:
    with world(4, file=8) as w:
        chain = w.chain(3)
        buffers = [memoryview(bytearray(content(key))) for key in chain]
        stored = w.store.store_from(w.ns, chain, None, buffers, w.clock() + 1)
        assert not stored.done
        w.settle()
        assert (stored.num_blocks, stored.busy) == (3, False)
        w.store.evict(2)
        lent = [memoryview(bytearray(LAYOUT.block_bytes)) for _ in range(4)]
        loaded = w.store.load_into(w.ns, w.chain(4), lent, w.clock() + 1)
        w.settle()
        assert loaded.num_blocks == 3
        assert lent[:3] == buffers
        w.assert_idle()


def test_lent_buffers_work_without_a_memory_tier() -> None:
    shared = DictSharedTier()
    with world(0, file=4, shared=shared) as w:
        chain = w.chain(2)
        stored = w.store.store_from(w.ns, chain, None, [memoryview(content(key)) for key in chain], w.clock() + 1)
        w.settle()
        assert stored.num_blocks == 2
        assert set(shared.kept) == set(chain)
        lent = [memoryview(bytearray(LAYOUT.block_bytes)) for _ in range(2)]
        loaded = w.store.load_into(w.ns, chain, lent, w.clock() + 1)
        w.settle()
        assert loaded.num_blocks == 2
        assert [bytes(buffer) for buffer in lent] == [content(key) for key in chain]
        assert w.store.lookup(chain).found == 2
        assert w.store.prefetch(chain, w.clock() + 1).done
        assert w.store.reserve(w.ns, 1).num_blocks == 0
        assert w.store.pin(chain).num_blocks == 0
        w.assert_idle()


def test_a_lent_buffer_is_busy_until_its_late_copy_has_returned() -> None:
    with world(0, file=4) as w:
        chain = w.chain(1)
        transfer = w.store.store_from(w.ns, chain, None, [memoryview(content(chain[0]))], w.clock() + 1)
        w.clock.advance(2)
        w.store.poll()
        assert (transfer.done, transfer.num_blocks, transfer.busy) == (True, 0, True)
        w.settle()
        assert not transfer.busy
        w.assert_idle()


def test_a_load_from_lent_buffers_is_an_exact_prefix_too() -> None:
    with world(0, file=4) as w:
        chain = w.chain(3)
        w.store.store_from(w.ns, chain, None, [memoryview(content(key)) for key in chain], w.clock() + 1)
        w.settle()
        assert w.file is not None
        w.file.fault = lambda op, move: Outcome.DAMAGED if op == "read" and move.key == chain[1] else None
        lent = [memoryview(bytearray(LAYOUT.block_bytes)) for _ in range(3)]
        loaded = w.store.load_into(w.ns, chain, lent, w.clock() + 1)
        w.settle()
        assert loaded.num_blocks == 1
        w.assert_idle()


def test_two_layouts_share_a_budget_and_demand_moves_extents() -> None:
    with world(16, num_extents=8) as w:
        other = w.store.open_namespace(IDENTITY, Layout("uint8", 1, 1, (2048,), 4))
        first, second = [w.ns.keys([number] * 4) for number in range(16)], other.keys(range(400))
        for chain in first:
            w.put(chain)
        assert all(w.store.lookup(chain).ready for chain in first)
        for key in second:
            lease = w.store.reserve(other, 1)
            if lease.num_blocks:
                w.store.commit(lease, [key], None)
        num_second = sum(w.store.lookup([key]).ready for key in second)
        num_first = sum(w.store.lookup(chain).ready for chain in first)
        assert num_second >= 6  # all the recent demand is for it; one extent of slack each way
        assert num_first + num_second <= 16
        w.assert_idle()


def test_a_layout_that_does_not_fit_is_refused_by_name() -> None:
    with world(2) as w, pytest.raises(LayoutError, match="raise the tier's capacity"):
        w.store.open_namespace(IDENTITY, Layout("uint8", 1, 1, (4 * PAGE_BYTES,), 4))


def test_a_store_without_tiers_or_after_close_says_so() -> None:
    with pytest.raises(ConfigError, match="no tier"):
        World(memory=0)
    with world(1) as w:
        w.close()
        w.close()
        with pytest.raises(ClosedError):
            w.store.lookup(w.chain(1))


def test_a_chain_of_a_namespace_nobody_opened_is_a_miss() -> None:
    with world(1, file=1) as w:
        stranger = [type(key)(bytes(16) + key[16:]) for key in w.chain(1)]
        assert w.store.lookup(stranger).found == 0
        assert w.store.pin(stranger).num_blocks == 0
        assert w.store.prefetch(stranger, w.clock() + 1).done


def test_a_write_that_finds_no_room_below_costs_only_that_copy() -> None:
    """CR-007: skipped and counted."""
    with world(4, file=4) as w:
        assert w.file is not None
        w.file.fault = _full
        chain = w.chain(2)
        w.put(chain)
        w.settle()
        assert w.get(chain) == 2
        w.settle()
        assert w.store.health()["file"] is BreakerState.CLOSED
        w.store.evict(2)
        assert w.store.lookup(chain).found == 0
        w.assert_idle()


def _full(op: str, move: BlockMove) -> Outcome | None:
    return Outcome.FULL if op == "write" else None
