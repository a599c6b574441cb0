"""From a configuration to an open store."""

from contextlib import ExitStack

from kvstore.config import Config, RedisConfig
from kvstore.recording import Recording
from kvstore.store import Store
from kvstore.tiers.domains import Arenas, DomainMemoryTier
from kvstore.tiers.file import FileTier
from kvstore.tiers.memory import Arena, MemoryTier
from kvstore.tiers.redis import RedisTier


def open_store(config: Config) -> Store:
    """Open every tier that ``config`` names. Raises ``KVStoreError`` saying what to do.

    A Redis server may be absent; a directory must be ours, and the memory must be there.
    """
    with ExitStack() as undo:
        memory, file, shared = _open_tiers(config, 0, undo)
        store = Store(memory=memory, file=file, shared=shared, config=config, notes=file, recording=_recording(config))
        undo.pop_all()
    return store


def open_shared_store(config: Config, num_domains: int) -> tuple[Store, FileTier | None]:
    """For a store that lends its RAM to other processes, of which ``num_domains`` must not read each other's.

    It answers at once: the file tier is open and yet to be ``Store.scanned`` and to ``join_file``. Raises as
    ``open_store`` does.
    """
    with ExitStack() as undo:
        memory, file, shared = _open_tiers(config, num_domains, undo)
        store = Store(memory=memory, shared=shared, config=config, notes=file, recording=_recording(config))
        undo.pop_all()
    return store, file


def _open_tiers(
    config: Config, num_domains: int, undo: ExitStack
) -> tuple[MemoryTier | None, FileTier | None, RedisTier | None]:
    config.validate_against_machine()
    file = shared = memory = None
    if config.file is not None:
        file = FileTier(
            config.file.directories, config.file.capacity_bytes, write_bytes_per_day=config.file.write_bytes_per_day
        )
        undo.callback(file.close)
    if config.redis is not None:
        shared = open_redis_tier(config.redis)
        undo.callback(shared.close)
    if config.memory.capacity_bytes:
        memory = _memory_tier(config.memory.capacity_bytes, num_domains)
        undo.callback(memory.close)
    return memory, file, shared


def _recording(config: Config) -> Recording | None:
    return None if config.record is None else Recording(config.record.directory, config.record.capacity_bytes)


def _memory_tier(capacity_bytes: int, num_domains: int) -> MemoryTier:
    return DomainMemoryTier(Arenas(capacity_bytes, num_domains)) if num_domains else MemoryTier(Arena(capacity_bytes))


def open_redis_tier(config: RedisConfig) -> RedisTier:
    """The Redis tier alone. Raises ``ConfigError`` where its TLS files cannot be used."""
    return RedisTier(
        config.url,
        ttl_s=config.ttl_s,
        codec=config.codec,
        username=config.username,
        password=config.password,
        tls_ca_file=config.tls_ca_file,
        tls_cert_file=config.tls_cert_file,
        tls_key_file=config.tls_key_file,
    )
