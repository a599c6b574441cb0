"""What goes down to lower levels: accepted means kept, and a tier that is stuck or down harms nobody."""

from kvstore.breaker import BreakerState
from kvstore.slot_level import Quota
from kvstore.testing.dict_tiers import DictSlotTier
from kvstore.tiers.base import BlockMove
from kvstore.types import BlockKey, Outcome
from tests.worlds import IDENTITY, LAYOUT, world


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


def test_a_disk_that_cannot_grow_serves_what_it_has_and_takes_new_blocks_in_place_of_old() -> None:
    """CR-015: full, evict, once more; and the room that was missing is tried again later."""
    with world(8, file=4, num_extents=2) as w:
        file = w.file
        assert file is not None
        half = file.extent_bytes
        file.fault = lambda op, move: Outcome.FULL if op == "write" and move.offset_bytes >= half else None
        for number in range(6):
            w.put(w.chain(1, first_token=100 * number))
            w.settle()
        assert len(file.kept) == 2
        newest = w.chain(1, first_token=500)[0]
        assert newest in {kept.move.key for kept in file.kept.values()}
        file.fault = lambda op, move: None
        w.clock.advance(60)
        for number in range(6, 10):
            w.put(w.chain(1, first_token=100 * number))
            w.settle()
        assert len(file.kept) == 4
        w.assert_idle()


def _full(op: str, move: BlockMove) -> Outcome | None:
    return Outcome.FULL if op == "write" else None


def test_a_quota_of_files_holds_though_the_files_join_late() -> None:
    """A sidecar opens namespaces while its files are still being scanned."""
    file = DictSlotTier(8, LAYOUT.block_bytes)
    with world(8) as w:
        quota = Quota("file", 2 * file.slot_bytes(LAYOUT.block_bytes))
        w.store.open_namespace(IDENTITY, LAYOUT, quotas=(quota,))
        w.store.join_file(w.store.scanned(file))
        for number in range(4):
            w.put(w.chain(1, first_token=1000 * number))
            w.settle()
        assert len(file.kept) == 2
        assert w.store.snapshot()["kvstore_blocks"]["memory",] == 4
