"""Copies of blocks between buffers and one level, from the tables' side: begin, submit, and what each outcome means.

Whatever happens to a copy, every slot it touched is given back exactly once: when the copy returned, or into quarantine
when its deadline passed and then out of it when the copy returned.

Copies that return out of turn are settled in turn, parents before their children: a child that is entered first cannot
be found, and it would rank above its own root.
"""

import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvstore.level import Level
from kvstore.mover import Mover, Ticket
from kvstore.namespace import Namespace
from kvstore.shared_level import SharedLevel
from kvstore.stats import Stats
from kvstore.tiers.base import BlockMove
from kvstore.types import BlockKey, Outcome

READ = "read"
WRITE = "write"
ERASE_BATCH_BLOCKS = 256
ERASE_TIMEOUT_S = 10.0
PROBE_BLOCKS = 16384
"""How many keys one probe asks for at most."""


class Block(NamedTuple):
    """One block to copy: its key, its parent's, the bytes, and when they were computed (0: not known)."""

    key: BlockKey
    parent: BlockKey | None
    buffer: memoryview
    created_unix_s: int = 0


OnReturn = Callable[[Sequence[BlockMove], Sequence[Outcome]], None]
"""The copy has returned; nothing touches the buffers any more."""

OnAbandon = Callable[[Sequence[BlockMove]], None]
"""The deadline has passed and the copy may still touch the buffers; ``OnReturn`` follows, with outcomes to ignore."""


@dataclass(eq=False, slots=True)
class _Flight:
    """A copy that has yet to be settled, and those that wait for it."""

    number: int
    keys: list[BlockKey]
    waiting: list[Callable[[], None]] = field(default_factory=list)


class _Flights:
    """Copies of one direction and level, which are settled when nothing above them is under way any more."""

    def __init__(self) -> None:
        self._of_key: dict[BlockKey, _Flight] = {}
        self._numbers = itertools.count()

    def begin(self, moves: Sequence[BlockMove]) -> _Flight:
        """A copy has started."""
        flight = _Flight(next(self._numbers), [move.key for move in moves])
        for key in flight.keys:
            self._of_key[key] = flight
        return flight

    def settle(self, flight: _Flight, moves: Sequence[BlockMove], settle: Callable[[], None]) -> None:
        """The copy has returned: ``settle`` now, or after the copies that its blocks' parents are in."""
        for move in moves:
            above = self._of_key.get(move.parent) if move.parent is not None else None
            if above is not None and above.number < flight.number:  # so that no two ever wait for each other
                above.waiting.append(lambda: self.settle(flight, moves, settle))
                return
        settle()
        self.end(flight)

    def end(self, flight: _Flight) -> None:
        """The copy is settled, or given up; those that waited go on."""
        for key in flight.keys:
            if self._of_key.get(key) is flight:
                del self._of_key[key]
        waiting, flight.waiting = flight.waiting, []
        for go_on in waiting:
            go_on()


@dataclass(frozen=True, slots=True)
class _Erasure:
    level: Level
    ns: Namespace
    moves: list[tuple[int, BlockMove]]
    """Held slots and what to erase in them."""


class Copies:
    """Starts copies and settles their slots."""

    def __init__(self, mover: Mover, stats: Stats, wall: Callable[[], float] = time.time) -> None:
        self._mover = mover
        self._stats = stats
        self._wall = wall
        self._erasures: list[_Erasure] = []
        self._disownments: dict[bytes, int] = {}
        self._flights: defaultdict[tuple[str, str], _Flights] = defaultdict(_Flights)

    def read(
        self,
        level: Level,
        ns: Namespace,
        blocks: Sequence[Block],
        deadline_s: float,
        on_return: OnReturn,
        on_abandon: OnAbandon,
    ) -> int:
        """Start reading ``blocks`` from ``level`` into their buffers; returns how many leading ones were started.

        Fewer where a block is not there or the lane is busy or down.
        """
        num_started = 0
        oldest_unix_s = self.oldest_unix_s(ns)
        for batch in self._batches(level, ns, blocks):
            slots = level.begin_reads(ns, [block.key for block in batch], oldest_unix_s)
            moves = _moves(level, ns, batch, slots, [level.created_unix_s(ns, slot) for slot in slots])
            if not moves or not self._submit_read(level, ns, moves, slots, deadline_s, on_return, on_abandon):
                level.end_reads(ns, slots)
                break
            num_started += len(moves)
            if len(moves) < len(batch):
                break
        return num_started

    def write(
        self,
        level: Level,
        ns: Namespace,
        blocks: Sequence[Block],
        deadline_s: float,
        on_return: OnReturn,
        on_abandon: OnAbandon,
    ) -> int:
        """Start writing ``blocks`` from their buffers to ``level``; returns how many leading ones were started.

        Fewer where the level has no room, or the lane is busy or down.
        """
        num_started = 0
        for batch in self._batches(level, ns, blocks):
            if not self._mover.can_take(level.name, len(batch) * ns.layout.block_bytes):
                break  # ask before evicting anything for it
            slots = level.begin_write(ns, len(batch))
            now_unix_s = int(self._wall())
            moves = _moves(level, ns, batch, slots, [block.created_unix_s or now_unix_s for block in batch])
            if not moves or not self._submit_write(level, ns, moves, slots, deadline_s, on_return, on_abandon):
                for slot in slots:
                    level.abort_write(ns, slot)
                break
            num_started += len(moves)
            if len(moves) < len(batch):
                break
        return num_started

    def probe(
        self, shared: SharedLevel, keys: Sequence[BlockKey], deadline_s: float, on_end: Callable[[], None]
    ) -> bool:
        """Start to ask the shared tier which of ``keys`` it has; ``on_end`` follows once what it has is known.

        Or at the deadline. False, and nothing happens, where its lane is busy or down.
        """

        def finish(outcomes: Sequence[Outcome]) -> None:
            shared.learn([key for key, outcome in zip(keys, outcomes, strict=True) if outcome is Outcome.OK])
            if not ticket.overdue:
                on_end()

        ticket = Ticket(
            work=lambda: shared.tier.probe(keys, deadline_s),
            num_blocks=len(keys),
            num_bytes=0,
            deadline_s=deadline_s,
            finish=finish,
            abandon=on_end,
            urgent=True,
        )
        return self._mover.submit(shared.name, ticket)

    def now_unix_s(self) -> float:
        """Wall-clock time, which blocks' ages are counted in."""
        return self._wall()

    def oldest_unix_s(self, ns: Namespace) -> int:
        """Blocks of ``ns`` computed before this moment are not served; 0: none is too old."""
        return ns.oldest_unix_s(self._wall())

    def disown(self, ns: Namespace) -> None:
        """Whatever copies of ``ns`` are in flight, their blocks do not count: it is being cleared."""
        self._disownments[ns.digest] = self._disownments.get(ns.digest, 0) + 1

    def erase(self, level: Level, ns: Namespace, keys: Sequence[BlockKey]) -> int:
        """Forget ``keys`` at once and erase their bytes in the background; returns how many were there.

        Their slots stay held until the bytes are gone, however busy the lane is: see ``retry_erasures``.
        """
        slots = {key: slot for key in keys if (slot := level.begin_erase(ns, key)) is not None}
        blocks = [Block(key, None, memoryview(b"")) for key in slots]
        held = list(slots.values())
        moves = list(zip(held, _moves(level, ns, blocks, held, [0] * len(held)), strict=True))
        for first in range(0, len(moves), ERASE_BATCH_BLOCKS):
            self._erasures.append(_Erasure(level, ns, moves[first : first + ERASE_BATCH_BLOCKS]))
        self.retry_erasures()
        return len(moves)

    def retry_erasures(self) -> None:
        """Submit erasures that found their lane busy or down."""
        waiting, self._erasures = self._erasures, []
        for erasure in waiting:
            if not self._submit_erase(erasure):
                self._erasures.append(erasure)

    @property
    def num_erasures_waiting(self) -> int:
        """Batches of blocks forgotten but not yet erased."""
        return len(self._erasures)

    def _batches(self, level: Level, ns: Namespace, blocks: Sequence[Block]) -> list[Sequence[Block]]:
        size = max(1, self._mover.lane(level.name).ticket_bytes // ns.layout.block_bytes)
        return [blocks[first : first + size] for first in range(0, len(blocks), size)]

    def _submit_read(
        self,
        level: Level,
        ns: Namespace,
        moves: list[BlockMove],
        slots: list[int],
        deadline_s: float,
        on_return: OnReturn,
        on_abandon: OnAbandon,
    ) -> bool:
        abandoned = False
        disowned = self._disownments.get(ns.digest, 0)
        flights = self._flights[level.name, READ]

        def abandon() -> None:
            nonlocal abandoned
            abandoned = True
            level.end_reads(ns, slots)  # a reader of a slot that is reused finds another block's header there: a miss
            self._count(level, READ, moves, [Outcome.LATE] * len(moves))
            on_abandon(moves)
            flights.end(flight)

        def settle(outcomes: list[Outcome]) -> None:
            if not abandoned:
                level.end_reads(ns, slots)
                self._count(level, READ, moves, outcomes)
                for move, outcome in zip(moves, outcomes, strict=True):
                    if outcome in (Outcome.ABSENT, Outcome.DAMAGED, Outcome.FOREIGN):
                        level.forget(ns, move.key)
            if self._disownments.get(ns.digest, 0) != disowned:
                outcomes = [Outcome.ABSENT] * len(moves)
            on_return(moves, outcomes)

        ticket = Ticket(
            work=lambda: self._read(level, moves, deadline_s),
            num_blocks=len(moves),
            num_bytes=len(moves) * ns.layout.block_bytes,
            deadline_s=deadline_s,
            finish=lambda outcomes: flights.settle(flight, moves, lambda: settle(outcomes)),
            abandon=abandon,
            urgent=True,
        )
        if not self._mover.submit(level.name, ticket):
            return False
        flight = flights.begin(moves)
        return True

    def _submit_write(
        self,
        level: Level,
        ns: Namespace,
        moves: list[BlockMove],
        slots: list[int],
        deadline_s: float,
        on_return: OnReturn,
        on_abandon: OnAbandon,
    ) -> bool:
        abandoned = False
        disowned = self._disownments.get(ns.digest, 0)
        flights = self._flights[level.name, WRITE]

        def abandon() -> None:
            nonlocal abandoned
            abandoned = True
            for slot in slots:
                level.quarantine_write(ns, slot)
            self._count(level, WRITE, moves, [Outcome.LATE] * len(moves))
            on_abandon(moves)
            flights.end(flight)

        def settle(outcomes: list[Outcome]) -> None:
            is_disowned = self._disownments.get(ns.digest, 0) != disowned
            if abandoned:
                self._reclaim(level, ns, moves, slots, is_disowned=is_disowned)
            else:
                self._count(level, WRITE, moves, outcomes)
                for move, slot, outcome in zip(moves, slots, outcomes, strict=True):
                    if outcome is Outcome.OK:
                        level.commit_write(ns, slot, move.key, move.parent, move.created_unix_s)
                    elif outcome is Outcome.FULL:
                        level.refuse_write(ns, slot)
                    else:
                        level.abort_write(ns, slot)
                if is_disowned:
                    self.erase(level, ns, [move.key for move in moves])
            on_return(moves, outcomes)

        ticket = Ticket(
            work=lambda: level.tier.write(moves, deadline_s),
            num_blocks=len(moves),
            num_bytes=len(moves) * ns.layout.block_bytes,
            deadline_s=deadline_s,
            finish=lambda outcomes: flights.settle(flight, moves, lambda: settle(outcomes)),
            abandon=abandon,
        )
        if not self._mover.submit(level.name, ticket):
            return False
        flight = flights.begin(moves)
        return True

    def _reclaim(
        self, level: Level, ns: Namespace, moves: Sequence[BlockMove], slots: Sequence[int], *, is_disowned: bool
    ) -> None:
        """A write that was given up has returned: its slots are free, after what it wrote of a cleared namespace."""
        if not is_disowned:
            for slot in slots:
                level.reclaim_write(ns, slot)
            return
        for move in moves:
            level.begin_erase(ns, move.key)  # a shared tier has it under its key
        self._erasures.append(_Erasure(level, ns, list(zip(slots, moves, strict=True))))
        self.retry_erasures()

    def _read(self, level: Level, moves: Sequence[BlockMove], deadline_s: float) -> list[Outcome]:
        """In a mover thread: read, and erase what is broken while its slots are still pinned."""
        outcomes = level.tier.read(moves, deadline_s)
        damaged = [move for move, outcome in zip(moves, outcomes, strict=True) if outcome is Outcome.DAMAGED]
        if damaged and self._mover.clock() < deadline_s:
            level.tier.erase(damaged)
        return outcomes

    def _submit_erase(self, erasure: _Erasure) -> bool:
        level, ns = erasure.level, erasure.ns

        def work() -> list[Outcome]:
            level.tier.erase([move for _, move in erasure.moves])
            return [Outcome.OK] * len(erasure.moves)

        def finish(outcomes: list[Outcome]) -> None:
            if outcomes[0] is Outcome.LATE:
                self._erasures.append(erasure)
                return
            for slot, _ in erasure.moves:
                level.end_erase(ns, slot)

        ticket = Ticket(
            work=work,
            num_blocks=len(erasure.moves),
            num_bytes=0,
            deadline_s=self._mover.clock() + ERASE_TIMEOUT_S,
            finish=finish,
            abandon=lambda: None,
        )
        return self._mover.submit(level.name, ticket)

    def _count(self, level: Level, op: str, moves: Sequence[BlockMove], outcomes: Sequence[Outcome]) -> None:
        num_ok = outcomes.count(Outcome.OK)
        for outcome in {Outcome.OK} if num_ok == len(outcomes) else set(outcomes):
            self._stats.inc("kvstore_copies_total", outcomes.count(outcome), level.name, op, outcome.value)
        self._stats.inc("kvstore_copied_bytes_total", num_ok * moves[0].layout.block_bytes, level.name, op)


def _moves(
    level: Level, ns: Namespace, blocks: Sequence[Block], slots: Sequence[int], created_unix_s: Sequence[int]
) -> list[BlockMove]:
    """The moves of as many leading blocks as there are slots."""
    layout, max_age_s = ns.layout, ns.max_age_s
    offsets_bytes = level.offsets_bytes(ns.fingerprint, slots)
    return [
        BlockMove(key, parent, layout, buffer, offset_bytes, created, max_age_s)
        for (key, parent, buffer, _), offset_bytes, created in zip(blocks, offsets_bytes, created_unix_s, strict=False)
    ]
