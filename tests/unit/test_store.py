"""What the store promises of each call, over fakes. Real tiers: tests/integration/test_store.py."""

import sys

import pytest

from kvstore.errors import ClosedError, ConfigError, LayoutError, LeaseError
from kvstore.extents import extent_bytes_for
from kvstore.hashing import Identity
from kvstore.layout import Layout
from kvstore.mover import Mover
from kvstore.testing.dict_tiers import DictSharedTier
from kvstore.types import Request
from tests.worlds import IDENTITY, LAYOUT, PAGE_BYTES, World, content, world


def test_what_was_committed_is_found_and_served() -> None:
    with world(4) as w:
        chain = w.chain(3)
        assert w.store.lookup(chain) == type(w.store.lookup(chain))(0, 0, pending=False)
        w.put(chain)
        assert w.store.lookup(chain).ready == 3
        assert w.get(chain) == 3
        w.assert_idle()


def test_a_block_is_worth_keeping_where_any_tier_keeps_it() -> None:
    """RAM that would not keep a block must not keep it from a file that would."""

    def worth(file: int, shared: DictSharedTier | None) -> int:
        with world(4, file=file, shared=shared) as w:
            for first_token in (0, 100):  # RAM is full now
                w.put(w.chain(4, first_token=first_token))
                w.settle()
            return w.store.arrive(Request("r", 5.0, w.ns.digest, 32), w.chain(8, first_token=200))

    assert worth(0, None) <= 4
    assert worth(64, None) == 8
    assert worth(0, DictSharedTier()) == 8


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


def test_a_lease_ends_with_its_scope() -> None:
    """LK-005, HG-003: whatever happens in there, nothing is left behind."""
    with world(4) as w:
        chain = w.chain(2)
        with w.store.reserve(w.ns, 3) as lease:
            w.store.commit(lease, chain, None)
        assert w.store.reserve(w.ns, 2).num_blocks == 2
        with pytest.raises(RuntimeError), w.store.pin(chain):
            raise RuntimeError("in the middle")
        with w.store.pin(chain) as read:
            w.store.release(read)
        assert w.store.evict(2) == 2


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


def test_a_lease_of_another_store_is_refused() -> None:
    with world(4) as w, world(4) as other:
        foreign = other.store.open_namespace(Identity("another", b"weights"), Layout("int8", 1, 1, (1024,), 4))
        lease = other.store.reserve(foreign, 1)
        with pytest.raises(LayoutError, match="not opened here"):
            w.store.commit(lease, foreign.keys(range(4)), None)
        other.store.abort(lease)


def test_pinned_blocks_stay_while_others_come() -> None:
    with world(3) as w:
        chain = w.chain(2)
        w.put(chain)
        lease = w.store.pin(chain)
        for first in (100, 200, 300):
            w.put(w.chain(2, first_token=first))
        assert [bytes(view) for view in lease.views] == [content(key) for key in chain]
        w.store.release(lease)


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


def test_blocks_of_a_namespace_nobody_opens_again_do_not_outlive_their_age() -> None:
    with world(4, file=4, max_age="1h") as w:
        w.put(w.chain(2))
        w.settle()
        file = w.file
    with world(4, file_tier=file) as w:
        assert file is not None
        other = w.store.open_namespace(Identity("another", b"weights"), Layout("int8", 1, 1, (1024,), 4))
        w.settle()
        assert len(file.kept) == 2
        w.clock.advance(3601)
        w.settle()
        assert not file.kept
        assert w.store.lookup(other.keys(range(4))).found == 0
        w.assert_idle()


def test_what_a_shared_tier_has_is_found_no_longer_than_its_age() -> None:
    """Though the hint of it is younger: it came down late, or a probe saw it."""
    shared = DictSharedTier()
    with world(4, shared=shared, max_age="1m", admission="second_touch") as w:
        chain = w.chain(1)
        w.put(chain)
        w.clock.advance(50)
        w.get(chain)  # and now it is copied down
        w.settle()
        w.store.evict(1)
        assert w.store.lookup(chain).found == 1
        w.clock.advance(11)
        assert w.store.lookup(chain).found == 0
        w.store.prefetch(chain, w.clock() + 1)
        w.settle()
        w.clock.advance(61)
        assert w.store.lookup(chain).found == 0


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


def test_a_second_layout_gets_room_at_once_where_the_first_has_several_extents() -> None:
    """And the first keeps the rest, though all of the demand was its own."""
    with world(16, num_extents=4) as w:
        w.put(w.chain(16))
        other = w.store.open_namespace(IDENTITY, Layout("uint8", 1, 1, (2048,), 4))
        with w.store.reserve(other, 1) as lease:
            assert lease.num_blocks == 1
        assert w.store.lookup(w.chain(16)).found == 12


@pytest.mark.parametrize("capacity_mib", [4, 16, 20, 64, 200, 1024, 100 * 1024])
def test_every_tier_has_room_for_several_layouts(capacity_mib: int) -> None:
    capacity_bytes = capacity_mib << 20
    extent_bytes = extent_bytes_for(capacity_bytes)
    assert 4 <= capacity_bytes // extent_bytes <= 100
    assert extent_bytes >= 1 << 20


def test_a_layout_that_does_not_fit_is_refused_by_name() -> None:
    with world(2) as w, pytest.raises(LayoutError, match="raise the tier's capacity"):
        w.store.open_namespace(IDENTITY, Layout("uint8", 1, 1, (4 * PAGE_BYTES,), 4))


def test_closing_waits_two_seconds_for_what_hangs() -> None:
    with world(4, file=4) as w:
        w.put(w.chain(2))
        w.clock.tick_s = 0.01
        began_s = w.clock.now_s
        w.store.close()  # with its own patience; no copy ever returns
        assert 2 <= w.clock.now_s - began_s < 4


def test_closing_waits_longer_for_what_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies that return one by one: what was accepted is below in the end."""
    with world(8, file=8) as w:
        for number in range(4):
            w.put(w.chain(1, first_token=100 * number))
        lane = w.steps.lanes["file"]
        began_s = w.clock.now_s

        def pass_time(_: Mover, timeout_s: float) -> None:
            w.clock.advance(timeout_s)
            if lane.num_waiting and w.clock.now_s - began_s > 1.5 * (5 - lane.num_waiting):
                lane.step()

        monkeypatch.setattr(Mover, "wait", pass_time)
        w.store.close()
        assert w.file is not None
        assert len(w.file.kept) == 4
        assert w.clock.now_s - began_s > 5


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


def test_a_step_with_nothing_to_do_costs_the_same_whatever_the_store_holds() -> None:
    """PF-010."""

    def calls_of_a_poll(num_blocks: int) -> int:
        with world(128, file=128) as w:
            w.put(w.chain(num_blocks))
            w.settle()
            w.store.poll()
            calls = 0

            def count(_frame: object, event: str, _arg: object) -> None:
                nonlocal calls
                calls += event in ("call", "c_call")

            sys.setprofile(count)
            try:
                w.store.poll()
            finally:
                sys.setprofile(None)
            return calls

    assert calls_of_a_poll(2) == calls_of_a_poll(100) < 100


def test_who_opens_a_namespace_again_without_a_rate_leaves_it_as_it_is() -> None:
    with world(4, prefill_tokens_per_s=1000) as w:
        assert w.ns.prefill_tokens_per_s == 1000
        assert w.store.open_namespace(IDENTITY, LAYOUT, prefill_tokens_per_s=7).prefill_tokens_per_s == 7
        assert w.store.open_namespace(IDENTITY, LAYOUT).prefill_tokens_per_s == 7
        with pytest.raises(ConfigError, match="prefill_tokens_per_s is -1"):
            w.store.open_namespace(IDENTITY, LAYOUT, prefill_tokens_per_s=-1)
