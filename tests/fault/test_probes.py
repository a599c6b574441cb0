"""Probes that stores of this kind have failed in production, put to ours."""

import gc
import tracemalloc
from pathlib import Path

import pytest

from kvstore.types import BlockKey
from tests.real_stores import LAYOUT, chain_of, config_of, get, opened, put
from tests.worlds import world

NUM_BLOCKS = 600
RAM_BLOCKS = NUM_BLOCKS // 3


@pytest.mark.parametrize("blocks_per_chain", [5, 60])
def test_what_was_accepted_is_readable_after_passing_through_a_small_ram(tmp_path: Path, blocks_per_chain: int) -> None:
    """UX-017, WK-001: written through RAM a third that size, then read back through the same full RAM."""
    memory = f"{RAM_BLOCKS * LAYOUT.block_bytes >> 10}KiB"
    with opened(config_of(tmp_path / "kv", memory=memory)) as (store, ns):
        accepted: set[BlockKey] = set()
        chains = [chain_of(ns, blocks_per_chain, number) for number in range(NUM_BLOCKS // blocks_per_chain)]
        for number, chain in enumerate(chains):
            accepted |= put(store, ns, chain)
            if number % (RAM_BLOCKS // blocks_per_chain) == 0:
                assert store.drain(10)  # an engine computes meanwhile
        assert store.drain(10)
        assert len(accepted) > NUM_BLOCKS / 2, "so little was accepted that this proves nothing"
        for chain in chains:
            num_accepted = next((at for at, key in enumerate(chain) if key not in accepted), len(chain))
            assert get(store, chain) >= num_accepted


def test_lookups_do_not_keep_anything() -> None:
    """HG-020: a full store that is asked for all it has, again and again, still makes room."""
    with world(4, file=4) as w:
        for number in range(40):
            assert w.put(w.chain(2, first_token=100 * number)), f"no room for chain {number}"
            w.settle()
            for asked in range(number + 1):
                w.store.lookup(w.chain(2, first_token=100 * asked))
            assert w.store.lookup(w.chain(2, first_token=100 * number)).ready == 2
        w.assert_idle()


def test_memory_is_bounded_by_what_is_held_and_not_by_what_has_passed() -> None:
    """A million distinct keys through a tiny cache leave no trace; some hundreds of chains here."""
    with world(8, file=16, policy="lru") as w:  # what HIX remembers has bounds of its own, and tests

        def pass_through(numbers: range) -> int:
            for number in numbers:
                chain = w.chain(2, first_token=10 * number)
                w.put(chain)
                w.get(w.chain(3, first_token=10 * number))
                w.settle()
            gc.collect()
            return tracemalloc.get_traced_memory()[0]

        pass_through(range(100))
        tracemalloc.start()
        try:
            before_bytes = pass_through(range(100, 300))
            after_bytes = pass_through(range(300, 800))
        finally:
            tracemalloc.stop()
        assert after_bytes - before_bytes < 500 * 20, "more than a few bytes a chain stay behind"
        w.assert_idle()
