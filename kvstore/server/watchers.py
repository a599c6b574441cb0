"""Those who follow what comes and goes. Owner thread only. While nobody does, nothing is noted.

A watcher is told everything that is there, then every change, by number and without a gap. One that has fallen so far
behind that changes were dropped is told everything anew.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice

from kvstore.api.v1 import kvstore_pb2 as api
from kvstore.journal import Change, Journal
from kvstore.server.tenants import Tenant
from kvstore.store import Store
from kvstore.types import NAMESPACE_DIGEST_BYTES

MAX_WATCHERS = 64
BATCH_BLOCKS = 4096


class Watcher:
    """One of them, and how far it has come."""

    def __init__(self, store: Store, journal: Journal, tenant: Tenant, last: int) -> None:
        self._store = store
        self._journal = journal
        self._tenant = tenant
        self._next = last + 1 if last else 0

    def news(self) -> Iterator[api.Changes]:
        """What it has not been told; may be taken in steps, while more happens."""
        while (changes := self._journal.since(self._next, BATCH_BLOCKS)) is None:
            yield from self._everything()
        while changes:
            self._next += len(changes)
            yield api.Changes(last=self._next - 1, runs=self._runs(changes))
            changes = self._journal.since(self._next, BATCH_BLOCKS)

    def _everything(self) -> Iterator[api.Changes]:
        self._next = self._journal.next
        yield api.Changes(last=self._next - 1, is_new_beginning=True)
        pools = [(level.name, pool) for level in self._store.slot_levels for _, pool in level.pools()]
        for tier, pool in pools:
            keys = iter(list(pool))
            while batch := list(islice(keys, BATCH_BLOCKS)):
                # What has left meanwhile is left out: that it left comes later, and is no news then.
                slots = [(key, slot) for key in batch if (slot := pool.find(key)) is not None]
                changes = [Change(tier, key, pool.parent_of(slot), is_here=True) for key, slot in slots]
                yield api.Changes(last=self._next - 1, runs=self._runs(changes))

    def _runs(self, changes: Iterable[Change]) -> Iterator[api.Run]:
        """Of the tenant's own blocks."""
        run: list[Change] = []
        for change in changes:
            if change.key[:NAMESPACE_DIGEST_BYTES] not in self._tenant.namespaces:
                continue
            if run and not _follows(run[-1], change):
                yield self._run(run)
                run = []
            run.append(change)
        if run:
            yield self._run(run)

    def _run(self, run: Sequence[Change]) -> api.Run:
        first = run[0]
        start = NAMESPACE_DIGEST_BYTES
        return api.Run(
            is_here=first.is_here,
            tier=first.tier,
            namespace=self._tenant.namespaces[first.key[:start]],
            digest_bytes=len(first.key) - start,
            digests=b"".join([change.key[start:] for change in run]),
            parent=b"" if first.parent is None else first.parent[start:],
        )


class Watchers:
    """All of them."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._journal = Journal()
        self._num = 0

    @property
    def can_add(self) -> bool:
        """Whether one more may watch."""
        return self._num < MAX_WATCHERS

    @contextmanager
    def watcher(self, tenant: Tenant, last: int) -> Iterator[Watcher]:
        """One more, who was told everything up to number ``last``; 0: nothing."""
        if self._num == 0:
            self._journal.skip()  # what happened while nobody watched was not noted
            self._store.keep_journal(self._journal)
        self._num += 1
        try:
            yield Watcher(self._store, self._journal, tenant, last)
        finally:
            self._num -= 1
            if self._num == 0:
                self._store.keep_journal(None)


def _follows(before: Change, change: Change) -> bool:
    """Whether it can go into the same run."""
    is_alike = (before.tier, before.is_here, len(before.key)) == (change.tier, change.is_here, len(change.key))
    same_namespace = before.key[:NAMESPACE_DIGEST_BYTES] == change.key[:NAMESPACE_DIGEST_BYTES]
    return is_alike and same_namespace and (not change.is_here or change.parent == before.key)
