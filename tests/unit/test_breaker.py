"""The breaker's states, against its rules."""

from kvstore.breaker import FAILURES_TO_OPEN, FIRST_COOL_DOWN_S, LAST_COOL_DOWN_S, Breaker, BreakerState


def opened(now_s: float = 0.0) -> Breaker:
    breaker = Breaker()
    for _ in range(FAILURES_TO_OPEN):
        breaker.fail(now_s)
    return breaker


def test_it_opens_after_failures_in_a_row_only() -> None:
    breaker = Breaker()
    for _ in range(10):
        breaker.fail(0.0)
        breaker.succeed()
    assert breaker.state is BreakerState.CLOSED
    assert opened().state is BreakerState.OPEN


def test_a_stuck_copy_opens_it_at_once() -> None:
    breaker = Breaker()
    breaker.trip(0.0)
    assert not breaker.is_ready(0.0)


def test_after_the_cool_down_exactly_one_try_goes_through() -> None:
    breaker = opened()
    assert not breaker.is_ready(FIRST_COOL_DOWN_S / 2)
    assert breaker.is_ready(FIRST_COOL_DOWN_S)
    breaker.let_through()
    assert breaker.state is BreakerState.HALF_OPEN
    assert not breaker.is_ready(FIRST_COOL_DOWN_S)
    breaker.succeed()
    assert breaker.is_ready(FIRST_COOL_DOWN_S)


def test_failed_tries_wait_longer_each_time_but_never_long() -> None:
    breaker = opened()
    now_s = 0.0
    for _ in range(8):
        now_s += LAST_COOL_DOWN_S
        assert breaker.is_ready(now_s)
        breaker.let_through()
        breaker.fail(now_s)
        assert not breaker.is_ready(now_s + FIRST_COOL_DOWN_S)
    assert breaker.is_ready(now_s + LAST_COOL_DOWN_S)


def test_answers_to_older_copies_say_nothing_while_it_is_open() -> None:
    breaker = opened()
    breaker.succeed()
    assert breaker.state is BreakerState.OPEN
    breaker.fail(FIRST_COOL_DOWN_S - 0.01)
    assert breaker.is_ready(FIRST_COOL_DOWN_S)
