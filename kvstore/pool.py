"""The accounting of one tier and layout: which key is in which slot, and who may leave. Pure, one owner thread.

    absent --reserve--> FILLING --commit--> READY --evict--> absent
                           `----abort-----> absent
    READY or FILLING --a copy may still touch it--> QUARANTINED --unhold, unpin--> absent

Rule 1: only READY can be found. Rule 2: a pinned slot is never evicted.
Rule 3, leaf-first: a block with resident children is never evicted.
Rule 4: a slot under a copy (``hold``) or a pin is handed out again only after the last of both is gone.

Invariant, proved by ``check``: every slot is in exactly one state; a key has at most one slot; an entry's child count
is the number of READY slots that name it as parent.

A block whose parent is absent is an *orphan*: it stays, cannot be reached through the chain, and is linked again when
its parent returns. This is how a damaged or expired root costs one block and not its whole tree.
"""

import heapq
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import IntEnum

import numpy as np

from kvstore.errors import LeaseError
from kvstore.policy.base import Learner, Policy, Refit
from kvstore.policy.learned import Learned
from kvstore.types import NAMESPACE_DIGEST_BYTES, BlockKey, Request

NO_SLOT = -1


class SlotState(IntEnum):
    """Where a slot is in its life."""

    ABSENT = 0  # not part of any extent of this pool
    FREE = 1
    FILLING = 2
    READY = 3
    QUARANTINED = 4


class BlockPool:
    """Slots, the keys in them, and the order of leaving."""

    def __init__(
        self,
        policy: Policy[BlockKey],
        *,
        on_evict: Callable[[BlockKey, int], None] | None = None,
        max_quarantined: int | None = None,
    ) -> None:
        """An empty pool; ``grow`` gives it slots.

        ``on_evict(key, slot)`` is called as a victim leaves and may ``hold`` the slot to start a copy from it. At
        ``max_quarantined`` (None: a quarter of the slots) blocks under a copy are no longer evicted.
        """
        self._policy = policy
        self._on_evict = on_evict
        self._max_quarantined = max_quarantined
        self._quarantine_bound = 0
        self._slot_of: dict[BlockKey, int] = {}
        self._key: list[BlockKey | None] = []
        self._state = bytearray()
        self._parent = array("i")
        self._children = array("i")
        self._created_unix_s = array("q")
        self._expires_unix_s = array("q")
        self._pins: Counter[int] = Counter()
        self._holds: dict[int, int] = {}
        self._free: list[int] = []
        self._orphans: dict[BlockKey, set[int]] = {}
        self._lost_parent: dict[int, BlockKey] = {}
        self._counts = [0] * len(SlotState)
        self.num_evicted = 0
        """Blocks that left to make room, ever."""
        self._none_may_leave = False  # known since the policy last found no victim; spares a scan per reserve
        self.on_change: Callable[[BlockKey, BlockKey | None, bool], None] | None = None
        """Told of every block that becomes READY, with its parent, or stops being so."""

    # ---- questions

    @property
    def num_slots(self) -> int:
        """Slots of all extents of this pool."""
        return sum(self._counts) - self._counts[SlotState.ABSENT]

    def num(self, state: SlotState) -> int:
        """How many slots are in ``state``."""
        return self._counts[state]

    @property
    def num_pinned(self) -> int:
        """How many slots are pinned."""
        return len(self._pins)

    @property
    def num_held(self) -> int:
        """How many slots a copy may touch."""
        return len(self._holds)

    def find(self, key: BlockKey) -> int | None:
        """The slot of ``key`` if it is READY."""
        return self._slot_of.get(key)

    def __len__(self) -> int:
        """How many blocks are READY."""
        return len(self._slot_of)

    def __contains__(self, key: BlockKey) -> bool:
        """Whether ``key`` is READY."""
        return key in self._slot_of

    def prefix(self, chain: Sequence[BlockKey], oldest_unix_s: int = 0) -> list[int]:
        """Slots of the longest READY prefix of ``chain`` created at or after ``oldest_unix_s``."""
        slots: list[int] = []
        get = self._slot_of.get
        for key in chain:
            slot = get(key)
            if slot is None or (oldest_unix_s and self._created_unix_s[slot] < oldest_unix_s):
                break
            slots.append(slot)
        return slots

    def key_at(self, slot: int) -> BlockKey | None:
        """The key of a READY slot."""
        return self._key[slot]

    def parent_of(self, slot: int) -> BlockKey | None:
        """The key of the parent of the READY block in ``slot``, resident or not; None for a root."""
        parent = self._parent[slot]
        return self._lost_parent.get(slot) if parent == NO_SLOT else self._key[parent]

    def created_unix_s(self, slot: int) -> int:
        """When the READY block in ``slot`` was computed, in wall-clock seconds."""
        return self._created_unix_s[slot]

    def __iter__(self) -> Iterator[BlockKey]:
        """Every READY key, in no order; the pool must not change meanwhile."""
        return iter(self._slot_of)

    def expired(
        self, now_unix_s: float, oldest_unix_s: Mapping[bytes, int], first_slot: int, num_slots: int
    ) -> tuple[list[BlockKey], int]:
        """READY keys past their age in a range of slots, and where to go on.

        By what they were adopted with, or created before what ``oldest_unix_s`` says of their namespace.
        """
        end = min(first_slot + num_slots, len(self._key))
        columns = self._key[first_slot:end], self._created_unix_s[first_slot:end], self._expires_unix_s[first_slot:end]
        keys = [
            key
            for key, created, expires in zip(*columns, strict=True)
            if key is not None
            and (0 < expires <= now_unix_s or created < oldest_unix_s.get(key[:NAMESPACE_DIGEST_BYTES], 0))
        ]
        return keys, 0 if end == len(self._key) else end

    # ---- extents

    def grow(self, first_slot: int, num_slots: int) -> None:
        """An extent joins: ``num_slots`` free slots from ``first_slot`` on, none of them ours yet."""
        end = first_slot + num_slots
        missing = end - len(self._state)
        if missing > 0:
            self._state.extend(bytes(missing))
            self._key.extend([None] * missing)
            self._parent.extend([NO_SLOT] * missing)
            self._children.extend([0] * missing)
            self._created_unix_s.extend([0] * missing)
            self._expires_unix_s.extend([0] * missing)
            self._counts[SlotState.ABSENT] += missing
        for slot in range(first_slot, end):
            if self._state[slot] != SlotState.ABSENT:
                raise LeaseError(f"slot {slot} is already part of this pool; an extent joins once")
            self._move(slot, SlotState.FREE)
            heapq.heappush(self._free, slot)
        self._resize()

    def shrink(self, first_slot: int, num_slots: int) -> bool:
        """An extent leaves, with the blocks in it; False, and nothing changes, while one of its slots is in use."""
        slots = range(first_slot, first_slot + num_slots)
        if any(not self._idle(slot) for slot in slots):
            return False
        for slot in slots:
            key = self._key[slot]
            if key is not None:
                self._forget(slot, key)
            self._move(slot, SlotState.ABSENT)
        self._free = [slot for slot in self._free if slot not in slots]
        heapq.heapify(self._free)
        self._resize()
        return True

    def num_ready_in(self, first_slot: int, num_slots: int) -> int:
        """READY blocks among these slots: what handing the extent over would cost."""
        return self._state[first_slot : first_slot + num_slots].count(SlotState.READY)

    # ---- writing

    def reserve(self, num_blocks: int) -> list[int]:
        """Up to ``num_blocks`` FILLING slots, ascending, evicting only the shortfall.

        Fewer when the rest is in use, or when victims are being copied on their way out.
        """
        self.evict(num_blocks - len(self._free))
        pop, free = heapq.heappop, self._free
        slots = [pop(free) for _ in range(min(num_blocks, len(free)))]
        for slot in slots:
            self._move(slot, SlotState.FILLING)
        return slots

    def commit(self, slot: int, key: BlockKey, parent: BlockKey | None, created_unix_s: int = 0) -> int:
        """Name a FILLING slot: it is READY and can be found. Returns the slot that has ``key``.

        If ``key`` is READY already, that is the older slot, and ``slot`` is given back.
        """
        self._require(slot, SlotState.FILLING, "commit")
        existing = self._slot_of.get(key)
        if existing is not None:
            self._give_back(slot)
            return existing
        self._move(slot, SlotState.READY)
        self._enter(slot, key, parent, created_unix_s)
        return slot

    def abort(self, slot: int) -> None:
        """Give a FILLING slot back unnamed."""
        self._require(slot, SlotState.FILLING, "abort")
        self._give_back(slot)

    def adopt(
        self, slot: int, key: BlockKey, parent: BlockKey | None, created_unix_s: int, expires_unix_s: int = 0
    ) -> bool:
        """Enter a block that a scan found in a free slot; False if its key is here already.

        ``end_adoption`` must follow before the next ``reserve``. Adopt parents before children and old before new.
        """
        self._require(slot, SlotState.FREE, "adopt")
        if key in self._slot_of:
            return False
        self._move(slot, SlotState.READY)
        self._enter(slot, key, parent, created_unix_s)
        self._expires_unix_s[slot] = expires_unix_s
        return True

    def end_adoption(self) -> None:
        """Take the adopted slots off the free list, all at once."""
        self._free = [slot for slot in self._free if self._state[slot] == SlotState.FREE]
        heapq.heapify(self._free)

    # ---- reading

    def pin(self, slot: int) -> None:
        """Forbid eviction of a READY slot until ``unpin``; counted."""
        self._require(slot, SlotState.READY, "pin")
        self._pins[slot] += 1

    def pin_prefix(self, chain: Sequence[BlockKey], oldest_unix_s: int = 0) -> list[int]:
        """``pin`` the longest READY prefix of ``chain`` created at or after ``oldest_unix_s``; returns its slots."""
        slots = self.prefix(chain, oldest_unix_s)
        self._pins.update(slots)
        return slots

    def unpin(self, slot: int) -> None:
        """End one ``pin``."""
        self._decrement(self._pins, slot, "unpin")

    def unpin_all(self, slots: Sequence[int]) -> None:
        """End one ``pin`` of each slot."""
        pins, state = self._pins, self._state
        for slot in slots:
            if pins.get(slot) == 1 and state[slot] == SlotState.READY:
                pins.pop(slot)
            else:
                self.unpin(slot)
        self._none_may_leave = False

    def hold(self, slot: int) -> None:
        """A copy may touch the bytes of ``slot`` until ``unhold``; counted. Holding does not forbid eviction."""
        if self._state[slot] in (SlotState.ABSENT, SlotState.FREE):
            raise LeaseError(f"hold of slot {slot}, which holds no block: nothing may copy from or to it")
        self._holds[slot] = self._holds.get(slot, 0) + 1

    def unhold(self, slot: int) -> None:
        """One copy has returned."""
        self._decrement(self._holds, slot, "unhold")

    def arrive(self, request: Request, chain: Sequence[BlockKey]) -> int:
        """A request refers to ``chain``: touch it. Returns how many leading blocks are worth keeping here."""
        return self._policy.arrive(request, chain)

    def finish(self, request: Request, output_tokens: int) -> None:
        """The request ended."""
        self._policy.finish(request, output_tokens)

    def refit(self) -> Refit | None:
        """What the policy would learn in another thread, if there is something to learn."""
        return self._policy.refit()

    def learned(self) -> Learned[BlockKey] | None:
        """A copy of what the policy has learned; None for one that learns nothing."""
        return self._policy.learned() if isinstance(self._policy, Learner) else None

    # ---- leaving

    def evict(self, num_blocks: int) -> int:
        """Make room: up to ``num_blocks`` leave in the policy's order; returns how many did."""
        num_evicted = 0
        while num_evicted < num_blocks and self._evict_one():
            num_evicted += 1
        return num_evicted

    def remove(self, key: BlockKey) -> int | None:
        """``key`` is gone at once; its slot is free when no pin and no copy is on it. Returns the slot it was in."""
        slot = self._slot_of.get(key)
        if slot is None:
            return None
        self._forget(slot, key)
        self._give_back(slot)
        return slot

    # ---- the inside

    def _evict_one(self) -> bool:
        if self._none_may_leave:
            return False
        key = self._policy.victim(self._may_leave)
        if key is None:
            self._none_may_leave = True
            return False
        slot = self._slot_of[key]
        if self._on_evict is not None and self._counts[SlotState.QUARANTINED] < self._quarantine_bound:
            self._on_evict(key, slot)
        self._forget(slot, key)
        self._give_back(slot)
        self.num_evicted += 1
        return True

    def _may_leave(self, key: BlockKey) -> bool:
        slot = self._slot_of[key]
        if slot in self._pins or self._children[slot]:
            return False
        return slot not in self._holds or self._counts[SlotState.QUARANTINED] < self._quarantine_bound

    def _resize(self) -> None:
        self._policy.resize(self.num_slots)
        quarter = max(1, self.num_slots // 4)
        self._quarantine_bound = quarter if self._max_quarantined is None else self._max_quarantined

    def _idle(self, slot: int) -> bool:
        if slot in self._pins or slot in self._holds:
            return False
        return self._state[slot] in (SlotState.FREE, SlotState.READY)

    def _enter(self, slot: int, key: BlockKey, parent: BlockKey | None, created_unix_s: int) -> None:
        self._slot_of[key] = slot
        self._key[slot] = key
        self._created_unix_s[slot] = created_unix_s
        self._expires_unix_s[slot] = 0
        parent_slot = NO_SLOT if parent is None else self._slot_of.get(parent, NO_SLOT)
        self._parent[slot] = parent_slot
        if parent_slot != NO_SLOT:
            self._children[parent_slot] += 1
        elif parent is not None:
            self._orphans.setdefault(parent, set()).add(slot)
            self._lost_parent[slot] = parent
        if key in self._orphans:
            for child in self._orphans.pop(key):
                del self._lost_parent[child]
                self._parent[child] = slot
                self._children[slot] += 1
        self._policy.insert(key, parent if parent_slot != NO_SLOT else None)
        self._none_may_leave = False
        if self.on_change is not None:
            self.on_change(key, parent, True)

    def _forget(self, slot: int, key: BlockKey) -> None:
        parent_slot = self._parent[slot]
        if parent_slot != NO_SLOT:
            self._children[parent_slot] -= 1
            self._none_may_leave = False
        elif slot in self._lost_parent:
            self._drop_orphan(slot)
        if self._children[slot]:
            self._orphan_children(slot, key)
        del self._slot_of[key]
        self._key[slot] = None
        self._parent[slot] = NO_SLOT
        self._policy.remove(key)
        if self.on_change is not None:
            self.on_change(key, None, False)

    def _drop_orphan(self, slot: int) -> None:
        lost = self._lost_parent.pop(slot)
        siblings = self._orphans[lost]
        siblings.discard(slot)
        if not siblings:
            del self._orphans[lost]

    def _orphan_children(self, slot: int, key: BlockKey) -> None:
        children = np.flatnonzero(np.frombuffer(self._parent, dtype=np.int32) == slot).tolist()
        for child in children:
            self._parent[child] = NO_SLOT
            self._lost_parent[child] = key
        self._orphans[key] = set(children)
        self._children[slot] = 0
        self._none_may_leave = False

    def _give_back(self, slot: int) -> None:
        if slot in self._pins or slot in self._holds:
            self._move(slot, SlotState.QUARANTINED)
            return
        self._move(slot, SlotState.FREE)
        heapq.heappush(self._free, slot)

    def _decrement(self, counts: dict[int, int], slot: int, call: str) -> None:
        count = counts.get(slot, 0)
        if count == 0:
            raise LeaseError(
                f"{call} of slot {slot}, which has none outstanding: it was ended twice; a bug of the caller"
            )
        self._none_may_leave = False
        if count > 1:
            counts[slot] = count - 1
            return
        counts.pop(slot)
        if self._state[slot] == SlotState.QUARANTINED and slot not in self._pins and slot not in self._holds:
            self._give_back(slot)

    def _move(self, slot: int, state: SlotState) -> None:
        self._counts[self._state[slot]] -= 1
        self._state[slot] = state
        self._counts[state] += 1

    def _require(self, slot: int, state: SlotState, call: str) -> None:
        if not (0 <= slot < len(self._state) and self._state[slot] == state):
            actual = SlotState(self._state[slot]) if 0 <= slot < len(self._state) else SlotState.ABSENT
            raise LeaseError(f"{call} of slot {slot}, which is {actual.name} and not {state.name}; a lease ends once")

    def check(self) -> None:
        """Prove the invariants; raises AssertionError naming the one that does not hold. O(slots), for tests."""
        states = [SlotState(state) for state in self._state]
        for state in SlotState:
            assert self._counts[state] == states.count(state), f"count of {state.name} is off"
        assert sorted(self._free) == [s for s, state in enumerate(states) if state == SlotState.FREE], (
            "free list is off"
        )
        ready = {s for s, state in enumerate(states) if state == SlotState.READY}
        assert set(self._slot_of.values()) == ready, "keys and READY slots differ"
        assert len(self._slot_of) == len(ready), "two keys share a slot"
        children = [0] * len(states)
        for key, slot in self._slot_of.items():
            assert self._key[slot] == key, f"slot {slot} does not know its key"
            if self._parent[slot] != NO_SLOT:
                assert self._parent[slot] in ready, f"slot {slot} names a parent that is not READY"
                children[self._parent[slot]] += 1
        assert children == list(self._children), "child counts are off"
        lost = {(parent, slot) for parent, slots in self._orphans.items() for slot in slots}
        assert lost == {(parent, slot) for slot, parent in self._lost_parent.items()}, "orphans are off"
        assert all(parent not in self._slot_of for parent in self._orphans), "an orphan's parent is resident"
        assert all(slot in ready for slot in self._lost_parent), "an orphan is not READY"
        for slot in self._pins:
            assert states[slot] in (SlotState.READY, SlotState.QUARANTINED), f"slot {slot} is pinned but not READY"
        for slot, state in enumerate(states):
            if state == SlotState.QUARANTINED:
                assert slot in self._pins or slot in self._holds, f"slot {slot} is quarantined for nothing"
            if state == SlotState.FREE:
                assert slot not in self._holds, f"slot {slot} is free under a copy"
