"""What is worth keeping and who leaves. Pure; one file per policy, registered here by name."""

from collections.abc import Callable
from typing import Any

from kvstore.policy.base import Policy
from kvstore.policy.lru import LRU
from kvstore.policy.s3fifo import S3FIFO

POLICIES: dict[str, Callable[[], Policy[Any]]] = {"lru": LRU, "s3fifo": S3FIFO}
