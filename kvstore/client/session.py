"""One stream to the sidecar, from this side: requests go out in order, replies come back to whoever waits for them.

The owner thread asks and polls; one reader thread takes in. They meet in ``Call`` objects and in the ``Inbox``.

Rule 1: a call is settled once: by its reply, or by None when the session ends or its time is over.
Rule 2: a lease is valid until ``held_until_s``, which only a pong that the sidecar has seen can move.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from threading import Event

import grpc

from kvstore.api.v1 import kvstore_pb2 as api
from kvstore.api.v1.kvstore_pb2_grpc import KVStoreStub
from kvstore.client.stream import Stream
from kvstore.client.tether import Tether
from kvstore.errors import WireError
from kvstore.namespace import Namespace

OnReply = Callable[[api.SessionReply | None], None]


@dataclass(eq=False, slots=True)
class Call:
    """A request that wants a reply."""

    deadline_s: float
    on_reply: OnReply | None = None
    """What the owner's ``poll`` is to do with the reply, or with None."""
    settled: Event = field(default_factory=Event)
    reply: api.SessionReply | None = None


class Inbox:
    """What the owner has yet to apply, of every session there has been."""

    def __init__(self) -> None:
        self._due: deque[Callable[[], None]] = deque()  # append and popleft are atomic
        self._arrived = Event()

    def put(self, apply: Callable[[], None]) -> None:
        """Any thread: have the owner call it in its next ``poll``."""
        self._due.append(apply)
        self._arrived.set()

    def wait(self, timeout_s: float) -> None:
        """Sleep until there is something, at most ``timeout_s``."""
        self._arrived.wait(timeout_s)

    def poll(self) -> int:
        """Apply everything; returns how much that was."""
        self._arrived.clear()
        num_applied = 0
        while self._due:
            self._due.popleft()()
            num_applied += 1
        return num_applied


class Session:
    """A registered stream."""

    def __init__(self, tether: Tether, channel: grpc.Channel, register: api.Register, inbox: Inbox) -> None:
        """Open the stream; ``register`` is its first request."""
        self.tether = tether
        self.is_over = False
        self.is_stalled = False
        """The sidecar let a call's time pass and has said nothing since: until it does, nobody waits for it."""
        self.held_until_s = 0.0
        self.on_ping: Callable[[], None] = _nothing
        """Called in the reader thread, about once a second."""
        self._lease_s = 0.0
        self._outbox: SimpleQueue[api.SessionRequest | None] = SimpleQueue()
        self._calls: dict[int, Call] = {}
        self._inbox = inbox
        self._pongs_s: dict[int, float] = {}
        self._outbox.put(api.SessionRequest(register=register))
        self._replies = Stream(KVStoreStub(channel).Session(iter(self._outbox.get, None)))

    # ---- the reader thread

    def register(self) -> api.Registered:
        """Wait until it is registered. Raises ``StreamEndedError`` or ``WireError`` where that does not come."""
        began_s = time.monotonic()
        reply = next(self._replies, None)
        if reply is None:
            raise WireError("the sidecar ended the session before it began")
        registered: api.Registered = reply.registered
        self._lease_s = registered.lease_ms / 1000
        self.held_until_s = began_s + self._lease_s
        return registered

    def read(self) -> None:
        """Take in what comes until the stream ends. Raises ``StreamEndedError`` when it is cut off."""
        for reply in self._replies:
            self.is_stalled = False
            if reply.HasField("ping"):
                self._answer(reply.ping)
            elif (call := self._calls.pop(reply.call, None)) is not None:
                self._settle(call, reply)

    def end(self) -> None:
        """The stream is over, whoever ended it. Any thread; may be called again."""
        self.is_over = True
        self._outbox.put(None)
        self._replies.cancel()
        while self._calls:
            _, call = self._calls.popitem()
            self._settle(call, None)

    def close(self) -> None:
        """``end``, and let go of the stream. In the reader thread."""
        self.end()
        self._replies.close()

    def _answer(self, ping: api.Ping) -> None:
        now_s = time.monotonic()
        sent_s = self._pongs_s.get(ping.last_pong)
        if sent_s is not None:
            self.held_until_s = sent_s + self._lease_s
        self._pongs_s = {number: at_s for number, at_s in self._pongs_s.items() if number > ping.last_pong}
        self._pongs_s[ping.number] = now_s
        self._outbox.put(api.SessionRequest(pong=api.Pong(number=ping.number)))
        self.on_ping()

    def _settle(self, call: Call, reply: api.SessionReply | None) -> None:
        call.reply = reply
        call.settled.set()
        if call.on_reply is not None:
            self._inbox.put(partial(call.on_reply, reply))

    # ---- the owner thread

    @property
    def holds(self) -> bool:
        """Whether leases of this session are valid at this moment."""
        return not self.is_over and time.monotonic() < self.held_until_s

    def views(self, ns: Namespace, offsets_bytes: Sequence[int]) -> list[memoryview]:
        """The bytes of slots; good as long as somebody has them, whatever becomes of the session."""
        return self.tether.arena.views(offsets_bytes, ns.layout.block_bytes)

    def tell(self, request: api.SessionRequest) -> None:
        """Send; no reply is wanted."""
        self._outbox.put(request)

    def ask(self, request: api.SessionRequest, budget_s: float) -> api.SessionReply | None:
        """Send, and wait for the reply as long as the budget lasts; None: there is none."""
        call = self.begin(request, time.monotonic() + budget_s)
        return None if call is None else self.result(call)

    def begin(self, request: api.SessionRequest, deadline_s: float, on_reply: OnReply | None = None) -> Call | None:
        """Send; ``on_reply`` is called in some ``poll``. None, and nothing happens, where the session is over."""
        call = Call(deadline_s, on_reply)
        self._calls[request.call] = call
        self._outbox.put(request)
        # At the end the reader has settled the calls that it saw; it does not come back for one more.
        return None if self.is_over and self._calls.pop(request.call, None) is not None else call

    def result(self, call: Call) -> api.SessionReply | None:
        """The reply, waited for until the call's deadline; None: there is none."""
        if not call.settled.wait(max(0.0, call.deadline_s - time.monotonic())):
            self.is_stalled = True
        return call.reply

    def give_up_overdue(self) -> None:
        """Settle the calls whose time is over with None."""
        now_s = time.monotonic()
        for number, call in list(self._calls.items()):
            if now_s >= call.deadline_s and self._calls.pop(number, None) is not None:
                self._settle(call, None)


def _nothing() -> None:
    """Nobody wants to know."""


def no_views(_ns: Namespace, _slots: Sequence[int]) -> list[memoryview]:
    """Of no slots there is nothing to see."""
    return []
