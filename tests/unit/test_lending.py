"""Transfers between the caller's own buffers and the levels."""

from kvstore.testing.dict_tiers import DictSharedTier
from kvstore.types import Outcome
from tests.worlds import LAYOUT, content, world


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
