"""What a session answers to requests that no client of ours would send, or not in this order."""

import time
from collections.abc import Iterator

import pytest

from kvstore.api.v1 import kvstore_pb2 as api
from kvstore.config import Config
from kvstore.errors import WireError
from kvstore.namespace import Namespace
from kvstore.opening import open_shared_store
from kvstore.server import session as sessions
from kvstore.server.clients import Clients
from kvstore.server.ranks import Ranks
from kvstore.server.session import Host, Session
from kvstore.server.tenants import Tenants
from kvstore.testing.sidecar import eventually
from kvstore.tiers.domains import DomainMemoryTier
from kvstore.types import BlockKey
from kvstore.wire import pack_chain, pack_identity, pack_layout
from tests.real_stores import IDENTITY, LAYOUT, chain_of

NS = Namespace(IDENTITY, LAYOUT)
OPEN = api.OpenNamespace(namespace=1, identity=pack_identity(IDENTITY), layout=pack_layout(LAYOUT))


class Asker:
    """A session without a wire."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.sent: list[api.SessionReply] = []
        self.clients = Clients(host)
        tenant = Tenants.of(Config.from_mapping({}).server).find("")
        assert tenant is not None
        client = self.clients.admit(tenant)
        register = api.Register(client=client.id, incarnation=1)
        self.session: Session = self.clients.register(register, self.sent.append, lambda: None)
        self.calls = iter(range(1, 10**9))
        self.ask(open_namespace=OPEN)

    def ask(self, **what: object) -> api.SessionReply:
        reply = self.session.handle(api.SessionRequest(call=next(self.calls), **what))  # type: ignore[arg-type]  # a field of it
        assert reply is not None
        return reply

    def reserve(self, num_blocks: int) -> int:
        """The number of the lease."""
        reply = self.ask(reserve=api.Reserve(namespace=1, num_blocks=num_blocks))
        assert len(reply.leased.offsets_bytes) == num_blocks
        return reply.call

    def commit(self, lease: int, keys: list[BlockKey], num_named: int, parent: bytes = b"") -> api.SessionReply:
        commit = api.Commit(lease=lease, chain=pack_chain(1, keys), num_named=num_named, parent=parent)
        return self.ask(commit=commit)


@pytest.fixture
def asker() -> Iterator[Asker]:
    store, _ = open_shared_store(Config.from_mapping({"memory": {"capacity": "2MiB"}}), 1)
    memory = store.memory_tier
    assert isinstance(memory, DomainMemoryTier)
    eventually(lambda: memory.usable_bytes == memory.capacity_bytes)
    yield Asker(Host(store, memory, Ranks(store), time.monotonic))
    store.check()
    store.close()


def test_a_commit_after_one_that_failed_names_nothing(asker: Asker) -> None:
    """Nobody waits for a commit before the next: that must not get the slots of the one before."""
    chain = chain_of(NS, 4)
    lease = asker.reserve(4)
    bad = api.Commit(lease=lease, chain=api.Chain(namespace=1, digest_bytes=5, digests=b"x" * 11), num_named=0)
    assert asker.ask(commit=bad).HasField("refused")
    assert asker.commit(lease, chain[2:], num_named=2, parent=chain[1][16:]).HasField("refused")
    assert asker.ask(lookup=api.Lookup(chain=pack_chain(1, chain[2:]))).found.ready == 0
    assert len(asker.commit(lease, chain, num_named=0).committed.offsets_bytes) == 4


def test_what_is_not_held_cannot_be_used(asker: Asker) -> None:
    assert asker.commit(99, chain_of(NS, 1), 0).HasField("refused")
    assert asker.ask(commit_stripes=api.CommitStripes(lease=99)).HasField("refused")
    lease = asker.reserve(1)
    assert asker.commit(lease, chain_of(NS, 2), 0).HasField("refused")  # more keys than slots
    asker.session.handle(api.SessionRequest(end_leases=api.EndLeases(leases=[lease, lease, 12345])))
    assert asker.commit(lease, chain_of(NS, 1), 0).HasField("refused")


@pytest.mark.parametrize(
    "chain",
    [
        api.Chain(namespace=2, digest_bytes=32, digests=b"x" * 32),
        api.Chain(namespace=1, digest_bytes=0, digests=b"x" * 32),
        api.Chain(namespace=1, digest_bytes=32, digests=b"x" * 33),
        api.Chain(namespace=1, digest_bytes=4000, digests=b"x" * 4000),
        api.Chain(namespace=1, digest_bytes=8, digests=bytes(8 * (sessions.MAX_LEASES * 8 + 1))),
    ],
)
def test_a_chain_that_is_none_is_refused(asker: Asker, chain: api.Chain) -> None:
    for request in (
        {"lookup": api.Lookup(chain=chain)},
        {"pin": api.Pin(chain=chain)},
        {"prefetch": api.Prefetch(chain=chain)},
    ):
        assert asker.ask(**request).HasField("refused")


def test_a_request_of_a_newer_client_is_refused_and_the_session_goes_on(asker: Asker) -> None:
    unknown = api.SessionRequest.FromString(b"\x08\x07\xfa\x7f\x00")  # call 7, and field 2047, which nobody knows yet
    reply = asker.session.handle(unknown)
    assert reply is not None
    assert (reply.call, reply.HasField("refused")) == (7, True)
    assert asker.reserve(1)


def test_a_layout_that_cannot_be_is_refused(asker: Asker) -> None:
    bad = api.OpenNamespace(namespace=3, identity=pack_identity(IDENTITY), layout=api.Layout(dtype="float7"))
    assert "float7" in asker.ask(open_namespace=bad).refused.reason


def test_the_number_of_leases_is_bounded(asker: Asker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_LEASES", 3)
    for _ in range(3):
        asker.reserve(1)
    assert asker.ask(reserve=api.Reserve(namespace=1, num_blocks=1)).HasField("refused")
    assert asker.ask(pin=api.Pin(chain=pack_chain(1, chain_of(NS, 1)))).HasField("refused")


def test_an_older_incarnation_does_not_come_back(asker: Asker) -> None:
    client = asker.session.client
    asker.reserve(2)
    asker.clients.register(api.Register(client=client.id, incarnation=2), asker.sent.append, lambda: None)
    assert sum(slots.num_slots for slots in client.quarantined) == 2
    with pytest.raises(WireError):
        asker.clients.register(api.Register(client=client.id, incarnation=2), asker.sent.append, lambda: None)
    with pytest.raises(WireError):
        asker.clients.register(api.Register(client=b"x" * 16, incarnation=3), asker.sent.append, lambda: None)


def test_what_is_only_told_gets_no_answer(asker: Asker) -> None:
    for what in ({"evict": api.Evict(num_blocks=1)}, {"lookup": api.Lookup()}, {"pong": api.Pong(number=1)}):
        assert asker.session.handle(api.SessionRequest(**what)) is None
