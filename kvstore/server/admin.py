"""What an operator asks of a running sidecar. Runs on the event loop, as everything does."""

import asyncio
import time

import grpc

from kvstore import __version__
from kvstore.api.v1 import admin_pb2 as api
from kvstore.api.v1.admin_pb2_grpc import AdminServicer
from kvstore.server.clients import Clients
from kvstore.server.session import Client
from kvstore.store import Store

EVICT_STEP_BLOCKS = 64


class Admin(AdminServicer):
    """Answers over one store and its clients."""

    def __init__(self, store: Store, clients: Clients) -> None:
        self._store = store
        self._clients = clients
        self._began_s = time.monotonic()

    async def GetStats(  # noqa: N802 - the proto's name
        self, request: api.GetStatsRequest, context: grpc.aio.ServicerContext[api.GetStatsRequest, api.SidecarStats]
    ) -> api.SidecarStats:
        """Every metric, every client, every namespace."""
        samples = [
            api.Sample(metric=metric, labels=labels, value=value)
            for metric, series in self._store.snapshot().items()
            for labels, value in series.items()
        ]
        namespaces = [
            api.NamespaceStats(digest=ns.digest, model=ns.identity.model, block_bytes=ns.layout.block_bytes)
            for ns in self._store.namespaces
        ]
        return api.SidecarStats(
            version=__version__,
            uptime_s=time.monotonic() - self._began_s,
            samples=samples,
            clients=[_client_stats(client) for client in self._clients],
            namespaces=namespaces,
        )

    async def EvictBlocks(  # noqa: N802 - the proto's name
        self, request: api.EvictBlocksRequest, context: grpc.aio.ServicerContext[api.EvictBlocksRequest, api.BlockCount]
    ) -> api.BlockCount:
        """Make room in RAM, a bounded step at a time."""
        memory = self._store.slot_levels[0]
        used_bytes = memory.used_bytes
        num_blocks = 0
        while used_bytes - memory.used_bytes < request.num_bytes:
            num_evicted = self._store.evict(EVICT_STEP_BLOCKS)
            if num_evicted == 0:
                break
            num_blocks += num_evicted
            await asyncio.sleep(0)
        return api.BlockCount(num_blocks=num_blocks)

    async def ClearNamespace(  # noqa: N802 - the proto's name
        self,
        request: api.ClearNamespaceRequest,
        context: grpc.aio.ServicerContext[api.ClearNamespaceRequest, api.BlockCount],
    ) -> api.BlockCount:
        """Forget a namespace; NOT_FOUND if nobody has opened it."""
        ns = next((ns for ns in self._store.namespaces if ns.digest == request.digest), None)
        if ns is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no client opened this namespace since the sidecar started")
        return api.BlockCount(num_blocks=self._store.clear(ns))

    async def CheckTables(  # noqa: N802 - the proto's name
        self, request: api.CheckTablesRequest, context: grpc.aio.ServicerContext[api.CheckTablesRequest, api.TableCheck]
    ) -> api.TableCheck:
        """Prove the invariants; holds up everybody for as long as that takes."""
        try:
            self._store.check()
        except AssertionError as error:
            return api.TableCheck(broken=str(error) or "an invariant without a name")
        return api.TableCheck()


def _client_stats(client: Client) -> api.ClientStats:
    session = client.session
    stats = api.ClientStats(
        name=client.title, num_quarantined_slots=sum(slots.num_slots for slots in client.quarantined)
    )
    if session is not None:
        stats.incarnation = client.incarnation
        stats.num_reads, stats.num_writes, stats.idle_ticks = (
            len(session.reads),
            len(session.writes) + len(session.stripes),
            session.idle_ticks,
        )
    return stats
