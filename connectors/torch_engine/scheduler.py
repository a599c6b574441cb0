"""Who computes how many tokens next. Pure: pages are asked of the ``Pages`` it is given.

Rule 1: requests that run come before those that wait; each of them that decodes gets its token, prompts share what is
left of the step's budget. Rule 2: where pages run out, the request admitted last gives up its own and waits again,
first in line; its tokens are kept and their KV is recomputed or found in a tier. Rule 3: a request whose prefix is on
its way is passed over and delays nobody; otherwise the line is kept.
"""

from collections import deque
from enum import Enum
from typing import Protocol

from connectors.torch_engine.request import EngineRequest


class Admission(Enum):
    """What came of a try to admit a request."""

    ADMITTED = "admitted"
    NOT_YET = "not yet"  # its prefix is on its way
    NO_ROOM = "no room"  # too few pages for its prompt


class Pages(Protocol):
    """The KV pages of requests."""

    def attach(self, request: EngineRequest) -> Admission:
        """Give an admitted request what the tiers have of its prefix."""

    def grow(self, request: EngineRequest, num_tokens: int) -> bool:
        """Give pages to the next ``num_tokens``; False, and nothing changes, where there are too few."""

    def release(self, request: EngineRequest) -> None:
        """Take all pages back; the request has computed nothing."""


class Scheduler:
    """The line of requests and the set that runs."""

    def __init__(self, pages: Pages, max_running: int, max_step_tokens: int) -> None:
        self._pages = pages
        self._max_running = max_running
        self._max_step_tokens = max_step_tokens
        self.waiting: deque[EngineRequest] = deque()
        self.running: list[EngineRequest] = []
        """In order of admission."""

    def add(self, request: EngineRequest) -> None:
        """Join the line."""
        self.waiting.append(request)

    def remove(self, request: EngineRequest) -> None:
        """Leave, from wherever it is, and give all pages back."""
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self._pages.release(request)

    def schedule(self) -> list[tuple[EngineRequest, int]]:
        """The next step: each request with how many tokens it computes."""
        num_decoding = sum(request.num_left == 1 for request in self.running)
        budget = self._max_step_tokens - num_decoding
        work: list[tuple[EngineRequest, int]] = []
        for request in tuple(self.running):
            num_tokens = 1 if request.num_left == 1 else min(request.num_left, budget)
            if num_tokens > 0 and request in self.running and self._make_room(request, num_tokens):
                work.append((request, num_tokens))
                budget -= num_tokens if request.num_left > 1 else 0
        work.extend(self._admit(budget))
        return work

    def _make_room(self, request: EngineRequest, num_tokens: int) -> bool:
        """Preempt from the end until ``request`` has its pages; False if it had to give way, or wait, itself."""
        while not self._pages.grow(request, num_tokens):
            if len(self.running) == 1:
                return False  # the rest is under copies, which return
            victim = self.running.pop()
            self._pages.release(victim)
            victim.metrics.num_preemptions += 1
            self.waiting.appendleft(victim)
            if victim is request:
                return False
        return True

    def _admit(self, budget: int) -> list[tuple[EngineRequest, int]]:
        admitted: list[tuple[EngineRequest, int]] = []
        for request in tuple(self.waiting):
            if budget <= 0 or len(self.running) == self._max_running:
                break
            outcome = self._pages.attach(request)
            if outcome is Admission.NO_ROOM:
                break
            if outcome is Admission.NOT_YET:
                continue
            self.waiting.remove(request)
            self.running.append(request)
            num_tokens = min(request.num_left, budget)
            if self._pages.grow(request, num_tokens):
                admitted.append((request, num_tokens))
                budget -= num_tokens
        return admitted
