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
    """``url`` taken apart. Raises ``ConfigError``, which never shows the password."""
    parts = urlsplit(url)
    if parts.scheme not in _SCHEMES:
        raise ConfigError(f"redis url has the scheme {parts.scheme!r}; use one of {', '.join(_SCHEMES)}")
    userinfo, _, hosts = parts.netloc.rpartition("@")
    username, _, password = userinfo.partition(":")
    transport, _, mode = parts.scheme.partition("+")
    path = unquote(parts.path)
    query = parse_qs(parts.query)
    if set(query) - {"db"}:
        raise ConfigError(f"redis url has the options {sorted(set(query) - {'db'})}; only db is known")
    if transport == "unix":
        endpoints: tuple[Endpoint, ...] = (Endpoint("", path=path),)
        if not path:
            raise ConfigError("redis url names no socket; write unix:///path/to/socket")
    else:
        port = _SENTINEL_PORT if mode == "sentinel" else _PORT
        endpoints = tuple(_endpoint(host, port) for host in hosts.split(","))
    service = path.strip("/") if mode == "sentinel" else ""
    if mode == "sentinel" and not service:
        raise ConfigError("redis url names no service; write redis+sentinel://host:26379/service")
    db = path.strip("/") if transport != "unix" and not mode else ""
    return RedisUrl(
        mode=mode or "single",
        tls=transport == "rediss",
        endpoints=endpoints,
        service=service,
        db=_number(query.get("db", [db or "0"])[0], "db"),
        username=unquote(username),
        password=unquote(password),
    )


def _endpoint(text: str, default_port: int) -> Endpoint:
    """``host``, ``host:port`` or ``[v6]:port``."""
    host, bracket, rest = text.removeprefix("[").partition("]") if text.startswith("[") else ("", "", "")
    if not bracket:
        host, colon, port = text.partition(":")
        rest = colon + port
    if not host:
        raise ConfigError("redis url names no host; write redis://host:port")
    return Endpoint(unquote(host), _number(rest.removeprefix(":"), "port") if rest else default_port)


def _number(text: str, what: str) -> int:
    if not (text.isascii() and text.isdigit()) or int(text) > 0xFFFF:
        raise ConfigError(f"redis url has the {what} {text!r}; it must be a number from 0 to 65535")
    return int(text)
