# ruff: noqa: D102 - the name of a test says what it asserts
"""What every eviction policy of the store promises, as tests to inherit.

A subclass named ``Test...`` says in ``name`` which policy of the registry it is about.
"""

import gc
import tracemalloc
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from kvstore.config import Config
from kvstore.hashing import Identity
from kvstore.namespace import Namespace
from kvstore.policy import POLICIES
from kvstore.policy.base import Policy
from kvstore.pool import BlockPool, SlotState
from kvstore.replay.simulator import Cache, replay
from kvstore.replay.trace import TraceRequest
from kvstore.store import Store
from kvstore.testing.blocks import key_of, layout_of
from kvstore.testing.traces import made_up_trace
from kvstore.tiers.memory import Arena, MemoryTier
from kvstore.types import BlockKey, Request

BLOCK_BYTES = 4096
STATE_BYTES = 16 << 20
"""What a policy may keep beside its resident blocks."""


class PolicyContract:
    """What holds for any policy."""

    name: str

    @pytest.fixture
    def policy(self) -> Policy[Any]:
        return POLICIES[self.name]()

    @pytest.mark.parametrize("num_slots", [1, 5, 40, 200])
    def test_the_store_evicts_what_the_simulator_evicts(self, num_slots: int) -> None:
        trace = made_up_trace(250)
        cache = Cache(POLICIES[self.name](), num_slots)
        with closing(store_of(self.name, num_slots)) as store:
            ns = store.open_namespace(Identity("policy", b"weights"), layout_of(BLOCK_BYTES))
            chains: list[Sequence[int]] = []
            for number, request in enumerate(trace.requests):
                announced = Request(str(number), request.now_s, ns.digest, request.input_tokens)
                chains.append(request.chain)
                assert serve(store, ns, announced, request) == cache.hit_blocks(request.chain)
                cache.serve(announced, request.chain, request.output_tokens)
                # Every block that can be there is on one of these chains.
                for chain in chains:
                    assert store.lookup(keys_of(ns, chain)).ready == cache.hit_blocks(chain)

    def test_whoever_may_leave_does_so_once(self, policy: Policy[Any]) -> None:
        pool = BlockPool(policy)
        pool.grow(0, 64)
        trace = made_up_trace(60)
        fill(pool, trace.requests)
        assert pool.num(SlotState.READY) == 64
        assert pool.evict(1000) == 64
        assert set(pool) == set()
        assert policy.victim(lambda _: True) is None
        fill(pool, trace.requests)
        assert pool.num(SlotState.READY) == 64

    def test_nobody_leaves_who_may_not(self, policy: Policy[Any]) -> None:
        chain = [key_of(number) for number in range(4)]
        policy.resize(8)
        policy.arrive(Request("r", 0.0, b"", 64), chain)
        for parent, key in zip([None, *chain], chain, strict=False):
            policy.insert(key, parent)
        assert policy.victim(lambda _: False) is None
        for key in reversed(chain):
            assert policy.victim(lambda other, key=key: other == key) == key  # type: ignore[misc]  # a loop's variable
            policy.remove(key)

    def test_blocks_that_no_request_announced_leave_in_the_order_in_which_they_came(self, policy: Policy[Any]) -> None:
        """An engine that stores and never says what it asks for has a store that works all the same."""
        policy.resize(100)
        keys = [[key_of(10 * chain + depth) for depth in range(3)] for chain in range(5)]
        for chain in keys:
            for parent, key in zip([None, *chain], chain, strict=False):
                policy.insert(key, parent)
        for chain in keys:
            for leaf in reversed(chain):
                leaves = {other[-1] for other in keys} | {leaf}
                assert policy.victim(leaves.__contains__) == leaf
                policy.remove(leaf)

    def test_blocks_are_removed_and_extents_come_and_go(self, policy: Policy[Any]) -> None:
        pool = BlockPool(policy)
        pool.grow(0, 48)
        for step, request in enumerate(made_up_trace(150).requests):
            fill(pool, [request])
            if step % 10 == 5:
                pool.remove(next(iter(pool)))
            if step == 70:
                pool.grow(48, 16)
            if step == 110:
                assert pool.num(SlotState.READY) == 64
                assert pool.shrink(48, 16)
            pool.check()
        assert pool.num(SlotState.READY) == 48

    def test_a_clock_that_jumps_does_no_harm(self, policy: Policy[Any]) -> None:
        trace = made_up_trace(120)
        jumps = [0.0, 1e9, -1e9, 1e-9, 1e300, -1e300]
        requests = [
            replace(request, now_s=request.now_s + jumps[index // 7 % len(jumps)])
            for index, request in enumerate(trace.requests)
        ]
        assert replay(replace(trace, requests=requests), policy, 40).hit_tokens > 0

    def test_it_does_not_matter_what_keys_are(self) -> None:
        trace = made_up_trace(150)
        turned = replace(trace, requests=[replace(r, chain=[-block for block in r.chain]) for r in trace.requests])
        assert replay(trace, POLICIES[self.name](), 40) == replay(turned, POLICIES[self.name](), 40)

    def test_what_has_left_is_forgotten(self, policy: Policy[Any]) -> None:
        """No table grows with the number of keys that ever passed."""
        policy_cache = Cache(policy, 64)

        def pass_by(first: int, num_requests: int) -> int:
            for number in range(first, first + num_requests):
                chain = list(range(8 * number, 8 * number + 8))
                policy_cache.serve(Request(str(number), float(number), b"", 128), chain, 10)
            gc.collect()
            return tracemalloc.get_traced_memory()[0]

        tracemalloc.start()
        try:
            before_bytes = pass_by(0, 500)
            assert pass_by(500, 2000) - before_bytes < STATE_BYTES
        finally:
            tracemalloc.stop()


class AtOnce:
    """An executor without a thread."""

    def submit(self, run: Callable[[], None], *, urgent: bool = False) -> None:
        run()

    def close(self) -> None:
        """There is nothing to close."""


def store_of(policy: str, num_slots: int) -> Store:
    """A store with RAM for ``num_slots`` blocks, all of them the policy's from the start."""
    arena = Arena(num_slots * BLOCK_BYTES, prefault=False)
    memory = MemoryTier(arena, extent_bytes=arena.capacity_bytes)
    return Store(memory=memory, config=Config.from_mapping({"policy": policy}), executor=lambda *_: AtOnce())


def serve(store: Store, ns: Namespace, announced: Request, request: TraceRequest) -> int:
    """What an engine does with a store: announce, load what is there, store what was missing. Returns blocks loaded."""
    chain = keys_of(ns, request.chain)
    keep = store.arrive(announced, chain)
    with store.pin(chain) as loan:
        missing = chain[loan.num_blocks : keep]
        with store.reserve(ns, len(missing)) as lease:
            parent = chain[loan.num_blocks - 1] if loan.num_blocks else None
            store.commit(lease, missing[: lease.num_blocks], parent)
        num_loaded = loan.num_blocks
    store.finish(announced, chain, request.output_tokens)
    store.poll()  # lets the policy learn
    store.poll()  # and applies that
    return num_loaded


def keys_of(ns: Namespace, chain: Sequence[int]) -> list[BlockKey]:
    """A key for each block of a trace."""
    return [BlockKey(ns.digest + block.to_bytes(32, "big")) for block in chain]


def fill(pool: BlockPool, requests: Iterable[TraceRequest]) -> None:
    """Serve requests from a pool."""
    for request in requests:
        chain = [key_of(block) for block in request.chain]
        pool.arrive(Request("r", request.now_s, b"", request.input_tokens), chain)
        pinned = pool.pin_prefix(chain)
        missing = chain[len(pinned) :]
        above = chain[len(pinned) - 1] if pinned else None
        for slot, key in zip(pool.reserve(len(missing)), missing, strict=False):
            pool.commit(slot, key, above)
            above = key
        pool.unpin_all(pinned)
