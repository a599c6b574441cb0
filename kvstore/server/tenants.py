"""Who may use the sidecar: tenants, each with a token, a trust domain of its own, and quotas of RAM and files.

A tenant's blocks are its own in every tier: its name goes into the fingerprint of its layouts, on this side of the
wire, so neither a key nor a slot nor a file of another tenant can be named. Namespaces of one tenant, salts included,
lie in one arena: whoever has the token can read them all. Without a file of tenants there is one, of no name, whose
keys are those of an embedded store.
"""

import hashlib
import hmac
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvstore.config import ServerConfig
from kvstore.errors import ConfigError, WireError
from kvstore.hashing import Identity
from kvstore.layout import Layout
from kvstore.namespace import Namespace
from kvstore.quantity import parse_size
from kvstore.slot_level import Quota
from kvstore.store import Store
from kvstore.tiers.domains import DomainMemoryTier

MAX_NAME_CHARACTERS = 64
MAX_LAYOUTS = 256
_QUOTAS = {"memory", "file"}
_KEYS = {"token_sha256", "models", *_QUOTAS}


@dataclass(eq=False, slots=True)
class Tenant:
    """Processes that trust each other."""

    name: str
    token_digest: bytes
    domain: int
    """Whose arena is theirs."""
    quotas: tuple[Quota, ...] = ()
    model_quotas: Mapping[str, tuple[Quota, ...]] = field(default_factory=dict)
    fingerprints: set[bytes] = field(default_factory=set)
    """Of the layouts that they have opened."""
    namespaces: dict[bytes, bytes] = field(default_factory=dict)
    """The digests of the namespaces that they have opened, and the same as they compute them themselves."""

    def open_namespace(
        self,
        store: Store,
        memory: DomainMemoryTier,
        identity: Identity,
        layout: Layout,
        max_age_s: int | None,
        prefill_tokens_per_s: int = 0,
    ) -> Namespace:
        """A namespace that is nobody else's. Raises ``LayoutError`` if a block does not fit a tier."""
        own_digest = Namespace(identity, layout).digest
        if self.name:
            # With the model in it, each model of the tenant has a pool that a quota can be of, today or later.
            layout = replace(layout, owner=f"{self.name}\0{identity.model}")
        if layout.fingerprint not in self.fingerprints and len(self.fingerprints) >= MAX_LAYOUTS:
            raise WireError(f"tenant {self.name!r} has {MAX_LAYOUTS} layouts open, and that is the most")
        memory.assign(layout.fingerprint, self.domain)
        self.fingerprints.add(layout.fingerprint)
        quotas = self.quotas + self.model_quotas.get(identity.model, ())
        ns = store.open_namespace(
            identity, layout, max_age_s=max_age_s, prefill_tokens_per_s=prefill_tokens_per_s, quotas=quotas
        )
        self.namespaces[ns.digest] = own_digest
        return ns


class Tenants:
    """All of them."""

    def __init__(self, tenants: list[Tenant]) -> None:
        self._tenants = tenants

    def __len__(self) -> int:
        return len(self._tenants)

    @classmethod
    def of(cls, config: ServerConfig) -> "Tenants":
        """From the configuration. Raises ``ConfigError``."""
        if config.tenants_file is None:
            return cls([Tenant("", _digest(config.token), domain=0)])
        if config.token:
            raise ConfigError("server.token and server.tenants_file are both set: put the token's tenant into the file")
        return cls(_read(config.tenants_file))

    def find(self, token: str) -> Tenant | None:
        """Whose token it is, in a time that tells nothing of how much of it was right."""
        digest = _digest(token)
        found = None
        for tenant in self._tenants:
            if hmac.compare_digest(tenant.token_digest, digest):
                found = tenant
        return found


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def _read(path: Path) -> list[Tenant]:
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the tenants {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"the tenants {path} are no valid TOML: {error}") from error
    if not tables:
        raise ConfigError(f"{path} names no tenant, so nobody could use the sidecar: write [name] and token_sha256")
    tenants = [_tenant(path, name, table, domain) for domain, (name, table) in enumerate(tables.items())]
    if len({tenant.token_digest for tenant in tenants}) < len(tenants):
        raise ConfigError(f"{path}: two tenants have the same token")
    return tenants


def _tenant(path: Path, name: str, table: object, domain: int) -> Tenant:
    where = f"{path}: [{name}]"
    if not isinstance(table, dict) or not table.keys() <= _KEYS or "token_sha256" not in table:
        raise ConfigError(f"{where}: a tenant has token_sha256, and perhaps memory, file and models")
    if not 0 < len(name) <= MAX_NAME_CHARACTERS or not name.isprintable():
        raise ConfigError(f"{where}: a name has 1 to {MAX_NAME_CHARACTERS} printable characters")
    try:
        token_digest = bytes.fromhex(str(table["token_sha256"]))
    except ValueError:
        token_digest = b""
    if len(token_digest) != hashlib.sha256().digest_size:
        raise ConfigError(f"{where}: token_sha256 is not 64 hex digits; printf %s TOKEN | sha256sum gives them")
    models = table.get("models", {})
    if not isinstance(models, dict) or not all(isinstance(q, dict) and q.keys() <= _QUOTAS for q in models.values()):
        raise ConfigError(f'{where}: models is not a table such as {{"a-model" = {{memory = "8GiB", file = "1TiB"}}}}')
    return Tenant(
        name,
        token_digest,
        domain,
        quotas=_quotas(where, table),
        model_quotas={model: _quotas(where, of_model) for model, of_model in models.items()},
    )


def _quotas(where: str, table: Mapping[str, object]) -> tuple[Quota, ...]:
    return tuple(_quota(where, tier, table[tier]) for tier in sorted(_QUOTAS & table.keys()))


def _quota(where: str, tier: str, size: object) -> Quota:
    try:
        return Quota(tier, parse_size(str(size)))
    except ValueError as error:
        raise ConfigError(f'{where}: {size}: {error}; write for example "8GiB"') from error
