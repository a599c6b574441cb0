"""Which of several engines gets a request. Pure."""

from collections.abc import Callable, Sequence

from kvstore.replay.fleet import Engine, cost_of
from kvstore.replay.hardware import Hardware
from kvstore.replay.trace import Trace, TraceRequest

Router = Callable[[TraceRequest, Sequence[Engine]], int]
"""The index of the engine for a request."""


class RoundRobin:
    """One after another."""

    def __init__(self, trace: Trace, hardware: Hardware) -> None:
        self._next = -1

    def __call__(self, request: TraceRequest, engines: Sequence[Engine]) -> int:
        """The next one."""
        self._next = (self._next + 1) % len(engines)
        return self._next


class Sticky:
    """A session stays where it began; new ones go round.

    Where a trace does not say what a session is, a request goes on the one that ends with one of its blocks.
    """

    def __init__(self, trace: Trace, hardware: Hardware) -> None:
        self._tokens_per_block = trace.tokens_per_block
        self._engine_of: dict[object, int] = {}
        self._last = -1

    def __call__(self, request: TraceRequest, engines: Sequence[Engine]) -> int:
        """Where the session is, else the next one."""
        session = request.hints.get("session")
        whole = request.chain[: request.input_tokens // self._tokens_per_block]
        names: Sequence[object] = whole[::-1] if session is None else [("session", session)]
        engine = next((self._engine_of[name] for name in names if name in self._engine_of), None)
        if engine is None:
            engine = self._last = (self._last + 1) % len(engines)
        if names:
            self._engine_of[names[0]] = engine
        return engine


class PrefixAware:
    """Where the first token would come earliest, given what each engine has and what waits for it."""

    def __init__(self, trace: Trace, hardware: Hardware) -> None:
        self._trace = trace
        self._hardware = hardware

    def __call__(self, request: TraceRequest, engines: Sequence[Engine]) -> int:
        """The first of the earliest."""

        def first_token_s(index: int) -> float:
            engine = engines[index]
            cost = cost_of(self._trace, request, engine, self._hardware)
            return max(request.now_s, engine.free_at_s) + cost.service_s

        return min(range(len(engines)), key=first_token_s)


ROUTERS: dict[str, Callable[[Trace, Hardware], Router]] = {
    "round-robin": RoundRobin,
    "sticky": Sticky,
    "prefix-aware": PrefixAware,
}
