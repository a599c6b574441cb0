"""One server and the connections to it."""

import socket
import ssl
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Event

from kvstore.errors import ConfigError
from kvstore.tiers.redis_url import Endpoint, RedisUrl, require_tls
from kvstore.tiers.redis_wire import ServerError, Wire

CONNECT_TIMEOUT_S = 1.0
"""A server that is there accepts at once; one that is not shall not eat the whole deadline."""

_KEEPALIVE_IDLE_S = 30


@dataclass(frozen=True, slots=True)
class Dialer:
    """How to connect and who to be: the same for every server of a tier."""

    tls: ssl.SSLContext | None = None
    username: str = ""
    password: str = field(default="", repr=False)
    db: int = 0

    def dial(self, endpoint: Endpoint, deadline_s: float) -> Wire:
        """A clean wire to ``endpoint``, logged in. Raises ``OSError``."""
        wire = self.dial_anonymous(endpoint, deadline_s)
        try:
            self.log_in(wire, deadline_s)
        except OSError:
            wire.close()
            raise
        return wire

    def dial_anonymous(self, endpoint: Endpoint, deadline_s: float) -> Wire:
        """A clean wire to ``endpoint``, not logged in. Raises ``OSError``."""
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the deadline has passed")
        try:
            return Wire(self._connect(endpoint, min(left_s, CONNECT_TIMEOUT_S)))
        except TimeoutError as error:
            if time.monotonic() >= deadline_s:
                raise
            raise ConnectionError(f"no connection within {CONNECT_TIMEOUT_S} s") from error

    def _connect(self, endpoint: Endpoint, timeout_s: float) -> socket.socket:
        sock = _open_socket(endpoint, timeout_s)
        if self.tls is None or endpoint.path:
            return sock
        try:
            return self.tls.wrap_socket(sock, server_hostname=endpoint.host)
        except OSError:
            sock.close()
            raise

    def log_in(self, wire: Wire, deadline_s: float) -> None:
        """Say who we are, if there is anything to say. Raises ``PermissionError`` if the server refuses."""
        commands: list[tuple[bytes | int, ...]] = []
        if self.username:
            commands.append((b"AUTH", self.username.encode(), self.password.encode()))
        elif self.password:
            commands.append((b"AUTH", self.password.encode()))
        if self.db:
            commands.append((b"SELECT", self.db))
        for command, reply in zip(commands, wire.ask(commands, deadline_s) if commands else (), strict=True):
            if reply != b"OK":
                code = reply.code if isinstance(reply, ServerError) else "a wrong reply"
                raise PermissionError(f"the server refuses {command[0]!r} of user {self.username!r}: {code}")


def tls_of(where: RedisUrl, ca_file: str, cert_file: str, key_file: str) -> ssl.SSLContext | None:
    """The TLS that a URL asks for. Raises ``ConfigError`` where a file cannot be used, or there is no use for it."""
    require_tls(where, ca_file, cert_file, key_file)
    return tls_context(ca_file, cert_file, key_file) if where.tls else None


def tls_context(ca_file: str = "", cert_file: str = "", key_file: str = "") -> ssl.SSLContext:
    """What to trust and show: the CA of ``ca_file`` alone, or the system's; our certificate, where servers ask for one.

    Certificate and host name are always checked. Raises ``ConfigError`` where a file cannot be used.
    """
    if key_file and not cert_file:
        raise ConfigError("redis.tls_key_file is set without a redis.tls_cert_file, whose key it would be: set both")
    try:
        context = ssl.create_default_context(cafile=ca_file or None)
        if cert_file:
            context.load_cert_chain(cert_file, key_file or None)
    except OSError as error:
        raise ConfigError(
            f"redis tls files cannot be used: {error}; check tls_ca_file, tls_cert_file and tls_key_file"
        ) from error
    return context


class Node:
    """A server's endpoint with the idle wires to it, which are taken and given back by any thread."""

    def __init__(self, endpoint: Endpoint, dialer: Dialer) -> None:
        self.endpoint = endpoint
        self._dialer = dialer
        self._idle: deque[Wire] = deque()  # append and pop are atomic; no lock that a fork could leave locked
        self._closed = Event()

    @contextmanager
    def wire(self, deadline_s: float) -> Iterator[Wire]:
        """A clean wire for one exchange; kept for the next one only if it is clean afterwards. Raises ``OSError``."""
        if self._closed.is_set():
            raise ConnectionError("the tier was closed")
        wire = self._take_idle() or self._dialer.dial(self.endpoint, deadline_s)
        try:
            yield wire
        finally:
            if wire.is_clean:
                self._idle.append(wire)
            else:
                wire.close()
            if self._closed.is_set():
                self.close()

    def close(self) -> None:
        """Close idle wires; one in use closes when its exchange ends. Safe to call twice."""
        self._closed.set()
        while self._idle:
            self._idle.pop().close()

    def _take_idle(self) -> Wire | None:
        while self._idle:
            wire = self._idle.pop()
            if wire.is_quiet:
                return wire
            wire.close()  # the server hung up, or it was opened before a fork
        return None


def _open_socket(endpoint: Endpoint, timeout_s: float) -> socket.socket:
    if endpoint.path:
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.settimeout(timeout_s)
            sock.connect(endpoint.path)
        except OSError:
            sock.close()
            raise
        return sock
    sock = socket.create_connection((endpoint.host, endpoint.port), timeout_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # an idle wire that a firewall forgot is noticed
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_IDLE_S)
    return sock
