"""The mover's rules: every ticket comes back once, late ones touch nothing, a stuck one is waited for by nobody."""

from collections.abc import Callable
from functools import partial
from threading import Event, Semaphore

import pytest

from kvstore.breaker import BreakerState
from kvstore.mover import OVERDUE_GRACE_S, Lane, LaneShape, Mover, ThreadExecutor, Ticket
from kvstore.testing.dict_tiers import DictSlotTier
from kvstore.testing.steps import FakeClock, StepExecutor
from kvstore.types import Outcome

OK = [Outcome.OK]


class World:
    """A mover with one lane whose copies run when the test says so."""

    def __init__(self, max_bytes_in_flight: int = 100) -> None:
        self.clock = FakeClock()
        self.steps = StepExecutor()
        self.mover = Mover(self.clock)
        self.lane = Lane(DictSlotTier(1, 1), self.steps, LaneShape(1, max_bytes_in_flight, 10))
        self.mover.add_lane(self.lane)
        self.log: list[str] = []

    def ticket(
        self, name: str, *, work: Callable[[], list[Outcome]] = lambda: OK, num_bytes: int = 10, seconds: float = 1.0
    ) -> Ticket:
        def run() -> list[Outcome]:
            self.log.append(f"{name} runs")
            return work()

        return Ticket(
            work=run,
            num_blocks=1,
            num_bytes=num_bytes,
            deadline_s=self.clock() + seconds,
            finish=lambda outcomes: self.log.append(f"{name} {outcomes[0].value}"),
            abandon=lambda: self.log.append(f"{name} abandoned"),
        )

    def submit(self, ticket: Ticket) -> bool:
        return self.mover.submit("file", ticket)


@pytest.fixture
def world() -> World:
    return World()


def test_results_are_applied_by_poll_and_only_once(world: World) -> None:
    world.submit(world.ticket("a"))
    assert world.mover.poll() == 0
    world.steps.step()
    assert world.log == ["a runs"]
    assert world.mover.poll() == 1
    assert world.mover.poll() == 0
    assert world.log == ["a runs", "a ok"]
    assert world.lane.bytes_in_flight == 0


def test_bytes_in_flight_are_bounded_but_an_idle_lane_takes_anything(world: World) -> None:
    """LK-023: a slow tier makes the caller hear no, not a queue grow."""
    assert world.submit(world.ticket("big", num_bytes=1000))
    assert not world.submit(world.ticket("more"))
    world.steps.run_all()
    world.mover.poll()
    assert all(world.submit(world.ticket(str(number))) for number in range(10))
    assert not world.submit(world.ticket("eleventh"))


def test_a_ticket_whose_deadline_passed_in_the_queue_touches_nothing(world: World) -> None:
    world.submit(world.ticket("a"))
    world.clock.advance(1.0)
    world.steps.step()
    world.mover.poll()
    assert world.log == ["a late"]


def test_a_stuck_copy_is_given_up_then_finished_when_it_returns(world: World) -> None:
    """HG-004, WK-034: abandoned once, finished once, in that order."""
    world.submit(world.ticket("a"))
    world.clock.advance(1.0 + OVERDUE_GRACE_S)
    assert world.mover.poll() == 1
    assert world.mover.poll() == 0
    assert world.log == ["a abandoned"]
    assert world.lane.breaker.state is BreakerState.OPEN
    assert not world.submit(world.ticket("b"))
    world.steps.step()
    world.mover.poll()
    assert world.log == ["a abandoned", "a late"]
    assert world.mover.num_in_flight == 0


def test_a_tier_that_raises_is_a_failure_and_no_hang(world: World) -> None:
    def work() -> list[Outcome]:
        raise RuntimeError("a bug in a tier")

    world.submit(world.ticket("a", work=work))
    world.steps.step()
    world.mover.poll()
    assert world.log[-1] == "a failed"


def test_misses_and_a_full_tier_are_answers_and_leave_the_breaker_closed(world: World) -> None:
    for outcome in (Outcome.ABSENT, Outcome.FULL, Outcome.DAMAGED, Outcome.FOREIGN) * 3:
        world.submit(world.ticket("a", work=lambda outcome=outcome: [outcome]))  # type: ignore[misc]  # mypy cannot infer a lambda with defaults
        world.steps.step()
        world.mover.poll()
    assert world.lane.breaker.state is BreakerState.CLOSED


def test_a_tier_that_came_back_is_used_again(world: World) -> None:
    for _ in range(3):
        world.submit(world.ticket("bad", work=lambda: [Outcome.FAILED]))
        world.steps.step()
        world.mover.poll()
    assert not world.submit(world.ticket("refused"))
    world.clock.advance(5.0)
    assert world.submit(world.ticket("try"))
    assert not world.submit(world.ticket("second try"))
    world.steps.step()
    world.mover.poll()
    assert world.submit(world.ticket("again"))


def test_a_try_that_had_no_turn_is_followed_by_another(world: World) -> None:
    """A half-open breaker never waits for a try that told nothing."""
    world.lane.breaker.trip(world.clock())
    world.clock.advance(5.0)
    world.submit(world.ticket("try", seconds=0.5))
    world.clock.advance(0.52)  # past its deadline, within the grace
    world.steps.step()
    world.mover.poll()
    world.clock.advance(10.0)
    assert world.submit(world.ticket("another"))


def test_threads_run_copies_and_a_stuck_one_holds_nobody_up() -> None:
    mover = Mover()
    mover.add_lane(Lane(DictSlotTier(1, 1), ThreadExecutor("test", 2), LaneShape(2, 100, 10)))
    release, done = Event(), Event()

    def stuck() -> list[Outcome]:
        release.wait(60)
        return OK

    def quick() -> list[Outcome]:
        done.set()
        return OK

    finished: list[str] = []

    def submit(name: str, work: Callable[[], list[Outcome]]) -> None:
        finish = partial(_append, finished, name)
        mover.submit("file", Ticket(work, 1, 1, mover.clock() + 60, finish, abandon=lambda: None))

    submit("stuck", stuck)
    submit("quick", quick)
    assert done.wait(30)
    while not finished:
        mover.wait(1.0)
        mover.poll()
    assert finished == ["quick"]
    mover.close()  # does not wait for the stuck one
    release.set()
    while len(finished) < 2:
        mover.wait(1.0)
        mover.poll()


def test_what_somebody_waits_for_goes_first_and_the_rest_is_not_starved() -> None:
    """PF-025: a prefetch does not queue behind all that is being copied down."""
    executor = ThreadExecutor("test", 1)
    started, go_on, over = Event(), Event(), Event()
    ran: list[str] = []

    def block() -> None:
        started.set()
        go_on.wait(60)

    executor.submit(block)
    assert started.wait(60)
    for number in range(3):
        executor.submit(partial(ran.append, f"write {number}"))
    for number in range(5):
        executor.submit(partial(ran.append, f"read {number}"), urgent=True)
    executor.submit(over.set)
    go_on.set()
    assert over.wait(60)
    executor.close()
    assert ran == [
        *("read 0", "read 1", "read 2", "write 0", "read 3", "read 4"),
        *("write 1", "write 2"),
    ]


def test_every_turn_is_taken_once_however_many_threads_there_are() -> None:
    executor = ThreadExecutor("test", 8)
    left = Semaphore(0)
    ran: list[int] = []
    for number in range(5000):
        executor.submit(partial(_note, ran, number, left), urgent=number % 3 != 0)
    assert all(left.acquire(timeout=60) for _ in range(5000))
    executor.close()
    assert sorted(ran) == list(range(5000))


def _note(ran: list[int], number: int, left: Semaphore) -> None:
    ran.append(number)
    left.release()


def _append(finished: list[str], name: str, _: list[Outcome]) -> None:
    finished.append(name)


class SpreadTier(DictSlotTier):
    """Several servers, of which some answer."""

    some_answer = True

    def is_down(self) -> bool:
        return not self.some_answer


def test_a_tier_of_which_a_server_answers_is_not_given_up_for_another() -> None:
    """A copy of which nothing came may be all of one dead server's."""
    world = World()
    tier = SpreadTier(1, 1)
    world.lane.tier = tier

    def state_after(*names: str) -> BreakerState:
        for name in names:
            world.submit(world.ticket(name, work=lambda: [Outcome.FAILED]))
            world.steps.run_all()
            world.mover.poll()
        return world.lane.breaker.state

    assert state_after(*"abcdefgh") is BreakerState.CLOSED
    tier.some_answer = False
    assert state_after(*"ijk") is BreakerState.OPEN
    tier.some_answer = True
    world.clock.advance(1)
    assert state_after("the one try") is BreakerState.CLOSED
