"""KV events: what vLLM tells routers of the blocks that the store has in RAM and in files.

They come beside those of vLLM's own pages and name blocks by the same hashes and groups; like those of its
OffloadingConnector they come without tokens. ``medium`` is CPU or STORAGE. Blocks of one chain that come together are
one event. What lies on a server of its own is not told: every host can ask there.
"""

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_STORAGE, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

from kvstore.journal import MAX_CHANGES, Change, Journal
from kvstore.namespace import Namespace
from kvstore.store import Store
from kvstore.types import NAMESPACE_DIGEST_BYTES, BlockKey

MEDIA = {"memory": MEDIUM_CPU, "file": MEDIUM_STORAGE}
MAX_BLOCKS = 4096

_log = logging.getLogger(__name__)


class StoreEvents:
    """What has happened in a store since it was asked the last time. The owner of the store only.

    Blocks of namespaces that were not opened here are of other models, with the same tokens and so the same hashes: of
    these nothing is told.
    """

    def __init__(self, store: Store, tokens_per_block: int) -> None:
        """Follow ``store`` from now on."""
        self._store = store
        self._tokens_per_block = tokens_per_block
        self._groups: dict[bytes, int] = {}
        """By a namespace's digest: which group of layers its blocks are of."""
        self._waiting: deque[Change] = deque()
        self._journal = Journal()
        self._next = self._journal.next
        store.keep_journal(self._journal)

    def open_namespaces(self, spaces: Sequence[Namespace]) -> None:
        """Tell of ``spaces``, those of each group, from now on: first what is there, say from before a restart."""
        self._drain()
        for group, ns in enumerate(spaces):
            self._groups[ns.digest] = group
            for level in self._store.slot_levels:
                pool = level.pool(ns.fingerprint)
                for key in list(pool):
                    slot = pool.find(key)
                    if slot is not None and key.startswith(ns.digest):
                        self._waiting.append(Change(level.name, key, pool.parent_of(slot), is_here=True))

    def take(self) -> list[KVCacheEvent]:
        """In the order in which it happened; in so many steps that none has many blocks to tell of."""
        self._drain()
        changes = [self._waiting.popleft() for _ in range(min(MAX_BLOCKS, len(self._waiting)))]
        return [self._event(run) for run in _runs(changes)]

    def _drain(self) -> None:
        changes = self._journal.since(self._next, MAX_CHANGES)
        if changes is None:
            _log.warning("so much has changed since the last step that routers are not told of all of it")
            changes = []
        self._next = self._journal.next
        self._waiting += (change for change in changes if _namespace(change) in self._groups)

    def _event(self, run: list[Change]) -> KVCacheEvent:
        first = run[0]
        hashes, group = [_hash(change.key) for change in run], self._groups[_namespace(first)]
        if not first.is_here:
            return BlockRemoved(block_hashes=hashes, medium=MEDIA[first.tier], group_idx=group)
        return BlockStored(
            block_hashes=hashes,
            parent_block_hash=None if first.parent is None else _hash(first.parent),
            token_ids=[],
            block_size=self._tokens_per_block,
            lora_id=None,
            medium=MEDIA[first.tier],
            lora_name=None,
            group_idx=group,
        )


def _runs(changes: Iterable[Change]) -> Iterator[list[Change]]:
    """Those that one event can tell."""
    run: list[Change] = []
    for change in changes:
        if run and not _goes_on(run[-1], change):
            yield run
            run = []
        run.append(change)
    if run:
        yield run


def _goes_on(before: Change, change: Change) -> bool:
    if (before.tier, before.is_here, _namespace(before)) != (change.tier, change.is_here, _namespace(change)):
        return False
    return not change.is_here or change.parent == before.key


def _namespace(change: Change) -> bytes:
    return change.key[:NAMESPACE_DIGEST_BYTES]


def _hash(key: BlockKey) -> bytes | int:
    """What vLLM tells others for the hash in it."""
    told: bytes | int = maybe_convert_block_hash(BlockHash(key[NAMESPACE_DIGEST_BYTES:]))
    return told
