"""Prefetching in a store without RAM: it finds out what others have stored."""

from kvstore.testing.dict_tiers import DictSharedTier
from tests.worlds import LAYOUT, World, content, world


def stored_elsewhere(num_blocks: int) -> DictSharedTier:
    """What another host has left on the shared tier."""
    shared = DictSharedTier()
    with world(4, shared=shared) as w:
        w.put(w.chain(num_blocks))
        w.settle()
    return shared


def loaded(w: World, num_blocks: int) -> int:
    chain = w.chain(num_blocks)
    lent = [memoryview(bytearray(LAYOUT.block_bytes)) for _ in chain]
    transfer = w.store.load_into(w.ns, chain, lent, w.clock() + 1)
    w.settle()
    for key, buffer in zip(chain[: transfer.num_blocks], lent, strict=False):
        assert buffer == content(key)
    return transfer.num_blocks


def test_a_prefetch_finds_what_another_host_stored() -> None:
    with world(0, shared=stored_elsewhere(3)) as w:
        prefetch = w.store.prefetch(w.chain(5), w.clock() + 1)
        assert not prefetch.done
        w.settle()
        assert (prefetch.done, prefetch.ready) == (True, 0)
        assert w.store.lookup(w.chain(5)).found == 3
        assert loaded(w, 5) == 3
        w.assert_idle()


def test_a_load_asks_for_what_no_table_knows() -> None:
    """Without a prefetch before it, and while what is known is read."""
    shared = stored_elsewhere(3)
    with world(0, file=4, shared=shared) as w:
        chain = w.chain(5)
        w.store.store_from(w.ns, chain[:2], None, [content(key) for key in chain[:2]], w.clock() + 1)
        w.settle()
        lent = [bytearray(LAYOUT.block_bytes) for _ in chain]
        transfer = w.store.load_into(w.ns, chain, lent, w.clock() + 1)
        assert (transfer.done, transfer.busy) == (False, True)
        w.settle()
        assert (transfer.done, transfer.busy) == (True, False)
        assert transfer.num_blocks == 3
        assert [bytes(buffer) for buffer in lent[:3]] == [content(key) for key in chain[:3]]


def test_a_load_whose_question_hangs_ends_at_its_deadline() -> None:
    with world(0, shared=stored_elsewhere(2)) as w:
        transfer = w.store.load_into(w.ns, w.chain(2), [bytearray(LAYOUT.block_bytes)] * 2, w.clock() + 1)
        assert transfer.busy
        w.clock.advance(1.1)
        w.store.poll()
        assert (transfer.done, transfer.busy, transfer.num_blocks) == (True, False, 0)


def test_what_lies_on_file_is_not_asked_for() -> None:
    shared = stored_elsewhere(3)
    with world(0, file=4, shared=shared) as w:
        chain = w.chain(3)
        w.store.store_from(w.ns, chain[:2], None, [memoryview(content(key)) for key in chain[:2]], w.clock() + 1)
        w.settle()
        assert w.store.prefetch(chain[:2], w.clock() + 1).done
        prefetch = w.store.prefetch(chain, w.clock() + 1)
        w.settle()
        assert prefetch.done
        assert loaded(w, 3) == 3


def test_a_prefetch_ends_at_its_deadline_and_may_be_asked_for_again() -> None:
    with world(0, shared=stored_elsewhere(2)) as w:
        prefetch = w.store.prefetch(w.chain(2), w.clock() + 1)
        w.clock.advance(1.1)
        w.store.poll()
        assert prefetch.done
        assert w.store.lookup(w.chain(2)).found == 0
        w.clock.advance(1)
        again = w.store.prefetch(w.chain(2), w.clock() + 1)
        w.settle()
        assert again.done
        assert loaded(w, 2) == 2


def test_a_store_that_closes_ends_its_prefetches() -> None:
    with world(0, shared=stored_elsewhere(2)) as w:
        prefetch = w.store.prefetch(w.chain(2), w.clock() + 1)
        w.close()
        assert prefetch.done
