"""What is worth keeping and who leaves. Pure; one file per policy, registered here by name."""

from collections.abc import Callable

from kvstore.policy.base import Policy
from kvstore.policy.lru import LRU
from kvstore.policy.s3fifo import S3FIFO
from kvstore.types import BlockKey

POLICIES: dict[str, Callable[[], Policy[BlockKey]]] = {"lru": LRU, "s3fifo": S3FIFO}
