"""A store in the sidecar, used like an embedded one: the same calls, the same leases, the same answers or a miss.

One thread owns a client, as one owns a store. ``lookup`` and ``prefetch`` never wait; the other calls wait for the
sidecar as long as ``budget_s`` lasts, and not at all while it is away or silent. Whatever goes wrong is a miss and a
counter.
"""

import itertools
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore import machine
from kvstore.api.v1 import kvstore_pb2 as api
from kvstore.client.ahead import Ahead
from kvstore.client.connection import Connection
from kvstore.client.lending import Lending
from kvstore.client.session import Inbox, Session, no_views
from kvstore.deadline import bounded
from kvstore.errors import ClosedError, LayoutError
from kvstore.hashing import Identity
from kvstore.layout import Layout
from kvstore.lease import Committed, LeaseState, Location, Lookup, ReadLease, WriteLease, too_many_keys
from kvstore.lending import LentBuffer, Transfer, readable_bytes, writable_bytes
from kvstore.namespace import Namespace
from kvstore.promotion import Prefetch
from kvstore.stats import Stats
from kvstore.types import NAMESPACE_DIGEST_BYTES, BlockKey, Request
from kvstore.wire import pack_chain, pack_opening, pack_request

BUDGET_S = 0.1
"""An engine's step takes some ten milliseconds; a sidecar that needs longer than a few of them is not worth waiting."""
FRESH_S = 1.0
MAX_ANSWERS = 1024
LONG_CHAIN_BLOCKS = 64
MAX_SHARE_AHEAD = 1 / 8
"""Of the arena, what one client asks for before it needs it."""
CLOSE_TIMEOUT_S = 2.0


@dataclass(eq=False, slots=True)
class _Answer:
    """What is known of a chain that was looked up."""

    deadline_s: float
    lookup: Lookup | None = None


@dataclass(frozen=True, slots=True)
class _Opened:
    """A namespace and its number on the wire."""

    number: int
    ns: Namespace
    message: api.OpenNamespace


@dataclass(eq=False, slots=True)
class Held:
    """A lease as the sidecar knows it."""

    session: Session
    call: int


class StoreClient:
    """Blocks of any number of namespaces in the sidecar of this host."""

    def __init__(
        self,
        path: Path | None = None,
        *,
        token: str = "",
        name: str = "",
        budget_s: float = BUDGET_S,
        prefill_tokens_per_s: int = 0,
    ) -> None:
        """Of the sidecar at the socket ``path``, by default this user's own; it may be absent. The engine's rate."""
        self.stats = Stats()
        self._budget_s = budget_s
        self._prefill_tokens_per_s = prefill_tokens_per_s
        self._calls = itertools.count(1)
        self._namespaces: dict[bytes, _Opened] = {}
        self._opening = threading.Lock()
        self._answers: dict[tuple[BlockKey, BlockKey], _Answer] = {}
        self._held: dict[ReadLease | WriteLease, Held] = {}
        self._prefetches: set[Prefetch] = set()
        self._ahead = Ahead()
        self._unacknowledged: Session | None = None
        """A session that is yet to hear that nothing of the ones before it is written to."""
        self._inbox = Inbox()
        self._lending = Lending(self, self._inbox)
        self._packed: tuple[tuple[BlockKey, ...], api.Chain] = ((), api.Chain())
        self._closed = False
        self._connection = Connection(
            path or machine.default_socket(), token, name or f"process {os.getpid()}", self._inbox, self._reopen
        )
        self._connection.start()

    def wait_connected(self, timeout_s: float) -> bool:
        """Sleep until the sidecar is there, at most ``timeout_s``; whether it is. Nobody has to."""
        return self._connection.wait_connected(timeout_s)

    # ---- namespaces

    def open_namespace(self, identity: Identity, layout: Layout, *, max_age_s: int | None = None) -> Namespace:
        """Whose blocks the following calls are about. Raises ``LayoutError`` if the sidecar says so."""
        self._require_open()
        ns = Namespace(identity, layout, max_age_s or 0, self._prefill_tokens_per_s)
        with self._opening:
            known = self._namespaces.get(ns.digest)
            number = known.number if known else len(self._namespaces) + 1
            message = pack_opening(number, ns, max_age_s)
            self._namespaces[ns.digest] = _Opened(number, ns, message)
            session = self._session()
        if session is not None:
            reply = self._ask(session, "open_namespace", open_namespace=message)
            if reply is not None and reply.HasField("refused"):
                raise LayoutError(reply.refused.reason)
        return ns

    def _reopen(self, session: Session) -> None:
        """In the reader thread: a new session learns of every namespace before anything else."""
        with self._opening:
            for opened in self._namespaces.values():
                session.tell(api.SessionRequest(open_namespace=opened.message))
            self._unacknowledged = session
            session.on_ping = self._ahead.expire
            self._connection.session = session
        self._acknowledge()

    # ---- requests

    def arrive(self, request: Request, chain: Sequence[BlockKey]) -> int:
        """A request refers to ``chain``; returns how many leading blocks are worth keeping."""
        self._require_open()
        opened = self._opened(chain)
        if opened is None:
            return 0
        arrive = api.Arrive(request=pack_request(request), chain=self._pack(opened, chain))
        reply = self._ask(self._session(), "arrive", arrive=arrive)
        return reply.arrived.keep if reply is not None and reply.HasField("arrived") else len(chain)

    def finish(self, request: Request, chain: Sequence[BlockKey], output_tokens: int) -> None:
        """The request ended."""
        opened, session = self._opened(chain), self._session()
        if opened is not None and session is not None:
            finish = api.Finish(
                request=pack_request(request), chain=self._pack(opened, chain), output_tokens=output_tokens
            )
            session.tell(api.SessionRequest(finish=finish))

    def lookup(self, chain: Sequence[BlockKey]) -> Lookup:
        """How much of ``chain`` is here: pending at first, and the sidecar's answer when that has come."""
        self._require_open()
        opened, session, now_s = self._opened(chain), self._session(), time.monotonic()
        if opened is None or session is None:
            return _NOTHING
        asked = chain[0], chain[-1]  # the last key stands for all before it
        answer = self._answers.pop(asked, None)
        if answer is not None and answer.lookup is None and now_s >= answer.deadline_s:
            self.stats.inc("kvstore_errors_total", 1, "client.lookup")
            return _NOTHING
        if answer is not None and answer.lookup is not None and now_s < answer.deadline_s + FRESH_S:
            return answer.lookup
        if answer is None or answer.lookup is not None:
            self.stats.inc("kvstore_lookups_total")
            answer = self._ask_for(session, self._pack(opened, chain), now_s)
        while len(self._answers) >= MAX_ANSWERS:
            del self._answers[next(iter(self._answers))]
        self._answers[asked] = answer
        return Lookup(0, 0, pending=True)

    def _ask_for(self, session: Session, chain: api.Chain, now_s: float) -> _Answer:
        answer = _Answer(now_s + self._budget_s)

        def on_reply(reply: api.SessionReply | None) -> None:
            if reply is not None:
                answer.lookup = Lookup(reply.found.ready, reply.found.found, reply.found.pending)

        request = api.SessionRequest(call=next(self._calls), lookup=api.Lookup(chain=chain))
        session.begin(request, answer.deadline_s, on_reply)
        return answer

    def prefetch(self, chain: Sequence[BlockKey], deadline_s: float) -> Prefetch:
        """Bring as much of ``chain`` into RAM as lower levels have, by ``deadline_s``."""
        self._require_open()
        self.stats.inc("kvstore_prefetches_total")
        opened, session = self._opened(chain), self._session()
        now_s = time.monotonic()
        deadline_s = bounded(deadline_s, now_s)
        budget_s = deadline_s - now_s
        prefetch = Prefetch(opened.ns if opened else _NOWHERE, chain, deadline_s, done=True)
        if opened is None or session is None or budget_s <= 0:
            return prefetch

        def on_reply(reply: api.SessionReply | None) -> None:
            self._prefetches.discard(prefetch)
            prefetch.done = True
            if reply is not None:
                prefetch.ready = reply.prefetched.ready
                prefetch.blocks_from.update(reply.prefetched.blocks_from)

        request = api.Prefetch(chain=self._pack(opened, chain), budget_ms=int(budget_s * 1000))
        message = api.SessionRequest(call=next(self._calls), prefetch=request)
        if session.begin(message, deadline_s + self._budget_s, on_reply) is not None:
            prefetch.done = False
            self._prefetches.add(prefetch)
        return prefetch

    # ---- leases

    def pin(self, chain: Sequence[BlockKey]) -> ReadLease:
        """Pin the longest READY prefix of ``chain`` in RAM; ask the lease whether it is ``still_held`` after a copy."""
        return self._pin(chain)

    def _pin(self, chain: Sequence[BlockKey], **of_rank: Any) -> ReadLease:
        self._require_open()
        opened, session = self._opened(chain), self._session()
        ns = opened.ns if opened else _NOWHERE
        call, offsets_bytes = next(self._calls), list[int]()
        if opened is not None and session is not None:
            pin = api.Pin(chain=self._pack(opened, chain), **of_rank)
            offsets_bytes = list(self._lease(session, call, "pin", pin=pin).offsets_bytes)
        if session is None or not offsets_bytes:
            return ReadLease(ns, (), [], no_views, self.release)
        lease = ReadLease(
            ns, chain[: len(offsets_bytes)], offsets_bytes, session.views, self.release, lambda: session.holds
        )
        self._held[lease] = Held(session, call)
        self.stats.inc("kvstore_loaded_blocks_total", lease.num_blocks, "memory")
        self.stats.inc("kvstore_loaded_bytes_total", lease.num_blocks * ns.layout.block_bytes, "memory")
        return lease

    def release(self, lease: ReadLease) -> None:
        """End a pin. Raises ``LeaseError`` the second time."""
        lease.require(LeaseState.HELD, "release")
        lease.state = LeaseState.ENDED
        self._end(lease)

    def reserve(self, ns: Namespace, num_blocks: int) -> WriteLease:
        """Up to ``num_blocks`` slots in RAM to write to; fewer, down to none, when the rest is in use."""
        self._require_open()
        opened, session = self._require_ours(ns), self._session()
        if session is None or num_blocks <= 0:
            return WriteLease(ns, [], no_views, self.abort)
        wanted = api.Reserve(namespace=opened.number, num_blocks=num_blocks)
        call, offsets_bytes = self._ahead.take(session, wanted) or self._reserve(session, wanted)
        lease = WriteLease(ns, offsets_bytes, session.views, self.abort)
        if offsets_bytes and not self._hold(lease, Held(session, call)):
            return WriteLease(ns, [], no_views, self.abort)
        if num_blocks * ns.layout.block_bytes <= MAX_SHARE_AHEAD * session.tether.arena.capacity_bytes:
            self._ahead.renew(session, wanted, next(self._calls), self._budget_s)
        return lease

    def _reserve(self, session: Session, wanted: api.Reserve) -> tuple[int, list[int]]:
        call = next(self._calls)
        return call, list(self._lease(session, call, "reserve", reserve=wanted).offsets_bytes)

    def commit(self, lease: WriteLease, keys: Sequence[BlockKey], parent: BlockKey | None) -> Committed:
        """Name the next ``len(keys)`` slots of ``lease``, root first; none of them where the lease was lost.

        Does not wait; whoever asks what came of it does. Raises ``LeaseError`` past the lease's end or for more keys
        than slots.
        """
        self._require_open()
        lease.require(LeaseState.HELD, "commit")
        if len(keys) > len(lease.unnamed):
            raise too_many_keys(len(keys), lease)
        opened = self._require_ours(lease.ns)
        if any(not key.startswith(lease.ns.digest) for key in keys):
            raise LayoutError(f"a key is of another namespace than that of model {lease.ns.identity.model!r}")
        held = self._held.get(lease)
        if not keys or held is None or not held.session.holds:
            return Committed([], frozenset())
        request = api.Commit(
            lease=held.call,
            chain=self._pack(opened, keys),
            parent=parent[NAMESPACE_DIGEST_BYTES:] if parent is not None else b"",
            num_named=lease.num_named,
        )
        lease.num_named += len(keys)
        if not lease.unnamed:
            lease.state = LeaseState.ENDED
            del self._held[lease]
        return self._commit(held, request, keys, lease.ns.layout.block_bytes)

    def _commit(self, held: Held, request: api.Commit, keys: Sequence[BlockKey], block_bytes: int) -> Committed:
        session = held.session

        def on_reply(reply: api.SessionReply | None) -> None:
            if reply is not None and reply.HasField("committed"):
                self.stats.inc("kvstore_stored_blocks_total", len(keys))
                self.stats.inc("kvstore_stored_bytes_total", len(keys) * block_bytes)
                return
            self.stats.inc("kvstore_errors_total", 1, "client.commit")
            session.tell(api.SessionRequest(end_leases=api.EndLeases(leases=[held.call])))

        def ask() -> Committed:
            reply = session.result(call) if call is not None else None
            committed = reply.committed if reply is not None else api.Committed()
            return Committed(list(committed.offsets_bytes), frozenset(keys[index] for index in committed.accepted))

        message = api.SessionRequest(call=next(self._calls), commit=request)
        call = session.begin(message, time.monotonic() + self._budget_s, on_reply)
        return Committed([], frozenset(), ask)

    def abort(self, lease: WriteLease) -> None:
        """Give the unnamed slots back; nothing may touch them any more. Raises ``LeaseError`` the second time."""
        lease.require(LeaseState.HELD, "abort")
        lease.state = LeaseState.ENDED
        self._end(lease)

    def quarantine(self, lease: WriteLease) -> None:
        """Give the unnamed slots up while a copy may still write to them; the sidecar need not know."""
        lease.require(LeaseState.HELD, "quarantine")
        lease.state = LeaseState.QUARANTINED

    def reclaim(self, lease: WriteLease) -> None:
        """That copy has returned: the slots are free."""
        lease.require(LeaseState.QUARANTINED, "reclaim")
        lease.state = LeaseState.ENDED
        self._end(lease)

    def locate(self, lease: ReadLease | WriteLease) -> Location | None:
        """Where the slots of a held lease lie, for other processes of the engine; None if it was lost.

        With the tie to the sidecar, so that a process that writes to them outlives nobody: they are handed out again
        when all that have it are gone.
        """
        held = self._held.get(lease)
        if held is None or held.session.is_over:
            return None
        tether = held.session.tether
        descriptors = tether.arena.fd, tether.connection.fileno()
        return Location(descriptors, list(lease.slots), tether.arena.pages_stay)

    def fixed_memory(self) -> memoryview | None:
        """The arena as this process maps it, if the sidecar takes no page of it back; None while there is none."""
        session = self._connection.session
        arena = None if session is None else session.tether.arena
        try:
            return arena.view(0, arena.capacity_bytes) if arena is not None and arena.pages_stay else None
        except ValueError:  # it has been unmapped: the client is closed
            return None

    # ---- lent buffers

    def store_from(
        self,
        ns: Namespace,
        keys: Sequence[BlockKey],
        parent: BlockKey | None,
        buffers: Sequence[LentBuffer],
        deadline_s: float,
    ) -> Transfer:
        """Store blocks from the caller's buffers, ``block_bytes`` each; they are busy until the transfer says else."""
        self._require_open()
        self._require_ours(ns)
        views, deadline_s = readable_bytes(ns, keys, buffers), bounded(deadline_s, time.monotonic())
        return self._lending.store_from(ns, keys, parent, views, deadline_s)

    def load_into(
        self, ns: Namespace, chain: Sequence[BlockKey], buffers: Sequence[LentBuffer], deadline_s: float
    ) -> Transfer:
        """Load the longest prefix of ``chain`` that any level has into the caller's buffers, ``block_bytes`` each."""
        self._require_open()
        self._require_ours(ns)
        views, deadline_s = writable_bytes(ns, chain, buffers), bounded(deadline_s, time.monotonic())
        return self._lending.load_into(ns, chain, views, deadline_s)

    # ---- time passes

    def poll(self) -> int:
        """Apply what has come in, and give up what is overdue; returns how much that was."""
        self._require_open()
        session = self._session()
        if session is not None:
            session.give_up_overdue()
        return self._inbox.poll() + self._lending.poll()

    def wait(self, timeout_s: float) -> None:
        """Sleep until there is something to ``poll``, at most ``timeout_s``."""
        self._inbox.wait(timeout_s)

    def drain(self, timeout_s: float) -> bool:
        """Poll until nothing that was asked for is under way, at most ``timeout_s``; whether that was reached."""
        deadline_s = time.monotonic() + timeout_s
        while self._prefetches or self._lending.is_busy:
            if time.monotonic() >= deadline_s:
                return False
            self.wait(0.05)
            self.poll()
        return True

    def evict(self, num_blocks: int) -> int:
        """Forget up to ``num_blocks`` blocks in RAM, in the policy's order; returns how many left."""
        self._require_open()
        reply = self._ask(self._session(), "evict", evict=api.Evict(num_blocks=num_blocks))
        return reply.counted.num_blocks if reply is not None else 0

    def clear(self, ns: Namespace) -> int:
        """Forget a namespace in every level; returns how many blocks."""
        self._require_open()
        clear = api.Clear(namespace=self._require_ours(ns).number)
        reply = self._ask(self._session(), "clear", clear=clear)
        return reply.counted.num_blocks if reply is not None else 0

    def close(self) -> None:
        """End the session and every lease; the slots of a quarantined one are kept until we exit. Idempotent."""
        if self._closed:
            return
        self.drain(CLOSE_TIMEOUT_S)
        self._closed = True
        self._lending.close()
        is_written_to = any(lease.state is LeaseState.QUARANTINED for lease in self._held)
        self._connection.close(untie=not (is_written_to or self._lending.is_busy))
        self._held.clear()

    # ---- the inside

    def _session(self) -> Session | None:
        """The one to ask; None while the sidecar is away, or silent although it owes an answer."""
        session = self._connection.session
        return session if session is not None and not session.is_over and not session.is_stalled else None

    def _ask(self, session: Session | None, what: str, call: int = 0, **request: Any) -> api.SessionReply | None:
        """The reply, or None and a count."""
        reply = None
        if session is not None:
            reply = session.ask(api.SessionRequest(call=call or next(self._calls), **request), self._budget_s)
        if reply is None or reply.HasField("refused"):
            self.stats.inc("kvstore_errors_total", 1, f"client.{what}")
        return reply

    def _lease(self, session: Session, call: int, what: str, **request: Any) -> api.Leased:
        """Begin a lease; an empty one if that did not come off."""
        reply = self._ask(session, what, call, **request)
        if reply is None:
            session.tell(api.SessionRequest(end_leases=api.EndLeases(leases=[call])))  # in case it is only late
            return api.Leased()
        return reply.leased

    def _hold(self, lease: WriteLease, held: Held) -> bool:
        """Count a lease; False where its session ended before: a new one may have said that nothing writes there."""
        self._held[lease] = held
        if not held.session.is_over:
            return True
        self._end(lease)
        return False

    def _end(self, lease: ReadLease | WriteLease) -> None:
        held = self._held.pop(lease, None)
        if held is not None:
            held.session.tell(api.SessionRequest(end_leases=api.EndLeases(leases=[held.call])))
            self._acknowledge()

    def _acknowledge(self) -> None:
        """Let a new session know once nothing writes to slots of the ones before it any more. Any thread."""
        newcomer = self._unacknowledged
        leases = list(self._held.items())  # one step under the interpreter's lock
        if newcomer is not None and all(
            isinstance(lease, ReadLease) or held.session is newcomer for lease, held in leases
        ):
            newcomer.tell(api.SessionRequest(acknowledge=api.Acknowledge()))
            self._unacknowledged = None

    def _opened(self, chain: Sequence[BlockKey]) -> _Opened | None:
        return self._namespaces.get(chain[0][:NAMESPACE_DIGEST_BYTES]) if chain else None

    def _pack(self, opened: _Opened, chain: Sequence[BlockKey]) -> api.Chain:
        """A request asks about the same chain several times over; its ends stand for it."""
        if len(chain) < LONG_CHAIN_BLOCKS:
            return pack_chain(opened.number, chain)
        ends = chain[0], chain[-1]
        if self._packed[0] != ends:
            self._packed = ends, pack_chain(opened.number, chain)
        return self._packed[1]

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("the client is closed; make another one")

    def _require_ours(self, ns: Namespace) -> _Opened:
        opened = self._namespaces.get(ns.digest)
        if opened is None:
            raise LayoutError(
                f"namespace of model {ns.identity.model!r} was not opened here; call open_namespace first"
            )
        return opened


_NOTHING = Lookup(0, 0, pending=False)
_NOWHERE = Namespace(Identity("", b""), Layout("uint8", 1, 1, (1,), 1))
"""Of a chain whose namespace nobody opened here: nothing is found."""
