"""Slots asked for before they are needed: who stores step by step waits for the sidecar at the first two steps only.

Rule 1: there is one spare at most, like the last reserve, asked for when two such follow each other.
Rule 2: a spare is taken whole, by a reserve that wants just that; any other, and a second of rest, give it back.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvstore.api.v1 import kvstore_pb2 as api
from kvstore.client.session import Call, Session

KEEP_S = 1.0
"""The steps of a prefill follow one another faster."""


@dataclass(frozen=True, slots=True)
class Spare:
    """A reserve that was sent; ``number`` is that of its call, and so of its lease."""

    session: Session
    number: int
    wanted: api.Reserve
    call: Call
    since_s: float

    def give_back(self) -> None:
        """Also where the answer is yet to come: requests are handled in order."""
        self.session.tell(api.SessionRequest(end_leases=api.EndLeases(leases=[self.number])))


class Ahead:
    """The spare of one client. The owner thread's, but for ``expire``."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._spare: Spare | None = None
        self._last: tuple[api.Reserve | None, float] = None, 0.0

    def take(self, session: Session, wanted: api.Reserve) -> tuple[int, list[int]] | None:
        """Number and offsets of the lease that was asked for ahead, if it is ``wanted``; any other is given back."""
        with self._lock:
            spare, self._spare = self._spare, None
        if spare is None:
            return None
        if spare.session is session and spare.wanted == wanted:
            reply = session.result(spare.call)
            if reply is not None and len(reply.leased.offsets_bytes) == wanted.num_blocks:
                return spare.number, list(reply.leased.offsets_bytes)
        spare.give_back()
        return None

    def renew(self, session: Session, wanted: api.Reserve, number: int, budget_s: float) -> None:
        """After a reserve of ``wanted``: send another, as call ``number``, where the one before was the same."""
        now_s = self._clock()
        (last, last_s), self._last = self._last, (wanted, now_s)
        if last != wanted or now_s >= last_s + KEEP_S:
            return
        call = session.begin(api.SessionRequest(call=number, reserve=wanted), now_s + budget_s)
        if call is not None:
            with self._lock:
                self._spare = Spare(session, number, wanted, call, now_s)

    def expire(self) -> None:
        """Give back a spare that nobody wants any more. Any thread."""
        with self._lock:
            spare = self._spare
            if spare is None or self._clock() < spare.since_s + KEEP_S:
                return
            self._spare = None
        spare.give_back()
