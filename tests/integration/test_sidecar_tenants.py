"""Tenants of one sidecar: nobody reads, probes or evicts another's blocks; memory moves between them, bytes do not."""

import hashlib
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from kvstore.client.store_client import StoreClient
from kvstore.config import Config
from kvstore.errors import ConfigError
from kvstore.hashing import Identity
from kvstore.layout import Layout
from kvstore.lease import Lookup
from kvstore.server.tenants import Tenants
from kvstore.testing.sidecar import Sidecar, eventually
from kvstore.testing.store_contract import looked_up
from kvstore.types import BlockKey

LAYOUT = Layout("uint8", 1, 1, (65536,), 16)  # 1 MiB a block
MODEL = Identity("a-model", b"weights")
NUM_SLOTS = 256
EXTENT_SLOTS = 64


def line(name: str, token: str, rest: str = "") -> str:
    return f'[{name}]\ntoken_sha256 = "{hashlib.sha256(token.encode()).hexdigest()}"\n{rest}\n'


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    path = tmp_path_factory.mktemp("tenants") / "tenants.toml"
    small = 'memory = "40MiB"\nmodels = {"a-model" = {memory = "8MiB"}}'
    path.write_text(line("red", "red-token") + line("blue", "blue-token") + line("small", "small-token", small))
    with Sidecar(MEMORY_CAPACITY="256MiB", SERVER_TENANTS_FILE=str(path)) as served:
        yield served


@pytest.fixture
def tenants(served: Sidecar) -> Iterator[dict[str, StoreClient]]:
    with ExitStack() as stack:
        clients = {}
        for name in ("red", "blue", "small"):
            client = StoreClient(served.socket, token=f"{name}-token", budget_s=5.0)
            stack.enter_context(closing(client))
            assert client.wait_connected(20.0)
            client.open_namespace(MODEL, LAYOUT)
            clients[name] = client
        yield clients
        for client in clients.values():
            client.evict(10**6)
    with served.admin() as admin:
        assert admin.check() == ""


def chain_of(client: StoreClient, num_blocks: int, number: int = 0, identity: Identity = MODEL) -> list[BlockKey]:
    return client.open_namespace(identity, LAYOUT).keys([number] + [7] * (16 * num_blocks - 1))


def put(client: StoreClient, chain: Sequence[BlockKey], mark: bytes, identity: Identity = MODEL) -> int:
    """Store a chain of blocks that are full of ``mark``, as far as there is room; returns how far that was."""
    ns = client.open_namespace(identity, LAYOUT)
    with client.reserve(ns, len(chain)) as lease:
        for view in lease.views:
            view[:] = mark * (len(view) // len(mark))
        keys = chain[: lease.num_blocks]
        assert client.commit(lease, keys, None).slots or not keys
        return len(keys)


def marks(client: StoreClient, chain: Sequence[BlockKey]) -> list[bytes]:
    with client.pin(chain) as lease:
        return [bytes(view[:4]) for view in lease.views]


def put_eventually(client: StoreClient, chain: Sequence[BlockKey], mark: bytes, identity: Identity = MODEL) -> None:
    """An extent's pages are made in the background; until then there is no room."""
    eventually(lambda: put(client, chain, mark, identity) == len(chain))


def everything(client: StoreClient) -> memoryview:
    """All that a process can see that has the token and ignores every rule."""
    session = client._connection.session
    assert session is not None
    return session.tether.arena.view(0, session.tether.arena.capacity_bytes)


def sees(client: StoreClient, mark: bytes) -> bool:
    view = everything(client)
    return any(mark in bytes(view[start : start + 4096]) for start in range(0, len(view), LAYOUT.block_bytes))


def test_the_same_prompt_of_another_tenant_is_a_miss(tenants: dict[str, StoreClient]) -> None:
    red, blue = tenants["red"], tenants["blue"]
    chain = chain_of(red, 4)
    put_eventually(red, chain, b"RED.")
    assert looked_up(red, chain).ready == 4
    assert chain == chain_of(blue, 4)  # a client's own keys are the same: it is the sidecar that tells them apart
    assert looked_up(blue, chain) == Lookup(0, 0, pending=False)
    assert marks(blue, chain) == []
    put_eventually(blue, chain, b"BLUE")
    assert marks(red, chain) == [b"RED."] * 4
    assert marks(blue, chain) == [b"BLUE"] * 4
    assert sees(red, b"RED.")
    assert not sees(red, b"BLUE")
    assert not sees(blue, b"RED.")


def test_a_tenant_clears_and_evicts_its_own(tenants: dict[str, StoreClient]) -> None:
    red, blue = tenants["red"], tenants["blue"]
    chain = chain_of(red, 4)
    put_eventually(red, chain, b"RED.")
    put_eventually(blue, chain, b"BLUE")
    assert blue.evict(10**6) == 4
    put_eventually(blue, chain, b"BLUE")
    assert blue.clear(blue.open_namespace(MODEL, LAYOUT)) == 4
    assert marks(red, chain) == [b"RED."] * 4


def test_memory_moves_to_who_needs_it_and_takes_no_bytes_along(tenants: dict[str, StoreClient]) -> None:
    red, blue = tenants["red"], tenants["blue"]
    chains = [chain_of(red, 32, number) for number in range(8)]

    def fill(client: StoreClient, mark: bytes) -> int:
        """How many blocks of all are here, after the client has stored them all once more."""
        for chain in chains:
            put(client, chain, mark)
        return sum(looked_up(client, chain).ready for chain in chains)

    eventually(lambda: fill(red, b"RED.") > 2 * EXTENT_SLOTS)  # most of what there is
    eventually(lambda: fill(blue, b"BLUE") > 2 * EXTENT_SLOTS)
    num_red = sum(looked_up(red, chain).ready for chain in chains)
    assert num_red <= NUM_SLOTS - 2 * EXTENT_SLOTS
    assert not sees(blue, b"RED.")
    assert not sees(red, b"BLUE")
    for chain in chains:
        assert set(marks(red, chain)) <= {b"RED."}
        assert set(marks(blue, chain)) <= {b"BLUE"}


def test_who_connects_makes_no_memory_of_its_own(tmp_path: Path) -> None:
    """Each maps as much as all tenants have together, and only pages that the sidecar makes are there."""
    path = tmp_path / "tenants.toml"
    path.write_text(line("red", "red-token") + line("blue", "blue-token"))
    with Sidecar(MEMORY_CAPACITY="64MiB", SERVER_TENANTS_FILE=str(path)) as served, ExitStack() as stack:
        num_bytes = 0
        for name in ("red", "blue"):
            client = stack.enter_context(closing(StoreClient(served.socket, token=f"{name}-token", budget_s=5.0)))
            assert client.wait_connected(20.0)
            put_eventually(client, chain_of(client, 1), b"LIVE")
            session = client._connection.session
            assert session is not None
            eventually(lambda: all(thread.name != "kvstore-prefault" for thread in threading.enumerate()))
            num_bytes += os.stat(session.tether.arena.fd).st_blocks * 512
        assert 0 < num_bytes <= 64 << 20


def test_quotas_hold(tenants: dict[str, StoreClient]) -> None:
    small = tenants["small"]
    other = Identity("another-model", b"weights")
    eventually(lambda: put(small, chain_of(small, 20), b"SMAL") == 8)  # the model's quota
    for number in range(3):
        assert put(small, chain_of(small, 20, number), b"SMAL") == 8

    def fill() -> int:
        return put(small, chain_of(small, 60, 1, other), b"SMAL", other)

    eventually(lambda: fill() == 40)  # the tenant's: the first model makes room
    assert looked_up(small, chain_of(small, 20)).ready == 0
    assert looked_up(small, chain_of(small, 60, 1, other)).ready == 40


def test_quotas_of_files_hold_over_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    filer = 'file = "24MiB"\nmodels = {"a-model" = {file = "12MiB"}}'
    path.write_text(line("filer", "filer-token", filer) + line("free", "free-token"))
    settings = {"SERVER_TENANTS_FILE": str(path), "FILE_DIRECTORIES": str(tmp_path / "f"), "FILE_CAPACITY": "256MiB"}
    other = Identity("another-model", b"weights")
    with Sidecar(MEMORY_CAPACITY="128MiB", FILE_ADMISSION="always", **settings) as served:

        def file_blocks() -> float:
            eventually(lambda: served.metric("kvstore_tickets_in_flight", "file") == 0)
            return served.metric("kvstore_used_bytes", "file") / LAYOUT.block_bytes

        def fill(token: str, identity: Identity, count: int) -> None:
            with closing(served.client(token=token)) as client:
                for first in range(0, count, 10):
                    put_eventually(client, chain_of(client, 10, first, identity), b"FILL", identity)

        fill("filer-token", MODEL, 50)
        assert 0 < file_blocks() <= 12
        served.restart()
        fill("filer-token", MODEL, 50)
        assert 0 < file_blocks() <= 12
        fill("filer-token", other, 50)
        assert 12 < file_blocks() <= 24
        assert served.metric("kvstore_used_bytes", "memory") > 24 << 20  # of RAM it has no quota
        fill("free-token", MODEL, 40)
        eventually(lambda: file_blocks() > 24 + 12)  # who has no quota has what there is


def test_ranks_of_a_tenant_share_blocks_in_stripes(tenants: dict[str, StoreClient]) -> None:
    striped = Layout("uint8", 1, 8, (8192,), 16, num_stripes=8)
    ns = {name: tenants[name].open_namespace(MODEL, striped) for name in ("red", "blue")}
    chain = ns["red"].keys(list(range(16)))

    def store() -> bool:
        with tenants["red"].reserve(ns["red"], 1) as lease:
            return bool(lease.num_blocks and tenants["red"].commit(lease, chain, None).slots)

    eventually(store)
    assert looked_up(tenants["red"], chain).ready == 1
    assert looked_up(tenants["blue"], ns["blue"].keys(list(range(16)))).ready == 0


def test_a_stranger_gets_nothing(served: Sidecar) -> None:
    for token in ("", "red", "red-token ", hashlib.sha256(b"red-token").hexdigest()):
        with closing(StoreClient(served.socket, token=token)) as client:
            assert not client.wait_connected(0.2)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no tenant"),
        ("[red]\n", "token_sha256"),
        ('[red]\ntoken_sha256 = "abc"\n', "64 hex digits"),
        ('[red]\ntoken = "secret"\n', "token_sha256"),
        (line("red", "x") + line("blue", "x"), "same token"),
        (line("red", "x", 'memory = "much"'), "8GiB"),
        (line("red", "x", 'file = "much"'), "8GiB"),
        (line("red", "x", 'models = {"a-model" = "8GiB"}'), "table"),
        (line("red", "x", 'models = {"a-model" = {ram = "8GiB"}}'), "table"),
        ("red = [", "TOML"),
    ],
)
def test_a_file_of_tenants_that_cannot_be_used_says_why(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text(text)
    config = Config.from_mapping({"server": {"tenants_file": str(path)}})
    with pytest.raises(ConfigError, match=says):
        Tenants.of(config.server)


def test_memory_that_moves_between_tenants_is_never_given_to_a_device(tenants: dict[str, StoreClient]) -> None:
    """It would go on reading and writing the pages that were there when it was told, whoever's they are by then."""
    assert tenants["red"].fixed_memory() is None
    with tenants["red"].reserve(tenants["red"].open_namespace(MODEL, LAYOUT), 1) as lease:
        location = tenants["red"].locate(lease)
    assert location is None or not location.pages_stay
