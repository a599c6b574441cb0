"""A store over fakes, small enough to think through: blocks of one page, steps and time in the test's hand."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from kvstore.config import Config
from kvstore.hashing import Identity
from kvstore.layout import Layout
from kvstore.pool import SlotState
from kvstore.store import Store
from kvstore.testing.dict_tiers import DictSharedTier, DictSlotTier
from kvstore.testing.steps import FakeClock, Steps
from kvstore.tiers.memory import Arena, MemoryTier
from kvstore.types import BlockKey, Request

LAYOUT = Layout("uint8", 1, 1, (1024,), 4)
PAGE_BYTES = 4096
IDENTITY = Identity("tiny", b"weights")
REQUEST = Request("r", 0.0, b"", 0)


class World:
    """A store with ``memory`` and ``file`` slots and, if ``shared``, a shared tier; nothing moves by itself."""

    def __init__(
        self,
        memory: int = 4,
        file: int = 0,
        *,
        shared: DictSharedTier | None = None,
        file_tier: DictSlotTier | None = None,
        admission: str = "always",
        max_age: str = "0",
        policy: str = "hix",
        prefill_tokens_per_s: int = 0,
        num_extents: int = 1,
    ) -> None:
        self.clock = FakeClock()
        self.steps = Steps()
        self.file = file_tier
        if file:
            self.file = DictSlotTier(file, LAYOUT.block_bytes, num_extents=num_extents, clock=self.clock)
        self.shared = shared
        tables: dict[str, object] = {"max_age": max_age, "policy": policy, "prefill_tokens_per_s": prefill_tokens_per_s}
        if self.file:
            tables["file"] = {"directories": ["/nowhere"], "capacity": "1GiB", "admission": admission}
        if shared:
            tables["redis"] = {"url": "redis://nowhere", "admission": admission}
        self.arena = Arena(memory * PAGE_BYTES) if memory else None
        self.memory = None
        if self.arena:
            extent_bytes = self.arena.capacity_bytes // num_extents
            self.memory = MemoryTier(self.arena, extent_bytes=extent_bytes, clock=self.clock)
        self.store = Store(
            memory=self.memory,
            file=self.file,
            shared=shared,
            config=Config.from_mapping(tables),
            executor=self.steps,
            clock=self.clock,
            wall=self.clock,
        )
        self.ns = self.store.open_namespace(IDENTITY, LAYOUT)

    def chain(self, num_blocks: int, *, first_token: int = 0) -> list[BlockKey]:
        return self.ns.keys(range(first_token, first_token + 4 * num_blocks))

    def put(self, chain: Sequence[BlockKey]) -> frozenset[BlockKey]:
        """Compute and commit what RAM lacks of a chain; returns what was accepted for copy-down."""
        self.store.arrive(REQUEST, chain)
        ready = self.store.lookup(chain).ready
        lease = self.store.reserve(self.ns, len(chain) - ready)
        keys = chain[ready : ready + lease.num_blocks]
        for key, view in zip(keys, lease.views, strict=True):
            view[:] = content(key)
        if not keys:
            self.store.abort(lease)
            return frozenset()
        return self.store.commit(lease, keys, chain[ready - 1] if ready else None).accepted

    def settle(self) -> None:
        """Let every copy run and be applied, until nothing moves any more."""
        self.store.poll()
        while self.steps.run_all() or self.store.poll():
            self.store.poll()

    def get(self, chain: Sequence[BlockKey], seconds: float = 1.0) -> int:
        """Prefetch, pin, check every byte; returns how many blocks were served."""
        prefetch = self.store.prefetch(chain, self.clock() + seconds)
        while not prefetch.done and (self.steps.run_all() or self.store.poll()):
            self.store.poll()
        lease = self.store.pin(chain)
        for key, view in zip(lease.keys, lease.views, strict=True):
            assert view == content(key), "wrong bytes"
        self.store.release(lease)
        return lease.num_blocks

    def assert_idle(self) -> None:
        """Nothing leaks: no pin, no copy, no slot in between."""
        self.store.check()
        metrics = self.store.snapshot()
        for name in ("kvstore_pinned_blocks", "kvstore_quarantined_slots", "kvstore_tickets_in_flight"):
            assert not any(metrics.get(name, {}).values()), f"{name} is not 0 when idle"
        pools = [pool for level in self.store.slot_levels for _, pool in level.pools()]
        assert not any(pool.num(SlotState.FILLING) for pool in pools), "a slot is being filled when idle"

    def close(self) -> None:
        self.store.close(timeout_s=0.0)


def content(key: BlockKey) -> bytes:
    """The right bytes of a block."""
    return np.random.default_rng(list(key)).bytes(LAYOUT.block_bytes)


@contextmanager
def world(*args: int, **options: object) -> Iterator[World]:
    """A world that is closed at the end."""
    made = World(*args, **options)  # type: ignore[arg-type]  # passed on as they are
    try:
        yield made
    finally:
        made.close()
