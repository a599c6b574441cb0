"""When to stop asking a tier that fails, and when to try again. Pure.

    CLOSED --`failures_to_open` failures in a row, or a stuck copy--> OPEN --cool-down over--> HALF_OPEN
    HALF_OPEN --one success--> CLOSED        HALF_OPEN --one failure--> OPEN, with twice the cool-down

Invariant: while OPEN nothing is let through; while HALF_OPEN exactly one try is out.
"""

from enum import Enum

FAILURES_TO_OPEN = 3
FIRST_COOL_DOWN_S = 0.5
LAST_COOL_DOWN_S = 4.0
"""A tier that came back is used again within seconds, so the cool-down stays short."""


class BreakerState(Enum):
    """What a tier's breaker lets through."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Breaker:
    """The health of one tier, as its answers show it."""

    def __init__(self) -> None:
        self.state = BreakerState.CLOSED
        self.num_openings = 0
        self._failures = 0
        self._cool_down_s = FIRST_COOL_DOWN_S
        self._retry_at_s = 0.0

    def is_ready(self, now_s: float) -> bool:
        """Whether a copy may start now."""
        if self.state is BreakerState.OPEN:
            return now_s >= self._retry_at_s
        return self.state is BreakerState.CLOSED

    def let_through(self) -> None:
        """A copy starts, as ``is_ready`` allowed; in OPEN it is the one try."""
        if self.state is BreakerState.OPEN:
            self.state = BreakerState.HALF_OPEN

    def succeed(self) -> None:
        """A copy was answered; one that was started before the breaker opened says nothing new."""
        if self.state is BreakerState.OPEN:
            return
        self.state = BreakerState.CLOSED
        self._failures = 0
        self._cool_down_s = FIRST_COOL_DOWN_S

    def fail(self, now_s: float) -> None:
        """A copy failed; one that was started before the breaker opened says nothing new."""
        if self.state is BreakerState.OPEN:
            return
        self._failures += 1
        if self.state is BreakerState.HALF_OPEN or self._failures >= FAILURES_TO_OPEN:
            self.trip(now_s)

    def trip(self, now_s: float) -> None:
        """Open at once: a copy is stuck."""
        if self.state is BreakerState.HALF_OPEN:
            self._cool_down_s = min(2 * self._cool_down_s, LAST_COOL_DOWN_S)
        if self.state is not BreakerState.OPEN:
            self.num_openings += 1
        self.state = BreakerState.OPEN
        self._failures = 0
        self._retry_at_s = now_s + self._cool_down_s
