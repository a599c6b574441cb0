"""Reserves that are asked for ahead: they spare a wait, and hold nothing back from anybody."""

import signal
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from kvstore.api.v1 import kvstore_pb2 as api
from kvstore.client import ahead
from kvstore.client.session import Session
from kvstore.client.store_client import StoreClient
from kvstore.namespace import Namespace
from kvstore.testing.sidecar import Sidecar, eventually
from tests.real_stores import IDENTITY, LAYOUT, chain_of, get, put

STEP_BLOCKS = 4
NUM_ALLOWED = 32
"""Half of RAM: what one client may write to."""


@pytest.fixture
def served() -> Iterator[Sidecar]:
    with Sidecar(MEMORY_CAPACITY=f"{2 * NUM_ALLOWED * LAYOUT.block_bytes}B") as served:
        wait_usable(served)
        yield served


@pytest.fixture
def client(served: Sidecar) -> Iterator[StoreClient]:
    with closing(served.client()) as client:
        yield client


@pytest.fixture
def ns(client: StoreClient) -> Namespace:
    return client.open_namespace(IDENTITY, LAYOUT)


def wait_usable(served: Sidecar) -> None:
    eventually(lambda: served.metric("kvstore_usable_bytes", "memory") == 2 * NUM_ALLOWED * LAYOUT.block_bytes)


def reserve_twice(client: StoreClient, ns: Namespace) -> None:
    for _ in range(2):
        client.abort(client.reserve(ns, STEP_BLOCKS))


def num_left(client: StoreClient, ns: Namespace) -> int:
    with client.reserve(ns, NUM_ALLOWED) as lease:
        return lease.num_blocks


def test_the_third_step_does_not_wait_for_the_sidecar(served: Sidecar, client: StoreClient, ns: Namespace) -> None:
    reserve_twice(client, ns)
    time.sleep(1.0)  # the answer is on its way
    served.send(signal.SIGSTOP)
    began_s = time.monotonic()
    lease = client.reserve(ns, STEP_BLOCKS)
    assert lease.num_blocks == STEP_BLOCKS
    assert time.monotonic() < began_s + 1.0  # the budget is five seconds
    served.send(signal.SIGCONT)
    chain = chain_of(ns, STEP_BLOCKS)
    client.abort(lease)
    put(client, ns, chain)
    assert get(client, chain) == STEP_BLOCKS


def test_what_was_asked_for_ahead_is_given_back_to_who_wants_more(client: StoreClient, ns: Namespace) -> None:
    reserve_twice(client, ns)
    assert num_left(client, ns) == NUM_ALLOWED


def test_who_rests_gives_it_back(served: Sidecar, client: StoreClient, ns: Namespace) -> None:
    reserve_twice(client, ns)
    with closing(served.client()) as one, closing(served.client()) as other:
        for each in (one, other):
            each.open_namespace(IDENTITY, LAYOUT)
        with one.reserve(ns, NUM_ALLOWED) as lease:
            assert lease.num_blocks == NUM_ALLOWED
            assert num_left(other, ns) == NUM_ALLOWED - STEP_BLOCKS
            eventually(lambda: num_left(other, ns) == NUM_ALLOWED)


def test_a_spare_of_a_sidecar_that_died_is_nobodys(
    served: Sidecar, client: StoreClient, ns: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its slots are somebody else's by now."""
    monkeypatch.setattr(ahead, "KEEP_S", 60.0)
    chain, lost = chain_of(ns, STEP_BLOCKS), client._connection.session
    reserve_twice(client, ns)
    time.sleep(1.0)  # the answer is on its way
    served.restart()
    served.wait_ready()
    wait_usable(served)
    eventually(lambda: client._connection.session is not lost)
    put(client, ns, chain)
    assert get(client, chain) == STEP_BLOCKS


@pytest.mark.parametrize("num_blocks", [STEP_BLOCKS, NUM_ALLOWED])
def test_only_steps_that_follow_each_other_and_are_small_are_asked_for(
    num_blocks: int, client: StoreClient, ns: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    if num_blocks == STEP_BLOCKS:
        monkeypatch.setattr(ahead, "KEEP_S", 0.0)
    for _ in range(3):
        client.abort(client.reserve(ns, num_blocks))
    assert client._ahead._spare is None


def test_slots_of_a_session_that_ends_meanwhile_are_not_given_to_anybody(
    client: StoreClient, ns: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the lease was counted, a new session may have told the sidecar that nothing writes to them any more."""
    reserve_twice(client, ns)
    take = client._ahead.take

    def take_and_lose(session: Session, wanted: api.Reserve) -> tuple[int, list[int]] | None:
        taken = take(session, wanted)
        assert taken is not None
        session.end()
        eventually(lambda: client._connection.session not in (None, session))
        return taken

    with monkeypatch.context() as losing:
        losing.setattr(client._ahead, "take", take_and_lose)
        assert client.reserve(ns, STEP_BLOCKS).num_blocks == 0
    eventually(lambda: num_left(client, ns) == NUM_ALLOWED)
