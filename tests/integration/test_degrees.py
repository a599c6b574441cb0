"""Engines of every tensor-parallel degree on one sidecar: what one has stored, all others load, byte for byte."""

from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

import pytest
import torch

from gpu_io.cpu_copier import CpuCopier
from gpu_io.testing import DEGREES, IN_ORDER, STRIDED, Pages, finish
from kvstore.client.rank_client import RankClient
from kvstore.hashing import Identity
from kvstore.layout import Layout
from kvstore.namespace import Namespace
from kvstore.testing.sidecar import Sidecar, eventually
from kvstore.types import BlockKey, Rank

PAGES = [7, 2, 3]
IDENTITY = Identity("model", b"weights")

Ranks = dict[int, list[RankClient]]


@pytest.fixture(scope="module")
def engines() -> Iterator[Ranks]:
    """The ranks of an engine of each degree."""
    with ExitStack() as stack:
        served = stack.enter_context(Sidecar(MEMORY_CAPACITY="4MiB"))
        engines = {
            degree: [
                stack.enter_context(
                    closing(RankClient(Rank(f"of {degree}", rank, degree), served.socket, budget_s=5.0))
                )
                for rank in range(degree)
            ]
            for degree in DEGREES
        }
        assert all(client.wait_connected(20.0) for ranks in engines.values() for client in ranks)
        yield engines


def pages_of(client: RankClient, axes: str, num_heads: int, seed: int) -> tuple[slice, Pages]:
    """Of one rank of the model, and which heads it has."""
    rank, num_ranks = client.rank.index, client.rank.num_ranks
    heads = slice(rank * num_heads // num_ranks, (rank + 1) * num_heads // num_ranks)
    num_stripes = DEGREES[-1] // num_ranks
    more: dict[str, Any] = {"num_heads": num_heads, "heads": heads, "num_stripes": num_stripes}
    return heads, Pages(axes, seed, dtype=torch.bfloat16, device="cpu", **more)


def chain(client: RankClient, layout: Layout, salt: str) -> tuple[Namespace, list[BlockKey]]:
    ns = client.open_namespace(replace(IDENTITY, salt=salt), layout)
    return ns, ns.keys(range(len(PAGES) * layout.tokens_per_block))


def num_ready(client: RankClient, keys: list[BlockKey]) -> int:
    with client.pin(keys) as lease:
        return lease.num_blocks


@pytest.mark.parametrize("num_heads", [8, 16])
@pytest.mark.parametrize("degree", DEGREES)
def test_a_block_stored_at_one_degree_is_loaded_at_every_other(engines: Ranks, degree: int, num_heads: int) -> None:
    salt = f"{degree} {num_heads}"
    whole = Pages(STRIDED[0], 1, dtype=torch.bfloat16, device="cpu", num_heads=num_heads, num_stripes=DEGREES[-1])
    layout = whole.kv.layout
    for client in engines[degree]:
        ns, keys = chain(client, layout, salt)
        _, source = pages_of(client, STRIDED[0], num_heads, seed=1)
        lease = client.reserve_stripes(ns, keys, None)
        assert lease.keys == keys
        part = layout.bytes_of(client.rank.index, degree)
        with closing(CpuCopier(source.kv)) as copier:
            finish(copier.offload(PAGES, [view[part] for view in lease.views]))
        client.commit_stripes(lease)
    eventually(lambda: num_ready(engines[1][0], chain(engines[1][0], layout, salt)[1]) == len(PAGES))
    for other, ranks in engines.items():
        for client in ranks:
            _, keys = chain(client, layout, salt)
            heads, target = pages_of(client, IN_ORDER[0], num_heads, seed=2)
            part = layout.bytes_of(client.rank.index, other)
            with client.pin_together(keys, salt) as pinned, closing(CpuCopier(target.kv)) as copier:
                assert pinned.num_blocks == len(PAGES)
                finish(copier.onboard([view[part] for view in pinned.views], [4, 0, 5]))
            assert target.content()[[4, 0, 5]].equal(whole.content()[PAGES][..., heads, :])


def test_other_stripes_are_other_blocks(engines: Ranks) -> None:
    client = engines[1][0]
    layout = Layout("bfloat16", 3, 8, (8, 8), 4, num_stripes=8)
    ns, keys = chain(client, layout, "stripes")
    client.commit(client.reserve(ns, len(keys)), keys, None)
    assert num_ready(client, keys) == len(keys)
    for num_stripes in (1, 2, 4):
        others = chain(client, replace(layout, num_stripes=num_stripes), "stripes")[1]
        assert num_ready(client, others) == 0
