"""The arena's socket: whoever may use the store is given the descriptor of its memory, and is known to live by it.

gRPC passes no descriptors, so this is a unix socket of its own. A connection stays open for as long as the process has
the arena mapped; the kernel closes it when the process has gone, after its mappings.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Coroutine
from pathlib import Path

from google.protobuf.message import DecodeError

from kvstore.api.v1 import kvstore_pb2 as api
from kvstore.errors import WireError
from kvstore.server.clients import Clients
from kvstore.server.tenants import Tenant, Tenants
from kvstore.tiers.domains import Arenas
from kvstore.wire import HEADER_BYTES, frame, frame_bytes, unframe

HELLO_TIMEOUT_S = 5.0
MAX_CONNECTIONS = 4096
ACCEPT_PAUSE_S = 0.1

_log = logging.getLogger(__name__)


class Handshake:
    """Listens on ``path``: the directory decides who can reach it, the token whose arena it gets."""

    def __init__(self, path: Path, arenas: Arenas, clients: Clients, tenants: Tenants) -> None:
        self._path = path
        self._arenas = arenas
        self._clients = clients
        self._tenants = tenants
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)

    def start(self) -> None:
        """Bind and listen; whoever has the path's lock may. For us alone, as the process's umask has it."""
        self._path.unlink(missing_ok=True)
        self._listener.bind(str(self._path))
        self._listener.listen(128)
        self._spawn(self._accept())

    async def close(self) -> None:
        """Let everyone go."""
        self._path.unlink(missing_ok=True)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listener.close()

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError as error:  # such as too many open files
                _log.warning("cannot take in another process: %s", error)
                await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            if len(self._tasks) > MAX_CONNECTIONS:
                connection.close()
                continue
            connection.setblocking(False)
            self._spawn(self._serve(connection))

    async def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                hello = await asyncio.wait_for(_hello(connection), HELLO_TIMEOUT_S)
            except (OSError, TimeoutError, WireError, DecodeError) as error:
                _log.info("a handshake came to nothing: %s", error)
                return
            tenant = self._tenants.find(hello.token)
            if tenant is None:
                _log.warning("a process (uid %d) was refused: wrong token", _peer_uid(connection))
                await _refuse(connection, "the token is not one that this store knows")
                return
            await self._tether(connection, tenant)

    async def _tether(self, connection: socket.socket, tenant: Tenant) -> None:
        """Hand the descriptor over, and wait for the end of the process."""
        client = self._clients.admit(tenant)
        try:
            welcome = api.Welcome(
                client=client.id, arena_bytes=self._arenas.capacity_bytes, pages_stay=self._arenas.pages_stay
            )
            with contextlib.suppress(OSError):
                socket.send_fds(connection, [frame(welcome)], [self._arenas.domains[tenant.domain].fd])
                while await asyncio.get_running_loop().sock_recv(connection, 4096):
                    pass  # nothing more is said here
        finally:
            self._clients.depart(client)


async def _hello(connection: socket.socket) -> api.Hello:
    """Raises ``WireError``, ``DecodeError`` or ``OSError`` for anything else."""
    received = b""
    while len(received) < HEADER_BYTES or len(received) < frame_bytes(received):
        part = await asyncio.get_running_loop().sock_recv(connection, frame_bytes(received) - len(received))
        if not part:
            raise WireError("the other side went away before it had said who it is")
        received += part
    return api.Hello.FromString(unframe(received))


async def _refuse(connection: socket.socket, reason: str) -> None:
    with contextlib.suppress(OSError):
        await asyncio.get_running_loop().sock_sendall(connection, frame(api.Welcome(refused=reason)))


def _peer_uid(connection: socket.socket) -> int:
    """The user at the other end, as the kernel knows it."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int.from_bytes(credentials[4:8], "little", signed=True)
