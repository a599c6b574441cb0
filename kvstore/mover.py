"""The threads that touch bytes. One lane per tier, bounded, with deadlines and a breaker.

The owner thread submits tickets and, in ``poll``, applies those whose copy has returned. Mover threads run a ticket's
work and nothing else: they never see a table.

Rule 1: ``poll`` finishes every submitted ticket exactly once, when its copy has returned, however late; if the deadline
passes first, it abandons the ticket before that, once.
Rule 2: a ticket whose deadline passes before its turn comes back LATE without having touched a byte.
Rule 3: nothing here waits for a copy, ``close`` included: a stuck thread is a daemon and keeps only what it holds.
"""

import itertools
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from threading import Event, Thread
from typing import Protocol

from kvstore.breaker import Breaker, BreakerState
from kvstore.placement import ReadSpeed
from kvstore.tiers.base import Measured, Spread, Tier
from kvstore.types import Outcome

Work = Callable[[], list[Outcome]]
Clock = Callable[[], float]


@dataclass(eq=False, slots=True)
class Ticket:
    """A copy in flight: what to run in the lane, and what the owner does once it has returned."""

    work: Work
    num_blocks: int
    num_bytes: int
    deadline_s: float
    finish: Callable[[list[Outcome]], None]
    """Called by the owner once the copy has returned, with one outcome per block."""
    abandon: Callable[[], None]
    """Called by the owner, before ``finish``, if the deadline passes while the copy is still running."""
    urgent: bool = False
    """Whether somebody waits for it: it goes before what is only copied down."""
    outcomes: list[Outcome] = field(default_factory=list)
    started: bool = False
    began_s: float = 0.0
    took_s: float = 0.0
    overdue: bool = False


class Executor(Protocol):
    """Where tickets run: threads, or steps that a test takes."""

    def submit(self, run: Callable[[], None], *, urgent: bool = False) -> None:
        """Run it soon, in order of submission where there is one thread; before others if somebody waits for it."""

    def close(self) -> None:
        """Take no more; do not wait."""


MAX_URGENT_IN_A_ROW = 3
"""Then something else has its turn: a copy-down that never came to it would take its tier for stuck."""


class ThreadExecutor:
    """Long-lived daemon threads on one SimpleQueue: a hand-off costs a hundredth of a thread pool's."""

    def __init__(self, name: str, num_threads: int) -> None:
        self._turns: SimpleQueue[bool] = SimpleQueue()
        """One for each that was submitted; False ends a thread."""
        self._urgent: deque[Callable[[], None]] = deque()  # append and popleft are atomic
        self._others: deque[Callable[[], None]] = deque()
        self._num_urgent_in_a_row = 0
        self._num_threads = num_threads
        for index in range(num_threads):
            Thread(target=self._run, name=f"kvstore-{name}-{index}", daemon=True).start()

    def submit(self, run: Callable[[], None], *, urgent: bool = False) -> None:
        """Queue it."""
        (self._urgent if urgent else self._others).append(run)
        self._turns.put(True)

    def close(self) -> None:
        """Let each thread end after what is queued."""
        for _ in range(self._num_threads):
            self._turns.put(False)

    def _run(self) -> None:
        while self._turns.get():
            self._next()()

    def _next(self) -> Callable[[], None]:
        """What was queued first among the urgent, or among the others when those have waited long enough."""
        order = [self._urgent, self._others]
        if self._num_urgent_in_a_row >= MAX_URGENT_IN_A_ROW:
            order.reverse()
        for queue in itertools.cycle(order):  # there is one for every turn, though another thread may get there first
            with suppress(IndexError):
                run = queue.popleft()
                # a race costs one turn
                self._num_urgent_in_a_row = self._num_urgent_in_a_row + 1 if queue is self._urgent else 0
                return run
        raise AssertionError("a cycle does not end")


@dataclass(frozen=True, slots=True)
class LaneShape:
    """How a tier likes its work. ``ticket_bytes``: how large one ticket is, so that all threads have some."""

    num_threads: int
    max_bytes_in_flight: int
    ticket_bytes: int

    def beside(self, ram_bytes: int) -> "LaneShape":
        """The shape where copies hold slots of so much RAM: a tier that hangs may keep a share of it, and no more."""
        max_bytes = min(self.max_bytes_in_flight, max(MIN_BYTES_IN_FLIGHT, int(ram_bytes * MAX_SHARE_OF_RAM)))
        return replace(self, max_bytes_in_flight=max_bytes, ticket_bytes=min(self.ticket_bytes, max_bytes))


MAX_SHARE_OF_RAM = 0.5
"""What copies to and from one lower tier may hold of RAM; less would cost a small one much of what it copies down."""
MIN_BYTES_IN_FLIGHT = 4 << 20
"""With less a tier could not be kept busy, and RAM that this is much of is a test's."""

_MIB = 1 << 20
LANE_SHAPES = {
    "memory": LaneShape(num_threads=1, max_bytes_in_flight=1024 * _MIB, ticket_bytes=8 * _MIB),
    "file": LaneShape(num_threads=4, max_bytes_in_flight=256 * _MIB, ticket_bytes=4 * _MIB),
    "redis": LaneShape(num_threads=2, max_bytes_in_flight=256 * _MIB, ticket_bytes=16 * _MIB),
}


class Lane:
    """The way to one tier."""

    def __init__(self, tier: Tier, executor: Executor, shape: LaneShape) -> None:
        self.tier = tier
        self.name = tier.name
        self.ticket_bytes = shape.ticket_bytes
        self.breaker = Breaker()
        self.max_bytes_in_flight = shape.max_bytes_in_flight
        self.bytes_in_flight = 0
        self.copy_s = 0.0
        """What all copies have taken in their threads, once they returned."""
        self.reads = ReadSpeed(tier.read_bytes_per_s() if isinstance(tier, Measured) else None)
        self.in_flight: set[Ticket] = set()
        self._executor = executor

    def is_down(self) -> bool:
        """Whether a copy of which nothing came says so of the whole tier."""
        return not isinstance(self.tier, Spread) or self.tier.is_down()

    @property
    def read_bytes_in_flight(self) -> int:
        """Bytes of the copies that somebody waits for."""
        return sum(ticket.num_bytes for ticket in self.in_flight if ticket.urgent)

    def has_room(self, num_bytes: int) -> bool:
        """Whether ``num_bytes`` more may be in flight; an idle lane takes a ticket of any size."""
        return not self.in_flight or self.bytes_in_flight + num_bytes <= self.max_bytes_in_flight

    def start(self, ticket: Ticket, run: Callable[[], None]) -> None:
        """Count the ticket and hand it to the executor."""
        self.in_flight.add(ticket)
        self.bytes_in_flight += ticket.num_bytes
        self._executor.submit(run, urgent=ticket.urgent)

    def end(self, ticket: Ticket) -> None:
        """The ticket has returned."""
        self.in_flight.remove(ticket)
        self.bytes_in_flight -= ticket.num_bytes
        self.copy_s += ticket.took_s
        if ticket.started and ticket.urgent and ticket.num_bytes:  # a probe moves no bytes
            num_bytes = ticket.num_bytes * ticket.outcomes.count(Outcome.OK) // ticket.num_blocks
            is_last = self.read_bytes_in_flight == 0
            self.reads.note(num_bytes, ticket.began_s, ticket.began_s + ticket.took_s, is_last=is_last)

    def close(self) -> None:
        """Take no more tickets."""
        self._executor.close()


class Mover:
    """All lanes, and the place where owner and threads meet."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self.clock = clock
        self._lanes: dict[str, Lane] = {}
        self._returned: deque[tuple[Lane, Ticket]] = deque()  # append and popleft are atomic
        self._wake = Event()
        self.on_return: Callable[[], object] = _nothing
        """Called in a mover thread when a copy has returned, for an owner that sleeps elsewhere than in ``wait``."""

    def add_lane(self, lane: Lane) -> None:
        """Open the way to a tier."""
        self._lanes[lane.name] = lane

    def lane(self, name: str) -> Lane:
        """The lane of a tier."""
        return self._lanes[name]

    @property
    def lanes(self) -> list[Lane]:
        """Every lane."""
        return list(self._lanes.values())

    @property
    def num_in_flight(self) -> int:
        """Tickets that have not come back."""
        return sum(len(lane.in_flight) for lane in self._lanes.values())

    def can_take(self, lane_name: str, num_bytes: int) -> bool:
        """Whether ``submit`` of a ticket of ``num_bytes`` would be accepted now."""
        lane = self._lanes[lane_name]
        return lane.has_room(num_bytes) and lane.breaker.is_ready(self.clock())

    def room_blocks(self, lane_name: str, block_bytes: int) -> int:
        """How many blocks may be added to what is in flight in a lane; none while its breaker is open."""
        lane = self._lanes[lane_name]
        if not lane.breaker.is_ready(self.clock()):
            return 0
        if not lane.in_flight:
            return max(1, lane.max_bytes_in_flight // block_bytes)
        return max(0, lane.max_bytes_in_flight - lane.bytes_in_flight) // block_bytes

    def submit(self, lane_name: str, ticket: Ticket) -> bool:
        """Start a copy; False, and nothing happens, where the lane is full or its breaker open."""
        lane = self._lanes[lane_name]
        if not self.can_take(lane_name, ticket.num_bytes):
            return False
        lane.breaker.let_through()
        lane.start(ticket, lambda: self._run(lane, ticket))
        return True

    def poll(self) -> int:
        """Apply what has returned, then abandon what is overdue; returns how many tickets that was."""
        self._wake.clear()
        now_s = self.clock()
        num_applied = 0
        while self._returned:
            lane, ticket = self._returned.popleft()
            lane.end(ticket)
            _judge(lane, ticket, now_s)
            ticket.finish(ticket.outcomes)
            num_applied += 1
        return num_applied + sum(self._abandon_overdue(lane, now_s) for lane in self._lanes.values())

    def _abandon_overdue(self, lane: Lane, now_s: float) -> int:
        """A copy that outlived its deadline is stuck: the tier is down, and nobody waits for it any more."""
        stuck = [t for t in lane.in_flight if not t.overdue and now_s >= t.deadline_s + OVERDUE_GRACE_S]
        if stuck:
            lane.breaker.trip(now_s)
        for ticket in stuck:
            ticket.overdue = True
            ticket.abandon()
        return len(stuck)

    def wait(self, timeout_s: float) -> None:
        """Sleep until a copy returns, at most ``timeout_s``. Only for callers with nothing else to do."""
        if not self._returned:
            self._wake.wait(timeout_s)

    def close(self) -> None:
        """Take no more tickets; never waits for one."""
        for lane in self._lanes.values():
            lane.close()

    def _run(self, lane: Lane, ticket: Ticket) -> None:
        began_s = self.clock()
        if began_s >= ticket.deadline_s:
            ticket.outcomes = [Outcome.LATE] * ticket.num_blocks
        else:
            ticket.started, ticket.began_s = True, began_s
            try:
                ticket.outcomes = ticket.work()
            except Exception:  # noqa: BLE001 - the edge of a mover thread: a bug in a tier is a miss, not a hang
                ticket.outcomes = [Outcome.FAILED] * ticket.num_blocks
            ticket.took_s = self.clock() - began_s
        self._returned.append((lane, ticket))
        self._wake.set()
        self.on_return()


def _nothing() -> None:
    """Nobody sleeps elsewhere."""


OVERDUE_GRACE_S = 0.05
"""A tier gives up by itself at the deadline; only one that did not is stuck."""


def _judge(lane: Lane, ticket: Ticket, now_s: float) -> None:
    """Tell the breaker what a returned ticket says of its tier; a miss or a full tier is an answer like any other."""
    breaker = lane.breaker
    if ticket.overdue:
        return  # it was counted when it became overdue
    if ticket.started:
        # One block of many that failed is a bad sector, or one server of a Cluster: the rest of the tier answers.
        if all(outcome in (Outcome.FAILED, Outcome.LATE) for outcome in ticket.outcomes) and lane.is_down():
            breaker.fail(now_s)
        else:
            breaker.succeed()
    elif breaker.state is BreakerState.HALF_OPEN:
        breaker.fail(now_s)  # the one try had no turn: there must be another
