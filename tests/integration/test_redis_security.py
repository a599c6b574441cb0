"""TLS, users and passwords, against real servers."""

import logging
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import trustme

from kvstore.testing.redis_proxy import RedisProxy
from kvstore.testing.valkey import ValkeyServer
from kvstore.tiers.redis import RedisTier
from kvstore.tiers.redis_node import Dialer
from kvstore.tiers.redis_url import parse_url
from kvstore.types import Outcome
from tests.redis_blocks import NAMESPACE, WHOLE, are_right, empty, full, key, keys, probed, soon

OK, LATE, FAILED = Outcome.OK, Outcome.LATE, Outcome.FAILED
SECRET = "open-sesame"


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyServer]:
    with ValkeyServer() as running:
        yield running


@dataclass
class Authority:
    """A CA, its file, and a client certificate that it signed."""

    ca: trustme.CA
    ca_file: str
    cert_file: str
    key_file: str

    def context(self, host: str = "localhost", *, asks_for_certificate: bool = False) -> ssl.SSLContext:
        """What a server with a certificate for ``host`` listens with."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self.ca.issue_cert(host).configure_cert(context)
        if asks_for_certificate:
            self.ca.configure_trust(context)
            context.verify_mode = ssl.CERT_REQUIRED
        return context


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return _authority(tmp_path_factory.mktemp("tls"))


def _authority(directory: Path) -> Authority:
    ca = trustme.CA()
    client = ca.issue_cert("client")
    paths = [directory / name for name in ("ca.pem", "cert.pem", "key.pem")]
    ca.cert_pem.write_to_path(str(paths[0]))
    client.cert_chain_pems[0].write_to_path(str(paths[1]))
    client.private_key_pem.write_to_path(str(paths[2]))
    return Authority(ca, *map(str, paths))


def write_one(tier: RedisTier, deadline_s: float = 5.0) -> Outcome:
    (outcome,) = tier.write(full([key(1)]), soon(deadline_s))
    tier.close()
    return outcome


def test_blocks_travel_over_tls(server: ValkeyServer, authority: Authority) -> None:
    with RedisProxy(server.port, tls=authority.context()) as proxy:
        tier = RedisTier(proxy.url, tls_ca_file=authority.ca_file)
        for some in (full(keys(20)), full([key(50)], WHOLE)):
            assert tier.write(some, soon()) == [OK] * len(some)
            moves = empty([move.key for move in some], some[0].layout)
            assert tier.read(moves, soon()) == [OK] * len(some)
            assert are_right(moves)
        assert probed(tier, [key(0), key(99)], soon()) == [True, False]
        assert proxy.num_connections == 1
        tier.close()


def test_a_server_nobody_vouches_for_is_refused(
    server: ValkeyServer, authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """SE-002: verification is on by default; without it TLS hides bytes from everybody but the attacker."""
    stranger = _authority(tmp_path)
    with RedisProxy(server.port, tls=stranger.context()) as proxy, caplog.at_level(logging.WARNING):
        assert write_one(RedisTier(proxy.url, tls_ca_file=authority.ca_file)) is FAILED
        assert write_one(RedisTier(proxy.url)) is FAILED
        assert "CERTIFICATE_VERIFY_FAILED" in caplog.text
        assert proxy.commands == []


def test_a_certificate_of_another_host_is_refused(server: ValkeyServer, authority: Authority) -> None:
    with RedisProxy(server.port, tls=authority.context("elsewhere")) as proxy:
        assert write_one(RedisTier(proxy.url, tls_ca_file=authority.ca_file)) is FAILED
        assert proxy.commands == []


def test_a_server_may_ask_for_our_certificate(server: ValkeyServer, authority: Authority) -> None:
    with RedisProxy(server.port, tls=authority.context(asks_for_certificate=True)) as proxy:
        assert write_one(RedisTier(proxy.url, tls_ca_file=authority.ca_file)) is FAILED
        known = RedisTier(
            proxy.url,
            tls_ca_file=authority.ca_file,
            tls_cert_file=authority.cert_file,
            tls_key_file=authority.key_file,
        )
        assert write_one(known) is OK


def test_tls_and_plain_ends_do_not_meet(server: ValkeyServer, authority: Authority) -> None:
    with RedisProxy(server.port, tls=authority.context()) as proxy:
        assert write_one(RedisTier(f"redis://localhost:{proxy.port}")) is FAILED
    plain = RedisTier(f"rediss://localhost:{server.port}", tls_ca_file=authority.ca_file)
    assert write_one(plain) is FAILED


def test_a_hung_tls_server_costs_the_deadline(server: ValkeyServer, authority: Authority) -> None:
    """The handshake too is waited for no longer."""
    server.pause()
    try:
        began_s = time.monotonic()
        tier = RedisTier(f"rediss://localhost:{server.port}", tls_ca_file=authority.ca_file)
        assert write_one(tier, 0.4) is LATE
        assert time.monotonic() < began_s + 0.7
    finally:
        server.resume()


DOCS = Path(__file__).parents[2] / "docs" / "redis.md"
RULES = "+get +set +getrange +exists +unlink +pexpire +scan +info +select"


@pytest.fixture
def user(server: ValkeyServer) -> Iterator[str]:
    """A user who may do what ``docs/redis.md`` lists and nothing else; returns its URL without a login."""
    server.command("FLUSHALL")
    server.command("ACL", "SETUSER", "kv", "reset", "on", f">{SECRET}", "~tkv1:*", *RULES.split())
    yield server.url
    server.command("ACL", "DELUSER", "kv")


def test_the_documented_permissions_are_enough(user: str) -> None:
    assert RULES in DOCS.read_text()
    tier = RedisTier(user, username="kv", password=SECRET, ttl_s=100)
    assert tier.write(full(keys(4)), soon()) == [OK] * 4
    assert tier.read(empty(keys(4)), soon()) == [OK] * 4
    assert probed(tier, keys(5), soon()) == [True] * 4 + [False]
    tier.renew(keys(4), soon())
    tier.erase(empty(keys(1)))
    assert tier.clear(NAMESPACE, soon()) == 3
    tier.close()


def test_a_login_may_stand_in_the_url(user: str) -> None:
    assert write_one(RedisTier(user.replace("://", f"://kv:{SECRET}@") + "/3")) is OK


@pytest.mark.parametrize("missing", ["+set", "+get", "+exists", "+unlink", "+scan", "+info"])
def test_what_a_user_may_not_do_fails_and_nothing_else(server: ValkeyServer, user: str, missing: str) -> None:
    server.command("ACL", "SETUSER", "kv", missing.replace("+", "-"))
    tier = RedisTier(user, username="kv", password=SECRET)
    assert tier.write(full([key(1)]), soon()) == [FAILED if missing == "+set" else OK]
    server.command("ACL", "SETUSER", "kv", "+set")
    assert tier.write(full([key(1)]), soon()) == [OK]
    assert tier.read(empty([key(1)]), soon()) == [FAILED if missing == "+get" else OK]
    assert probed(tier, [key(1)], soon()) == [missing != "+exists"]
    assert tier.clear(NAMESPACE, soon()) == (None if missing in ("+scan", "+unlink") else 1)
    tier.close()


def test_keys_of_others_are_out_of_reach(server: ValkeyServer, user: str) -> None:
    server.command("ACL", "SETUSER", "kv", "resetkeys", "~other:*")
    tier = RedisTier(user, username="kv", password=SECRET)
    assert tier.write(full([key(1)]), soon()) == [FAILED]
    assert tier.read(empty([key(1)]), soon()) == [FAILED]
    tier.close()


def test_a_wrong_password_fails_and_is_never_shown(user: str, caplog: pytest.LogCaptureFixture) -> None:
    wrong = "hunter2-" + SECRET
    with caplog.at_level(logging.DEBUG):
        for tier in (
            RedisTier(user, username="kv", password=wrong),
            RedisTier(user.replace("://", f"://kv:{wrong}@")),
            RedisTier(user, password=wrong),
        ):
            assert tier.write(full([key(1)]), soon()) == [FAILED]
            assert tier.read(empty([key(1)]), soon()) == [FAILED]
            assert wrong not in repr(tier)
            assert wrong not in repr(vars(tier))
            tier.close()
    assert wrong not in repr(Dialer(username="kv", password=wrong))
    assert wrong not in repr(parse_url(f"redis://kv:{wrong}@host"))
    assert "WRONGPASS" in caplog.text
    assert wrong not in caplog.text


def test_a_password_alone_is_that_of_the_default_user() -> None:
    with ValkeyServer(requirepass=SECRET) as locked:
        assert write_one(RedisTier(locked.url)) is FAILED
        assert write_one(RedisTier(locked.url, password="wrong")) is FAILED
        assert write_one(RedisTier(locked.url, password=SECRET)) is OK
        assert write_one(RedisTier(locked.url.replace("://", f"://:{SECRET}@"))) is OK
