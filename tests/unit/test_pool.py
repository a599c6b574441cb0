"""What the pool promises of each call."""

from collections.abc import Callable, Sequence

import pytest

from kvstore.errors import LeaseError
from kvstore.policy.lru import LRU
from kvstore.pool import BlockPool, SlotState
from kvstore.testing.blocks import key_of
from kvstore.types import BlockKey, Request

A, B, C, D, E = (key_of(number) for number in range(5))
REQUEST = Request("r", 0.0, b"", 0)


def pool_of(num_slots: int, max_quarantined: int | None = None) -> BlockPool:
    pool = BlockPool(LRU[BlockKey](), max_quarantined=max_quarantined)
    pool.grow(0, num_slots)
    return pool


def store(pool: BlockPool, *chain: BlockKey) -> list[int]:
    """Commit what is missing of a chain, as an engine would."""
    pool.arrive(REQUEST, chain)
    slots = []
    for index, key in enumerate(chain):
        found = pool.find(key)
        if found is None:
            (slot,) = pool.reserve(1)
            found = pool.commit(slot, key, chain[index - 1] if index else None)
        slots.append(found)
    pool.check()
    return slots


def resident(pool: BlockPool, keys: Sequence[BlockKey] = (A, B, C, D, E)) -> list[BlockKey]:
    return [key for key in keys if key in pool]


def test_only_a_committed_block_can_be_found() -> None:
    pool = pool_of(2)
    (slot,) = pool.reserve(1)
    assert pool.find(A) is None
    assert pool.commit(slot, A, None) == slot
    assert pool.find(A) == slot


def test_eviction_takes_the_tail_of_the_coldest_chain_first() -> None:
    """PF-001: deepest first within a chain, and only the shortfall (PF-013)."""
    pool = pool_of(4)
    store(pool, A, B, C)  # coldest to hottest: C B A
    store(pool, D)  # C B A D
    store(pool, E)  # C leaves
    assert resident(pool) == [A, B, D, E]
    pool.evict(1)
    assert resident(pool) == [A, D, E]


def test_a_parent_outlives_its_children_even_when_it_is_colder() -> None:
    pool = pool_of(3)
    store(pool, A)
    store(pool, B)
    pool.arrive(REQUEST, [B])
    (slot,) = pool.reserve(1)
    pool.commit(slot, C, A)
    pool.pin(slot)
    assert pool.evict(3) == 1
    assert resident(pool) == [A, C]


def test_a_pinned_block_is_never_evicted_and_reserve_returns_fewer() -> None:
    pool = pool_of(2)
    slots = store(pool, A, B)
    for slot in slots:
        pool.pin(slot)
    assert pool.reserve(2) == []
    pool.unpin(slots[1])
    assert pool.reserve(2) == [slots[1]]
    assert resident(pool) == [A]
    pool.check()


def test_a_second_commit_of_a_key_keeps_the_first_slot() -> None:
    """LK-021: idempotent, and the new slot is given back."""
    pool = pool_of(3)
    (first,) = store(pool, A)
    (second,) = pool.reserve(1)
    assert pool.commit(second, A, None) == first
    assert pool.num(SlotState.FREE) == 2
    pool.check()


def test_a_slot_under_a_copy_is_not_handed_out_again() -> None:
    pool = pool_of(2)
    (slot,) = store(pool, A)
    pool.hold(slot)
    pool.remove(A)
    assert pool.find(A) is None
    assert pool.num(SlotState.QUARANTINED) == 1
    assert slot not in pool.reserve(2)
    pool.unhold(slot)
    assert pool.reserve(2) == [slot]
    pool.check()


def test_a_pin_outlives_the_removal_of_its_key() -> None:
    """A reader of a block that is cleared meanwhile goes on reading the same bytes."""
    pool = pool_of(1)
    (slot,) = store(pool, A)
    pool.pin(slot)
    pool.remove(A)
    assert pool.reserve(1) == []
    pool.unpin(slot)
    assert pool.reserve(1) == [slot]


def test_quarantine_is_bounded() -> None:
    pool = pool_of(4, max_quarantined=1)
    for slot in store(pool, A, B, C, D):
        pool.hold(slot)
    assert pool.evict(4) == 1
    assert pool.num(SlotState.QUARANTINED) == 1


def test_a_victim_may_be_copied_while_it_leaves() -> None:
    left: list[tuple[BlockKey, int]] = []

    def on_evict(key: BlockKey, slot: int) -> None:
        left.append((key, slot))
        pool.hold(slot)

    pool = BlockPool(LRU[BlockKey](), on_evict=on_evict, max_quarantined=4)
    pool.grow(0, 2)
    (_, slot_b) = store(pool, A, B)
    assert pool.reserve(1) == []
    assert left == [(B, slot_b)]
    pool.unhold(slot_b)
    assert pool.reserve(1) == [slot_b]
    pool.check()


def test_children_of_a_removed_parent_wait_for_its_return() -> None:
    pool = pool_of(4)
    store(pool, A, B, C)
    pool.remove(A)
    pool.check()
    assert pool.prefix([A, B, C]) == []
    store(pool, A)
    assert len(pool.prefix([A, B, C])) == 3
    assert pool.parent_of(pool.prefix([A, B])[1]) == A
    pool.evict(1)
    assert resident(pool) == [A, B]  # linked again: the tail goes first


def test_a_block_remembers_its_parent_while_that_is_away() -> None:
    pool = pool_of(2)
    (slot,) = pool.reserve(1)
    pool.commit(slot, B, A)
    assert pool.parent_of(slot) == A
    pool.remove(B)
    pool.check()


def test_blocks_older_than_asked_are_not_served() -> None:
    pool = pool_of(2)
    for key, parent, created_unix_s in ((A, None, 100), (B, A, 50)):
        (slot,) = pool.reserve(1)
        pool.commit(slot, key, parent, created_unix_s)
    assert len(pool.prefix([A, B])) == 2
    assert len(pool.prefix([A, B], oldest_unix_s=60)) == 1
    assert pool.expired(1000, {B[:16]: 60}, 0, 10) == ([B], 0)
    assert pool.expired(1000, {bytes(16): 60}, 0, 10) == ([], 0)


def test_adopted_blocks_know_when_they_end() -> None:
    pool = pool_of(2)
    pool.adopt(0, A, None, 10, expires_unix_s=70)
    pool.adopt(1, B, A, 10)
    pool.end_adoption()
    assert pool.expired(69, {}, 0, 10) == ([], 0)
    assert pool.expired(70, {}, 0, 10) == ([A], 0)
    pool.remove(A)
    (slot,) = pool.reserve(1)
    pool.commit(slot, A, None, 10)
    assert pool.expired(1000, {}, 0, 10) == ([], 0)


def test_an_extent_leaves_only_when_idle_and_takes_its_blocks_with_it() -> None:
    pool = BlockPool(LRU[BlockKey]())
    pool.grow(0, 2)
    pool.grow(2, 2)
    slots = store(pool, A, B, C)
    pool.pin(slots[2])
    assert not pool.shrink(2, 2)
    assert resident(pool) == [A, B, C]
    pool.unpin(slots[2])
    assert pool.shrink(2, 2)
    pool.check()
    assert resident(pool) == [A, B]
    assert pool.num_slots == 2


def test_adopted_blocks_are_found_and_their_slots_are_taken() -> None:
    pool = pool_of(3)
    assert pool.adopt(1, B, A, 7)  # a child may be found before its parent
    assert pool.adopt(2, A, None, 7)
    assert not pool.adopt(0, A, None, 7)
    pool.end_adoption()
    pool.check()
    assert pool.prefix([A, B]) == [2, 1]
    assert pool.reserve(1) == [0]


@pytest.mark.parametrize("call", ["commit", "abort", "pin", "unpin", "unhold", "hold"])
def test_an_illegal_call_raises_and_changes_nothing(call: str) -> None:
    """WK-056, LK-006: what is ended twice is a bug that shows, and accounting stays right."""
    pool = pool_of(1)
    illegal: dict[str, Callable[[], object]] = {
        "commit": lambda: pool.commit(0, A, None),
        "abort": lambda: pool.abort(0),
        "pin": lambda: pool.pin(0),
        "unpin": lambda: pool.unpin(0),
        "hold": lambda: pool.hold(0),
        "unhold": lambda: pool.unhold(0),
    }
    with pytest.raises(LeaseError):
        illegal[call]()
    pool.check()
    assert pool.num(SlotState.FREE) == 1


def test_adjacent_slots_are_handed_out_in_runs() -> None:
    pool = pool_of(8)
    assert pool.reserve(4) == [0, 1, 2, 3]
    assert pool.reserve(4) == [4, 5, 6, 7]


def test_nothing_grows_with_the_number_of_keys_that_passed() -> None:
    """A million distinct keys through a tiny cache leave no trace (a few thousand here; the tables are the same)."""
    pool = pool_of(4)
    for number in range(5000):
        (slot,) = pool.reserve(1)
        pool.commit(slot, key_of(number), None if number % 3 else key_of(number + 1))
    pool.check()
    assert len(pool._orphans) + len(pool._lost_parent) <= 8


def test_what_is_handed_out_belongs_to_who_asked() -> None:
    """WK-057: a list of slots that shows or rewrites the pool's own free list gives one slot to two owners."""
    pool = pool_of(4)
    slots = pool.reserve(2)
    kept = list(slots)
    others = pool.reserve(2)
    for slot in others:
        pool.abort(slot)
    assert slots == kept
    slots.clear()
    others.clear()
    again = pool.reserve(4)
    assert sorted([*again, *kept]) == [0, 1, 2, 3]
    pool.check()
