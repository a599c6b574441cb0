"""One connection to a server, speaking RESP2 straight out of and into the caller's buffers.

hiredis parses small replies. Blocks bypass it: they are sent from where they lie and received into where they shall
lie, since every copy on the way costs as much as the socket does (``docs/redis.md`` has the numbers).

Rule 1: every wait ends at the deadline of the call.
Rule 2: a wire that still owes replies, or whose replies made no sense, is not clean; it is closed and never used again,
so that a late reply cannot pass for another request's.
Rule 3: whatever goes wrong is an ``OSError``: ``TimeoutError`` at the deadline, ``WrongReplyError`` for nonsense. An
error that the server states is no exception but a reply, ``ServerError``.
"""

import os
import select
import socket
import ssl
import time
from collections import deque
from collections.abc import Iterable, Sequence

import hiredis

from kvstore.codecs.base import Buffer

_CRLF = b"\r\n"
_PEEK_BYTES = 512  # a reply's first line and a block's header, and little of the payload, which then needs no copy
_SMALL_REPLY_BYTES = 64 << 10
_SKIP_BYTES = 64 << 10
_IOVECS = 512  # the kernel takes 1,024 a call
_TIMEOUT_SLACK_S = 0.005  # setting the timeout before each system call would be another one
_MAX_TIMEOUT_S = 3600.0  # of one system call: a socket knows no infinity
_NOT_YET = object()


class ServerError(Exception):
    """An error reply, such as ``OOM command not allowed``: a value here, raised by nobody."""

    @property
    def code(self) -> str:
        """The first word: ``OOM``, ``LOADING``, ``MOVED``."""
        return str(self).partition(" ")[0]


class WrongReplyError(ConnectionError):
    """The server answered what nobody asked."""


class Wire:
    """A connected socket, and what is known of the replies on it."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._pid = os.getpid()
        self._is_tls = isinstance(sock, ssl.SSLSocket)
        self._owed = 0  # replies not yet read
        self._is_broken = False
        self._bounded_by_s = self._bounded_at_s = 0.0
        self._reader = hiredis.Reader(replyError=ServerError, notEnoughData=_NOT_YET)
        self._chunk = bytearray(_SMALL_REPLY_BYTES)
        self._peek = bytearray(_PEEK_BYTES)
        self._view = memoryview(self._peek)
        self._low = self._high = 0  # what of the peek is unread

    @property
    def is_clean(self) -> bool:
        """Every reply has been read to its end and made sense, in this very process."""
        return self._owed == 0 and not self._is_broken and self._pid == os.getpid()

    @property
    def is_quiet(self) -> bool:
        """Clean, still open, and nothing has arrived unasked."""
        poller = select.poll()
        poller.register(self._sock, select.POLLIN)
        return self.is_clean and not poller.poll(0)

    def wrong(self, what: str) -> WrongReplyError:
        """The error to raise for a reply that nobody asked for; the wire is not clean from now on."""
        self._is_broken = True
        return WrongReplyError(what)

    def close(self) -> None:
        """Close the socket; in a forked child only the child's copy of it."""
        self._sock.close()

    def send(self, buffers: Iterable[Buffer], num_replies: int, deadline_s: float) -> None:
        """Send ``buffers`` back to back; ``num_replies`` are owed from now on."""
        self._bound(deadline_s)  # too late before a byte was sent leaves the wire clean
        self._owed += num_replies
        views = deque(memoryview(buffer) for buffer in buffers)
        while views:
            sent = self._send_some(views, deadline_s)
            while views and sent >= len(views[0]):
                sent -= len(views.popleft())
            if sent:
                views[0] = views[0][sent:]

    def reply(self, deadline_s: float) -> object:
        """The next reply, whole: bytes, int, None, list or ``ServerError``."""
        if self._low != self._high:
            raise self.wrong("bytes are left over from the value before")
        try:
            while (reply := self._reader.gets()) is _NOT_YET:
                received = self._receive(memoryview(self._chunk), deadline_s)
                self._reader.feed(self._chunk, 0, received)  # type: ignore[arg-type]  # any buffer will do
        except hiredis.ProtocolError as error:
            raise self.wrong(f"not RESP: {error}") from error
        self._end_reply(surplus=self._reader.has_data())
        return reply

    def ask(self, commands: Sequence[Sequence[bytes | int]], deadline_s: float) -> list[object]:
        """The replies to ``commands``, sent in one go."""
        self.send([b"".join(map(pack, commands))], len(commands), deadline_s)
        return [self.reply(deadline_s) for _ in commands]

    def value(self, deadline_s: float) -> int | ServerError | None:
        """The start of a reply that is a value: its length, to be read by ``take`` and ``skip``, then ``end_value``.

        With None (there is no such key) or an error the reply is over.
        """
        line = self._line(deadline_s)
        kind, rest = line[:1], line[1:]
        if kind == b"-":
            self._end_reply()
            return ServerError(rest.decode(errors="replace"))
        if line == b"$-1":
            self._end_reply()
            return None
        if kind != b"$" or not rest.isdigit():
            raise self.wrong(f"expected a value, got {line[:32]!r}")
        return int(rest)

    def take(self, out: memoryview, deadline_s: float) -> None:
        """Fill ``out`` with the next bytes of the value."""
        filled = min(len(out), self._high - self._low)
        out[:filled] = self._view[self._low : self._low + filled]
        self._low += filled
        while filled < len(out):
            filled += self._receive(out[filled:], deadline_s)

    def skip(self, num_bytes: int, deadline_s: float) -> None:
        """Read and forget bytes of the value."""
        scratch = memoryview(bytearray(min(num_bytes, _SKIP_BYTES)))
        while num_bytes:
            step = min(num_bytes, len(scratch))
            self.take(scratch[:step], deadline_s)
            num_bytes -= step

    def end_value(self, deadline_s: float) -> None:
        """The value has been read; so is its end mark now."""
        while self._high - self._low < len(_CRLF):
            self._look_ahead(deadline_s)
        if not self._peek.startswith(_CRLF, self._low):
            raise self.wrong("a value is longer than its stated length")
        self._low += len(_CRLF)
        self._end_reply()

    def _end_reply(self, *, surplus: bool = False) -> None:
        """One reply less is owed; bytes beyond the last one were not asked for."""
        self._owed -= 1
        if self._owed == 0 and (surplus or self._low != self._high):
            raise self.wrong("more replies than requests")

    def _line(self, deadline_s: float) -> bytes:
        while (end := self._peek.find(_CRLF, self._low, self._high)) < 0:
            if self._high - self._low == _PEEK_BYTES:
                raise self.wrong("the first line of a reply has no end")
            self._look_ahead(deadline_s)
        line = bytes(self._view[self._low : end])
        self._low = end + len(_CRLF)
        return line

    def _look_ahead(self, deadline_s: float) -> None:
        """Receive into what is free of the peek."""
        unread = self._high - self._low
        self._peek[:unread] = self._peek[self._low : self._high]
        self._low, self._high = 0, unread
        self._high += self._receive(self._view[unread:], deadline_s)

    def _receive(self, into: memoryview, deadline_s: float) -> int:
        self._bound(deadline_s)
        received = self._sock.recv_into(into)
        if not received:
            raise ConnectionResetError("the server closed the connection")
        return received

    def _send_some(self, views: deque[memoryview], deadline_s: float) -> int:
        self._bound(deadline_s)
        if self._is_tls:  # has no scatter-gather
            return self._sock.send(views[0])
        return self._sock.sendmsg([views[index] for index in range(min(len(views), _IOVECS))])

    def _bound(self, deadline_s: float) -> None:
        """Let the next system call wait until the deadline, give or take ``_TIMEOUT_SLACK_S``."""
        now_s = time.monotonic()
        if now_s >= deadline_s:
            raise TimeoutError("the deadline has passed")
        if deadline_s != self._bounded_by_s or now_s > self._bounded_at_s + _TIMEOUT_SLACK_S:
            self._sock.settimeout(min(deadline_s - now_s, _MAX_TIMEOUT_S))
            self._bounded_by_s, self._bounded_at_s = deadline_s, now_s


def pack(command: Sequence[bytes | int]) -> bytes:
    """A command as the server reads it."""
    packed: bytes = hiredis.pack_command(tuple(command))  # type: ignore[arg-type]  # its stub knows 1-tuples only
    return packed
