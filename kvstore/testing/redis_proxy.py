"""A proxy before a Redis-protocol server that does to replies what networks and servers do on bad days.

It speaks RESP2 command by command, so that a fault hits the very reply it is meant for. With a TLS context it ends TLS.
"""

import socket
import ssl
import threading
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Answer:
    """A reply of our own; the server never sees the command."""

    reply: bytes


@dataclass(frozen=True)
class Alter:
    """The server's reply, changed."""

    change: Callable[[bytes], bytes]


@dataclass(frozen=True)
class Cut:
    """The first bytes of the server's reply, then the end of the connection."""

    num_bytes: int


@dataclass(frozen=True)
class Hold:
    """The server's reply, but not before ``release`` is set: a delay that a test controls. Never set: a hang."""

    release: threading.Event


Fault = Answer | Alter | Cut | Hold

OOM = Answer(b"-OOM command not allowed when used memory > 'maxmemory'.\r\n")
LOADING = Answer(b"-LOADING Valkey is loading the dataset in memory\r\n")
READONLY = Answer(b"-READONLY You can't write against a read only replica.\r\n")
MOVED = Answer(b"-MOVED 3999 127.0.0.1:1\r\n")
ASK = Answer(b"-ASK 3999 127.0.0.1:1\r\n")
TRYAGAIN = Answer(b"-TRYAGAIN Multiple keys request during rehashing of slot\r\n")
CLUSTERDOWN = Answer(b"-CLUSTERDOWN The cluster is down\r\n")
NOPERM = Answer(b"-NOPERM this user has no permissions to run this command\r\n")
MISCONF = Answer(b"-MISCONF Errors writing to the append only file\r\n")
DROP = Cut(0)


class RedisProxy:
    """Listens on loopback before the server at ``upstream_port``; ends with its context."""

    def __init__(self, upstream_port: int, *, tls: ssl.SSLContext | None = None) -> None:
        self._upstream_port = upstream_port
        self._tls = tls
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._faults: dict[bytes, deque[Fault]] = {}
        self._closing = threading.Event()
        self._holds: list[threading.Event] = []
        self._sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self.port: int = self._listener.getsockname()[1]
        self.commands: list[bytes] = []
        """The name of every command that arrived, in order."""
        self.num_connections = 0

    @property
    def url(self) -> str:
        """How a client reaches it."""
        return f"redis{'s' if self._tls else ''}://localhost:{self.port}"

    def inject(self, fault: Fault, command: bytes, times: int = 1) -> None:
        """Do ``fault`` to the next ``times`` replies to ``command``, such as ``b"GET"``."""
        if isinstance(fault, Hold):
            self._holds.append(fault.release)
        self._faults.setdefault(command, deque()).extend([fault] * times)

    def __enter__(self) -> Self:
        """Start to listen."""
        self._spawn(self._accept)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Hang up on everybody and wait until all is over."""
        self._closing.set()
        for release in self._holds:
            release.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for sock in list(self._sockets):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()

    def _spawn(self, run: Callable[[], None]) -> None:
        thread = threading.Thread(target=run, name="redis-proxy")
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.num_connections += 1
            self._spawn(lambda client=client: self._relay(client))  # type: ignore[misc]  # binds this very client

    def _relay(self, client: socket.socket) -> None:
        """One client, until somebody hangs up."""
        with ExitStack() as stack, suppress(OSError):
            stack.callback(self._sockets.discard, client)
            stack.callback(client.close)
            self._sockets.add(client)
            if self._tls is not None:
                client = stack.enter_context(self._tls.wrap_socket(client, server_side=True))
                self._sockets.add(client)
                stack.callback(self._sockets.discard, client)
            server = stack.enter_context(closing(socket.create_connection(("127.0.0.1", self._upstream_port))))
            self._sockets.add(server)
            stack.callback(self._sockets.discard, server)
            commands, replies = _Frames(client), _Frames(server)
            while not self._closing.is_set():
                self._serve(commands.next(), client, server, replies)

    def _serve(self, command: bytes, client: socket.socket, server: socket.socket, replies: "_Frames") -> None:
        name = command.split(b"\r\n", 3)[2].upper()
        self.commands.append(name)
        waiting = self._faults.get(name)
        fault = waiting.popleft() if waiting else None
        if isinstance(fault, Answer):
            client.sendall(fault.reply)
            return
        server.sendall(command)
        reply = replies.next()
        match fault:
            case Alter(change):
                reply = change(reply)
            case Hold(release):
                release.wait()
            case Cut(num_bytes):
                client.sendall(reply[:num_bytes])
                raise ConnectionAbortedError("cut, as asked")
        client.sendall(reply)


class _Frames:
    """Whole RESP2 frames as they come from a socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._data = bytearray()

    def next(self) -> bytes:
        """The next frame, as it came. Raises ``ConnectionResetError`` at the end of the connection."""
        while (end := _frame_end(self._data, 0)) is None:
            chunk = self._sock.recv(_CHUNK_BYTES)
            if not chunk:
                raise ConnectionResetError("the other side hung up")
            self._data += chunk
        frame = bytes(self._data[:end])
        del self._data[:end]
        return frame


def _frame_end(data: bytearray, start: int) -> int | None:
    """Where the frame ends that begins at ``start``; None: not here yet."""
    line_end = data.find(b"\r\n", start)
    if line_end < 0:
        return None
    kind, end = chr(data[start]), line_end + 2
    if kind not in "$*":
        return end
    length = int(data[start + 1 : line_end])
    if kind == "$":
        end += length + 2 if length >= 0 else 0
        return end if end <= len(data) else None
    for _ in range(length):
        item_end = _frame_end(data, end)
        if item_end is None:
            return None
        end = item_end
    return end
