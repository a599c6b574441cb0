"""Load or recompute: how long reads of a tier take, learned from those that were made. Pure.

A read of n bytes is taken to last ``latency + n / bandwidth``. What is learned from is a *spell*: from when a tier
begins to read until it rests, however many threads read at once. What it gives then the next prefetch may hope for.

Rule 1: of a tier that nothing is known of, loading is free: it is the first reads that tell.
Rule 2: one spell moves the estimate by a bounded factor, so that one that met a busy machine is soon forgotten.
Rule 3: where loading does not pay nothing is read, and nothing learned: a small read is let through now and then, and
again at once while they turn out faster than was believed.
Invariant: latency and seconds per byte are above 0, whatever the clock does.
"""

from math import inf

FIRST_LATENCY_S = 1e-3
"""Of a tier that has not been read from yet."""
MAX_SPELL_BYTES = 64 << 20
"""A tier that never rests is learned from all the same."""
MAX_SURPRISE = 4.0
"""So many times as slow, or as fast, as expected a spell counts at most."""
BELIEF = 0.5
"""How much of a surprise is believed: the half, in octaves."""

TRIAL_BYTES = 16 << 20
"""Enough to keep all threads of a lane at work."""
TRIAL_SHARE = 0.01
"""Of the time, at most, trials may keep requests waiting."""
MIN_TRIAL_INTERVAL_S, MAX_TRIAL_INTERVAL_S = 1.0, 600.0


class ReadSpeed:
    """What one tier gives when it is read from."""

    def __init__(self, bytes_per_s: float | None = None) -> None:
        """``bytes_per_s`` is what was measured beforehand; None: nothing was."""
        self.latency_s = FIRST_LATENCY_S
        self._byte_s = None if bytes_per_s is None else 1.0 / bytes_per_s
        self._spell_bytes = 0
        self._spell_s = 0.0
        self._read_until_s = -inf
        self._next_trial_s = -inf

    @property
    def bytes_per_s(self) -> float | None:
        """The bandwidth; None while nothing is known."""
        return None if self._byte_s is None else 1.0 / self._byte_s

    def seconds(self, num_bytes: int) -> float:
        """How long so many bytes will take once their turn has come; 0 while nothing is known."""
        return 0.0 if self._byte_s is None else self.latency_s + num_bytes * self._byte_s

    def note(self, num_bytes: int, began_s: float, ended_s: float, *, is_last: bool) -> None:
        """A read has returned with so many good bytes; ``is_last``: no other one is under way. In order of return."""
        self._spell_bytes += num_bytes
        self._spell_s += max(0.0, ended_s - max(began_s, self._read_until_s))
        self._read_until_s = max(self._read_until_s, ended_s)
        if is_last:
            self._read_until_s = -inf  # a clock that was set back costs one spell
        if is_last or self._spell_bytes >= MAX_SPELL_BYTES:
            self._learn(self._spell_bytes, self._spell_s)
            self._spell_bytes, self._spell_s = 0, 0.0

    def take_trial(self, now_s: float, num_bytes: int) -> bool:
        """Whether ``num_bytes`` may be read now only to learn how long that takes; the next time is a while away."""
        if 0.0 < self._next_trial_s - now_s <= MAX_TRIAL_INTERVAL_S:
            return False
        interval_s = max(MIN_TRIAL_INTERVAL_S, self.seconds(num_bytes) / TRIAL_SHARE)
        self._next_trial_s = now_s + min(interval_s, MAX_TRIAL_INTERVAL_S)
        return True

    def _learn(self, num_bytes: int, seconds: float) -> None:
        """Each part of the estimate takes as much of a surprise as it has of what was expected."""
        if not num_bytes or seconds <= 0.0:
            return
        if self._byte_s is None:
            self.latency_s = min(FIRST_LATENCY_S, seconds / 2)
            self._byte_s = (seconds - self.latency_s) / num_bytes
            return
        expected_s = self.seconds(num_bytes)
        if seconds < expected_s / 2:
            self._next_trial_s = -inf
        surprise = min(max(seconds / expected_s, 1.0 / MAX_SURPRISE), MAX_SURPRISE) ** BELIEF
        share = self.latency_s / expected_s
        self.latency_s *= surprise**share
        self._byte_s *= surprise ** (1.0 - share)
