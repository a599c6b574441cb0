"""How the workers of an engine come by the arena that its scheduler half leases slots in.

One process hands descriptors of its own to others of the same user, over a unix socket without a name in the file
system. With the arena goes whatever must stay open while somebody may write to it, see ``kvstore.lease.Location``.
"""

import array
import contextlib
import logging
import os
import secrets
import socket
import struct
import threading
from collections.abc import Sequence

from kvstore.lease import Location
from kvstore.mapping import Mapping

TIMEOUT_S = 5.0
MAX_DESCRIPTORS = 4
_NUMBER = struct.Struct("<Q")
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid: struct ucred

_log = logging.getLogger(__name__)


class ArenaDoor:
    """Hands out the descriptors of the arena that was shown last."""

    def __init__(self) -> None:
        self.address = f"kvstore-{os.getpid()}-{secrets.token_hex(8)}"
        self._number = 0
        self._descriptors: tuple[int, ...] = ()
        self._pages_stay = False
        self._changing = threading.Lock()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind("\0" + self.address)
        self._listener.listen(64)
        threading.Thread(target=self._serve, name="kvstore-door", daemon=True).start()

    def show(self, location: Location) -> int:
        """The number under which the arena of ``location`` can be had from now on, instead of an earlier one."""
        number = os.fstat(location.descriptors[0]).st_ino
        if number != self._number:
            with self._changing:
                self._forget()
                self._descriptors = tuple(os.dup(descriptor) for descriptor in location.descriptors)
                self._pages_stay = location.pages_stay
                self._number = number
        return number

    def close(self) -> None:
        """Nobody is let in any more. Safe to call twice."""
        with self._changing:
            self._forget()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _forget(self) -> None:
        descriptors, self._descriptors, self._number = self._descriptors, (), 0
        for descriptor in descriptors:
            os.close(descriptor)

    def _serve(self) -> None:
        """In the thread: let others in, one by one."""
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            with connection:
                try:
                    self._answer(connection)
                except OSError as error:
                    _log.warning("a worker could not be given the arena: %s", error)

    def _answer(self, connection: socket.socket) -> None:
        connection.settimeout(TIMEOUT_S)
        peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        if _CREDENTIALS.unpack(peer)[1] != os.getuid():
            _log.warning("a process of another user asked for the arena and was refused")
            return
        (number,) = _NUMBER.unpack(connection.recv(_NUMBER.size, socket.MSG_WAITALL))
        with self._changing:
            if number == self._number:
                socket.send_fds(connection, [bytes([self._pages_stay])], list(self._descriptors))


class ArenaView:
    """An arena as a worker sees it."""

    def __init__(self, address: str, number: int) -> None:
        """Ask at the door. Raises ``OSError`` where the arena cannot be had any more."""
        descriptors: Sequence[int] = array.array("i")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(TIMEOUT_S)
            connection.connect("\0" + address)
            connection.sendall(_NUMBER.pack(number))
            stays, descriptors, _, _ = socket.recv_fds(connection, 1, MAX_DESCRIPTORS)
        if not descriptors:
            raise OSError(f"arena {number} is not to be had any more")
        memory, *self._ties = descriptors
        # Its pages are there, or the scheduler half's to make; on huge pages they are mapped as such.
        self._mapping = Mapping(memory, os.fstat(memory).st_size, prefault=False, pages_stay=stays == b"\1")
        self._mapping.keep_from_children()

    @property
    def fixed_memory(self) -> memoryview | None:
        """All of it, if its pages stay the same, so that a device may be given it."""
        mapping = self._mapping
        return mapping.view(0, mapping.capacity_bytes) if mapping.pages_stay else None

    def views(self, offsets_bytes: Sequence[int], num_bytes: int) -> list[memoryview]:
        """As many writable bytes from each offset on."""
        return self._mapping.views(offsets_bytes, num_bytes)

    def close(self) -> None:
        """Unmap, then let the other end know. Nothing may look at its views any more."""
        self._mapping.close()
        for tie in self._ties:
            os.close(tie)
        self._ties = []
