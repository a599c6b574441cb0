"""What is worth keeping and who leaves. Pure; one file per policy, registered here by name."""

from collections.abc import Callable
from typing import Any

from kvstore.policy.base import Policy
from kvstore.policy.hix import HIX
from kvstore.policy.lru import LRU

POLICIES: dict[str, Callable[[], Policy[Any]]] = {"hix": HIX, "lru": LRU}
