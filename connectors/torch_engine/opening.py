"""From a path to a running engine: the only place that knows all parts."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch

from connectors.torch_engine.cache import PagedCache
from connectors.torch_engine.config import EngineConfig
from connectors.torch_engine.engine import Engine
from connectors.torch_engine.model import Model
from connectors.torch_engine.tokenizer import ChatTokenizer
from connectors.torch_engine.transfers import Transfers
from connectors.torch_engine.weights import open_checkpoint, tiny_checkpoint
from gpu_io.copier import Copier
from gpu_io.device import copier_for
from gpu_io.pages import PagedKV
from kvstore.block_store import BlockStore
from kvstore.hashing import Identity
from kvstore.namespace import Namespace
from kvstore.policy.lru import LRU
from kvstore.pool import BlockPool
from kvstore.weights import weights_digest

TINY_SEED = 0


def open_engine(
    path: Path | None,
    config: EngineConfig | None = None,
    *,
    dtype: str = "float32",
    device: str = "cpu",
    salt: str = "",
    store: BlockStore | None = None,
    open_copier: Callable[[PagedKV], Copier] = copier_for,
) -> tuple[Engine, ChatTokenizer | None]:
    """An engine for the checkpoint at ``path``, or for a generated tiny model, and its tokenizer if it has one.

    ``dtype`` and ``device`` are torch's names. ``salt`` keeps tenants apart in every tier. ``store`` is the caller's to
    close, after the engine; without one the KV lives in the pages alone. ``open_copier`` serves the pages' device.
    """
    config = config or EngineConfig()
    opened = nullcontext(tiny_checkpoint(TINY_SEED)) if path is None else open_checkpoint(path)
    with opened as checkpoint:
        max_positions = min(checkpoint.config.max_positions, config.num_pages * config.tokens_per_block)
        model = Model(checkpoint, getattr(torch, dtype), torch.device(device), max_positions)
        tokenizer = checkpoint.tokenizer()
    weights = f"tiny-{TINY_SEED}".encode() if path is None else weights_digest(path)
    identity = Identity("tiny" if path is None else path.name, weights, salt=salt)
    plain = model.config.layout(dtype, config.tokens_per_block)
    layout = plain.quantised(config.quantisation) if config.quantisation else plain
    kv = model.new_kv(config.num_pages, config.tokens_per_block)
    if store is None:
        pool = BlockPool(LRU())
        cache = PagedCache(kv, Namespace(identity, layout), pool, None)
    else:
        namespace = store.open_namespace(identity, layout)
        pool = BlockPool(LRU(), on_evict=lambda key, page: transfers.on_evict(key, page))  # noqa: PLW0108 - it is made below
        copier = open_copier(PagedKV([kv], "page layer plane token head dim", quantisation=config.quantisation))
        transfers = Transfers(store, namespace, pool, copier, config.prefetch_timeout_s)
        cache = PagedCache(kv, namespace, pool, transfers)
    pool.grow(0, config.num_pages)
    return Engine(model, cache, config), tokenizer
