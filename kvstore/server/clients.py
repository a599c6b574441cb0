"""Who uses the store, whether they are alive, and what becomes of what they held. Owner thread only; nothing waits.

A *client* is a process that maps the arena: it exists from the handshake that gave it the descriptor until that
connection closes, which the kernel does when the process is gone, however it went. A *session* is one stream of it.

Rule 1: a session's pins end with it, whatever ended it.
Rule 2: slots that it was writing to are quarantined when it ends: a mapping cannot be revoked, and a process that was
only stopped may write on. They are free once the client says that nothing of it writes any more, or is gone.
Rule 3: a session that answers no ping for ``LEASE_TICKS`` ticks is over. Ticks are the server's own: while it is
stopped itself, nobody's time runs.

Invariant: a slot reserved through a client is in one of its session's leases, in its quarantine, or was given back.
"""

from collections.abc import Callable, Iterator

from kvstore.api.v1 import kvstore_pb2 as api
from kvstore.errors import WireError
from kvstore.server.session import Client, Host, Session
from kvstore.server.tenants import Tenant

LEASE_TICKS = 5
MAX_TITLE_CHARACTERS = 100


class Clients:
    """Every client, and the rules above."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._clients: dict[bytes, Client] = {}

    def __iter__(self) -> Iterator[Client]:
        return iter(list(self._clients.values()))

    def sessions(self) -> Iterator[Session]:
        """Every open session; they may end meanwhile."""
        return (client.session for client in list(self._clients.values()) if client.session is not None)

    def admit(self, tenant: Tenant) -> Client:
        """A process is given the arena of ``tenant``."""
        client = Client(tenant)
        self._clients[client.id] = client
        return client

    def register(
        self, register: api.Register, send: Callable[[api.SessionReply], None], end_stream: Callable[[], None]
    ) -> Session:
        """A client opens a session, which takes over from an earlier one. Raises ``WireError`` for a stranger."""
        client = self._clients.get(register.client)
        if client is None:
            raise WireError("this client is not known here: shake hands at the arena's socket first")
        if register.incarnation <= client.incarnation:
            raise WireError(f"incarnation {register.incarnation} is over: {client.incarnation} came after it")
        if client.session is not None:
            self.end(client.session)
        client.incarnation = register.incarnation
        client.title = register.name[:MAX_TITLE_CHARACTERS]
        client.session = Session(self._host, client, send, end_stream)
        return client.session

    def end(self, session: Session) -> None:
        """The session is over: rules 1 and 2. May be called again."""
        client = session.client
        if client.session is not session:
            return
        client.session = None
        session.close()
        session.end_stream()

    def depart(self, client: Client) -> None:
        """The process is gone, and so is its mapping."""
        if client.session is not None:
            self.end(client.session)
        client.acknowledge()
        del self._clients[client.id]

    def tick(self) -> None:
        """Ping everyone; end the sessions that have been silent for too long, and what ranks have let wait."""
        self._host.ranks.tick()
        for session in self.sessions():
            session.idle_ticks += 1
            if session.idle_ticks > LEASE_TICKS:
                self._host.store.stats.inc("kvstore_expired_sessions_total")
                self.end(session)
            else:
                session.num_pings += 1
                session.send(api.SessionReply(ping=api.Ping(number=session.num_pings, last_pong=session.last_pong)))
