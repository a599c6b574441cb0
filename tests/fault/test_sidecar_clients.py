"""Clients of a sidecar that die, stop, wake up and come back: nobody else notices, and nothing stays behind."""

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import closing

import pytest

from kvstore.client.store_client import StoreClient
from kvstore.namespace import Namespace
from kvstore.testing.sidecar import Sidecar, eventually
from kvstore.types import BlockKey
from tests.engine_process import engine_process
from tests.real_stores import IDENTITY, LAYOUT, chain_of, get, put

LEASE_S = 1.0
NUM_SLOTS = 32
"""1 MiB of blocks of 32 KiB."""


@pytest.fixture(scope="module")
def shared() -> Iterator[Sidecar]:
    with Sidecar(MEMORY_CAPACITY="1MiB", SERVER_LEASE=f"{int(LEASE_S * 1000)}ms") as served:
        yield served


@pytest.fixture
def served(shared: Sidecar) -> Iterator[Sidecar]:
    yield shared
    eventually(lambda: not shared.stats().clients)
    with shared.admin() as admin:
        admin.evict(10**9)
        assert admin.check() == ""
    assert held(shared) == {"pinned": 0, "quarantined": 0, "used_bytes": 0}


def held(served: Sidecar) -> dict[str, float]:
    """What is not free."""
    return {
        "pinned": served.metric("kvstore_pinned_blocks", "memory"),
        "quarantined": served.metric("kvstore_quarantined_slots", "memory"),
        "used_bytes": served.metric("kvstore_used_bytes", "memory"),
    }


def fill(store: StoreClient, ns: Namespace, chain: Sequence[BlockKey]) -> None:
    """Store a long chain in steps, as an engine does: one client gets no more than half of the slots to write to."""
    for end in range(8, len(chain) + 1, 8):
        put(store, ns, chain[:end])


def test_a_killed_client_leaves_nothing_behind(served: Sidecar) -> None:
    with engine_process(served.socket) as victim, closing(served.client()) as other:
        victim.do("put", 1, 4)
        assert victim.do("pin", 1, 4) == 4
        assert victim.do("reserve", 100) == NUM_SLOTS / 2  # the most that one client may write to
        assert victim.do("reserve", 100) == 0
        ns = other.open_namespace(IDENTITY, LAYOUT)
        fill(other, ns, chain_of(ns, NUM_SLOTS, 2))
        assert get(other, chain_of(ns, NUM_SLOTS, 2)) == NUM_SLOTS / 2 - 4  # for the rest there is no room
        victim.send(signal.SIGKILL)
        eventually(lambda: served.metric("kvstore_pinned_blocks", "memory") == 0, LEASE_S)
        fill(other, ns, chain_of(ns, NUM_SLOTS, 3))
        assert get(other, chain_of(ns, NUM_SLOTS, 3)) == NUM_SLOTS


def test_a_stopped_client_loses_its_pins_but_keeps_its_slots_until_it_speaks(served: Sidecar) -> None:
    with engine_process(served.socket) as sleeper, closing(served.client()) as other:
        sleeper.do("put", 1, 4)
        sleeper.do("pin", 1, 4)
        assert sleeper.do("reserve", 8) == 8
        sleeper.send(signal.SIGSTOP)
        eventually(lambda: served.metric("kvstore_quarantined_slots", "memory") == 8)
        assert served.metric("kvstore_pinned_blocks", "memory") == 0
        ns = other.open_namespace(IDENTITY, LAYOUT)
        num_stored = NUM_SLOTS - 8  # all but what the sleeper may still write to
        chain = chain_of(ns, num_stored, 3)
        fill(other, ns, chain)
        assert get(other, chain) == num_stored

        sleeper.begin("scribble")
        sleeper.begin("read_pinned")
        sleeper.begin("commit", 7)
        sleeper.send(signal.SIGCONT)
        assert sleeper.answer() is None
        assert sleeper.answer() == {"right": False, "held": False}  # others have the places, and the reader knows
        assert sleeper.answer() == 0
        assert get(other, chain) == num_stored  # every byte is as it was

        eventually(lambda: any(client.incarnation == 2 for client in served.stats().clients))
        assert served.metric("kvstore_quarantined_slots", "memory") == 8  # it still has its lease
        sleeper.do("abort")
        eventually(lambda: served.metric("kvstore_quarantined_slots", "memory") == 0)
        assert sleeper.do("get", 3, num_stored) == num_stored


def test_a_stopped_client_that_is_killed_frees_its_quarantine(served: Sidecar) -> None:
    with engine_process(served.socket) as sleeper:
        sleeper.do("reserve", 8)
        sleeper.send(signal.SIGSTOP)
        eventually(lambda: served.metric("kvstore_quarantined_slots", "memory") == 8)
        sleeper.send(signal.SIGKILL)
        eventually(lambda: served.metric("kvstore_quarantined_slots", "memory") == 0, LEASE_S)


def test_a_sidecar_that_was_stopped_itself_expires_nobody(served: Sidecar) -> None:
    with engine_process(served.socket) as engine:
        engine.do("put", 1, 4)
        engine.do("pin", 1, 4)
        expired = served.metric("kvstore_expired_sessions_total")
        served.send(signal.SIGSTOP)
        time.sleep(1.5 * LEASE_S)
        served.send(signal.SIGCONT)
        time.sleep(LEASE_S)
        assert served.metric("kvstore_expired_sessions_total") == expired
        assert served.metric("kvstore_pinned_blocks", "memory") == 4
        assert engine.do("read_pinned")["right"]
        engine.do("release")


def test_a_hundred_clients_come_and_go(served: Sidecar) -> None:
    for _ in range(10):
        clients = [served.client() for _ in range(10)]
        for client in clients:
            client.reserve(client.open_namespace(IDENTITY, LAYOUT), 2)
        for client in clients:
            client.close()
