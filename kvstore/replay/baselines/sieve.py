"""SIEVE: a queue that a hand walks from the oldest to the newest; it spares the visited, once, where they are.

Zhang, Yang, Yue, Vigfusson, Rashmi: "SIEVE is simpler than LRU", NSDI 2024.
"""


class SIEVE:
    """Links from each block to the next newer and older one; the hand points at the next to be looked at."""

    def __init__(self, capacity_blocks: int) -> None:
        self._capacity_blocks = capacity_blocks
        self._visited: dict[int, bool] = {}
        self._newer: dict[int | None, int | None] = {None: None}  # None is both ends
        self._older: dict[int | None, int | None] = {None: None}
        self._hand: int | None = None

    def __contains__(self, block: int) -> bool:
        """Whether it is here."""
        return block in self._visited

    def access(self, block: int) -> None:
        """A hit is marked, a miss comes in as the newest."""
        if block in self._visited:
            self._visited[block] = True
            return
        if len(self._visited) >= self._capacity_blocks:
            self._evict()
        self._visited[block] = False
        self._link(self._older[None], block)
        self._link(block, None)

    def _evict(self) -> None:
        block = self._hand if self._hand is not None else self._newer[None]
        while block is None or self._visited[block]:
            if block is not None:
                self._visited[block] = False
            block = self._newer[block]
        self._hand = self._newer[block]
        self._link(self._older[block], self._hand)
        del self._visited[block], self._newer[block], self._older[block]

    def _link(self, older: int | None, newer: int | None) -> None:
        self._newer[older] = newer
        self._older[newer] = older
