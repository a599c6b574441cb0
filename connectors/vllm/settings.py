"""What a person writes into ``kv_connector_extra_config``: the tables of a configuration file, and what is vLLM's own.

{"sidecar": true}                                 the store of this host's sidecar
{"memory": {"capacity": "32GiB"}, "file": {...}}  a store of this engine's own
{}                                                the same, as KVSTORE_CONFIG and KVSTORE_* say
"""

from collections.abc import Mapping
from dataclasses import dataclass

from kvstore.block_store import BlockStore
from kvstore.client.store_client import StoreClient
from kvstore.config import Config
from kvstore.errors import ConfigError
from kvstore.opening import open_store

CONNECT_S = 2.0


@dataclass(frozen=True, slots=True)
class Settings:
    """Where the store is."""

    config: Config
    sidecar: bool
    salt: str
    """Isolates tenants; vLLM's ``cache_salt`` isolates single requests, and is in its block hashes."""

    @classmethod
    def read(cls, extra: Mapping[str, object], environ: Mapping[str, str]) -> "Settings":
        """Raises ``ConfigError`` for what is no setting."""
        tables = dict(extra)
        sidecar, salt = tables.pop("sidecar", False), tables.pop("salt", "")
        if not isinstance(sidecar, bool):
            raise ConfigError(f"kv_connector_extra_config: sidecar is {sidecar!r}; say true, and server.socket where")
        if not isinstance(salt, str):
            raise ConfigError(f"kv_connector_extra_config: salt is {salt!r}, which is no text in quotes")
        config = Config.from_mapping(tables) if tables else Config.load(None, environ)
        if not sidecar and not config.memory.capacity_bytes:
            raise ConfigError("memory.capacity is 0: an engine loads from RAM, so give the store some")
        return cls(config, sidecar, salt)

    def open(self) -> BlockStore:
        """The store; a sidecar may be absent. Raises ``KVStoreError`` for a store that cannot be opened."""
        if not self.sidecar:
            return open_store(self.config)
        client = StoreClient(
            self.config.server.socket,
            token=self.config.server.token,
            name="vllm",
            prefill_tokens_per_s=self.config.prefill_tokens_per_s,
        )
        client.wait_connected(CONNECT_S)
        return client
