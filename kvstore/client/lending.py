"""Lent buffers of a client's owner: their bytes are copied to and from the arena by a thread of this process.

Owner thread only; the copying thread touches bytes and nothing else. What it returns is applied in ``poll``.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from kvstore.block_store import BlockStore
from kvstore.client.session import Inbox
from kvstore.lease import LeaseState, ReadLease, WriteLease
from kvstore.lending import Transfer
from kvstore.mover import ThreadExecutor
from kvstore.namespace import Namespace
from kvstore.promotion import Prefetch
from kvstore.types import BlockKey, Outcome

Pairs = Sequence[tuple[memoryview, memoryview]]
"""Destination and source of each block, equally long."""


class Lending:
    """Transfers that are under way."""

    def __init__(self, store: BlockStore, inbox: Inbox) -> None:
        """``store`` gives the leases; ``inbox`` is applied by its ``poll``."""
        self._store = store
        self._inbox = inbox
        self._copier: ThreadExecutor | None = None
        self._coming: list[tuple[Transfer, Prefetch, Sequence[memoryview]]] = []
        self._num_copying = 0

    @property
    def is_busy(self) -> bool:
        """Whether a transfer has yet to end."""
        return bool(self._coming) or self._num_copying > 0

    def store_from(
        self,
        ns: Namespace,
        keys: Sequence[BlockKey],
        parent: BlockKey | None,
        buffers: Sequence[memoryview],
        deadline_s: float,
    ) -> Transfer:
        """Copy each buffer into a slot, then name the slots."""
        lease = self._store.reserve(ns, len(keys))
        count = lease.num_blocks
        transfer = Transfer(ns, keys, deadline_s, [None] * count + [Outcome.FULL] * (len(keys) - count))
        transfer.num_waiting = transfer.num_in_flight = count
        if count:
            pairs = _pairs(lease.views, buffers, ns)
            self._copy(pairs, deadline_s, lambda in_time: self._stored(transfer, lease, parent, in_time))
        return transfer

    def load_into(
        self, ns: Namespace, chain: Sequence[BlockKey], buffers: Sequence[memoryview], deadline_s: float
    ) -> Transfer:
        """Bring the chain up, then copy it out."""
        transfer = Transfer(ns, chain, deadline_s, [None] * len(chain))
        transfer.num_waiting = transfer.num_in_flight = len(chain)
        self._coming.append((transfer, self._store.prefetch(chain, deadline_s), buffers))
        self.poll()
        return transfer

    def poll(self) -> int:
        """Go on with what has come up; returns how many transfers that was."""
        up = [coming for coming in self._coming if coming[1].done]
        self._coming = [coming for coming in self._coming if not coming[1].done]
        for transfer, prefetch, buffers in up:
            lease = self._store.pin(prefetch.chain)
            count = lease.num_blocks
            transfer.outcomes[count:] = [Outcome.ABSENT] * (len(transfer.keys) - count)
            transfer.num_waiting = transfer.num_in_flight = count
            if count:
                pairs = [(lent, slot) for slot, lent in _pairs(lease.views, buffers, transfer.ns)]
                self._copy(pairs, transfer.deadline_s, partial(self._loaded, transfer, lease))
            else:
                self._store.release(lease)
        return len(up)

    def close(self) -> None:
        """Start no more copies."""
        if self._copier is not None:
            self._copier.close()

    # ---- the inside

    def _copy(self, pairs: Pairs, deadline_s: float, then: Callable[[bool], None]) -> None:
        """Have the thread copy; ``then`` is called in ``poll`` with whether all was done in time."""
        if self._copier is None:
            self._copier = ThreadExecutor("client-copier", 1)
        self._num_copying += 1

        def end(in_time: bool) -> None:
            self._num_copying -= 1
            then(in_time)

        self._copier.submit(lambda: self._inbox.put(partial(end, _copy_all(pairs, deadline_s))))

    def _stored(self, transfer: Transfer, lease: WriteLease, parent: BlockKey | None, in_time: bool) -> None:
        keys = transfer.keys[: lease.num_blocks]
        outcome = Outcome.LATE
        if in_time:
            named = self._store.commit(lease, keys, parent)
            outcome = Outcome.OK if named.slots else Outcome.FAILED
            transfer.accepted.update(keys if named.slots else ())
        if lease.state is LeaseState.HELD:
            self._store.abort(lease)
        _settle(transfer, len(keys), outcome)

    def _loaded(self, transfer: Transfer, lease: ReadLease, in_time: bool) -> None:
        outcome = Outcome.OK if in_time and lease.still_held() else Outcome.LATE
        self._store.release(lease)
        _settle(transfer, lease.num_blocks, outcome)


def _settle(transfer: Transfer, count: int, outcome: Outcome) -> None:
    transfer.outcomes[:count] = [outcome] * count
    transfer.num_waiting = transfer.num_in_flight = 0


def _pairs(
    slots: Sequence[memoryview], buffers: Sequence[memoryview], ns: Namespace
) -> list[tuple[memoryview, memoryview]]:
    return [(slot, buffer[: ns.layout.block_bytes]) for slot, buffer in zip(slots, buffers, strict=False)]


def _copy_all(pairs: Pairs, deadline_s: float) -> bool:
    """In the copying thread: one memmove a block; whether all was done by ``deadline_s``."""
    for destination, source in pairs:
        if time.monotonic() >= deadline_s:
            return False
        # numpy lets go of the interpreter lock while it copies; a memoryview assignment does not.
        np.copyto(np.frombuffer(destination, dtype=np.uint8), np.frombuffer(source, dtype=np.uint8))
    return True
