"""The gRPC service: streams of sessions over one store. Everything runs on the event loop, which owns the tables."""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable

import grpc

from kvstore.api.v1 import kvstore_pb2 as api
from kvstore.api.v1.kvstore_pb2_grpc import KVStoreServicer
from kvstore.errors import WireError
from kvstore.server.clients import LEASE_TICKS, Clients
from kvstore.server.session import Host
from kvstore.server.tenants import Tenants
from kvstore.server.watchers import Watchers
from kvstore.wire import token_of

POLL_INTERVAL_S = 0.05
"""Copies announce themselves; this is for deadlines."""

REGISTER_TIMEOUT_S = 5.0

_log = logging.getLogger(__name__)

NEWS_INTERVAL_S = 0.05

WatchContext = grpc.aio.ServicerContext[api.WatchRequest, api.Changes]
Context = grpc.aio.ServicerContext[api.SessionRequest, api.SessionReply]


class Service(KVStoreServicer):
    """Sessions, and the loop that applies what the mover's threads return."""

    def __init__(self, host: Host, clients: Clients, tenants: Tenants, version: str, lease_ms: int) -> None:
        self._host = host
        self._tenants = tenants
        self._watchers = Watchers(host.store)
        self._clients = clients
        server_id = secrets.token_bytes(16)
        self._registered = api.Registered(server=server_id, version=version, lease_ms=lease_ms)
        self._tick_s = lease_ms / 1000 / LEASE_TICKS
        self._wake = asyncio.Event()

    async def run(self) -> None:
        """Poll the store and tick until cancelled."""
        loop = asyncio.get_running_loop()
        self._host.store.notify(lambda: loop.call_soon_threadsafe(self._wake.set))
        await asyncio.gather(self._poll_forever(), self._tick_forever())

    async def _poll_forever(self) -> None:
        while True:
            try:
                async with asyncio.timeout(POLL_INTERVAL_S):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            self._guarded(self._poll)

    def _poll(self) -> None:
        self._host.store.poll()
        for session in self._clients.sessions():
            for reply in session.poll():
                session.send(reply)

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(self._tick_s)
            self._guarded(self._tick)

    def _tick(self) -> None:
        self._clients.tick()
        self._host.store.stats.set("kvstore_usable_bytes", self._host.memory.usable_bytes, "memory")
        self._host.store.snapshot()  # gauges, for those who read the statistics from another thread

    def _guarded(self, step: Callable[[], None]) -> None:
        """A bug must not end the loop that everybody depends on."""
        try:
            step()
        except Exception:  # noqa: BLE001 - the edge of the loop
            _log.exception("a bug in the sidecar; it goes on")
            self._host.store.stats.inc("kvstore_errors_total", 1, "server.loop")

    async def Session(self, requests: AsyncIterator[api.SessionRequest], context: Context) -> None:  # noqa: N802 - the proto's name
        """Handle a client's requests in order, for as long as its stream lasts."""
        stream = _Stream(context)
        try:
            first = await asyncio.wait_for(anext(aiter(requests)), REGISTER_TIMEOUT_S)
        except (TimeoutError, StopAsyncIteration):
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "the first request of a session is Register")
        try:
            session = self._clients.register(first.register, stream.send_soon, stream.end)
        except WireError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        try:
            await stream.send(api.SessionReply(call=first.call, registered=self._registered))
            async for request in requests:
                reply = session.handle(request)
                if reply is not None:
                    await stream.send(reply)
        except asyncio.CancelledError:
            if not stream.was_ended_here:
                raise
            # A handler that is merely cancelled would leave the other end waiting.
            await context.abort(grpc.StatusCode.ABORTED, "the session is over: another one took over, or it was silent")
        finally:
            stream.is_over = True
            self._clients.end(session)

    async def Watch(self, request: api.WatchRequest, context: WatchContext) -> None:  # noqa: N802 - the proto's name
        """What comes and goes, for as long as somebody wants to know."""
        tenant = self._tenants.find(token_of(context.invocation_metadata()))
        if tenant is None:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token is not one that this store knows")
        if not self._watchers.can_add:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many watch already")
        last = request.last if request.server == self._registered.server else 0
        with self._watchers.watcher(tenant, last) as watcher:
            while True:
                for changes in watcher.news():
                    changes.server = self._registered.server
                    await context.write(changes)
                await asyncio.sleep(NEWS_INTERVAL_S)


class _Stream:
    """The replies of one session, one at a time."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._turn = asyncio.Lock()
        self._sending: set[asyncio.Task[None]] = set()
        self._handler = asyncio.current_task()
        self.is_over = False
        self.was_ended_here = False

    async def send(self, reply: api.SessionReply) -> None:
        """Send, when it is this reply's turn."""
        async with self._turn:
            await self._context.write(reply)

    def send_soon(self, reply: api.SessionReply) -> None:
        """Send without waiting; lost if the stream ends first."""
        task = asyncio.get_running_loop().create_task(self._send_unless_over(reply))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    def end(self) -> None:
        """End the stream from this side."""
        if not self.is_over and self._handler is not None:
            self.is_over = self.was_ended_here = True
            self._handler.cancel()

    async def _send_unless_over(self, reply: api.SessionReply) -> None:
        try:
            if not self.is_over:
                await self.send(reply)
        except (asyncio.CancelledError, grpc.aio.UsageError, grpc.aio.BaseError):
            _log.debug("a reply found its stream ended")
