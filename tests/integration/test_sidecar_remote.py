"""A sidecar as other hosts see it: over TLS, with a token, every byte under a checksum."""

import gc
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme

from kvstore.api.v1 import remote_pb2 as api
from kvstore.api.v1.remote_pb2_grpc import RemoteStoreStub
from kvstore.client.remote_client import RemoteClient
from kvstore.config import Config
from kvstore.errors import ConfigError
from kvstore.header import checksum
from kvstore.lease import Lookup
from kvstore.namespace import Namespace
from kvstore.server.tls import credentials
from kvstore.testing.sidecar import Sidecar, eventually, streams
from kvstore.types import BlockKey
from kvstore.wire import bearer, pack_chain, pack_identity, pack_layout
from tests.real_stores import IDENTITY, LAYOUT, chain_of, content, get, put

TOKEN = "s3cret"
NS = Namespace(IDENTITY, LAYOUT)


@dataclass
class Tls:
    """A certificate authority and the files of one host."""

    directory: Path
    ca: trustme.CA

    @classmethod
    def make(cls, directory: Path) -> "Tls":
        tls = cls(directory, trustme.CA())
        tls.ca.cert_pem.write_to_path(str(directory / "ca.pem"))
        tls.issue()
        return tls

    def issue(self) -> None:
        certificate = self.ca.issue_cert("localhost", "127.0.0.1")
        certificate.private_key_pem.write_to_path(str(self.directory / "key.pem"))
        certificate.cert_chain_pems[0].write_to_path(str(self.directory / "cert.pem"))

    @property
    def settings(self) -> dict[str, str]:
        return {
            "SERVER_TLS_CERT_FILE": str(self.directory / "cert.pem"),
            "SERVER_TLS_KEY_FILE": str(self.directory / "key.pem"),
        }


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"localhost:{probe.getsockname()[1]}"


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    return Tls.make(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def address() -> str:
    return free_address()


@pytest.fixture(scope="module")
def served(tls: Tls, address: str) -> Iterator[Sidecar]:
    with Sidecar(MEMORY_CAPACITY="16MiB", SERVER_LISTEN=address, SERVER_TOKEN=TOKEN, **tls.settings) as served:
        eventually(lambda: served.metric("kvstore_usable_bytes", "memory") > 0)  # it is ready before its memory is
        yield served


@pytest.fixture
def remote(served: Sidecar, address: str, tls: Tls) -> Iterator[RemoteClient]:
    with closing(RemoteClient(address, token=TOKEN, tls_ca_file=tls.directory / "ca.pem")) as client:
        eventually(lambda: client.find(NS, chain_of(NS, 1), soon()).pending or True)
        yield client


def soon() -> float:
    return time.monotonic() + 10.0


def buffers(count: int) -> list[memoryview]:
    return [memoryview(bytearray(LAYOUT.block_bytes)) for _ in range(count)]


def full(chain: Sequence[BlockKey]) -> list[memoryview]:
    return [memoryview(content(key)) for key in chain]


def test_what_one_host_computed_another_loads(served: Sidecar, remote: RemoteClient) -> None:
    chain = chain_of(NS, 6)
    assert remote.store_from(NS, chain, None, full(chain), soon()) == 6
    assert remote.find(NS, chain_of(NS, 9), soon()) == Lookup(6, 6, pending=False)
    with closing(served.client(token=TOKEN)) as local:
        ns = local.open_namespace(IDENTITY, LAYOUT)
        assert get(local, chain) == 6
        put(local, ns, chain_of(ns, 8))
    lent = buffers(10)
    assert remote.load_into(NS, chain_of(NS, 10), lent, soon()) == 8
    assert [bytes(buffer) for buffer in lent[:8]] == [content(key) for key in chain_of(NS, 8)]
    assert remote.stats.get("kvstore_errors_total", "remote.load") == 0


def test_only_what_is_missing_is_sent(remote: RemoteClient) -> None:
    chain = chain_of(NS, 6, 2)
    assert remote.store_from(NS, chain[:4], None, full(chain[:4]), soon()) == 4
    lies = [memoryview(bytes(LAYOUT.block_bytes)) for _ in range(4)]
    assert remote.store_from(NS, chain, None, lies + full(chain[4:]), soon()) == 6
    lent = buffers(6)
    assert remote.load_into(NS, chain, lent, soon()) == 6
    assert [bytes(buffer) for buffer in lent] == [content(key) for key in chain]


def test_nothing_of_a_call_stays_behind(served: Sidecar, remote: RemoteClient) -> None:
    stub: Any = RemoteStoreStub(remote._channel)
    chain = chain_of(NS, 2, 3)
    forever = iter([first_part(chain, bytes(100), 0)])
    with pytest.raises(grpc.RpcError):
        stub.StoreBlocks(_then_hang(forever), timeout=0.3, metadata=bearer(TOKEN))
    eventually(lambda: served.metric("kvstore_pinned_blocks", "memory") == 0)
    used = served.metric("kvstore_blocks", "memory") * LAYOUT.block_bytes
    eventually(lambda: served.metric("kvstore_used_bytes", "memory") == used)


def _then_hang(parts: Iterator[api.StorePart]) -> Iterator[api.StorePart]:
    yield from parts
    time.sleep(1.0)


def first_part(chain: Sequence[BlockKey], data: bytes, digest: int) -> api.StorePart:
    of = api.NamespaceOf(identity=pack_identity(IDENTITY), layout=pack_layout(LAYOUT))
    return api.StorePart(of=of, chain=pack_chain(0, chain), part=api.Part(index=0, data=data, checksum=digest))


def test_a_block_that_was_damaged_on_the_way_is_not_stored(served: Sidecar, remote: RemoteClient) -> None:
    stub: Any = RemoteStoreStub(remote._channel)
    chain = chain_of(NS, 1, 4)
    good = content(chain[0])
    damaged = bytes([good[0] ^ 1]) + good[1:]
    reply = stub.StoreBlocks(iter([first_part(chain, damaged, checksum(good))]), timeout=5, metadata=bearer(TOKEN))
    assert reply.num_blocks == 0
    assert remote.find(NS, chain, soon()).ready == 0
    assert served.metric("kvstore_errors_total", "server.checksum") == 1
    reply = stub.StoreBlocks(iter([first_part(chain, good, checksum(good))]), timeout=5, metadata=bearer(TOKEN))
    assert reply.num_blocks == 1


def test_calls_that_are_not_allowed_are_refused(served: Sidecar, remote: RemoteClient) -> None:
    stub: Any = RemoteStoreStub(remote._channel)
    chain = chain_of(NS, 1, 5)
    of = api.NamespaceOf(identity=pack_identity(IDENTITY), layout=pack_layout(LAYOUT))
    find = api.FindBlocksRequest(of=of, chain=pack_chain(0, chain))
    part = first_part(chain, bytes(LAYOUT.block_bytes + 1), 0)
    calls: list[tuple[grpc.StatusCode, Callable[[], object]]] = [
        (grpc.StatusCode.INVALID_ARGUMENT, lambda: stub.FindBlocks(find, metadata=bearer(TOKEN))),  # no deadline
        (grpc.StatusCode.UNAUTHENTICATED, lambda: stub.FindBlocks(find, timeout=5)),
        (grpc.StatusCode.UNAUTHENTICATED, lambda: stub.FindBlocks(find, timeout=5, metadata=bearer("wrong"))),
        (grpc.StatusCode.INVALID_ARGUMENT, lambda: stub.StoreBlocks(iter([part]), timeout=5, metadata=bearer(TOKEN))),
    ]
    for code, call in calls:
        with pytest.raises(grpc.RpcError) as caught:
            call()
        assert caught.value.code() is code


def test_without_the_right_token_or_authority_everything_is_a_miss(
    served: Sidecar, address: str, tls: Tls, tmp_path: Path
) -> None:
    chain = chain_of(NS, 2, 6)
    other = Tls.make(tmp_path)
    for token, ca_file in (
        ("", tls.directory / "ca.pem"),
        ("wrong", tls.directory / "ca.pem"),
        (TOKEN, other.directory / "ca.pem"),
    ):
        with closing(RemoteClient(address, token=token, tls_ca_file=ca_file)) as client:
            assert client.store_from(NS, chain, None, full(chain), time.monotonic() + 1.0) == 0
            assert client.load_into(NS, chain, buffers(2), time.monotonic() + 1.0) == 0
            assert client.stats.get("kvstore_errors_total", "remote.store") == 1
    with grpc.insecure_channel(address) as channel:
        plaintext: Any = RemoteStoreStub(channel)
        with pytest.raises(grpc.RpcError):
            plaintext.FindBlocks(api.FindBlocksRequest(), timeout=1, metadata=bearer(TOKEN))


def test_nothing_of_a_load_that_failed_is_left_for_the_interpreters_exit(tls: Tls) -> None:
    """As for the streams of a session, see test_sidecar.py."""
    before = streams()
    gc.disable()
    try:
        with closing(RemoteClient(free_address(), token=TOKEN, tls_ca_file=tls.directory / "ca.pem")) as client:
            assert client.load_into(NS, chain_of(NS, 2), buffers(2), time.monotonic() + 0.2) == 0
        assert streams() <= before
    finally:
        gc.enable()


def test_a_dead_host_is_a_miss_in_time(tls: Tls) -> None:
    with closing(RemoteClient(free_address(), token=TOKEN, tls_ca_file=tls.directory / "ca.pem")) as client:
        began_s = time.monotonic()
        assert client.find(NS, chain_of(NS, 2), time.monotonic() + 0.5).found == 0
        assert time.monotonic() - began_s < 5.0


@pytest.mark.parametrize("missing", ["tls_cert_file", "tls_key_file", "token"])
def test_it_does_not_listen_without_tls_and_a_secret(tls: Tls, missing: str) -> None:
    files = {name: str(tls.directory / f"{name.split('_')[1]}.pem") for name in ("tls_cert_file", "tls_key_file")}
    settings = {"listen": "0.0.0.0:7411", "token": TOKEN, **files}
    assert credentials(Config.from_mapping({"server": settings}).server)
    del settings[missing]
    with pytest.raises(ConfigError, match=f"server.{missing}"):
        credentials(Config.from_mapping({"server": settings}).server)


def test_a_client_certificate_is_a_secret_too_and_certificates_are_renewed(tmp_path: Path) -> None:
    ours = Tls.make(tmp_path)
    address = free_address()
    client_ca = {"SERVER_TLS_CLIENT_CA_FILE": str(tmp_path / "ca.pem")}
    with Sidecar(SERVER_LISTEN=address, **ours.settings, **client_ca):
        with_certificate = partial(
            RemoteClient,
            address,
            tls_ca_file=tmp_path / "ca.pem",
            tls_cert_file=tmp_path / "cert.pem",
            tls_key_file=tmp_path / "key.pem",
        )
        with closing(RemoteClient(address, tls_ca_file=tmp_path / "ca.pem")) as client:
            assert store_one(client) == 0
        with closing(with_certificate()) as client:
            assert store_one(client) == 1
        renewed = Tls.make(tmp_path)  # by another authority, even
        assert renewed.ca is not ours.ca
        with closing(with_certificate()) as client:
            assert store_one(client) == 1


def store_one(client: RemoteClient) -> int:
    chain = chain_of(NS, 1)
    return client.store_from(NS, chain, None, full(chain), time.monotonic() + 2.0)
