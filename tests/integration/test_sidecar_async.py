"""The asyncio facade over the same client."""

import asyncio
import time
from collections.abc import Iterator

import pytest

from kvstore.client.async_client import AsyncStoreClient
from kvstore.lease import Lookup
from kvstore.testing.sidecar import Sidecar
from kvstore.types import BlockKey, Outcome, Request
from tests.real_stores import IDENTITY, LAYOUT, chain_of, content


@pytest.fixture(scope="module")
def served() -> Iterator[Sidecar]:
    with Sidecar() as served:
        yield served


async def put(client: AsyncStoreClient, chain: list[BlockKey]) -> None:
    ns = await client.open_namespace(IDENTITY, LAYOUT)
    assert await client.arrive(Request("r", time.time(), ns.digest, 16 * len(chain)), chain) == len(chain)
    async with client.reserve(ns, len(chain)) as lease:
        for key, view in zip(chain, lease.views, strict=True):
            view[:] = content(key)
        assert await client.commit(lease, chain, None) == frozenset()  # there is nothing below RAM


@pytest.mark.asyncio
async def test_everything_can_be_awaited(served: Sidecar) -> None:
    async with AsyncStoreClient(served.socket, budget_s=5.0) as client:
        assert await client.wait_connected(20.0)
        ns = await client.open_namespace(IDENTITY, LAYOUT)
        chain = chain_of(ns, 5)
        assert await client.lookup(chain) == Lookup(0, 0, pending=False)
        await put(client, chain)
        assert await client.lookup(chain) == Lookup(5, 5, pending=False)
        assert (await client.prefetch(chain_of(ns, 7), time.monotonic() + 1.0)).ready == 5
        async with client.pin(chain) as lease:
            assert [bytes(view) for view in lease.views] == [content(key) for key in chain]
            assert lease.still_held()
        lent = [memoryview(bytearray(LAYOUT.block_bytes)) for _ in chain]
        loaded = await client.load_into(ns, chain, lent, time.monotonic() + 5.0)
        assert loaded.outcomes == [Outcome.OK] * 5
        assert [bytes(buffer) for buffer in lent] == [content(key) for key in chain]
        assert await client.clear(ns) == 5
        assert (await client.store_from(ns, chain, None, lent, time.monotonic() + 5.0)).num_blocks == 5
    assert served.metric("kvstore_pinned_blocks", "memory") == 0


@pytest.mark.asyncio
async def test_calls_at_the_same_time_do_not_mix_their_answers(served: Sidecar) -> None:
    async with AsyncStoreClient(served.socket, budget_s=5.0) as client:
        assert await client.wait_connected(20.0)
        ns = await client.open_namespace(IDENTITY, LAYOUT)
        chains = [chain_of(ns, length, 100 + length) for length in range(1, 9)]
        await asyncio.gather(*(put(client, chain) for chain in chains))
        found = await asyncio.gather(*(client.lookup(chain) for chain in chains))
        assert [lookup.ready for lookup in found] == list(range(1, 9))


@pytest.mark.asyncio
async def test_an_absent_sidecar_is_a_miss() -> None:
    with Sidecar() as served:
        served.kill()
        async with AsyncStoreClient(served.socket) as client:
            ns = await client.open_namespace(IDENTITY, LAYOUT)
            assert await client.lookup(chain_of(ns, 3)) == Lookup(0, 0, pending=False)
            async with client.pin(chain_of(ns, 3)) as lease:
                assert lease.num_blocks == 0
