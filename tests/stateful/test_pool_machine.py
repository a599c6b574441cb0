"""The pool against a model of it, in a tiny world: five keys in a chain and a branch, five slots in two extents."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.policy import POLICIES
from kvstore.pool import BlockPool, SlotState
from kvstore.testing.blocks import key_of
from kvstore.types import BlockKey, Request

KEYS = [key_of(number) for number in range(5)]
PARENT: dict[BlockKey, BlockKey | None] = dict(
    zip(KEYS, [None, KEYS[0], KEYS[1], KEYS[0], None], strict=True)
)  # 0-1-2, 0-3, 4
EXTENTS = [(0, 2), (2, 3)]

keys = st.sampled_from(KEYS)


class PoolMachine(RuleBasedStateMachine):
    """What the test knows: which slots are being filled, pinned and held, and how often."""

    def __init__(self) -> None:
        super().__init__()
        self.left: list[BlockKey] = []
        self.filling: list[int] = []
        self.pins: list[int] = []
        self.holds: list[int] = []
        self.extents: set[tuple[int, int]] = set()
        self.pool = BlockPool(POLICIES["lru"](), on_evict=self.on_evict, max_quarantined=2)
        self.capture = False

    def on_evict(self, key: BlockKey, slot: int) -> None:
        assert slot not in self.pins, "a pinned block was evicted"
        resident_children = [child for child, parent in PARENT.items() if parent == key and child in self.pool]
        assert not resident_children, "a block was evicted before its children"
        self.left.append(key)
        if self.capture:
            self.pool.hold(slot)
            self.holds.append(slot)

    @rule(extent=st.sampled_from(EXTENTS))
    def grow(self, extent: tuple[int, int]) -> None:
        if extent not in self.extents:
            self.pool.grow(*extent)
            self.extents.add(extent)

    @rule(extent=st.sampled_from(EXTENTS))
    def shrink(self, extent: tuple[int, int]) -> None:
        slots = range(extent[0], sum(extent))
        busy = any(slot in slots for slot in (*self.filling, *self.pins, *self.holds))
        if extent in self.extents:
            assert self.pool.shrink(*extent) == (not busy)
            if not busy:
                self.extents.discard(extent)

    @rule(num_blocks=st.integers(1, 4), capture=st.booleans())
    def reserve(self, num_blocks: int, capture: bool) -> None:
        self.capture = capture
        free = self.pool.num(SlotState.FREE)
        slots = self.pool.reserve(num_blocks)
        self.capture = False
        assert len(slots) >= min(num_blocks, free)
        assert not set(slots) & {*self.filling, *self.pins, *self.holds}, "a slot in use was handed out"
        self.filling.extend(slots)

    @precondition(lambda self: self.filling)
    @rule(data=st.data(), key=keys)
    def commit(self, data: st.DataObject, key: BlockKey) -> None:
        slot = data.draw(st.sampled_from(self.filling))
        before = self.pool.find(key)
        self.filling.remove(slot)
        after = self.pool.commit(slot, key, PARENT[key])
        assert after == (slot if before is None else before)
        assert self.pool.find(key) == after

    @precondition(lambda self: self.filling)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.filling))
        self.filling.remove(slot)
        self.pool.abort(slot)

    @rule(key=keys)
    def pin(self, key: BlockKey) -> None:
        slot = self.pool.find(key)
        if slot is not None:
            self.pool.pin(slot)
            self.pins.append(slot)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.pins))
        self.pins.remove(slot)
        self.pool.unpin(slot)

    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        ready = [slot for key in KEYS if (slot := self.pool.find(key)) is not None]
        if ready or self.filling:
            slot = data.draw(st.sampled_from(ready + self.filling))
            self.pool.hold(slot)
            self.holds.append(slot)

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def unhold(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.holds))
        self.holds.remove(slot)
        self.pool.unhold(slot)

    @rule(key=keys)
    def remove(self, key: BlockKey) -> None:
        self.pool.remove(key)
        assert key not in self.pool

    @rule(chain=st.sampled_from([KEYS[:3], [KEYS[0], KEYS[3]], KEYS[4:]]))
    def arrive(self, chain: list[BlockKey]) -> None:
        self.pool.arrive(Request("r", 0.0, b"", 0), chain)

    @rule()
    def evict_all(self) -> None:
        """Whatever is neither pinned nor an ancestor of something pinned or over the quarantine bound leaves."""
        self.pool.evict(len(KEYS))
        if not self.pins and not self.holds:
            assert self.pool.num(SlotState.READY) == 0

    @invariant()
    def accounts(self) -> None:
        self.pool.check()
        assert self.pool.num(SlotState.FILLING) == len(self.filling)
        assert self.pool.num_slots == sum(num_slots for _, num_slots in self.extents)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=150, stateful_step_count=40)
