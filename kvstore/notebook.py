"""What policies have learned, by layout, in a note that a tier keeps over a restart. Owner thread only, but ``_write``.

The pools of one layout all learn from the same requests: the first one's knowledge is kept, and given to each.
"""

import logging
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

from kvstore.mover import Executor
from kvstore.policy.base import Learner, Policy
from kvstore.policy.learned import Learned, pack, parse
from kvstore.pool import BlockPool
from kvstore.tiers.base import NoteKeeper
from kvstore.types import BlockKey

SAVE_INTERVAL_S = 600.0
MAX_LAYOUTS = 8
CLOSE_TIMEOUT_S = 1.0

log = logging.getLogger(__name__)

_PAGE = struct.Struct("<BI")

Pools = Iterable[tuple[bytes, BlockPool]]


class Notebook:
    """A page for each layout."""

    def __init__(self, policy: Callable[[], Policy[BlockKey]], keeper: NoteKeeper | None, executor: Executor) -> None:
        """Read what ``keeper`` kept; ``policy`` makes those that it is for."""
        self._new_policy = policy
        self._keeper = keeper
        self._executor = executor
        self._found = dict(_pages(keeper.read_note())) if keeper else {}
        self._next_save_s: float | None = None
        self._num_observed = 0
        self._saved = threading.Event()
        self._saved.set()

    def policy(self, fingerprint: bytes) -> Policy[BlockKey]:
        """A policy for a pool of this layout, which knows what others learned before."""
        policy = self._new_policy()
        if isinstance(policy, Learner) and (learned := parse(self._found.get(fingerprint, b""))):
            policy.resume(learned)
        return policy

    def poll(self, pools: Pools, now_s: float) -> None:
        """Save what the policies of ``pools`` have learned, once in a while."""
        if self._next_save_s is None:
            self._next_save_s = now_s + SAVE_INTERVAL_S
        elif now_s >= self._next_save_s:
            self._next_save_s = now_s + SAVE_INTERVAL_S
            self._save(pools)

    def close(self, pools: Pools) -> None:
        """Save once more; a stuck disk is not waited for."""
        self._save(pools)
        self._saved.wait(CLOSE_TIMEOUT_S)

    def _save(self, pools: Pools) -> None:
        if self._keeper is None or not self._saved.is_set():
            return
        learned: dict[bytes, Learned[BlockKey]] = {}
        for fingerprint, pool in pools:
            if fingerprint not in learned and (of_pool := pool.learned()) is not None:
                learned[fingerprint] = of_pool
        num_observed = sum(of_layout.num_observed for of_layout in learned.values())
        if num_observed != self._num_observed:
            self._num_observed = num_observed
            self._saved.clear()
            self._executor.submit(partial(self._write, self._keeper, learned))

    def _write(self, keeper: NoteKeeper, learned: Mapping[bytes, Learned[BlockKey]]) -> None:
        try:
            pages = self._found | {fingerprint: pack(of_layout) for fingerprint, of_layout in learned.items()}
            newest = sorted(pages, key=learned.__contains__)[-MAX_LAYOUTS:]
            keeper.save_note(b"".join(_PAGE.pack(len(name), len(pages[name])) + name + pages[name] for name in newest))
        except Exception:  # the edge of the thread, which others learn in
            log.exception("what the policies learned could not be saved, which is a bug; the next start learns afresh")
        finally:
            self._saved.set()


def _pages(note: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The pages of a note by layout; each proves itself, so that damage costs what it hit."""
    at = 0
    while at + _PAGE.size <= len(note):
        num_name_bytes, num_page_bytes = _PAGE.unpack_from(note, at)
        start = at + _PAGE.size + num_name_bytes
        yield note[at + _PAGE.size : start], note[start : start + num_page_bytes]
        at = start + num_page_bytes
