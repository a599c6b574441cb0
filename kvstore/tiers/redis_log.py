"""What an operator is told of the servers. Never a password, and never the same twice within a minute."""

import logging
import time

_log = logging.getLogger(__name__)

_REPEAT_S = 60.0
_MAX_KINDS = 256  # error codes come from servers: bound what is kept of them


class Troubles:
    """Warnings about servers, one a minute for each server and kind of trouble."""

    def __init__(self) -> None:
        self._told_at_s: dict[tuple[str, str], float] = {}

    def note(self, server: str, kind: str, text: str) -> None:
        """Log ``text``, unless this kind was logged of this server a moment ago."""
        now_s = time.monotonic()
        if now_s - self._told_at_s.get((server, kind), -_REPEAT_S) < _REPEAT_S:
            return
        if len(self._told_at_s) >= _MAX_KINDS:
            self._told_at_s.clear()
        self._told_at_s[server, kind] = now_s
        _log.warning("redis tier: %s: %s", server, text)


def memory_advice(info: bytes, ttl_s: int) -> str:
    """What ``INFO memory`` shows to be amiss for a cache, or nothing."""
    fields = dict(line.split(":", 1) for line in info.decode(errors="replace").splitlines() if ":" in line)
    policy = fields.get("maxmemory_policy", "")
    if fields.get("maxmemory", "0") == "0":
        return "maxmemory is not set, so blocks fill the machine; set maxmemory and maxmemory-policy allkeys-lru"
    if policy == "noeviction" or (policy.startswith("volatile") and not ttl_s):
        return f"maxmemory-policy {policy} evicts nothing of ours, so a full server refuses blocks; set allkeys-lru"
    return ""
