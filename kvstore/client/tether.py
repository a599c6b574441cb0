"""The tie between a client process and the sidecar's memory: the connection that lives as long as the mapping does."""

import os
import socket
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from kvstore.api.v1 import kvstore_pb2 as api
from kvstore.errors import WireError
from kvstore.mapping import Mapping
from kvstore.wire import HEADER_BYTES, arena_socket, frame, frame_bytes, unframe

HANDSHAKE_TIMEOUT_S = 2.0


@dataclass(eq=False, slots=True)
class Tether:
    """The arena as this process sees it, and who it is to the sidecar."""

    connection: socket.socket
    client: bytes
    arena: Mapping

    @classmethod
    def tie(cls, path: Path, token: str) -> "Tether":
        """Shake hands at the sidecar's ``path``. Raises ``OSError`` or ``WireError`` where that cannot be done."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(HANDSHAKE_TIMEOUT_S)
            connection.connect(str(arena_socket(path)))
            connection.sendall(frame(api.Hello(token=token)))
            welcome, fd = _welcome(connection)
            # Pages that move between tenants are the sidecar's to make: each client would make all that there may be.
            stays = welcome.pages_stay
            arena = Mapping(fd, welcome.arena_bytes, prefault=stays, pages_stay=stays)
        except BaseException:  # whatever it is goes on its way, and nobody else would close this
            connection.close()
            raise
        arena.keep_from_children()
        return cls(connection, welcome.client, arena)

    def is_tied(self) -> bool:
        """Whether the sidecar at the other end is the same as ever."""
        self.connection.setblocking(False)
        try:
            return self.connection.recv(1, socket.MSG_PEEK) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    def untie(self) -> None:
        """Unmap, then let the other end know."""
        self.arena.close()
        self.connection.close()

    def part(self) -> None:
        """The other end is gone. Leases of its slots may still be looked at; the mapping goes with the last of them."""
        self.connection.close()

    def leave(self) -> None:
        """Something may still write to the arena: stay tied until the process ends."""
        self.connection.detach()


def _welcome(connection: socket.socket) -> tuple[api.Welcome, int]:
    """The answer and the descriptor. Raises ``WireError`` where there is none."""
    with ExitStack() as undo:
        received = b""
        fds: list[int] = []
        while len(received) < HEADER_BYTES or len(received) < frame_bytes(received):
            part, new_fds, _, _ = socket.recv_fds(connection, frame_bytes(received) - len(received), 4)
            fds += new_fds
            for fd in new_fds:
                undo.callback(os.close, fd)
            if not part:
                raise WireError("the sidecar closed the connection instead of answering")
            received += part
        welcome = api.Welcome.FromString(unframe(received))
        if welcome.refused or len(fds) != 1:
            raise WireError(f"the sidecar refuses this process: {welcome.refused or 'no descriptor came'}")
        undo.pop_all()
        return welcome, fds[0]
