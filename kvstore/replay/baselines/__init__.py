"""Published cache algorithms to compare with, in their published forms. The store does not offer them."""

from collections.abc import Callable
from typing import Any

from kvstore.policy.base import Policy
from kvstore.replay.baselines.arc import ARC
from kvstore.replay.baselines.base import BlockCache
from kvstore.replay.baselines.fifo import FIFO
from kvstore.replay.baselines.gdsf import GDSF
from kvstore.replay.baselines.lecar import LeCaR
from kvstore.replay.baselines.lfu import LFU
from kvstore.replay.baselines.lirs import LIRS
from kvstore.replay.baselines.lru_2 import LRU2
from kvstore.replay.baselines.s3fifo import S3FIFO
from kvstore.replay.baselines.sieve import SIEVE
from kvstore.replay.baselines.two_q import TwoQ
from kvstore.replay.baselines.w_tinylfu import WTinyLFU
from kvstore.replay.baselines.workload_aware import WorkloadAware

BLOCK_CACHES: dict[str, Callable[[int], BlockCache]] = {
    "fifo": FIFO,
    "lfu": LFU,
    "lru-2": LRU2,
    "s3fifo": S3FIFO,
    "sieve": SIEVE,
    "arc": ARC,
    "2q": TwoQ,
    "lirs": LIRS,
    "w-tinylfu": WTinyLFU,
    "lecar": LeCaR,
}
"""Algorithms that know blocks only."""

CHAIN_POLICIES: dict[str, Callable[[], Policy[Any]]] = {"gdsf": GDSF, "workload-aware": WorkloadAware}
"""Algorithms that know requests and let leaves leave only, as the store does."""
