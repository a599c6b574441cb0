"""Following a sidecar: every way in and out is told once, in order, and who fell behind is told everything anew."""

import hashlib
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from kvstore.client.store_client import StoreClient
from kvstore.client.watching import Watching
from kvstore.errors import SidecarError
from kvstore.journal import Change, Journal
from kvstore.namespace import Namespace
from kvstore.testing.sidecar import Sidecar, eventually
from kvstore.types import BlockKey
from tests.real_stores import IDENTITY, LAYOUT, chain_of, get, put

NS = Namespace(IDENTITY, LAYOUT)


class Follower:
    """A ``Watching`` in a thread."""

    def __init__(self, watching: Watching) -> None:
        self.watching = watching
        self.numbers: list[int] = []
        self.arrivals: list[tuple[str, int]] = []
        self._thread = threading.Thread(target=self._follow)
        self._thread.start()

    def _follow(self) -> None:
        with suppress(SidecarError):
            for changes in self.watching.changes():
                self.numbers.append(changes.last)
                self.arrivals += [
                    (run.tier, len(run.digests) // run.digest_bytes) for run in changes.runs if run.is_here
                ]

    def close(self) -> None:
        self.watching.__exit__()
        self._thread.join(10)
        assert not self._thread.is_alive()

    def knows(self, tier: str, keys: list[BlockKey]) -> bool:
        return self.watching.blocks[tier] == set(keys)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Sidecar]:
    with Sidecar(FILE_DIRECTORIES=str(tmp_path / "kv"), FILE_CAPACITY="64MiB") as served:
        eventually(lambda: "joined" in served.log.read_text())
        yield served


@pytest.fixture
def client(served: Sidecar) -> Iterator[StoreClient]:
    with closing(served.client()) as client:
        client.open_namespace(IDENTITY, LAYOUT)
        yield client


def test_what_is_there_and_what_comes_and_goes_is_told(served: Sidecar, client: StoreClient) -> None:
    old, new = chain_of(NS, 4), chain_of(NS, 6, 1)
    put(client, NS, old)
    with closing(Follower(Watching(served.socket))) as follower:
        eventually(lambda: follower.knows("memory", old) and follower.knows("file", old))
        put(client, NS, new)
        eventually(lambda: follower.knows("memory", old + new) and follower.knows("file", old + new))
        assert ("memory", 6) in follower.arrivals  # a chain that comes as one is told as one
        client.evict(10**6)
        eventually(lambda: follower.knows("memory", []) and follower.knows("file", old + new))
        assert get(client, old) == 4
        eventually(lambda: follower.knows("memory", old))
        client.clear(NS)
        eventually(lambda: follower.knows("memory", []) and follower.knows("file", []))
        assert follower.watching.num_beginnings == 1
        assert follower.numbers == sorted(follower.numbers)


def test_one_that_was_away_goes_on_or_begins_anew(served: Sidecar, client: StoreClient) -> None:
    with closing(Follower(Watching(served.socket))) as stays:
        with closing(Follower(Watching(served.socket))) as leaves:
            put(client, NS, chain_of(NS, 2))
            eventually(lambda: leaves.knows("memory", chain_of(NS, 2)))
            position, blocks = leaves.watching.position, leaves.watching.blocks
        put(client, NS, chain_of(NS, 5, 1))
        again = Watching(served.socket, position=position)
        again.blocks = blocks
        with closing(Follower(again)) as follower:
            eventually(lambda: follower.knows("memory", chain_of(NS, 2) + chain_of(NS, 5, 1)))
            assert again.num_beginnings == 0
        assert stays.watching.num_beginnings == 1
    client.evict(3)  # while nobody watches, nothing is noted
    with closing(Follower(Watching(served.socket, position=position))) as follower:
        eventually(lambda: follower.watching.num_beginnings == 1)
        eventually(lambda: len(follower.watching.blocks["memory"]) == 4)
    with closing(Follower(Watching(served.socket, position=(b"another server", 1)))) as follower:
        eventually(lambda: follower.watching.num_beginnings == 1)


def test_a_tenant_is_told_of_its_own(tmp_path: Path) -> None:
    digests = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("red", "blue")}
    path = tmp_path / "tenants.toml"
    path.write_text("".join(f'[{name}]\ntoken_sha256 = "{digest}"\n' for name, digest in digests.items()))
    with (
        Sidecar(MEMORY_CAPACITY="256MiB", SERVER_TENANTS_FILE=str(path)) as served,
        closing(served.client(token="red")) as red,
    ):
        red.open_namespace(IDENTITY, LAYOUT)
        with (
            closing(Follower(Watching(served.socket, token="red"))) as ours,
            closing(Follower(Watching(served.socket, token="blue"))) as theirs,
        ):

            def stored() -> bool:
                put(red, NS, chain_of(NS, 3))
                return get(red, chain_of(NS, 3)) == 3

            eventually(stored)
            eventually(lambda: ours.knows("memory", chain_of(NS, 3)))
            eventually(lambda: theirs.numbers[-1:] == ours.numbers[-1:])
            assert theirs.arrivals == []
        with Watching(served.socket, token="green") as stranger, pytest.raises(SidecarError):
            next(stranger.changes())


def test_a_journal_is_bounded_and_says_so() -> None:
    journal = Journal(max_changes=3)
    assert journal.since(1, 10) == []
    changes = [Change("memory", BlockKey(bytes([number])), None, is_here=True) for number in range(5)]
    for change in changes[:3]:
        journal.note(change.tier, change.key, change.parent, is_here=change.is_here)
    assert journal.since(1, 10) == changes[:3]
    assert journal.since(2, 1) == changes[1:2]
    assert journal.since(4, 10) == []
    assert journal.since(5, 10) is None  # of another one
    for change in changes[3:]:
        journal.note(change.tier, change.key, change.parent, is_here=change.is_here)
    assert journal.since(2, 10) is None
    assert journal.since(3, 10) == changes[2:]
    journal.skip()
    assert journal.since(6, 10) is None
    assert journal.since(7, 10) == []
