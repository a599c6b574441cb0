"""Where the servers are: the URL a person configures, taken apart.

``redis://[user:password@]host[:port][/db]``, ``rediss://`` for TLS, ``unix:///path/to/socket[?db=n]``,
``redis+sentinel://host[:port],host[:port]/service`` and ``redis+cluster://host[:port],host[:port]``, both also with
``rediss+``.
"""

from dataclasses import dataclass, field
from urllib.parse import parse_qs, unquote, urlsplit

from kvstore.errors import ConfigError

_PORT = 6379
_SENTINEL_PORT = 26379
_SCHEMES = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One server's address: host and port, or the path of a unix socket."""

    host: str
    port: int = 0
    path: str = ""

    def __str__(self) -> str:
        return self.path or f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class RedisUrl:
    """What a URL says. ``mode`` is ``single``, ``sentinel`` or ``cluster``; in sentinel mode ``service`` is set."""

    mode: str
    tls: bool
    endpoints: tuple[Endpoint, ...]
    service: str = ""
    db: int = 0
    username: str = ""
    password: str = field(default="", repr=False)


def parse_url(url: str) -> RedisUrl:
    """``url`` taken apart. Raises ``ConfigError``.

    No error shows any of the URL: where a password has a ``/`` or a ``#`` in it, any part may be of the password.
    """
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ConfigError("redis url has brackets that are no address; write redis://[::1]:6379") from error
    if parts.scheme not in _SCHEMES:
        raise ConfigError(f"redis url begins with none of {', '.join(f'{scheme}://' for scheme in _SCHEMES)}")
    if parts.fragment or url.endswith("#"):
        raise ConfigError("redis url has a # in it; write one that is of the password as %23")
    userinfo, _, hosts = parts.netloc.rpartition("@")
    username, _, password = userinfo.partition(":")
    transport, _, mode = parts.scheme.partition("+")
    path = unquote(parts.path)
    return RedisUrl(
        mode=mode or "single",
        tls=transport == "rediss",
        endpoints=_endpoints(transport, mode, hosts, path),
        service=_service(path) if mode == "sentinel" else "",
        db=_db(parts.query, path if transport != "unix" and mode != "sentinel" else "", mode),
        username=unquote(username),
        password=unquote(password),
    )


def require_tls(where: RedisUrl, *files: str) -> None:
    """Raises ``ConfigError`` where TLS ``files`` are given for a URL without TLS: the traffic would be clear text."""
    if any(files) and not where.tls:
        raise ConfigError(
            "redis.tls_*_file are set, and redis.url asks for no TLS, so that blocks and password would travel in clear"
            " text: write rediss:// (rediss+sentinel://, rediss+cluster://), or leave the files out"
        )


def _endpoints(transport: str, mode: str, hosts: str, path: str) -> tuple[Endpoint, ...]:
    if transport == "unix":
        if hosts or not path:
            raise ConfigError("redis url names no socket; write unix:///path/to/socket")
        return (Endpoint("", path=path),)
    port = _SENTINEL_PORT if mode == "sentinel" else _PORT
    endpoints = tuple(_endpoint(host, port) for host in hosts.split(","))
    if not mode and len(endpoints) > 1:
        raise ConfigError("redis url names several hosts; write redis+cluster:// or redis+sentinel://")
    return endpoints


def _service(path: str) -> str:
    service = path.removeprefix("/")
    if not service or "/" in service:
        raise ConfigError("redis url names no service; write redis+sentinel://host:26379/service")
    return service


def _db(query: str, path: str, mode: str) -> int:
    """The database that the path or ``?db=`` names; 0, which is all that a Cluster has."""
    options = parse_qs(query, keep_blank_values=True)
    if set(options) - {"db"} or (query and not options):
        raise ConfigError("redis url has options that are not known; only db is, such as unix:///path?db=1")
    named = [*options.get("db", []), *([path.strip("/")] if path.strip("/") else [])]
    if len(named) > 1:
        raise ConfigError("redis url names two databases; leave one of them out")
    db = _number(named[0], "database", 0) if named else 0
    if db and mode == "cluster":
        raise ConfigError("redis url names a database, and a Cluster has none but 0: leave it out")
    return db


def _endpoint(text: str, default_port: int) -> Endpoint:
    """``host``, ``host:port`` or ``[v6]:port``."""
    host, bracket, rest = text.removeprefix("[").partition("]") if text.startswith("[") else ("", "", "")
    if not bracket:
        host, colon, port = text.partition(":")
        rest = colon + port
    if not host:
        raise ConfigError("redis url names no host; write redis://host:port")
    return Endpoint(unquote(host), _number(rest.removeprefix(":"), "port", 1) if rest else default_port)


def _number(text: str, what: str, least: int) -> int:
    if not (text.isascii() and text.isdigit()) or not least <= int(text) <= 0xFFFF:
        raise ConfigError(
            f"redis url has a {what} that is no number from {least} to 65535; a password with one of / ? # @ in it must"
            " have that percent-encoded, or stand in redis.password"
        )
    return int(text)
