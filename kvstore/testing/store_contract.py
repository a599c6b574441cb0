# ruff: noqa: D102 - the name of a test says what it asserts
"""What every store promises, embedded or behind a wire, as tests to inherit.

A subclass named ``Test...`` supplies the fixture ``store``: open, empty, with RAM for at least ``MIN_BLOCKS`` blocks. A
store may answer late: the suite asks again while an answer is pending, as a connector must. ``LateStore`` does nothing
else.
"""

import math
import mmap
import time
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from kvstore.block_store import BlockStore
from kvstore.errors import ClosedError, DeadlineError, LayoutError, LeaseError
from kvstore.hashing import Identity
from kvstore.layout import Layout
from kvstore.lease import Lookup
from kvstore.lending import LentBuffer, Transfer
from kvstore.namespace import Namespace
from kvstore.store import Store
from kvstore.types import BlockKey, Request

MIN_BLOCKS = 64
LAYOUT = Layout("float16", 2, 2, (32, 32), 16)
IDENTITY = Identity("contract", b"weights")
PATIENCE_S = 10.0


class LateStore(Store):
    """A store that never knows at once: each chain's first lookups are pending, until it was polled a few times."""

    num_late_polls = 3

    def lookup(self, chain: Sequence[BlockKey]) -> Lookup:
        """Pending at first."""
        asked = self.__dict__.setdefault("_asked", {})
        left = asked.setdefault(tuple(chain), self.num_late_polls)
        return Lookup(0, 0, pending=True) if left else super().lookup(chain)

    def poll(self) -> int:
        """One step nearer to an answer."""
        asked = self.__dict__.setdefault("_asked", {})
        for chain, left in asked.items():
            asked[chain] = max(0, left - 1)
        return super().poll()


class StoreContract:
    """What holds for any store."""

    @pytest.fixture
    def store(self) -> Iterator[BlockStore]:
        """An open, empty store; closed afterwards."""
        raise NotImplementedError

    @pytest.fixture
    def ns(self, store: BlockStore) -> Namespace:
        return store.open_namespace(IDENTITY, LAYOUT)

    def test_what_was_committed_is_found_and_served(self, store: BlockStore, ns: Namespace) -> None:
        chain = chain_of(ns, 8)
        assert looked_up(store, chain).ready == 0
        put(store, ns, chain)
        assert looked_up(store, chain) == Lookup(8, 8, pending=False)
        assert served(store, chain) == 8

    def test_nothing_is_found_before_it_is_committed(self, store: BlockStore, ns: Namespace) -> None:
        chain = chain_of(ns, 2)
        lease = store.reserve(ns, 2)
        assert looked_up(store, chain).found == 0
        assert served(store, chain) == 0
        store.abort(lease)
        assert looked_up(store, chain).found == 0

    def test_a_result_is_the_longest_prefix(self, store: BlockStore, ns: Namespace) -> None:
        put(store, ns, chain_of(ns, 3))
        assert served(store, chain_of(ns, 9)) == 3
        assert served(store, chain_of(ns, 9)[1:]) == 2
        assert served(store, chain_of(ns, 9, first=1)) == 0

    def test_an_empty_chain_is_an_empty_answer(self, store: BlockStore) -> None:
        assert looked_up(store, []) == Lookup(0, 0, pending=False)
        assert served(store, []) == 0

    def test_reserve_gives_what_there_is_and_takes_back_what_is_left(self, store: BlockStore, ns: Namespace) -> None:
        for _ in range(3):
            lease = store.reserve(ns, 10**6)
            assert MIN_BLOCKS <= lease.num_blocks < 10**6
            assert len(lease.views) == lease.num_blocks
            assert all(view.nbytes == LAYOUT.block_bytes and not view.readonly for view in lease.views)
            store.abort(lease)

    def test_slots_of_a_lease_can_be_found_by_other_processes(self, store: BlockStore, ns: Namespace) -> None:
        with store.reserve(ns, 3) as lease:
            location = store.locate(lease)
            assert location is not None
            lease.views[2][:] = bytes(range(256)) * (LAYOUT.block_bytes // 256)
            with mmap.mmap(location.descriptors[0], 0) as memory:
                begin = location.offsets_bytes[2]
                assert memory[begin : begin + LAYOUT.block_bytes] == bytes(lease.views[2])

    def test_all_slots_lie_in_the_memory_that_stays(self, store: BlockStore, ns: Namespace) -> None:
        with store.reserve(ns, 3) as lease:
            memory, location = store.fixed_memory(), store.locate(lease)
            assert memory is not None
            assert location is not None
            assert location.pages_stay
            for number, (view, begin) in enumerate(zip(lease.views, location.offsets_bytes, strict=True)):
                view[:] = bytes([number + 1]) * LAYOUT.block_bytes
                assert memory[begin : begin + LAYOUT.block_bytes] == view

    def test_a_lease_ends_once(self, store: BlockStore, ns: Namespace) -> None:
        lease = store.reserve(ns, 1)
        store.abort(lease)
        with pytest.raises(LeaseError):
            store.abort(lease)
        with pytest.raises(LeaseError):
            store.commit(lease, chain_of(ns, 1), None)
        put(store, ns, chain_of(ns, 1))
        read = store.pin(chain_of(ns, 1))
        store.release(read)
        with pytest.raises(LeaseError):
            store.release(read)

    def test_the_slots_of_a_late_copy_are_nobody_elses(self, store: BlockStore, ns: Namespace) -> None:
        lease = store.reserve(ns, 10**6)
        views = lease.views
        store.quarantine(lease)
        put(store, ns, chain_of(ns, 1))
        assert served(store, chain_of(ns, 1)) == 0  # there was no room left
        for view in views:
            view[:] = b"\xee" * len(view)
        store.reclaim(lease)
        put(store, ns, chain_of(ns, 1))
        assert served(store, chain_of(ns, 1)) == 1

    def test_pinned_blocks_keep_their_bytes_while_others_come(self, store: BlockStore, ns: Namespace) -> None:
        chain = chain_of(ns, 4)
        put(store, ns, chain)
        with store.pin(chain) as lease:
            for number in range(2, 40):
                put(store, ns, chain_of(ns, 16, first=number))
            assert [bytes(view) for view in lease.views] == [content(key) for key in chain]

    def test_a_second_commit_changes_nothing(self, store: BlockStore, ns: Namespace) -> None:
        chain = chain_of(ns, 2)
        put(store, ns, chain)
        with store.reserve(ns, 2) as lease:
            store.commit(lease, chain, None)
        assert served(store, chain) == 2

    def test_keys_of_another_namespace_are_refused(self, store: BlockStore, ns: Namespace) -> None:
        other = store.open_namespace(Identity("other", b""), LAYOUT)
        with store.reserve(ns, 1) as lease, pytest.raises(LayoutError):
            store.commit(lease, chain_of(other, 1), None)

    def test_clear_forgets_one_namespace(self, store: BlockStore, ns: Namespace) -> None:
        other = store.open_namespace(Identity("other", b""), LAYOUT)
        put(store, ns, chain_of(ns, 2))
        put(store, other, chain_of(other, 2))
        store.clear(ns)
        assert served(store, chain_of(ns, 2)) == 0
        assert served(store, chain_of(other, 2)) == 2

    def test_lent_buffers_are_stored_and_loaded(self, store: BlockStore, ns: Namespace) -> None:
        chain = chain_of(ns, 5)
        stored = store.store_from(ns, chain, None, [memoryview(content(key)) for key in chain], soon())
        assert finished(store, stored).num_blocks == 5
        lent = [memoryview(bytearray(LAYOUT.block_bytes)) for _ in range(7)]
        loaded = store.load_into(ns, chain_of(ns, 7), lent, soon())
        assert finished(store, loaded).num_blocks == 5
        assert [bytes(buffer) for buffer in lent[:5]] == [content(key) for key in chain]

    def test_buffers_that_are_too_short_are_refused(self, store: BlockStore, ns: Namespace) -> None:
        with pytest.raises(LayoutError):
            store.store_from(ns, chain_of(ns, 1), None, [memoryview(b"short")], soon())

    @pytest.mark.parametrize("kind", ["bytearray", "array", "planes"])
    def test_any_contiguous_bytes_may_be_lent(self, store: BlockStore, ns: Namespace, kind: str) -> None:
        def lent(key: BlockKey) -> LentBuffer:
            if kind == "bytearray":
                return bytearray(content(key))
            array = np.frombuffer(content(key), dtype=np.float16).copy()
            return array if kind == "array" else array.reshape(2, -1)

        chain = chain_of(ns, 2)
        stored = store.store_from(ns, chain, None, [lent(key) for key in chain], soon())
        assert finished(store, stored).num_blocks == 2
        empty = [lent(key) for key in chain_of(ns, 2, first=7)]
        assert finished(store, store.load_into(ns, chain, empty, soon())).num_blocks == 2
        assert [bytes(memoryview(buffer).cast("B")) for buffer in empty] == [content(key) for key in chain]  # type: ignore[arg-type]  # an array is a buffer

    def test_buffers_that_cannot_hold_a_block_are_refused(self, store: BlockStore, ns: Namespace) -> None:
        """By name and before anything is started: no tier is blamed for them."""
        size, chain = LAYOUT.block_bytes, chain_of(ns, 1)
        put(store, ns, chain)
        unfit: list[tuple[str, object]] = [
            ("gaps", memoryview(bytearray(2 * size))[::2]),
            ("gaps", np.zeros((size, 2), np.uint8)[:, 0]),
            ("at least", bytearray(size - 1)),
            ("lend a", [0] * size),
            ("lend a", None),
        ]
        for says, buffer in [*unfit, ("read-only", memoryview(bytes(size)))]:
            with pytest.raises(LayoutError, match=says):
                store.load_into(ns, chain, [buffer], soon())  # type: ignore[list-item]  # the mistake in question
        for says, buffer in unfit:
            with pytest.raises(LayoutError, match=says):
                store.store_from(ns, chain, None, [buffer], soon())  # type: ignore[list-item]  # the same mistake
        with pytest.raises(LayoutError, match="there are 0"):
            store.load_into(ns, chain, [], soon())
        assert served(store, chain) == 1

    @pytest.mark.parametrize("deadline_s", [math.inf, 1e12, 1e300])
    def test_a_deadline_may_be_as_far_as_one_likes(self, store: BlockStore, ns: Namespace, deadline_s: float) -> None:
        chain = chain_of(ns, 2)
        buffers = [bytearray(content(key)) for key in chain]
        assert finished(store, store.store_from(ns, chain, None, buffers, deadline_s)).num_blocks == 2
        prefetch = store.prefetch(chain, deadline_s)
        while not prefetch.done:
            store.wait(0.01)
            store.poll()
        assert prefetch.ready == 2
        assert finished(store, store.load_into(ns, chain, buffers, deadline_s)).num_blocks == 2

    def test_a_deadline_that_is_no_moment_is_refused(self, store: BlockStore, ns: Namespace) -> None:
        chain = chain_of(ns, 1)
        for deadline_s in (math.nan, None, "soon"):
            for call in (
                lambda d: store.prefetch(chain, d),
                lambda d: store.load_into(ns, chain, [bytearray(LAYOUT.block_bytes)], d),
                lambda d: store.store_from(ns, chain, None, [bytearray(LAYOUT.block_bytes)], d),
            ):
                with pytest.raises(DeadlineError, match="monotonic"):
                    call(deadline_s)

    def test_a_prefetch_ends_whatever_there_is(self, store: BlockStore, ns: Namespace) -> None:
        put(store, ns, chain_of(ns, 2))
        for chain in (chain_of(ns, 2), chain_of(ns, 6), chain_of(ns, 3, first=5)):
            prefetch = store.prefetch(chain, time.monotonic() + 0.2)
            while not prefetch.done:
                store.wait(0.01)
                store.poll()
            assert prefetch.ready == looked_up(store, chain).ready

    def test_a_closed_store_says_so(self, store: BlockStore, ns: Namespace) -> None:
        lease = store.reserve(ns, 1)
        store.close()
        store.close()
        with pytest.raises(ClosedError):
            store.reserve(ns, 1)
        with pytest.raises(ClosedError):
            store.commit(lease, chain_of(ns, 1), None)
        with pytest.raises(ClosedError):
            store.arrive(Request("r", 0.0, ns.digest, 16), chain_of(ns, 1))


def soon() -> float:
    """A deadline that a healthy store keeps."""
    return time.monotonic() + PATIENCE_S


def chain_of(ns: Namespace, num_blocks: int, *, first: int = 0) -> list[BlockKey]:
    """A chain of its own for each first token."""
    return ns.keys([first] + [7] * (16 * num_blocks - 1))


def content(key: BlockKey) -> bytes:
    """The right bytes of a block."""
    return np.random.default_rng(list(key)).bytes(LAYOUT.block_bytes)


def looked_up(store: BlockStore, chain: Sequence[BlockKey]) -> Lookup:
    """The answer, asked for until it is one."""
    give_up_s = soon()
    while (found := store.lookup(chain)).pending:
        assert time.monotonic() < give_up_s, "an answer stays pending for ever"
        store.wait(0.01)
        store.poll()
    return found


def put(store: BlockStore, ns: Namespace, chain: Sequence[BlockKey]) -> None:
    """Compute and commit what RAM lacks of a chain, as far as there is room."""
    store.arrive(Request("r", time.time(), ns.digest, 0), chain)
    ready = looked_up(store, chain).ready
    with store.reserve(ns, len(chain) - ready) as lease:
        keys = chain[ready : ready + lease.num_blocks]
        for key, view in zip(keys, lease.views, strict=True):
            view[:] = content(key)
        if keys:
            store.commit(lease, keys, chain[ready - 1] if ready else None)
    store.poll()


def served(store: BlockStore, chain: Sequence[BlockKey]) -> int:
    """Prefetch, pin, check every byte; how many blocks that were."""
    prefetch = store.prefetch(chain, soon())
    while not prefetch.done:
        store.wait(0.01)
        store.poll()
    with store.pin(chain) as lease:
        assert [bytes(view) for view in lease.views] == [content(key) for key in lease.keys]
        return lease.num_blocks


def finished(store: BlockStore, transfer: Transfer) -> Transfer:
    """The transfer, when it has given the buffers back."""
    give_up_s = soon()
    while not transfer.done or transfer.busy:
        assert transfer.busy, "the buffers are given back before the transfer is done"
        assert time.monotonic() < give_up_s, "a transfer never ends"
        store.wait(0.01)
        store.poll()
    return transfer
