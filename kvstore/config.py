"""The configuration: one TOML file, then ``KVSTORE_*`` environment variables over it, then defaults under both.

Everything a person can set is one row of ``SETTINGS``: a setting ``redis.url`` is ``url`` under ``[redis]`` in the file
and ``KVSTORE_REDIS_URL`` in the environment. Parsing is apart from looking at the machine, see
``Config.validate_against_machine``.
"""

import difflib
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from kvstore import machine
from kvstore.codecs.registry import CODECS
from kvstore.errors import ConfigError
from kvstore.namespace import MAX_TOKENS_PER_S
from kvstore.policy import POLICIES
from kvstore.quantity import format_size, parse_duration, parse_size
from kvstore.tiers.redis_url import parse_url, require_tls

Admission = Literal["always", "second_touch", "on_evict"]
"""When a block in RAM is worth a copy in a tier below: at once, when it is used again, or when RAM evicts it."""

ENVIRONMENT_PREFIX = "KVSTORE_"
PATH_VARIABLE = "KVSTORE_CONFIG"
"""Names the TOML file where none is given."""

# A Kubernetes service called kvstore puts KVSTORE_SERVICE_HOST, KVSTORE_PORT_6379_TCP_ADDR and so on into every pod.
_SERVICE_LINK = re.compile(r"KVSTORE_(\w+_)?(SERVICE_(HOST|PORT(_\w+)?)|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)")


@dataclass(frozen=True, slots=True)
class MemoryConfig:
    """The memory tier. ``capacity_bytes`` 0: there is none."""

    capacity_bytes: int


@dataclass(frozen=True, slots=True)
class FileConfig:
    """The file tier. ``capacity_bytes`` is that of all directories together; ``write_bytes_per_day`` None: no cap."""

    directories: tuple[Path, ...]
    capacity_bytes: int
    write_bytes_per_day: int | None = None
    admission: Admission = "always"

    def validate_against_machine(self) -> None:
        """Raises ``ConfigError`` where a disk is too small; the directories share the capacity equally."""
        share_bytes = self.capacity_bytes // len(self.directories)
        for directories in machine.by_file_system(self.directories):
            wanted_bytes = share_bytes * len(directories)
            # Not what is free: a disk that others fill up is no reason not to start, see the file tier.
            disk_bytes = machine.disk_bytes(directories[0])
            if wanted_bytes > disk_bytes:
                raise ConfigError(
                    f"file.capacity needs {format_size(wanted_bytes)} in {', '.join(map(str, directories))}, but that"
                    f" disk has {format_size(disk_bytes)} in all: lower file.capacity"
                )


@dataclass(frozen=True, slots=True)
class RedisConfig:
    """The Redis tier. ``ttl_s`` 0: blocks stay until the server evicts them. A login here wins over the URL's."""

    url: str = field(repr=False)
    ttl_s: int = 0
    codec: str = "none"
    admission: Admission = "always"
    username: str = ""
    password: str = field(default="", repr=False)
    tls_ca_file: str = ""
    tls_cert_file: str = ""
    tls_key_file: str = ""


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Of the sidecar alone. ``lease_ms``: a client that is silent for so long is given up."""

    socket: Path
    socket_mode: int = 0o600
    socket_group: str = ""
    token: str = field(default="", repr=False)
    """What a client has to know; empty: whoever can connect may use the store."""
    tenants_file: Path | None = None
    metrics: str = ""
    """Where Prometheus is answered; empty: nowhere."""
    listen: str = ""
    """Where other hosts are served; empty: nowhere."""
    tls_cert_file: Path | None = None
    tls_key_file: Path | None = None
    tls_client_ca_file: Path | None = None
    lease_ms: int = 5000


@dataclass(frozen=True, slots=True)
class RecordConfig:
    """Where to write what requests ask for, for ``kvstore replay``: hashes and lengths, never tokens."""

    directory: Path
    capacity_bytes: int


@dataclass(frozen=True, slots=True)
class Setting:
    """One thing that a person can set. ``parse`` takes what the file or the environment says, or raises ValueError."""

    key: str
    parse: Callable[[object], Any]
    default: object
    """As it would be written in the file; None where a tier is off without it."""
    example: str
    help: str

    @property
    def variable(self) -> str:
        """The environment variable."""
        return ENVIRONMENT_PREFIX + self.key.upper().replace(".", "_")


@dataclass(frozen=True, slots=True)
class Given:
    """What was said of a setting, and where."""

    value: object
    source: str


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("not a text in quotes")  # noqa: TRY004 - one kind of error for every bad value
    return value


def _size(value: object) -> int:
    return parse_size(_text(value))


def _duration_ms(value: object) -> int:
    return parse_duration(_text(value))


def _duration_s(value: object) -> int:
    duration_ms = _duration_ms(value)
    if duration_ms % 1000:
        raise ValueError("not a whole number of seconds")
    return duration_ms // 1000


def _rate(value: object) -> int:
    """A whole number; in the environment, its digits."""
    rate = int(value) if isinstance(value, str) and value.isdecimal() else value
    if not isinstance(rate, int) or isinstance(rate, bool) or not 0 <= rate <= MAX_TOKENS_PER_S:
        raise ValueError(f"not a whole number from 0 to {MAX_TOKENS_PER_S}")
    return rate


def _directories(value: object) -> tuple[Path, ...]:
    """A list; in the environment and for one directory a text, parted at colons."""
    parts = value if isinstance(value, list) else _text(value).split(":")
    directories = tuple(Path(_text(part)) for part in parts if part != "")
    if not all(directory.is_absolute() for directory in directories):
        raise ValueError("not every path is absolute")
    if len(set(directories)) < len(directories):
        raise ValueError("a directory is named twice")
    return directories


def _path(value: object) -> Path:
    path = Path(_text(value))
    if not path.is_absolute():
        raise ValueError("the path is not absolute")
    return path


def _endpoint(value: object) -> str:
    """host:port, or nothing."""
    text = _text(value)
    host, _, port = text.rpartition(":")
    if text and not (host and port.isdecimal() and 0 < int(port) < 65536):
        raise ValueError("not host:port")
    return text


def _mode(value: object) -> int:
    """Permissions as ``chmod`` takes them; write access is what lets somebody in."""
    mode = int(_text(value), 8)
    if mode not in (0o600, 0o660, 0o666):
        raise ValueError("none of 0600, 0660 and 0666")
    return mode


def _one_of(*choices: str) -> Callable[[object], str]:
    def parse(value: object) -> str:
        if value not in choices:
            raise ValueError(f"none of {', '.join(choices)}")
        return _text(value)

    return parse


def _redis_url(value: object) -> str:
    url = _text(value)
    if url:
        parse_url(url)
    return url


_ADMISSION = _one_of(*get_args(Admission))

SETTINGS = (
    Setting("policy", _one_of(*POLICIES), "hix", '"lru"', "what to keep: the eviction policy of every tier"),
    Setting("max_age", _duration_s, "0", '"24h"', "blocks are gone so long after they were computed; 0: never"),
    Setting("prefetch_deadline", _duration_ms, "1s", '"500ms"', "how long a request may wait for lower tiers"),
    Setting(
        "prefill_tokens_per_s", _rate, 0, "20000", "what the engine computes: nothing slower is loaded; 0: unknown"
    ),
    # 4 GiB hold 32,000 tokens of an 8B model and fit beside any engine; a share of RAM would differ by host
    Setting("memory.capacity", _size, "4GiB", '"64GiB"', "host RAM for blocks; 0: no memory tier"),
    Setting("file.directories", _directories, None, '["/mnt/nvme0/kv"]', "where files lie, one for each drive"),
    Setting("file.capacity", _size, None, '"500GB"', "disk for blocks, in all directories together"),
    Setting("file.write_per_day", _size, None, '"2TB"', "flash wears out: write no more than this; unset: no limit"),
    Setting("file.admission", _ADMISSION, "always", '"second_touch"', "which blocks are copied to file"),
    Setting("redis.url", _redis_url, None, '"rediss://host:6379/0"', "the server, Sentinel service or Cluster"),
    Setting("redis.ttl", _duration_s, "24h", '"24h"', "the server drops blocks so long after their last use; 0: never"),
    Setting("redis.codec", _one_of(*CODECS), "none", '"none"', "how blocks are encoded"),
    Setting("redis.admission", _ADMISSION, "always", '"second_touch"', "which blocks are copied to Redis"),
    Setting("redis.username", _text, "", '"kv"', "the ACL user"),
    Setting("redis.password", _text, "", '"..."', "better in the environment than in the file"),
    Setting("redis.tls_ca_file", _text, "", '"/etc/ssl/kv/ca.pem"', "who signs the server's certificate"),
    Setting("redis.tls_cert_file", _text, "", '"/etc/ssl/kv/cert.pem"', "our certificate, where the server asks"),
    Setting("redis.tls_key_file", _text, "", '"/etc/ssl/kv/key.pem"', "the key of our certificate"),
    Setting("record.directory", _path, None, '"/var/log/kvstore"', "write what requests ask for, to replay it"),
    Setting("record.capacity", _size, "1GiB", '"1GiB"', "where a recording ends, until the next start"),
    Setting(
        "server.socket",
        _path,
        str(machine.default_socket()),
        '"/run/kvstore/kvstore.sock"',
        "where the sidecar listens",
    ),
    Setting("server.socket_mode", _mode, "0600", '"0660"', "who may connect: its permissions"),
    Setting("server.socket_group", _text, "", '"engines"', "whose members may connect, with socket_mode 0660"),
    Setting(
        "server.token", _text, "", '"..."', "what a client has to know; better in the environment than in the file"
    ),
    Setting("server.tenants_file", _path, None, '"/etc/kvstore/tenants.toml"', "tenants apart: see docs/deploy.md"),
    Setting("server.metrics", _endpoint, "", '"127.0.0.1:9411"', "answer Prometheus at http://.../metrics"),
    Setting("server.listen", _endpoint, "", '"0.0.0.0:7411"', "serve other hosts too: over TLS, see docs/deploy.md"),
    Setting("server.tls_cert_file", _path, None, '"/etc/ssl/kv/cert.pem"', "the certificate shown to other hosts"),
    Setting("server.tls_key_file", _path, None, '"/etc/ssl/kv/key.pem"', "its key"),
    Setting("server.tls_client_ca_file", _path, None, '"/etc/ssl/kv/ca.pem"', "who signs clients' certificates"),
    Setting("server.lease", _duration_ms, "5s", '"5s"', "a client that is silent for so long loses what it holds"),
)

SECRETS = {"redis.password", "server.token"}

_URL_LOGIN = re.compile(r"((?<=//)|^(?!.*//)).*@", re.DOTALL)

_BY_KEY = {setting.key: setting for setting in SETTINGS}
_BY_VARIABLE = {setting.variable: setting for setting in SETTINGS}


@dataclass(frozen=True, slots=True)
class Config:
    """Everything a store needs to know to open."""

    memory: MemoryConfig
    file: FileConfig | None = None
    redis: RedisConfig | None = None
    policy: str = "hix"
    max_age_s: int = 0
    """For namespaces that set none of their own; 0: no limit."""
    prefetch_deadline_ms: int = 1000
    prefill_tokens_per_s: int = 0
    """For namespaces whose engine says none of its own; 0: not known, and whatever is found is loaded."""
    record: RecordConfig | None = None
    server: ServerConfig = field(default_factory=lambda: ServerConfig(machine.default_socket()))

    @classmethod
    def load(cls, path: Path | None, environ: Mapping[str, str]) -> "Config":
        """From the file at ``path``, or at ``KVSTORE_CONFIG``, or none; and the environment. Raises ``ConfigError``."""
        return cls.from_given(gather(path, environ))

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, object]) -> "Config":
        """From what a TOML file would hold, such as ``{"memory": {"capacity": "8GiB"}}``. Raises ``ConfigError``."""
        return cls.from_given(_from_tables(mapping, "the mapping"))

    @classmethod
    def from_given(cls, given: Mapping[str, Given]) -> "Config":
        """From what was said of each setting. Raises ``ConfigError``."""
        values = {setting.key: _value(setting, given) for setting in SETTINGS}
        return cls(
            memory=MemoryConfig(values["memory.capacity"]),
            file=_file(values, given),
            redis=_redis(values, given),
            policy=values["policy"],
            max_age_s=values["max_age"],
            prefetch_deadline_ms=values["prefetch_deadline"],
            prefill_tokens_per_s=values["prefill_tokens_per_s"],
            record=_record(values, given),
            server=_server(values),
        )

    def validate_against_machine(self) -> None:
        """Raises ``ConfigError`` where a tier is larger than what this machine has."""
        memory_bytes = machine.memory_bytes()
        if self.memory.capacity_bytes > memory_bytes:
            raise ConfigError(
                f"memory.capacity is {format_size(self.memory.capacity_bytes)}, but this process may use"
                f" {format_size(memory_bytes)} of memory: lower it, or raise the container's limit"
            )
        if self.file is not None:
            self.file.validate_against_machine()


def gather(path: Path | None, environ: Mapping[str, str]) -> dict[str, Given]:
    """What the file and the environment say, by setting. Raises ``ConfigError`` for what is no setting."""
    if path is None and environ.get(PATH_VARIABLE):
        path = Path(environ[PATH_VARIABLE])
    given = {} if path is None else _from_tables(_read(path), str(path))
    for variable, text in environ.items():
        setting = _BY_VARIABLE.get(variable)
        if setting is not None:
            given[setting.key] = Given(text, f"environment {variable}")
        elif variable.startswith(ENVIRONMENT_PREFIX) and not _is_foreign(variable):
            raise ConfigError(
                f"environment variable {variable} is no setting; did you mean {_nearest(variable, _BY_VARIABLE)}?"
            )
    return given


@dataclass(frozen=True, slots=True)
class Effective:
    """A setting's value as it would be written in the file, with secrets masked, and where it comes from."""

    key: str
    value: str
    source: str


def effective(given: Mapping[str, Given]) -> list[Effective]:
    """Every setting with its value and the value's source: default, the file's path, or the environment variable."""
    rows = []
    for setting in SETTINGS:
        where = given.get(setting.key, Given(setting.default, "default"))
        rows.append(Effective(setting.key, _written(setting.key, where.value), where.source))
    return rows


def _is_foreign(variable: str) -> bool:
    return variable == PATH_VARIABLE or _SERVICE_LINK.fullmatch(variable) is not None


def _read(path: Path) -> dict[str, object]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
    except ValueError as error:  # not TOML, or not UTF-8
        raise ConfigError(f"the configuration {path} is no valid TOML: {error}") from error


def _from_tables(tables: Mapping[str, object], source: str) -> dict[str, Given]:
    """``{"redis": {"url": ...}}`` by setting."""
    given = {}
    for name, value in tables.items():
        entries = {f"{name}.{key}": entry for key, entry in value.items()} if isinstance(value, dict) else {name: value}
        for key, entry in entries.items():
            if key not in _BY_KEY:
                raise ConfigError(f"{source}: {key} is no setting; did you mean {_nearest(key, _BY_KEY)}?")
            given[key] = Given(entry, source)
    return given


def _nearest(word: str, known: Mapping[str, Setting]) -> str:
    return difflib.get_close_matches(word, known, n=1, cutoff=0)[0]


def _value(setting: Setting, given: Mapping[str, Given]) -> Any:
    if setting.key not in given:
        return None if setting.default is None else setting.parse(setting.default)
    said = given[setting.key]
    try:
        return setting.parse(said.value)
    except (ValueError, ConfigError) as error:
        raise ConfigError(
            f"{said.source}: {setting.key} = {_written(setting.key, said.value)}: {error};"
            f" write for example {setting.key.rpartition('.')[2]} = {setting.example}"
        ) from error


def _written(key: str, value: object) -> str:
    if value is None:
        return ""
    if key in SECRETS and value:
        return '"***"'
    if isinstance(value, list):
        return "[" + ", ".join(_written(key, entry) for entry in value) + "]"
    if not isinstance(value, str):
        return str(value).lower() if isinstance(value, bool) else str(value)
    return '"' + (_URL_LOGIN.sub("***@", value) if key == "redis.url" else value) + '"'


def _file(values: Mapping[str, Any], given: Mapping[str, Given]) -> FileConfig | None:
    if not values["file.directories"]:
        _refuse_orphans("file.directories", given)
        return None
    if not values["file.capacity"]:
        raise ConfigError(
            f"{given['file.directories'].source}: file.directories is set without a file.capacity;"
            f" write for example capacity = {_BY_KEY['file.capacity'].example}"
        )
    return FileConfig(
        directories=values["file.directories"],
        capacity_bytes=values["file.capacity"],
        write_bytes_per_day=values["file.write_per_day"],
        admission=values["file.admission"],
    )


def _server(values: Mapping[str, Any]) -> ServerConfig:
    return ServerConfig(
        socket=values["server.socket"],
        socket_mode=values["server.socket_mode"],
        socket_group=values["server.socket_group"],
        token=values["server.token"],
        tenants_file=values["server.tenants_file"],
        metrics=values["server.metrics"],
        listen=values["server.listen"],
        tls_cert_file=values["server.tls_cert_file"],
        tls_key_file=values["server.tls_key_file"],
        tls_client_ca_file=values["server.tls_client_ca_file"],
        lease_ms=values["server.lease"],
    )


def _redis(values: Mapping[str, Any], given: Mapping[str, Given]) -> RedisConfig | None:
    if not values["redis.url"]:
        _refuse_orphans("redis.url", given)
        return None
    require_tls(parse_url(values["redis.url"]), *(values[f"redis.tls_{name}_file"] for name in ("ca", "cert", "key")))
    return RedisConfig(
        url=values["redis.url"],
        ttl_s=values["redis.ttl"],
        codec=values["redis.codec"],
        admission=values["redis.admission"],
        username=values["redis.username"],
        password=values["redis.password"],
        tls_ca_file=values["redis.tls_ca_file"],
        tls_cert_file=values["redis.tls_cert_file"],
        tls_key_file=values["redis.tls_key_file"],
    )


def _record(values: Mapping[str, Any], given: Mapping[str, Given]) -> RecordConfig | None:
    if values["record.directory"] is None:
        _refuse_orphans("record.directory", given)
        return None
    return RecordConfig(values["record.directory"], values["record.capacity"])


def _refuse_orphans(switch: str, given: Mapping[str, Given]) -> None:
    """A tier is off without its ``switch``: settings of it that stand alone are a mistake; an empty switch is none."""
    table = switch.partition(".")[0]
    orphan = next((key for key in given if key.startswith(f"{table}.")), None)
    if orphan is not None and switch not in given:
        raise ConfigError(
            f"{given[orphan].source}: {orphan} is set, but {switch} is not, so there is no {table} tier;"
            f" write for example {switch.partition('.')[2]} = {_BY_KEY[switch].example}"
        )
