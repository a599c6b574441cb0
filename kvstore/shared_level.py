"""A shared remote tier together with what is believed of it. Owner thread only, no I/O.

Others write the tier, and its server decides what stays. So the table here is no pool but hints: bounded, ageing, and
never trusted. A hint that proves wrong is a plain miss.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol

from kvstore.namespace import Namespace
from kvstore.tiers.base import Probing, Tier
from kvstore.types import NAMESPACE_DIGEST_BYTES, BlockKey

MAX_HINTS = 1 << 20
HINT_AGE_S = 600.0


class SharedTier(Tier, Probing, Protocol):
    """A tier that many hosts share."""


class SharedLevel:
    """Which keys the shared tier was last seen to have."""

    def __init__(
        self,
        tier: SharedTier,
        ttl_s: int,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """``ttl_s`` is the tier's time to live, which a touch renews; 0: none."""
        self.tier = tier
        self.name = tier.name
        self._ttl_s = ttl_s
        self._clock = clock
        self._wall = wall
        self._seen_at_s: OrderedDict[BlockKey, float] = OrderedDict()
        self._clearing: dict[bytes, int] = {}
        """Namespaces that are being cleared, and how many tries must still go well: no hint of them is kept."""

    @property
    def num_hints(self) -> int:
        """Keys believed to be there."""
        return len(self._seen_at_s)

    def learn(self, keys: Sequence[BlockKey]) -> None:
        """The tier has these keys, as a probe or a write has just shown."""
        self._enter(keys, self._clock())

    def _enter(self, keys: Sequence[BlockKey], seen_at_s: float) -> None:
        for key in keys:
            if self._clearing and key[:NAMESPACE_DIGEST_BYTES] in self._clearing:
                continue
            self._seen_at_s[key] = seen_at_s
            self._seen_at_s.move_to_end(key)
        while len(self._seen_at_s) > MAX_HINTS:
            self._seen_at_s.popitem(last=False)

    def due_for_renewal(self, chain: Sequence[BlockKey]) -> list[BlockKey]:
        """Keys of ``chain`` whose time to live should be started afresh: a quarter of it has gone since the last."""
        if not self._ttl_s:
            return []
        before_s = self._clock() - self._ttl_s / 4
        seen = self._seen_at_s
        return [key for key in chain if (seen_at_s := seen.get(key)) is not None and seen_at_s < before_s]

    def covered(self, ns: Namespace, chain: Sequence[BlockKey], start: int, oldest_unix_s: int) -> int:
        """How many blocks of ``chain`` from ``start`` on are believed to be there, without a gap."""
        after_s = self._clock() - self._hint_age_s(ns)
        seen = self._seen_at_s
        for index in range(start, len(chain)):
            if seen.get(chain[index], after_s) <= after_s:
                return index - start
        return len(chain) - start

    def missing(self, ns: Namespace, keys: Sequence[BlockKey]) -> list[int]:
        """Those that are not believed to be there."""
        after_s = self._clock() - self._hint_age_s(ns)
        seen = self._seen_at_s
        return [index for index, key in enumerate(keys) if seen.get(key, after_s) <= after_s]

    def offsets_bytes(self, fingerprint: bytes, slots: Sequence[int]) -> list[int]:
        """No place: the key says it all."""
        return [0] * len(slots)

    def begin_reads(self, ns: Namespace, keys: Sequence[BlockKey], oldest_unix_s: int) -> list[int]:
        """Anything may be there."""
        return [0] * len(keys)

    def end_reads(self, ns: Namespace, slots: Sequence[int]) -> None:
        """Nothing was pinned."""

    def created_unix_s(self, ns: Namespace, slot: int) -> int:
        """Only the tier knows."""
        return 0

    def forget(self, ns: Namespace, key: BlockKey) -> None:
        """Drop the hint."""
        self._seen_at_s.pop(key, None)

    @property
    def clearing(self) -> list[bytes]:
        """Namespaces of which the tier may have blocks that were to be erased: nothing is read or written of them."""
        return list(self._clearing)

    def begin_clear(self, namespace: bytes) -> None:
        """The tier is to erase a namespace. One that is being cleared already is cleared once more after that."""
        self._clearing[namespace] = 2 if namespace in self._clearing else 1
        for key in [key for key in self._seen_at_s if key.startswith(namespace)]:
            del self._seen_at_s[key]

    def end_clear(self, namespace: bytes, *, whole: bool) -> None:
        """One try has ended. After a failure two must go well: what the server had yet to do may follow one."""
        self._clearing[namespace] = self._clearing[namespace] - 1 if whole else 2
        if not self._clearing[namespace]:
            del self._clearing[namespace]

    def begin_write(self, ns: Namespace, num_blocks: int) -> list[int]:
        """Room is the server's business; there is none for what a clearing would erase."""
        return [] if ns.digest in self._clearing else [0] * num_blocks

    def commit_write(
        self,
        ns: Namespace,
        slot: int,
        key: BlockKey,
        parent: BlockKey | None,
        created_unix_s: int,
    ) -> None:
        """Believe it is there, until it is too old."""
        age_s = max(0.0, self._wall() - created_unix_s) if ns.max_age_s else 0.0
        self._enter([key], self._clock() - age_s)

    def abort_write(self, ns: Namespace, slot: int) -> None:
        """Nothing to give back."""

    def refuse_write(self, ns: Namespace, slot: int) -> None:
        """The server makes its own room, in its own time."""

    def quarantine_write(self, ns: Namespace, slot: int) -> None:
        """A late write of the right bytes under the right key does no harm."""

    def reclaim_write(self, ns: Namespace, slot: int) -> None:
        """Nothing was quarantined."""

    def begin_erase(self, ns: Namespace, key: BlockKey) -> int | None:
        """A write has returned after its namespace was cleared: clear it again."""
        self.begin_clear(ns.digest)
        return None

    def end_erase(self, ns: Namespace, slot: int) -> None:
        """Nothing was held."""

    def _hint_age_s(self, ns: Namespace) -> float:
        return min(HINT_AGE_S, self._ttl_s or HINT_AGE_S, ns.max_age_s or HINT_AGE_S)
