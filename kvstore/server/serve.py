"""The sidecar as a process: open the store, listen, and on SIGTERM let everything in flight come to an end."""

import asyncio
import contextlib
import fcntl
import logging
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection
from prometheus_client import start_http_server

from kvstore import __version__
from kvstore.api.v1 import admin_pb2, kvstore_pb2, remote_pb2
from kvstore.api.v1.admin_pb2_grpc import add_AdminServicer_to_server
from kvstore.api.v1.kvstore_pb2_grpc import add_KVStoreServicer_to_server
from kvstore.api.v1.remote_pb2_grpc import add_RemoteStoreServicer_to_server
from kvstore.config import Config, ServerConfig
from kvstore.errors import ConfigError, KVStoreError, LayoutError, OwnershipError
from kvstore.exposition import registry_of
from kvstore.opening import open_shared_store
from kvstore.server import logs
from kvstore.server.admin import Admin
from kvstore.server.clients import Clients
from kvstore.server.handshake import Handshake
from kvstore.server.ranks import Ranks
from kvstore.server.remote import RemoteStore
from kvstore.server.service import Service
from kvstore.server.session import Host
from kvstore.server.tenants import Tenants
from kvstore.server.tls import credentials
from kvstore.slot_level import SlotLevel
from kvstore.store import Store
from kvstore.tiers.base import SlotTier
from kvstore.tiers.domains import DomainMemoryTier
from kvstore.wire import MAX_MESSAGE_BYTES, admin_socket, arena_socket

SERVICE = kvstore_pb2.DESCRIPTOR.services_by_name["KVStore"].full_name
ADMIN_SERVICE = admin_pb2.DESCRIPTOR.services_by_name["Admin"].full_name
REMOTE_SERVICE = remote_pb2.DESCRIPTOR.services_by_name["RemoteStore"].full_name
HEALTH_SERVICE = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
DIRECTORY_MODES = {0o600: 0o700, 0o660: 0o710, 0o666: 0o711}
"""Of the socket's directory, by the mode of the socket."""
STOP_GRACE_S = 1.0
MAX_STREAMS = 4096
MAX_SOCKET_PATH_BYTES = 107
CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", 16 << 10),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.so_reuseport", 0),
)

_log = logging.getLogger(__name__)


def run(config: Config) -> None:
    """Serve until SIGTERM or SIGINT. Raises ``KVStoreError`` where it cannot start."""
    logs.set_up()
    os.umask(0o077)
    with _owned(config.server):
        tenants = Tenants.of(config.server)
        if not config.memory.capacity_bytes:
            raise ConfigError("a sidecar shares RAM, and memory.capacity is 0: set one")
        store, file = open_shared_store(config, len(tenants))
        try:
            asyncio.run(serve_until_told(store, config, tenants, file))
        finally:
            store.close()
            if file is not None:
                file.close()


async def serve_until_told(store: Store, config: Config, tenants: Tenants, file: SlotTier | None = None) -> None:
    """Serve an open store, on whose owner thread this is, until SIGTERM or SIGINT; ``file`` joins it when scanned."""
    told = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told.set)
    async with serving(store, config, tenants):
        if file is not None:
            _join_when_scanned(store, file)
        _log.info("ready: %s", config.server.socket)
        _notify_systemd("READY=1")
        await told.wait()
        _log.info("told to stop: letting copies end")
        _notify_systemd("STOPPING=1")


def _join_when_scanned(store: Store, file: SlotTier) -> None:
    """Let a thread look at what is on file; however much that is, the store answers meanwhile, without it."""
    loop = asyncio.get_running_loop()

    def join(level: SlotLevel) -> None:
        try:
            store.join_file(level)
        except LayoutError as error:
            _log.error("the file tier cannot be used: %s", error)
        else:
            _log.info("the file tier has joined, with %d blocks", sum(len(pool) for _, pool in level.pools()))

    def scan() -> None:
        try:
            level = store.scanned(file)
        except (KVStoreError, OSError) as error:
            _log.error("the file tier cannot be scanned, and is not used: %s", error)
            return
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(join, level)

    threading.Thread(target=scan, name="kvstore-scan", daemon=True).start()


def _notify_systemd(state: str) -> None:
    """As sd_notify does; nothing, where systemd did not start us."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify, contextlib.suppress(OSError):
        notify.sendto(state.encode(), "\0" + address[1:] if address.startswith("@") else address)


@asynccontextmanager
async def serving(store: Store, config: Config, tenants: Tenants) -> AsyncIterator[None]:
    """Serve ``store`` on the running event loop, which is its owner thread."""
    memory = store.memory_tier
    assert isinstance(memory, DomainMemoryTier)
    path = config.server.socket
    host = Host(store, memory, Ranks(store), time.monotonic)
    clients = Clients(host)
    service = Service(host, clients, tenants, __version__, config.server.lease_ms)
    health = HealthServicer()
    local, admin, remote = (
        grpc.aio.server(options=CHANNEL_OPTIONS, maximum_concurrent_rpcs=MAX_STREAMS) for _ in range(3)
    )
    add_KVStoreServicer_to_server(service, local)
    add_AdminServicer_to_server(Admin(store, clients), admin)
    add_RemoteStoreServicer_to_server(RemoteStore(host, tenants), remote)
    for server, name in ((local, SERVICE), (admin, ADMIN_SERVICE), (remote, REMOTE_SERVICE)):
        health_pb2_grpc.add_HealthServicer_to_server(health, server)
        if server is not remote:
            reflection.enable_server_reflection([name, HEALTH_SERVICE], server)
    handshake = Handshake(arena_socket(path), memory.arenas, clients, tenants)
    running = asyncio.create_task(service.run())
    undo = contextlib.ExitStack()
    try:
        handshake.start()
        await _listen(local, path)
        await _listen(admin, admin_socket(path))
        for door in (arena_socket(path), path):
            _let_in(door, config.server.socket_mode, config.server.socket_group)
        _let_in(admin_socket(path), 0o600, "")
        if config.server.listen:
            await _listen_to_others(remote, config.server)
        if config.server.metrics:
            _answer_prometheus(store, config.server.metrics, undo)
        await _say(health, health_pb2.HealthCheckResponse.SERVING)
        yield
    finally:
        await _say(health, health_pb2.HealthCheckResponse.NOT_SERVING)
        for server in (local, remote, admin):
            await server.stop(STOP_GRACE_S)
        undo.close()
        await handshake.close()
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


async def _listen_to_others(server: grpc.aio.Server, config: ServerConfig) -> None:
    """Over TLS, with a token or a client certificate, or not at all."""
    trusted = credentials(config)
    try:
        server.add_secure_port(config.listen, trusted)
    except RuntimeError as error:
        raise ConfigError(f"cannot listen at {config.listen}: {error}; set server.listen to host:port") from error
    await server.start()


async def _listen(server: grpc.aio.Server, path: Path) -> None:
    """Bind, for us alone as the process's umask has it."""
    try:
        server.add_insecure_port(f"unix:{path}")
    except RuntimeError as error:
        raise ConfigError(f"cannot listen at {path}: {error}; set server.socket elsewhere") from error
    await server.start()


def _answer_prometheus(store: Store, endpoint: str, undo: contextlib.ExitStack) -> None:
    """In threads of its own, from what the owner counts. Raises ``ConfigError`` where it cannot listen."""
    host, _, port = endpoint.rpartition(":")
    try:
        scraped, thread = start_http_server(int(port), host.strip("[]"), registry_of(store.stats))
    except OSError as error:
        raise ConfigError(f"cannot answer Prometheus at {endpoint}: {error}; set server.metrics elsewhere") from error
    undo.callback(thread.join)
    undo.callback(scraped.server_close)
    undo.callback(scraped.shutdown)


def _let_in(path: Path, mode: int, group: str) -> None:
    """Say who may connect. Raises ``ConfigError`` for a group that is none, or not ours to give to."""
    try:
        if group:
            shutil.chown(path, group=group)
    except (LookupError, OSError) as error:
        raise ConfigError(f"server.socket_group {group}: {error}; name a group that this user is in") from error
    path.chmod(mode)


async def _say(health: HealthServicer, status: int) -> None:
    for name in ("", SERVICE, ADMIN_SERVICE, REMOTE_SERVICE):
        await health.set(name, status)


@contextmanager
def _owned(config: ServerConfig) -> Iterator[None]:
    """Be the only server at the socket; makes its directory, for those who may connect, where there is none."""
    path = config.socket
    if len(os.fsencode(arena_socket(path))) > MAX_SOCKET_PATH_BYTES:
        raise ConfigError(
            f"server.socket {path} is too long for a socket: the kernel takes {MAX_SOCKET_PATH_BYTES} bytes"
        )
    if not path.parent.exists():
        path.parent.mkdir(parents=True)
        _let_in(path.parent, DIRECTORY_MODES[config.socket_mode], config.socket_group)
    found = path.parent.stat()
    if found.st_uid != os.geteuid() or found.st_mode & 0o002:
        raise OwnershipError(
            f"{path.parent} is another user's, or anybody may write to it: set server.socket elsewhere"
        )
    lock = path.with_name(path.name + ".lock")
    with lock.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise OwnershipError(
                f"{path} is served by process {file.read().strip() or '?'} already; use that one, or set server.socket"
            ) from error
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)
