"""Worker processes of one engine that write their parts of the same blocks: complete or not at all, alike for all."""

import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing

import pytest

from kvstore.client.rank_client import RankClient
from kvstore.lease import StripeLease
from kvstore.namespace import Namespace
from kvstore.testing.sidecar import Sidecar, eventually
from kvstore.types import BlockKey, Rank
from tests.engine_process import engine_process
from tests.real_stores import IDENTITY, LAYOUT, chain_of, content, put

NUM_RANKS = 3
NUM_SLOTS = 32
PART_BYTES = -(-LAYOUT.block_bytes // NUM_RANKS)


@pytest.fixture(scope="module")
def shared() -> Iterator[Sidecar]:
    with Sidecar(MEMORY_CAPACITY="1MiB", SERVER_LEASE="1500ms") as served:
        yield served


@pytest.fixture
def served(shared: Sidecar) -> Iterator[Sidecar]:
    yield shared
    eventually(lambda: not shared.stats().clients)
    with shared.admin() as admin:
        admin.evict(10**9)
        assert admin.check() == ""
    eventually(lambda: shared.metric("kvstore_used_bytes", "memory") == 0)
    assert shared.metric("kvstore_pinned_blocks", "memory") == 0


@pytest.fixture
def ranks(served: Sidecar) -> Iterator[list[RankClient]]:
    with ExitStack() as stack:
        clients = [
            RankClient(Rank("engine", index, NUM_RANKS), served.socket, budget_s=5.0) for index in range(NUM_RANKS)
        ]
        for client in clients:
            stack.enter_context(closing(client))
            assert client.wait_connected(20.0)
            client.open_namespace(IDENTITY, LAYOUT)
        yield clients


NS = Namespace(IDENTITY, LAYOUT)


def reserve(client: RankClient, chain: Sequence[BlockKey]) -> StripeLease:
    return client.reserve_stripes(NS, chain, None)


def write(client: RankClient, lease: StripeLease) -> None:
    """Of each block the part of the client's rank."""
    part = slice(client.rank.index * PART_BYTES, (client.rank.index + 1) * PART_BYTES)
    for key, view in zip(lease.keys, lease.views, strict=True):
        view[part] = content(key)[part]


def ready(client: RankClient, chain: Sequence[BlockKey]) -> int:
    """Blocks that are served, every byte checked."""
    with client.pin(chain) as lease:
        assert [bytes(view) for view in lease.views] == [content(key) for key in lease.keys]
        return lease.num_blocks


def test_a_block_is_there_when_every_rank_has_written_its_part(ranks: list[RankClient]) -> None:
    chain = chain_of(NS, 5)
    leases = [reserve(client, chain) for client in ranks]
    assert all(lease.keys == chain and lease.slots == leases[0].slots for lease in leases)
    for client, lease in zip(ranks, leases, strict=True):
        assert ready(ranks[0], chain) == 0
        write(client, lease)
        client.commit_stripes(lease)
    eventually(lambda: [ready(client, chain) for client in ranks] == [5, 5, 5])


def test_ranks_that_come_one_after_the_other_meet_in_the_same_slots(ranks: list[RankClient]) -> None:
    chain = chain_of(NS, 4)
    for client in ranks:
        lease = reserve(client, chain)
        write(client, lease)
        client.commit_stripes(lease)
        assert client is ranks[-1] or reserve(client, chain).keys == []  # not twice
    eventually(lambda: ready(ranks[0], chain) == 4)


def test_a_rank_that_aborts_costs_the_block_and_not_the_slot(ranks: list[RankClient], served: Sidecar) -> None:
    chain = chain_of(NS, 6)
    leases = [reserve(client, chain) for client in ranks]
    ranks[0].commit_stripes(leases[0])
    ranks[1].abort(leases[1])
    eventually(lambda: served.metric("kvstore_quarantined_slots", "memory") == 6)  # rank 2 may still write
    write(ranks[2], leases[2])
    ranks[2].commit_stripes(leases[2])
    assert ready(ranks[2], chain) == 0
    eventually(lambda: served.metric("kvstore_used_bytes", "memory") == 0)
    for client in ranks:  # and again
        lease = reserve(client, chain)
        write(client, lease)
        client.commit_stripes(lease)
    eventually(lambda: ready(ranks[1], chain) == 6)


def test_a_rank_that_is_killed_costs_the_block_and_the_others_go_on(served: Sidecar, ranks: list[RankClient]) -> None:
    chain = chain_of(NS, 6, 1)
    with engine_process(served.socket, rank=Rank("engine", 2, NUM_RANKS)) as victim:
        assert victim.do("reserve_stripes", 1, 6) == 6
        leases = [reserve(client, chain) for client in ranks[:2]]
        victim.send(signal.SIGKILL)
        eventually(lambda: served.metric("kvstore_quarantined_slots", "memory") == 6)
        for client, lease in zip(ranks, leases, strict=False):
            write(client, lease)
            client.commit_stripes(lease)
    assert ready(ranks[0], chain) == 0
    eventually(lambda: served.metric("kvstore_used_bytes", "memory") == 0)


def test_a_rank_that_is_stopped_keeps_its_slots_from_others(served: Sidecar, ranks: list[RankClient]) -> None:
    chain = chain_of(NS, 6, 1)
    with engine_process(served.socket, rank=Rank("engine", 2, NUM_RANKS)) as sleeper:
        sleeper.do("reserve_stripes", 1, 6)
        leases = [reserve(client, chain) for client in ranks[:2]]
        sleeper.send(signal.SIGSTOP)
        eventually(lambda: served.metric("kvstore_expired_sessions_total") > 0)
        for client, lease in zip(ranks, leases, strict=False):
            client.commit_stripes(lease)
        eventually(lambda: served.metric("kvstore_quarantined_slots", "memory") == 6)
        assert ready(ranks[0], chain) == 0
        for client in ranks:
            lease = reserve(client, chain)  # other slots
            assert not set(lease.slots) & set(leases[0].slots)
            write(client, lease)
            client.commit_stripes(lease)
        sleeper.begin("scribble")
        sleeper.send(signal.SIGCONT)
        sleeper.answer()
        eventually(lambda: ready(ranks[0], chain) == 6)


def test_two_engines_do_not_mix_their_stripes(served: Sidecar, ranks: list[RankClient]) -> None:
    chain = chain_of(NS, 3)
    with closing(RankClient(Rank("other", 0, 2), served.socket, budget_s=5.0)) as other:
        assert other.wait_connected(20.0)
        other.open_namespace(IDENTITY, LAYOUT)
        foreign = other.reserve_stripes(NS, chain, None)
        leases = [reserve(client, chain) for client in ranks]
        assert not set(foreign.slots) & set(leases[0].slots)
        other.commit_stripes(foreign)
        for client, lease in zip(ranks, leases, strict=True):
            write(client, lease)
            client.commit_stripes(lease)
        eventually(lambda: ready(ranks[0], chain) == 3)


def test_ranks_get_the_same_answer_whatever_happens_between_their_questions(
    served: Sidecar, ranks: list[RankClient]
) -> None:
    chain = chain_of(NS, 8)
    put(ranks[0], NS, chain)
    first = ranks[0].pin_together(chain, "request-1")
    assert first.num_blocks == 8
    ranks[0].release(first)
    with served.admin() as admin:
        admin.evict(10**9)
    put(ranks[1], NS, chain_of(NS, NUM_SLOTS // 2, 2))
    put(ranks[2], NS, chain_of(NS, NUM_SLOTS // 2, 3))
    others = [client.pin_together(chain, "request-1") for client in ranks[1:]]
    assert [lease.num_blocks for lease in others] == [8, 8]
    assert all(
        bytes(view) == content(key) for lease in others for key, view in zip(lease.keys, lease.views, strict=True)
    )
    for client, lease in zip(ranks[1:], others, strict=True):
        client.release(lease)
    missing = chain_of(NS, 4, 4)
    nothing = ranks[2].pin_together(missing, "request-2")
    with served.admin() as admin:
        admin.evict(8 * LAYOUT.block_bytes)
    put(ranks[0], NS, missing)
    assert (
        [client.pin_together(missing, "request-2").num_blocks for client in ranks[:2]]
        == [nothing.num_blocks] * 2
        == [0, 0]
    )


def test_ranks_that_disagree_are_told(ranks: list[RankClient], served: Sidecar) -> None:
    chain = chain_of(NS, 2)
    lease = reserve(ranks[0], chain)
    with closing(RankClient(Rank("engine", 1, 2), served.socket, budget_s=5.0)) as other:
        assert other.wait_connected(20.0)
        other.open_namespace(IDENTITY, LAYOUT)
        assert other.reserve_stripes(NS, chain, None).slots == []
        assert other.stats.get("kvstore_errors_total", "client.reserve_stripes") == 1
    ranks[0].abort(lease)
