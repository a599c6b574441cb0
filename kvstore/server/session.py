"""What one client holds while its stream lasts, and what it may ask. Owner thread only; nothing here waits.

Requests are handled one after the other, in the order in which they were sent: a lease's end never overtakes its
beginning, however late an answer was.
"""

import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvstore.api.v1 import kvstore_pb2 as api
from kvstore.errors import KVStoreError, WireError
from kvstore.lease import LeaseState, ReadLease, WriteLease
from kvstore.namespace import Namespace
from kvstore.promotion import Prefetch
from kvstore.server.ranks import Ranks, Stripes
from kvstore.server.tenants import Tenant
from kvstore.store import Store
from kvstore.tiers.domains import DomainMemoryTier
from kvstore.types import BlockKey
from kvstore.wire import unpack_chain, unpack_identity, unpack_layout, unpack_rank, unpack_request

CLIENT_BYTES = 16
MAX_NAMESPACES = 1024
MAX_LEASES = 16384
MAX_PREFETCHES = 4096
MAX_PREFETCH_MS = 600_000
LONG_CHAIN_BLOCKS = 64
MAX_SHARE_WRITTEN = 0.5
"""Of the slots of RAM, one client's that have no name yet."""

Reply = api.SessionReply


@dataclass(frozen=True, slots=True)
class Quarantined:
    """Slots that a process may still write to, and how to have them back."""

    num_slots: int
    reclaim: Callable[[], None]


@dataclass(eq=False, slots=True)
class Client:
    """One process that maps the arena."""

    tenant: Tenant
    id: bytes = field(default_factory=lambda: secrets.token_bytes(CLIENT_BYTES))
    """Drawn by chance, so that nobody else can speak for it."""
    title: str = ""
    """What the process calls itself."""
    incarnation: int = 0
    session: "Session | None" = None
    quarantined: list[Quarantined] = field(default_factory=list)
    """What earlier sessions left behind unnamed: the process may still write there."""

    def acknowledge(self) -> None:
        """Nothing of the process writes there any more."""
        for slots in self.quarantined:
            slots.reclaim()
        self.quarantined.clear()


@dataclass(frozen=True, eq=False, slots=True)
class Host:
    """What all sessions share."""

    store: Store
    memory: DomainMemoryTier
    ranks: Ranks
    clock: Callable[[], float]


@dataclass(eq=False, slots=True)
class Session:
    """One stream of one client. What it holds ends in ``close``."""

    host: Host
    client: Client
    send: Callable[[api.SessionReply], None]
    """Sends a reply soon."""
    end_stream: Callable[[], None]
    """Ends the stream, from this side."""
    namespaces: dict[int, Namespace] = field(default_factory=dict)
    reads: dict[int, ReadLease] = field(default_factory=dict)
    writes: dict[int, WriteLease] = field(default_factory=dict)
    stripes: dict[int, Stripes] = field(default_factory=dict)
    prefetches: dict[int, Prefetch] = field(default_factory=dict)
    num_pings: int = 0
    last_pong: int = 0
    latest: tuple[bytes, list[BlockKey]] = (b"", [])
    """The last long chain as it came and as keys: a request is looked up, fetched and pinned by the same one."""
    idle_ticks: int = 0
    """Ticks since the last pong."""

    def handle(self, request: api.SessionRequest) -> Reply | None:
        """Do what is asked; None where no answer is due, or not yet."""
        what = request.WhichOneof("what")
        handler = HANDLERS.get(what or "")
        try:
            if handler is None:
                raise WireError(f"request {what} is not known here: client and server are too far apart")
            reply = handler(self, request)
        except KVStoreError as error:
            self.host.store.stats.inc("kvstore_errors_total", 1, f"server.{what}")
            reply = Reply(refused=api.Refused(reason=str(error)))
        if reply is None or not request.call:
            return None
        reply.call = request.call
        return reply

    def poll(self) -> Iterator[Reply]:
        """Answers that have become due."""
        for call in [call for call, prefetch in self.prefetches.items() if prefetch.done]:
            yield _prefetched(call, self.prefetches.pop(call))

    def close(self) -> None:
        """End every pin; leave the slots that the client may still write to in its quarantine."""
        for read in self.reads.values():
            self.host.store.release(read)
        for write in self.writes.values():
            self.host.store.quarantine(write)
            self.client.quarantined.append(Quarantined(len(write.unnamed), partial(self.host.store.reclaim, write)))
        for stripes in self.stripes.values():
            self.host.ranks.give_up(stripes)
            slots = Quarantined(len(stripes.gatherings), partial(self.host.ranks.let_go, stripes))
            self.client.quarantined.append(slots)
        self.reads.clear()
        self.writes.clear()
        self.stripes.clear()
        self.prefetches.clear()

    # ---- requests

    def _pong(self, request: api.SessionRequest) -> None:
        self.last_pong = request.pong.number
        self.idle_ticks = 0

    def _open_namespace(self, request: api.SessionRequest) -> Reply:
        opening = request.open_namespace
        if len(self.namespaces) >= MAX_NAMESPACES:
            raise WireError(f"a session opens at most {MAX_NAMESPACES} namespaces")
        identity, layout = unpack_identity(opening.identity), unpack_layout(opening.layout)
        max_age_s = opening.max_age_s if opening.HasField("max_age_s") else None
        ns = self.client.tenant.open_namespace(
            self.host.store, self.host.memory, identity, layout, max_age_s, opening.prefill_tokens_per_s
        )
        self.namespaces[opening.namespace] = ns
        return Reply(done=api.Done())

    def _arrive(self, request: api.SessionRequest) -> Reply:
        ns, chain = self._chain(request.arrive.chain)
        keep = self.host.store.arrive(unpack_request(ns.digest, request.arrive.request), chain)
        return Reply(arrived=api.Arrived(keep=keep))

    def _finish(self, request: api.SessionRequest) -> None:
        ns, chain = self._chain(request.finish.chain)
        self.host.store.finish(unpack_request(ns.digest, request.finish.request), chain, request.finish.output_tokens)

    def _lookup(self, request: api.SessionRequest) -> Reply:
        found = self.host.store.lookup(self._chain(request.lookup.chain)[1])
        return Reply(found=api.Found(ready=found.ready, found=found.found, pending=found.pending))

    def _prefetch(self, request: api.SessionRequest) -> Reply | None:
        if len(self.prefetches) >= MAX_PREFETCHES:
            raise WireError(f"a session has at most {MAX_PREFETCHES} prefetches under way")
        _, chain = self._chain(request.prefetch.chain)
        deadline_s = self.host.clock() + min(request.prefetch.budget_ms, MAX_PREFETCH_MS) / 1000
        prefetch = self.host.store.prefetch(chain, deadline_s)
        if prefetch.done:
            return _prefetched(request.call, prefetch)
        if request.call:
            self.prefetches[request.call] = prefetch
        return None

    def _pin(self, request: api.SessionRequest) -> Reply:
        self._require_room(request.call)
        ns, chain = self._chain(request.pin.chain)
        if request.pin.HasField("rank"):
            lease = self.host.ranks.pin(unpack_rank(request.pin.rank), request.pin.request_id, ns, chain)
        else:
            lease = self.host.store.pin(chain)
        if not lease.slots:
            return Reply(leased=api.Leased())
        self.reads[request.call] = lease
        return Reply(leased=api.Leased(offsets_bytes=self._offsets_bytes(ns, lease.slots)))

    def _reserve(self, request: api.SessionRequest) -> Reply:
        self._require_room(request.call)
        ns = self._namespace(request.reserve.namespace)
        lease = self.host.store.reserve(ns, min(request.reserve.num_blocks, self._num_allowed(ns)))
        if not lease.slots:
            return Reply(leased=api.Leased())
        self.writes[request.call] = lease
        return Reply(leased=api.Leased(offsets_bytes=self._offsets_bytes(ns, lease.slots)))

    def _commit(self, request: api.SessionRequest) -> Reply:
        commit = request.commit
        lease = self.writes.get(commit.lease)
        if lease is None:
            raise WireError(f"commit of lease {commit.lease}, which this session does not hold")
        if lease.num_named != commit.num_named:
            raise WireError(
                f"commit from slot {commit.num_named} on, but {lease.num_named} have keys: one before failed"
            )
        ns, keys = self._chain(commit.chain)
        parent = BlockKey(ns.digest + commit.parent) if commit.parent else None
        committed = self.host.store.commit(lease, keys, parent)
        if lease.state is LeaseState.ENDED:
            del self.writes[commit.lease]
        accepted = [index for index, key in enumerate(keys) if key in committed.accepted] if committed.accepted else []
        offsets_bytes = self._offsets_bytes(ns, committed.slots)
        return Reply(committed=api.Committed(offsets_bytes=offsets_bytes, accepted=accepted))

    def _reserve_stripes(self, request: api.SessionRequest) -> Reply:
        self._require_room(request.call)
        reserve = request.reserve_stripes
        ns, keys = self._chain(reserve.chain)
        parent = BlockKey(ns.digest + reserve.parent) if reserve.parent else None
        keys = keys[: self._num_allowed(ns)]
        stripes = self.host.ranks.reserve(unpack_rank(reserve.rank), ns, keys, parent)
        if not stripes.gatherings:
            return Reply(leased=api.Leased())
        self.stripes[request.call] = stripes
        slots = [gathering.lease.slots[0] for gathering in stripes.gatherings]
        return Reply(leased=api.Leased(offsets_bytes=self._offsets_bytes(ns, slots), indices=stripes.indices))

    def _commit_stripes(self, request: api.SessionRequest) -> Reply:
        stripes = self.stripes.pop(request.commit_stripes.lease, None)
        if stripes is None:
            raise WireError(f"commit of stripes {request.commit_stripes.lease}, which this session does not hold")
        return Reply(counted=api.Counted(num_blocks=self.host.ranks.commit(stripes)))

    def _end_leases(self, request: api.SessionRequest) -> None:
        for call in request.end_leases.leases:
            if (read := self.reads.pop(call, None)) is not None:
                self.host.store.release(read)
            if (write := self.writes.pop(call, None)) is not None:
                self.host.store.abort(write)
            if (stripes := self.stripes.pop(call, None)) is not None:
                self.host.ranks.give_up(stripes)
                self.host.ranks.let_go(stripes)

    def _clear(self, request: api.SessionRequest) -> Reply:
        num_blocks = self.host.store.clear(self._namespace(request.clear.namespace))
        return Reply(counted=api.Counted(num_blocks=num_blocks))

    def _evict(self, request: api.SessionRequest) -> Reply:
        num_blocks = self.host.store.evict(request.evict.num_blocks, self.client.tenant.fingerprints)
        return Reply(counted=api.Counted(num_blocks=num_blocks))

    def _acknowledge(self, request: api.SessionRequest) -> None:
        self.client.acknowledge()

    # ---- the inside

    def _namespace(self, number: int) -> Namespace:
        ns = self.namespaces.get(number)
        if ns is None:
            raise WireError(f"namespace {number} was not opened in this session, or its opening was refused")
        return ns

    def _chain(self, chain: api.Chain) -> tuple[Namespace, list[BlockKey]]:
        ns = self._namespace(chain.namespace)
        digests, keys = self.latest
        if digests and digests == chain.digests and keys[0].startswith(ns.digest):
            return ns, keys
        keys = unpack_chain(ns.digest, chain)
        if len(keys) >= LONG_CHAIN_BLOCKS:
            self.latest = chain.digests, keys
        return ns, keys

    def _offsets_bytes(self, ns: Namespace, slots: Sequence[int]) -> list[int]:
        """Where each slot starts in the tenant's arena."""
        offsets_bytes = self.host.store.offsets_bytes(ns, slots)
        base_bytes = self.host.memory.base_bytes(ns.fingerprint)
        return [offset - base_bytes for offset in offsets_bytes] if base_bytes else offsets_bytes

    def _num_allowed(self, ns: Namespace) -> int:
        """How many more slots this client may write to or keep in quarantine: others want to store something, too."""
        num_held = sum(slots.num_slots for slots in self.client.quarantined)
        num_held += sum(len(write.unnamed) for write in self.writes.values())
        num_held += sum(len(stripes.gatherings) for stripes in self.stripes.values())
        return max(0, int(MAX_SHARE_WRITTEN * self._num_slots(ns)) - num_held)

    def _num_slots(self, ns: Namespace) -> int:
        """How many blocks of the namespace RAM could hold."""
        return self.host.memory.capacity_bytes // self.host.memory.slot_bytes(ns.layout.block_bytes)

    def _require_room(self, call: int) -> None:
        if call == 0 or call in self.reads or call in self.writes or call in self.stripes:
            raise WireError(f"call {call} cannot begin a lease: its number is none or in use")
        if len(self.reads) + len(self.writes) + len(self.stripes) >= MAX_LEASES:
            raise WireError(f"a session holds at most {MAX_LEASES} leases")


def _prefetched(call: int, prefetch: Prefetch) -> Reply:
    return Reply(call=call, prefetched=api.Prefetched(ready=prefetch.ready, blocks_from=prefetch.blocks_from))


HANDLERS: dict[str, Callable[[Session, api.SessionRequest], Reply | None]] = {
    "pong": Session._pong,
    "open_namespace": Session._open_namespace,
    "arrive": Session._arrive,
    "finish": Session._finish,
    "lookup": Session._lookup,
    "prefetch": Session._prefetch,
    "pin": Session._pin,
    "reserve": Session._reserve,
    "commit": Session._commit,
    "end_leases": Session._end_leases,
    "clear": Session._clear,
    "evict": Session._evict,
    "acknowledge": Session._acknowledge,
    "reserve_stripes": Session._reserve_stripes,
    "commit_stripes": Session._commit_stripes,
}
"""What a session may ask, by the name of the request's field."""
