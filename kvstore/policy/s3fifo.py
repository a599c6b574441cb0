"""S3-FIFO: a small queue for the new, a main queue for the used, a ghost list of those who left unused.

Yang, Zhang, Qiu, Yue, Rashmi: "FIFO queues are all you need for cache eviction", SOSP 2023. Choices that the paper
leaves open: a block moves to main after one reuse; the queues are walked by a reader that rotates what may not leave.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

from kvstore.types import Request

K = TypeVar("K", bound=Hashable)

SMALL_SHARE = 0.1
MAX_FREQUENCY = 3


class S3FIFO(Generic[K]):
    """Both queues hold key -> frequency in order of entry, the oldest first."""

    def __init__(self) -> None:
        self._capacity_blocks = 0
        self._small: OrderedDict[K, int] = OrderedDict()
        self._main: OrderedDict[K, int] = OrderedDict()
        self._ghost: OrderedDict[K, None] = OrderedDict()

    def resize(self, capacity_blocks: int) -> None:
        """The small queue is a tenth of it, the ghost list as long as main."""
        self._capacity_blocks = capacity_blocks
        self._trim_ghost()

    def arrive(self, request: Request, chain: Sequence[K]) -> int:
        """Count a use of each resident block; nothing moves."""
        for key in chain:
            queue = self._small if key in self._small else self._main
            frequency = queue.get(key)
            if frequency is not None:
                queue[key] = min(MAX_FREQUENCY, frequency + 1)
        return len(chain)

    def finish(self, request: Request, output_tokens: int) -> None:
        """S3-FIFO does not care."""

    def insert(self, key: K, parent: K | None) -> None:
        """A block that came back soon after it left goes to main, any other to the small queue."""
        if key in self._ghost:
            del self._ghost[key]
            self._main[key] = 0
        else:
            self._small[key] = 0

    def remove(self, key: K) -> None:
        """One that leaves from the small queue is remembered for a while."""
        if self._small.pop(key, None) is not None:
            self._ghost[key] = None
            self._trim_ghost()
        else:
            del self._main[key]

    def victim(self, may_leave: Callable[[K], bool]) -> K | None:
        """The oldest unused block of the small queue while that is over its share, else of main."""
        # Each turn moves a block on, promotes it, or lowers its frequency: so many turns see every block leave-ready.
        for _ in range((MAX_FREQUENCY + 3) * (len(self._small) + len(self._main))):
            from_small = self._small and (len(self._small) >= SMALL_SHARE * self._capacity_blocks or not self._main)
            queue = self._small if from_small else self._main
            if not queue:
                queue = self._small
            key, frequency = next(iter(queue.items()))
            if frequency == 0 and may_leave(key):
                return key
            if queue is self._small and frequency > 0:
                del queue[key]
                self._main[key] = 0
            else:
                queue[key] = max(0, frequency - 1)
                queue.move_to_end(key)
        return next((key for queue in (self._small, self._main) for key in queue if may_leave(key)), None)

    def _trim_ghost(self) -> None:
        while len(self._ghost) > self._capacity_blocks:
            self._ghost.popitem(last=False)
