"""The URL of the Redis tier: what it says, and that no mistake in it shows a password."""

import pytest

from kvstore.config import Config, effective, gather
from kvstore.errors import ConfigError
from kvstore.tiers.redis import RedisTier
from kvstore.tiers.redis_url import Endpoint, RedisUrl, parse_url


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://h", RedisUrl("single", False, (Endpoint("h", 6379),))),
        ("redis://h:7/3", RedisUrl("single", False, (Endpoint("h", 7),), db=3)),
        ("redis://[::1]:7", RedisUrl("single", False, (Endpoint("::1", 7),))),
        ("rediss://u:p%2F%23@h", RedisUrl("single", True, (Endpoint("h", 6379),), username="u", password="p/#")),
        ("unix:///run/s?db=2", RedisUrl("single", False, (Endpoint("", path="/run/s"),), db=2)),
        ("redis+cluster://a,b:7/0", RedisUrl("cluster", False, (Endpoint("a", 6379), Endpoint("b", 7)))),
        ("rediss+sentinel://a/kv", RedisUrl("sentinel", True, (Endpoint("a", 26379),), service="kv")),
        ("redis+sentinel://a/kv?db=1", RedisUrl("sentinel", False, (Endpoint("a", 26379),), service="kv", db=1)),
    ],
)
def test_what_a_url_says(url: str, expected: RedisUrl) -> None:
    assert parse_url(url) == expected


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://h", "redis://"),
        ("h:6379", "redis://"),
        ("redis://", "host"),
        ("redis://h:0", "port"),
        ("redis://h:65536", "port"),
        ("redis://h:", "port"),
        ("redis://h/x", "database"),
        ("redis://h#part", "%23"),
        ("redis://h#", "%23"),
        ("redis://h?timeout=3", "only db"),
        ("redis://h?garbage", "only db"),
        ("redis://h/1?db=2", "two databases"),
        ("redis://a,b", "several hosts"),
        ("redis://[::1", "brackets"),
        ("redis+cluster://h/3", "Cluster"),
        ("redis+cluster://h?db=3", "Cluster"),
        ("redis+sentinel://h", "service"),
        ("redis+sentinel://h/kv/3", "service"),
        ("unix://path", "socket"),
        ("unix://host/path", "socket"),
    ],
)
def test_what_cannot_be_meant_is_refused(url: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_url(url)


@pytest.mark.parametrize(
    "url",
    [
        "redis://user:hunter/2secret@h",
        "redis://user:hunter?2secret@h",
        "redis://user:hunter#2secret@h",
        "redis://user:hunter[2secret@h",
        "redis://hunter2secret@h:x",
        "redis:user:hunter2secret@h",
        "redis+sentinel://user:hunter/2secret@h/kv",
        "unix://user:hunter2secret@h/path",
    ],
)
def test_no_error_shows_a_part_of_the_password(url: str) -> None:
    """SE: operators paste errors into tickets."""
    for call in (lambda: RedisTier(url), lambda: Config.from_mapping({"redis": {"url": url}})):
        with pytest.raises(ConfigError) as caught:
            call()
        assert "hunter" not in str(caught.value)
        assert "secret" not in str(caught.value)
    rows = {row.key: row.value for row in effective(gather(None, {"KVSTORE_REDIS_URL": url}))}
    if "@" in url:
        assert "secret" not in rows["redis.url"]


@pytest.mark.parametrize("name", ["tls_ca_file", "tls_cert_file", "tls_key_file"])
@pytest.mark.parametrize("url", ["redis://h", "redis+cluster://h", "redis+sentinel://h/kv", "unix:///run/s"])
def test_tls_files_without_tls_are_refused(url: str, name: str) -> None:
    """Blocks and password would travel in clear text, and the operator think otherwise."""
    with pytest.raises(ConfigError, match="rediss://"):
        Config.from_mapping({"redis": {"url": url, name: "/etc/ssl/kv.pem"}})
    with pytest.raises(ConfigError, match="rediss://"):
        RedisTier(url, **{name: "/etc/ssl/kv.pem"})  # type: ignore[arg-type]  # one of three texts


def test_a_key_without_its_certificate_is_refused() -> None:
    with pytest.raises(ConfigError, match="tls_cert_file"):
        RedisTier("rediss://h", tls_key_file="/etc/ssl/kv/key.pem")
