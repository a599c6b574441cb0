"""Keeps a client in touch with its sidecar: ties, registers, reads; and again, with growing pauses, when that broke."""

import itertools
import logging
import random
import threading
from collections.abc import Callable
from pathlib import Path

import grpc

from kvstore.api.v1 import kvstore_pb2 as api
from kvstore.client.session import Inbox, Session
from kvstore.client.stream import StreamEndedError, reason
from kvstore.client.tether import Tether
from kvstore.errors import WireError
from kvstore.wire import MAX_MESSAGE_BYTES

FIRST_PAUSE_S = 0.05
MAX_PAUSE_S = 2.0
CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.use_local_subchannel_pool", 1),  # two clients of one process are two processes to the sidecar
    ("grpc.enable_retries", 0),
)

_log = logging.getLogger(__name__)


class Connection:
    """The reader thread, and the session that is open at the moment."""

    def __init__(
        self, path: Path, token: str, name: str, inbox: Inbox, open_session: Callable[[Session], None]
    ) -> None:
        """``open_session`` is called in the reader thread with every new session, before anybody else sees it."""
        self.session: Session | None = None
        self._inbox = inbox
        self._path = path
        self._token = token
        self._name = name
        self._open_session = open_session
        self._tether: Tether | None = None
        self._incarnations = itertools.count(1)
        self._closing = threading.Event()
        self._connected = threading.Event()
        self._opening: Session | None = None
        self._reader = threading.Thread(target=self._run, name="kvstore-client", daemon=True)

    def start(self) -> None:
        """Begin to get in touch: from now on ``open_session`` may be called."""
        self._reader.start()

    def wait_connected(self, timeout_s: float) -> bool:
        """Sleep until there is a session, at most ``timeout_s``; whether there is one."""
        return self._connected.wait(timeout_s)

    def close(self, *, untie: bool) -> None:
        """End the session. ``untie`` unless a copy may still write to the arena: the sidecar takes it for our end."""
        self._closing.set()
        if self._opening is not None:
            self._opening.end()
        self._reader.join(MAX_PAUSE_S)
        if self._tether is not None:
            self._tether.untie() if untie else self._tether.leave()
            self._tether = None

    def _run(self) -> None:
        pause_s = FIRST_PAUSE_S
        while not self._closing.is_set():
            try:
                self._connect()
                pause_s = FIRST_PAUSE_S
            except (OSError, WireError, StreamEndedError) as error:
                if pause_s == FIRST_PAUSE_S:  # once for each time that it is lost
                    _log.warning("no sidecar at %s: %s; every call is a miss meanwhile", self._path, reason(error))
            except Exception:  # noqa: BLE001 - the edge of this thread: a bug costs misses, and not every call from now on
                _log.exception("a bug ended the connection to the sidecar at %s; it is opened anew", self._path)
            self._closing.wait(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    def _connect(self) -> None:
        """Open a session and read it to its end. Raises for one that could not be opened."""
        if self._tether is None or not self._tether.is_tied():
            stale, self._tether = self._tether, None
            if stale is not None:
                stale.part()
            self._tether = Tether.tie(self._path, self._token)
        with grpc.insecure_channel(f"unix:{self._path}", CHANNEL_OPTIONS) as channel:
            register = api.Register(client=self._tether.client, incarnation=next(self._incarnations), name=self._name)
            session = self._opening = Session(self._tether, channel, register, self._inbox)
            try:
                if self._closing.is_set():
                    return
                registered = session.register()
                _log.info("connected to the sidecar at %s, version %s", self._path, registered.version)
                self._open_session(session)
                self.session = session
                self._connected.set()
                self._read(session)
            finally:
                self._connected.clear()
                session.close()

    def _read(self, session: Session) -> None:
        try:
            session.read()
        except StreamEndedError as error:
            if not self._closing.is_set():
                _log.warning("lost the sidecar at %s: %s", self._path, reason(error))
