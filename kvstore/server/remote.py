"""The sidecar for processes on other hosts: bytes in parts, each block under a checksum, over TLS.

A remote process maps nothing, so nothing has to be quarantined: what a call holds ends with the call. Runs on the event
loop as everything does; a part is small enough not to hold up the others.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NoReturn, cast

import grpc

from kvstore.api.v1 import kvstore_pb2, remote_pb2
from kvstore.api.v1.remote_pb2_grpc import RemoteStoreServicer
from kvstore.errors import KVStoreError, WireError
from kvstore.header import checksum
from kvstore.lease import WriteLease
from kvstore.namespace import Namespace
from kvstore.server.session import Host
from kvstore.server.tenants import Tenant, Tenants
from kvstore.types import BlockKey
from kvstore.wire import PART_BYTES, token_of, unpack_chain, unpack_identity, unpack_layout

MAX_CALLS = 16
"""More at a time would only share the same wire; whoever is turned away has a miss."""
MAX_DEADLINE_S = 600.0
POLL_S = 0.01

FindContext = grpc.aio.ServicerContext[remote_pb2.FindBlocksRequest, kvstore_pb2.Found]
LoadContext = grpc.aio.ServicerContext[remote_pb2.LoadBlocksRequest, remote_pb2.Part]
StoreContext = grpc.aio.ServicerContext[remote_pb2.StorePart, remote_pb2.StoreBlocksReply]
Context = FindContext | LoadContext | StoreContext


class RemoteStore(RemoteStoreServicer):
    """Answers over one store."""

    def __init__(self, host: Host, tenants: Tenants) -> None:
        self._host = host
        self._tenants = tenants
        self._num_calls = 0

    async def FindBlocks(  # noqa: N802 - the proto's name
        self, request: remote_pb2.FindBlocksRequest, context: FindContext
    ) -> kvstore_pb2.Found:
        """How much of a chain is here."""
        async with self._call(context) as (tenant, _):
            ns = self._namespace(tenant, request.of)
            found = self._host.store.lookup(unpack_chain(ns.digest, request.chain))
            return kvstore_pb2.Found(ready=found.ready, found=found.found, pending=found.pending)

    async def LoadBlocks(  # noqa: N802 - the proto's name
        self, request: remote_pb2.LoadBlocksRequest, context: LoadContext
    ) -> None:
        """Bring the chain up, then send it."""
        async with self._call(context) as (tenant, deadline_s):
            ns, store = self._namespace(tenant, request.of), self._host.store
            chain = unpack_chain(ns.digest, request.chain)
            prefetch = store.prefetch(chain, deadline_s)
            while not prefetch.done:
                await asyncio.sleep(POLL_S)  # the service polls
            with store.pin(chain) as lease:
                for index, view in enumerate(lease.views):
                    for part in _parts(index, view):
                        await context.write(part)

    async def StoreBlocks(  # noqa: N802 - the proto's name
        self, requests: AsyncIterator[remote_pb2.StorePart], context: StoreContext
    ) -> remote_pb2.StoreBlocksReply:
        """Take blocks in, in order, as far as they are whole and there is room."""
        async with self._call(context) as (tenant, _):
            incoming: _Incoming | None = None
            try:
                async for request in requests:
                    if incoming is None:
                        ns = self._namespace(tenant, request.of)
                        parent = BlockKey(ns.digest + request.parent) if request.parent else None
                        incoming = _Incoming(self._host, ns, unpack_chain(ns.digest, request.chain), parent)
                    if not incoming.take(request.part):
                        break
            finally:
                if incoming is not None:
                    incoming.close()
            return remote_pb2.StoreBlocksReply(num_blocks=incoming.num_blocks if incoming else 0)

    @asynccontextmanager
    async def _call(self, context: Context) -> AsyncIterator[tuple[Tenant, float]]:
        """Whose call it is and until when it may take; refuses what is not allowed."""
        tenant = self._tenants.find(token_of(context.invocation_metadata()))
        remaining_s = context.time_remaining()
        if tenant is None:
            await _refuse(context, grpc.StatusCode.UNAUTHENTICATED, "the token is not one that this store knows")
        if remaining_s is None or remaining_s > MAX_DEADLINE_S:
            await _refuse(
                context, grpc.StatusCode.INVALID_ARGUMENT, f"a deadline is missing, or above {MAX_DEADLINE_S} s"
            )
        if self._num_calls >= MAX_CALLS:
            await _refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MAX_CALLS} calls are under way already")
        self._num_calls += 1
        try:
            yield tenant, time.monotonic() + remaining_s
        except KVStoreError as error:
            self._host.store.stats.inc("kvstore_errors_total", 1, "server.remote")
            await _refuse(context, grpc.StatusCode.INVALID_ARGUMENT, str(error))
        finally:
            self._num_calls -= 1

    def _namespace(self, tenant: Tenant, of: remote_pb2.NamespaceOf) -> Namespace:
        identity, layout = unpack_identity(of.identity), unpack_layout(of.layout)
        return tenant.open_namespace(self._host.store, self._host.memory, identity, layout, None)


class _Incoming:
    """Blocks that are coming in. A block is named when it is whole; the first that is not ends it all."""

    def __init__(self, host: Host, ns: Namespace, keys: list[BlockKey], parent: BlockKey | None) -> None:
        self.num_blocks = 0
        self._host = host
        self._ns = ns
        self._keys = keys
        self._parent = parent
        self._lease: WriteLease | None = None
        self._num_bytes = 0

    def take(self, part: remote_pb2.Part) -> bool:
        """The next bytes; whether more are wanted. Raises ``WireError`` for bytes that are out of place."""
        if part.index != self.num_blocks or self.num_blocks >= len(self._keys):
            raise WireError(f"a part of block {part.index} where block {self.num_blocks} of {len(self._keys)} is due")
        block_bytes = self._ns.layout.block_bytes
        end = self._num_bytes + len(part.data)
        if end > block_bytes or not part.data:
            raise WireError(f"{end} bytes of a block of {block_bytes}, the last {len(part.data)} in one part")
        if self._lease is None:
            self._lease = self._host.store.reserve(self._ns, 1)
            if not self._lease.slots:
                return False
        (view,) = self._lease.views
        view[self._num_bytes : end] = part.data
        self._num_bytes = end
        if end < block_bytes:
            return True
        return self._name(view, part.checksum)

    def close(self) -> None:
        """No more comes."""
        if self._lease is not None:
            self._lease.__exit__()

    def _name(self, view: memoryview, wanted: int) -> bool:
        """The block is complete: name it if it is what was sent."""
        assert self._lease is not None
        if checksum(view) != wanted:
            self._host.store.stats.inc("kvstore_errors_total", 1, "server.checksum")
            return False
        key = self._keys[self.num_blocks]
        self._host.store.commit(self._lease, [key], self._parent)
        self._lease, self._num_bytes, self._parent = None, 0, key
        self.num_blocks += 1
        return self.num_blocks < len(self._keys)


def _parts(index: int, view: memoryview) -> list[remote_pb2.Part]:
    starts = range(0, len(view), PART_BYTES)
    parts = [remote_pb2.Part(index=index, data=bytes(view[start : start + PART_BYTES])) for start in starts]
    parts[-1].checksum = checksum(view)
    return parts


async def _refuse(context: Context, code: grpc.StatusCode, reason: str) -> NoReturn:
    await cast(FindContext, context).abort(code, reason)
    raise AssertionError("abort does not return")
