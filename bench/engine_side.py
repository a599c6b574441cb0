"""What an engine does with the store, and the memory it does it from: blocks of one layout, in fresh chains."""

import itertools
import time
from collections.abc import Sequence

import numpy as np

from bench.pages import noise, on_pages
from kvstore.block_store import BlockStore
from kvstore.hashing import Identity
from kvstore.layout import Layout
from kvstore.lending import Transfer
from kvstore.namespace import Namespace
from kvstore.types import BlockKey, Outcome

TOKENS_PER_BLOCK = 16
STEP_BYTES = 32 << 20
"""What an engine commits at a time: the blocks of one chunk of a prefill."""
PATIENCE_S = 60.0


def layout_of(block_bytes: int) -> Layout:
    return Layout("uint8", 1, 1, (block_bytes // TOKENS_PER_BLOCK,), TOKENS_PER_BLOCK)


class Engine:
    """An engine with host memory of its own, one chain of blocks long."""

    def __init__(self, store: BlockStore, block_bytes: int, num_blocks: int) -> None:
        self.store = store
        self.ns: Namespace = store.open_namespace(Identity("bench", b"weights"), layout_of(block_bytes))
        self.computed = noise(num_blocks, block_bytes)
        self.loaded = on_pages(num_blocks, block_bytes)
        self._lent_to_store = [memoryview(row) for row in self.computed]
        self._lent_to_load = [memoryview(row) for row in self.loaded]
        self._step = max(1, STEP_BYTES // block_bytes)
        self._numbers = itertools.count()
        self._num_tokens = num_blocks * TOKENS_PER_BLOCK
        self.chain: Sequence[BlockKey] = ()

    def renew_chain(self) -> None:
        """Keys that nobody had before."""
        tokens = np.arange(self._num_tokens, dtype=np.uint32)
        tokens[0] = next(self._numbers)
        self.chain = self.ns.keys(tokens)

    def store_chain(self) -> None:
        """Reserve, copy in and commit, step by step."""
        store, chain = self.store, self.chain
        for start in range(0, len(chain), self._step):
            keys = chain[start : start + self._step]
            with store.reserve(self.ns, len(keys)) as lease:
                for view, row in zip(lease.views, self.computed[start : start + len(keys)], strict=True):
                    np.copyto(np.frombuffer(view, dtype=np.uint8), row)
                store.commit(lease, keys, chain[start - 1] if start else None)
            store.poll()

    def load_chain(self) -> None:
        """Pin what is in RAM and copy it out."""
        with self.store.pin(self.chain) as lease:
            self._require(lease.num_blocks)
            for row, view in zip(self.loaded, lease.views, strict=True):
                np.copyto(row, np.frombuffer(view, dtype=np.uint8))

    def load_chain_from_below(self) -> None:
        """Prefetch, and copy blocks out as they come up."""
        store, chain = self.store, self.chain
        prefetch = store.prefetch(chain, time.monotonic() + PATIENCE_S)
        num_loaded = 0
        while num_loaded < len(chain):
            if not store.poll() and not prefetch.done:
                store.wait(PATIENCE_S)
                continue
            with store.pin(chain[: store.lookup(chain).ready]) as lease:
                if prefetch.done:
                    self._require(lease.num_blocks)
                for row, view in zip(self.loaded[num_loaded:], lease.views[num_loaded:], strict=False):
                    np.copyto(row, np.frombuffer(view, dtype=np.uint8))
                num_loaded = lease.num_blocks

    def store_chain_from_lent(self) -> None:
        """Let the store copy out of our memory."""
        deadline_s = time.monotonic() + PATIENCE_S
        self._await(self.store.store_from(self.ns, self.chain, None, self._lent_to_store, deadline_s))

    def load_chain_into_lent(self) -> None:
        """Let the store copy into our memory."""
        deadline_s = time.monotonic() + PATIENCE_S
        self._await(self.store.load_into(self.ns, self.chain, self._lent_to_load, deadline_s))

    def require_whole(self) -> None:
        """What was loaded last is what was computed."""
        if not np.array_equal(self.loaded, self.computed):
            raise SystemExit("the store gave back other bytes than it was given")
        self.loaded[:] = 0

    def _await(self, transfer: Transfer) -> None:
        while not transfer.done:
            self.store.wait(PATIENCE_S)
            self.store.poll()
        if set(transfer.outcomes) != {Outcome.OK}:
            raise SystemExit(f"a transfer came to {[outcome.value for outcome in transfer.outcomes if outcome]}")

    def _require(self, num_blocks: int) -> None:
        if num_blocks != len(self.chain):
            raise SystemExit(f"only {num_blocks} of {len(self.chain)} blocks are here")
