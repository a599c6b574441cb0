"""Deadlines as callers give them: absolute seconds on the store's clock. Pure."""

import math

from kvstore.errors import DeadlineError

MAX_WAIT_S = 600.0
"""What ``math.inf`` comes to: nothing here waits for ever, whoever asks for it."""


def bounded(deadline_s: float, now_s: float) -> float:
    """``deadline_s``, or the latest that may be. Raises ``DeadlineError`` for what is no moment at all."""
    if not isinstance(deadline_s, int | float) or math.isnan(deadline_s):
        raise DeadlineError(f"a deadline of {deadline_s!r}: give seconds on the clock of time.monotonic()")
    return min(deadline_s, now_s + MAX_WAIT_S)
