"""The sidecar for asyncio: the same client, on an owner thread of its own, and answers that are awaited."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

from kvstore.client.store_client import BUDGET_S, StoreClient
from kvstore.hashing import Identity
from kvstore.layout import Layout
from kvstore.lease import LeaseState, Lookup, ReadLease, WriteLease
from kvstore.lending import LentBuffer, Transfer
from kvstore.namespace import Namespace
from kvstore.promotion import Prefetch
from kvstore.types import BlockKey, Request

T = TypeVar("T")
POLL_S = 0.002


class AsyncStoreClient:
    """What ``StoreClient`` does, for coroutines: nothing is pending, for whoever awaits has the answer.

    Calls may be made at the same time; each is one step of the owner thread. Raises what ``StoreClient`` raises.
    """

    def __init__(
        self, path: Path | None = None, *, token: str = "", name: str = "", budget_s: float = BUDGET_S
    ) -> None:
        """A client of the sidecar at the socket ``path``; see ``StoreClient``."""
        self._owner = ThreadPoolExecutor(1, "kvstore-client-owner")
        self._client = StoreClient(path, token=token, name=name, budget_s=budget_s)

    async def __aenter__(self) -> "AsyncStoreClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def wait_connected(self, timeout_s: float) -> bool:
        """Until the sidecar is there, at most ``timeout_s``; whether it is."""
        return await asyncio.to_thread(self._client.wait_connected, timeout_s)

    async def open_namespace(self, identity: Identity, layout: Layout, *, max_age_s: int | None = None) -> Namespace:
        """Whose blocks the following calls are about."""
        return await self._step(lambda: self._client.open_namespace(identity, layout, max_age_s=max_age_s))

    async def arrive(self, request: Request, chain: Sequence[BlockKey]) -> int:
        """A request refers to ``chain``; returns how many leading blocks are worth keeping."""
        return await self._step(lambda: self._client.arrive(request, chain))

    async def finish(self, request: Request, chain: Sequence[BlockKey], output_tokens: int) -> None:
        """The request ended."""
        await self._step(lambda: self._client.finish(request, chain, output_tokens))

    async def lookup(self, chain: Sequence[BlockKey]) -> Lookup:
        """How much of ``chain`` is here."""
        while (found := await self._step(lambda: self._client.lookup(chain))).pending:
            await self._wait()
        return found

    async def prefetch(self, chain: Sequence[BlockKey], deadline_s: float) -> Prefetch:
        """Bring as much of ``chain`` into RAM as lower levels have, by ``deadline_s``."""
        prefetch = await self._step(lambda: self._client.prefetch(chain, deadline_s))
        while not prefetch.done:
            await self._wait()
        return prefetch

    @asynccontextmanager
    async def pin(self, chain: Sequence[BlockKey]) -> AsyncIterator[ReadLease]:
        """The longest READY prefix of ``chain``, pinned; ask the lease whether it is ``still_held`` after a copy."""
        lease = await self._step(lambda: self._client.pin(chain))
        try:
            yield lease
        finally:
            await self._step(lambda: self._client.release(lease))

    @asynccontextmanager
    async def reserve(self, ns: Namespace, num_blocks: int) -> AsyncIterator[WriteLease]:
        """Up to ``num_blocks`` slots to write to; what no ``commit`` has named by the end is given back."""
        lease = await self._step(lambda: self._client.reserve(ns, num_blocks))
        try:
            yield lease
        finally:
            if lease.state is LeaseState.HELD:
                await self._step(lambda: self._client.abort(lease))

    async def commit(
        self, lease: WriteLease, keys: Sequence[BlockKey], parent: BlockKey | None
    ) -> frozenset[BlockKey] | None:
        """Name the next slots of ``lease``; returns the keys that are being copied down, None if the lease was lost."""

        def commit() -> frozenset[BlockKey] | None:
            committed = self._client.commit(lease, keys, parent)
            return committed.accepted if committed.slots else None

        return await self._step(commit)

    async def store_from(
        self,
        ns: Namespace,
        keys: Sequence[BlockKey],
        parent: BlockKey | None,
        buffers: Sequence[LentBuffer],
        deadline_s: float,
    ) -> Transfer:
        """Store blocks from the caller's buffers, which are its own again when this returns."""
        return await self._finished(lambda: self._client.store_from(ns, keys, parent, buffers, deadline_s))

    async def load_into(
        self, ns: Namespace, chain: Sequence[BlockKey], buffers: Sequence[LentBuffer], deadline_s: float
    ) -> Transfer:
        """Load the longest prefix that any level has into the caller's buffers."""
        return await self._finished(lambda: self._client.load_into(ns, chain, buffers, deadline_s))

    async def clear(self, ns: Namespace) -> int:
        """Forget a namespace in every level; returns how many blocks."""
        return await self._step(lambda: self._client.clear(ns))

    async def close(self) -> None:
        """End the session and what it holds. Idempotent."""
        await asyncio.to_thread(self._owner.shutdown)
        await asyncio.to_thread(self._client.close)

    # ---- the inside

    async def _step(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._owner, call)

    async def _wait(self) -> None:
        await asyncio.sleep(POLL_S)
        await self._step(self._client.poll)

    async def _finished(self, begin: Callable[[], Transfer]) -> Transfer:
        transfer = await self._step(begin)
        while not transfer.done or transfer.busy:
            await self._wait()
        return transfer
