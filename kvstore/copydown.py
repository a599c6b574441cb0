"""Copy-down: blocks in RAM are written to lower levels, by admission and within bounds. Owner thread only.

An accepted block stays pinned until its copy has returned, so what was acknowledged is not lost to eviction. If a tier
is stuck, its pins are dropped and only the slots its copies may still read are kept from reuse.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Literal

from kvstore.copies import Block, Copies
from kvstore.level import Level
from kvstore.memory_level import MemoryLevel
from kvstore.mover import Mover
from kvstore.namespace import Namespace
from kvstore.stats import Stats
from kvstore.tiers.base import BlockMove
from kvstore.types import BlockKey, Outcome

Occasion = Literal["commit", "touch", "evict"]

ADMITTED: dict[str, frozenset[Occasion]] = {
    "always": frozenset({"commit", "touch"}),
    "second_touch": frozenset({"touch"}),
    "on_evict": frozenset({"evict"}),
}
"""On which occasion each admission mode copies a block that the level does not have."""

WRITE_TIMEOUT_S = 10.0
"""A copy-down that takes longer has met a stuck tier."""


class CopyDown:
    """What is being copied from RAM to each lower level."""

    def __init__(
        self,
        memory: MemoryLevel,
        lower: Sequence[tuple[Level, str]],
        copies: Copies,
        mover: Mover,
        stats: Stats,
    ) -> None:
        """``lower``: each level below RAM with its admission mode; one may be added later."""
        self._memory = memory
        self._lower = lower
        self._copies = copies
        self._mover = mover
        self._stats = stats
        self._writing: defaultdict[str, set[BlockKey]] = defaultdict(set)

    @property
    def copies_victims(self) -> bool:
        """Whether what RAM evicts is wanted below."""
        return any("evict" in ADMITTED[admission] for _, admission in self._lower)

    def offer(self, ns: Namespace, slots: Sequence[int], occasion: Occasion) -> set[BlockKey]:
        """Copy READY blocks of RAM down where admission wants it; returns the keys that some level accepted."""
        accepted: set[BlockKey] = set()
        for level, admission in self._lower:
            if occasion in ADMITTED[admission]:
                accepted.update(self._write(level, ns, slots, num_tries=2))
        return accepted

    def _write(self, level: Level, ns: Namespace, slots: Sequence[int], *, num_tries: int) -> list[BlockKey]:
        """Start to copy ``slots`` to ``level``; where that is full, once more, since room may be made by then."""
        pool, writing = self._memory.pool(ns.fingerprint), self._writing[level.name]
        slot_of = {key: slot for slot in slots if (key := pool.key_at(slot)) is not None}
        keys = list(slot_of)
        wanted = [keys[index] for index in level.missing(ns, keys) if keys[index] not in writing]
        if not wanted:
            return []
        # What there is no room for costs next to nothing: a busy or dead tier must not slow down answers from RAM.
        blocks = [
            Block(
                key,
                pool.parent_of(slot_of[key]),
                self._memory.buffer(ns, slot_of[key]),
                pool.created_unix_s(slot_of[key]),
            )
            for key in wanted[: self._mover.room_blocks(level.name, ns.layout.block_bytes)]
        ]
        taken = [slot_of[block.key] for block in blocks]
        for slot in taken:
            pool.pin(slot)
            pool.hold(slot)
        abandoned: set[BlockKey] = set()

        def on_abandon(moves: Sequence[BlockMove]) -> None:
            for move in moves:
                abandoned.add(move.key)
                pool.unpin(slot_of[move.key])
                writing.discard(move.key)

        def on_return(moves: Sequence[BlockMove], outcomes: Sequence[Outcome]) -> None:
            if moves[0].key in abandoned:
                for move in moves:
                    pool.unhold(slot_of[move.key])
                return
            writing.difference_update([move.key for move in moves])
            full = [move for move, outcome in zip(moves, outcomes, strict=True) if outcome is Outcome.FULL]
            if full and num_tries > 1:
                self._write(level, ns, [slot_of[move.key] for move in full], num_tries=num_tries - 1)
            for move in moves:
                pool.unhold(slot_of[move.key])
                pool.unpin(slot_of[move.key])

        deadline_s = self._mover.clock() + WRITE_TIMEOUT_S
        started = self._copies.write(level, ns, blocks, deadline_s, on_return, on_abandon)
        for slot in taken[started:]:
            pool.unpin(slot)
            pool.unhold(slot)
        writing.update(wanted[:started])
        self._stats.inc("kvstore_accepted_blocks_total", started, level.name)
        if started < len(wanted):
            reason = "busy" if self._mover.lane(level.name).breaker.state.value == "closed" else "down"
            self._stats.inc("kvstore_not_accepted_blocks_total", len(wanted) - started, level.name, reason)
        return wanted[:started]

    def offer_victim(self, ns: Namespace, slot: int) -> None:
        """RAM is evicting the block in ``slot``: copy it down first where admission wants that."""
        self.offer(ns, [slot], "evict")
