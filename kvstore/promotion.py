"""Promotion: blocks that lie in lower levels come up to RAM ahead of need. Owner thread only.

A prefetch walks its chain: what is READY in RAM it pins, what is on its way it joins, what a lower level has it reads,
what a shared level may have it probes for, once. Whenever something it waited for is settled it walks again. It is done
when nothing more can come, or at its deadline, whatever is stuck.

Where the engine's prefill rate is known, a run of blocks is read only if that takes less time than to compute them;
what is not read is a miss. The rate is taken to be the same at every depth, though deep tokens cost more; so a run pays
as a whole or not at all. What a prefetch waits for anyway is no cost of what it reads besides.

Invariant: a key is arriving from at most one level, and every prefetch that waits for it is told exactly once.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstore.copies import PROBE_BLOCKS, Block, Copies
from kvstore.level import Level
from kvstore.memory_level import MemoryLevel
from kvstore.mover import Mover
from kvstore.namespace import Namespace
from kvstore.placement import TRIAL_BYTES
from kvstore.shared_level import SharedLevel
from kvstore.stats import Stats
from kvstore.tiers.base import BlockMove
from kvstore.types import BlockKey, Outcome


@dataclass(eq=False, slots=True)
class Prefetch:
    """One call's promotion. ``done`` turns true in some ``poll``; pin then, before anything else can evict."""

    ns: Namespace
    chain: Sequence[BlockKey]
    deadline_s: float
    done: bool = False
    ready: int = 0
    """Leading blocks of the chain that were READY in RAM when it was done."""
    blocks_from: Counter[str] = field(default_factory=Counter)
    """How many blocks came up, by the tier they came from."""
    waiting: int = 0
    probed: bool = False
    hungry: bool = False
    refused: set[tuple[str, BlockKey]] = field(default_factory=set)
    declined: tuple[str, int] | None = None
    """The level that has blocks up to there which are faster to compute than to read, the last time there were any."""
    pinned: list[int] = field(default_factory=list)


class Promotions:
    """Every prefetch that is under way."""

    def __init__(self, memory: MemoryLevel, lower: Sequence[Level], copies: Copies, mover: Mover, stats: Stats) -> None:
        """``lower``: the levels below RAM, the nearest first."""
        self._memory = memory
        self._lower = lower
        self._copies = copies
        self._mover = mover
        self._stats = stats
        self._arriving: dict[BlockKey, list[Prefetch]] = {}
        self._open: set[Prefetch] = set()

    def start(self, ns: Namespace, chain: Sequence[BlockKey], deadline_s: float) -> Prefetch:
        """Begin; the answer may be done at once."""
        prefetch = Prefetch(ns, chain, deadline_s)
        self._open.add(prefetch)
        self._advance(prefetch)
        return prefetch

    def is_arriving(self, key: BlockKey) -> bool:
        """Whether ``key`` is on its way up."""
        return key in self._arriving

    def poll(self) -> None:
        """Feed what waits for room in a lane, and end what is past its deadline."""
        now_s = self._mover.clock()
        for prefetch in list(self._open):
            if now_s >= prefetch.deadline_s:
                self._end(prefetch)
            elif prefetch.hungry:
                self._advance(prefetch)

    def close(self) -> None:
        """End every prefetch with what it has."""
        for prefetch in list(self._open):
            self._end(prefetch)

    # ---- the inside

    def _advance(self, prefetch: Prefetch) -> None:
        if prefetch.done:
            return
        if self._mover.clock() >= prefetch.deadline_s:
            self._end(prefetch)
            return
        self._pin_ready(prefetch)
        self._join(prefetch)
        prefetch.hungry = False
        while self._read_next_run(prefetch):
            pass
        if prefetch.waiting == 0 and not prefetch.hungry:
            self._end(prefetch)

    def _pin_ready(self, prefetch: Prefetch) -> None:
        """Hold on to the READY prefix, or making room for the rest would evict it."""
        pool = self._memory.pool(prefetch.ns.fingerprint)
        slots = pool.prefix(prefetch.chain)
        for slot in slots[len(prefetch.pinned) :]:
            pool.pin(slot)
        prefetch.pinned.extend(slots[len(prefetch.pinned) :])

    def _join(self, prefetch: Prefetch) -> None:
        """Wait for what others have asked for."""
        for key in prefetch.chain[len(prefetch.pinned) :]:
            waiting = self._arriving.get(key)
            if waiting is not None and prefetch not in waiting:
                waiting.append(prefetch)
                prefetch.waiting += 1

    def _read_next_run(self, prefetch: Prefetch) -> bool:
        """Start one run of reads from one level; False when there is nothing more to start now."""
        chain = prefetch.chain
        start = self._first_missing(prefetch)
        if start == len(chain):
            return False
        for level in self._lower:
            if (level.name, chain[start]) in prefetch.refused:
                continue
            count = self._run_length(prefetch, level, start)
            if count == 0:
                continue
            if not self._mover.lane(level.name).breaker.is_ready(self._mover.clock()):
                prefetch.refused.add((level.name, chain[start]))
                continue
            num_worth = self._worth_reading(prefetch, level, count)
            if num_worth == 0:
                prefetch.refused.add((level.name, chain[start]))
                prefetch.declined = level.name, start + count
                continue
            return self._read(prefetch, level, start, num_worth)
        shared = next((level for level in self._lower if isinstance(level, SharedLevel)), None)
        if shared is not None and not prefetch.probed:
            self._probe(prefetch, shared, chain[start : start + PROBE_BLOCKS])
        return False

    def _first_missing(self, prefetch: Prefetch) -> int:
        pool = self._memory.pool(prefetch.ns.fingerprint)
        for index in range(len(prefetch.pinned), len(prefetch.chain)):
            key = prefetch.chain[index]
            if key not in self._arriving and key not in pool:
                return index
        return len(prefetch.chain)

    def _run_length(self, prefetch: Prefetch, level: Level, start: int) -> int:
        """How many blocks from ``start`` on to read from ``level`` in one go."""
        pool = self._memory.pool(prefetch.ns.fingerprint)
        covered = level.covered(prefetch.ns, prefetch.chain, start, self._copies.oldest_unix_s(prefetch.ns))
        for count in range(covered):
            key = prefetch.chain[start + count]
            if key in self._arriving or key in pool or (level.name, key) in prefetch.refused:
                return count
        return covered

    def _worth_reading(self, prefetch: Prefetch, level: Level, count: int) -> int:
        """How many blocks of a run of ``count`` to read from ``level`` rather than to compute."""
        layout, tokens_per_s = prefetch.ns.layout, prefetch.ns.prefill_tokens_per_s
        if not tokens_per_s:
            return count
        lane = self._mover.lane(level.name)
        ahead_bytes = max(0, lane.read_bytes_in_flight - prefetch.waiting * layout.block_bytes)
        read_s = lane.reads.seconds(ahead_bytes + count * layout.block_bytes)
        if prefetch.waiting:
            read_s -= lane.reads.latency_s
        if read_s < count * layout.tokens_per_block / tokens_per_s:
            return count
        num_tried = min(count, max(1, TRIAL_BYTES // layout.block_bytes))
        return num_tried if lane.reads.take_trial(self._mover.clock(), num_tried * layout.block_bytes) else 0

    def _read(self, prefetch: Prefetch, level: Level, start: int, count: int) -> bool:
        """Reserve RAM and read into it; False if not all of the run could be started."""
        ns, memory = prefetch.ns, self._memory
        room = self._mover.room_blocks(level.name, ns.layout.block_bytes)
        slots = memory.reserve(ns.fingerprint, min(count, room))
        if not slots:
            prefetch.hungry = room == 0
            return False
        blocks = [self._block(ns, prefetch.chain, start + index, slot) for index, slot in enumerate(slots)]
        slot_of = {block.key: slot for block, slot in zip(blocks, slots, strict=True)}
        for block in blocks:
            self._arriving[block.key] = [prefetch]
        prefetch.waiting += len(blocks)
        abandoned: set[BlockKey] = set()

        def on_abandon(moves: Sequence[BlockMove]) -> None:
            for move in moves:
                abandoned.add(move.key)
                memory.quarantine_write(ns, slot_of[move.key])
            self._settle(level, [move.key for move in moves], [Outcome.LATE] * len(moves))

        def on_return(moves: Sequence[BlockMove], outcomes: Sequence[Outcome]) -> None:
            if moves[0].key in abandoned:
                for move in moves:
                    memory.reclaim_write(ns, slot_of[move.key])
                return
            for move, outcome in zip(moves, outcomes, strict=True):
                if outcome is Outcome.OK:
                    memory.commit_write(ns, slot_of[move.key], move.key, move.parent, move.created_unix_s)
                else:
                    memory.abort_write(ns, slot_of[move.key])
            self._settle(level, [move.key for move in moves], outcomes)

        started = self._copies.read(level, ns, blocks, prefetch.deadline_s, on_return, on_abandon)
        for block, slot in zip(blocks[started:], slots[started:], strict=True):
            memory.abort_write(ns, slot)
            del self._arriving[block.key]
            prefetch.waiting -= 1
        if started == 0:
            prefetch.refused.add((level.name, blocks[0].key))
            return True  # another level may have it
        prefetch.hungry = started < count
        return started == count

    def _block(self, ns: Namespace, chain: Sequence[BlockKey], index: int, slot: int) -> Block:
        return Block(chain[index], chain[index - 1] if index else None, self._memory.buffer(ns, slot))

    def _settle(self, level: Level, keys: Sequence[BlockKey], outcomes: Sequence[Outcome]) -> None:
        """Tell everyone who waits; those with nothing left to wait for walk on."""
        woken: dict[Prefetch, None] = {}
        for key, outcome in zip(keys, outcomes, strict=True):
            for prefetch in self._arriving.pop(key):
                prefetch.waiting -= 1
                if outcome is Outcome.OK:
                    prefetch.blocks_from[level.name] += 1
                elif outcome is not Outcome.LATE:
                    prefetch.refused.add((level.name, key))
                woken[prefetch] = None
        for prefetch in woken:
            if prefetch.waiting == 0 or prefetch.hungry:
                self._advance(prefetch)
            elif not prefetch.done:
                self._pin_ready(prefetch)

    def _probe(self, prefetch: Prefetch, shared: SharedLevel, keys: Sequence[BlockKey]) -> None:
        """Ask the shared tier which of ``keys`` it has."""
        prefetch.probed = True

        def end() -> None:
            prefetch.waiting -= 1
            self._advance(prefetch)

        if self._copies.probe(shared, keys, prefetch.deadline_s, end):
            prefetch.waiting += 1

    def _end(self, prefetch: Prefetch) -> None:
        """Done, with what is READY now; joined blocks go on for others."""
        if prefetch.done:
            return
        self._pin_ready(prefetch)
        prefetch.done = True
        prefetch.hungry = False
        prefetch.ready = len(prefetch.pinned)
        if prefetch.declined is not None:
            name, end = prefetch.declined
            self._stats.inc("kvstore_declined_blocks_total", max(0, end - prefetch.ready), name)
        self._open.discard(prefetch)
        pool = self._memory.pool(prefetch.ns.fingerprint)
        for slot in prefetch.pinned:
            pool.unpin(slot)
        prefetch.pinned = []
