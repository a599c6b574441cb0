"""What no policy can beat: a cache without a limit, and Belady's with bypass at request granularity. Pure.

Belady keeps, after each request, the blocks whose next use is nearest. A parent's next use is never later than its
child's, so what it keeps is closed under prefixes by itself, and it bounds every policy.
"""

import heapq
from collections.abc import Iterator

from kvstore.replay.simulator import Result, Tally
from kvstore.replay.trace import Trace, known_prefixes

NEVER = 1 << 62


def replay_infinite(trace: Trace) -> Result:
    """Nothing ever leaves."""
    tally = Tally(trace)
    for request, num_hit in known_prefixes(trace):
        tally.count(request, num_hit, len(request.chain) - num_hit)
    return tally.result()


def replay_belady(trace: Trace, capacity_blocks: int) -> Result:
    """The clairvoyant bound at ``capacity_blocks``."""
    next_use_of: dict[int, int] = {}
    farthest: list[tuple[int, int, int]] = []
    tally = Tally(trace)
    for request, uses in zip(trace.requests, _next_uses(trace), strict=True):
        chain = request.chain
        num_hit = next((depth for depth, block in enumerate(chain) if block not in next_use_of), len(chain))
        depth = 0
        for use, end in uses:
            for block in chain[depth:end]:
                next_use_of[block] = use
                heapq.heappush(farthest, (-use, -depth, block))
                depth += 1
        for block in chain[depth:]:
            next_use_of.pop(block, None)
        while len(next_use_of) > capacity_blocks:
            use, _, block = heapq.heappop(farthest)
            if next_use_of.get(block) == -use:
                del next_use_of[block]
        num_kept = next((index for index, block in enumerate(chain) if block not in next_use_of), len(chain))
        tally.count(request, num_hit, max(0, num_kept - num_hit))
    return tally.result()


def _next_uses(trace: Trace) -> Iterator[list[tuple[int, int]]]:
    """Of each request: (next request, end) for the runs of its chain that are used again; the rest never is.

    The last use of a parent is never before its child's, nor its next use after: runs suffice, and they come in order.
    """
    uses: list[list[tuple[int, int]]] = []
    last_use: list[int] = []
    for index, request in enumerate(trace.requests):
        uses.append([])
        depth = 0
        for depth, block in enumerate(request.chain, start=1):
            if block >= len(last_use):
                last_use.append(index)
            else:
                runs = uses[last_use[block]]
                if runs and runs[-1][0] == index:
                    runs.pop()
                runs.append((index, depth))
                last_use[block] = index
    return iter(uses)
