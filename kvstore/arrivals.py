"""What is counted of requests as they arrive. Owner thread only."""

import logging
from collections.abc import Sequence

from kvstore.discovery import found_by_level
from kvstore.level import Level
from kvstore.namespace import Namespace
from kvstore.stats import Stats
from kvstore.types import BlockKey, Request

log = logging.getLogger(__name__)

UNUSED_REQUESTS = 100
"""After so many it is said if nobody has tried to store a block."""


def count_request(stats: Stats, request: Request) -> None:
    """One more; says once if a store seems to be of no use to anybody."""
    stats.inc("kvstore_requests_total", 1)
    stats.inc("kvstore_request_tokens_total", request.input_tokens)
    if stats.get("kvstore_requests_total") != UNUSED_REQUESTS:
        return
    copied = stats.snapshot()["kvstore_copies_total"]
    if not stats.get("kvstore_stored_blocks_total") and not any("write" in labels for labels in copied):
        log.warning(
            "%d requests have arrived and nobody tried to store a block: prompts are shorter than a block, or the"
            " engine's side does not store; see its log and its role",
            UNUSED_REQUESTS,
        )


def count_hits(
    stats: Stats, levels: Sequence[Level], ns: Namespace, chain: Sequence[BlockKey], oldest_unix_s: int
) -> None:
    """How much of ``chain`` is there, each block in the first level that has it."""
    for level, num_blocks in zip(levels, found_by_level(levels, ns, chain, 0, oldest_unix_s), strict=True):
        stats.inc("kvstore_hit_blocks_total", num_blocks, level.name)
        stats.inc("kvstore_hit_tokens_total", num_blocks * ns.layout.tokens_per_block, level.name)
