"""Pages of the simulated engine's ranks, and copies between them and slots, which move when a test says so.

A page is one block in every group: row ``page`` of an array that each rank has for each group.

Rule 1: a page is free when nobody holds it: neither its request nor a copy. Rule 2: what is free is poisoned at once,
and taken again before any other, so that who still reads it, or writes to it, is found out.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvstore.testing.engine_model import Bytes, Group

POISON = 0xAA
FAILED = 0xEE
"""What a copy that failed leaves behind."""


@dataclass(frozen=True, slots=True)
class Move:
    """One rank's part of one block in one group."""

    block: int
    """Its number in the request's chain."""
    source: Bytes
    target: Bytes


@dataclass(eq=False, slots=True)
class RankCopy:
    """What one rank has to copy for a load or a store, in the order of blocks; nothing moves by itself."""

    rank: int
    moves: list[Move]
    failed_block: int | None = None
    """The first block that was not copied, once the rank has failed."""

    @property
    def has_returned(self) -> bool:
        """Whether the rank is done with it, well or badly."""
        return not self.moves

    def step(self) -> None:
        """Copy the next part of a block, as its bytes are now."""
        move = self.moves.pop(0)
        move.target[:] = move.source

    def run(self) -> None:
        """Copy whatever is left."""
        while self.moves:
            self.step()

    def fail(self) -> None:
        """Return without having copied what is left; its targets hold anything."""
        self.failed_block = self.moves[0].block
        for move in self.moves:
            move.target[:] = FAILED
        self.moves.clear()


def first_failed(copies: Sequence[RankCopy]) -> int | None:
    """The first block that some rank did not copy."""
    return min((copy.failed_block for copy in copies if copy.failed_block is not None), default=None)


@dataclass(eq=False)
class Pages:
    """The pages of all ranks, and who holds them."""

    groups: Sequence[Group]
    num_pages: int
    num_ranks: int = 1
    _parts: dict[tuple[str, int], Bytes] = field(default_factory=dict)
    """By group and rank: ``[page][stripe][layer][plane][token][head][byte]``."""
    _free: list[int] = field(default_factory=list)
    _num_holders: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        for group in self.groups:
            group.layout.part(self.num_ranks)  # or they can have no blocks
            for rank in range(self.num_ranks):
                shape = (self.num_pages, *group.shape(self.num_ranks))
                self._parts[group.name, rank] = np.full(shape, POISON, np.uint8)
        self._free = list(reversed(range(self.num_pages)))
        self._num_holders = [0] * self.num_pages

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    @property
    def tokens_per_block(self) -> int:
        """The same in all groups."""
        return self.groups[0].layout.tokens_per_block

    # ---- who holds them

    def take(self, num_pages: int) -> list[int] | None:
        """So many free pages, held once; None, and nothing changes, where there are fewer."""
        if num_pages > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(num_pages)]
        self.hold(taken)
        return taken

    def hold(self, pages: Sequence[int]) -> None:
        """One more holder of each."""
        for page in pages:
            self._num_holders[page] += 1

    def drop(self, pages: Sequence[int]) -> None:
        """One holder less of each; those without one are free."""
        for page in pages:
            self._num_holders[page] -= 1
            assert self._num_holders[page] >= 0, f"page {page} was dropped by one who did not hold it"
            if self._num_holders[page] == 0:
                for parts in self._parts.values():
                    parts[page] = POISON
                self._free.append(page)

    # ---- what is in them

    def part(self, page: int, group: Group, rank: int) -> Bytes:
        """The bytes of a rank's part of a page, in a row."""
        row: Bytes = self._parts[group.name, rank][page].reshape(-1)
        return row

    def write(self, pages: Sequence[int], token: int, state: bytes) -> None:
        """The KV of the token at this place of a request with these pages, in every rank and group."""
        block, within = divmod(token, self.tokens_per_block)
        for group in self.groups:
            stripes = np.split(group.token_kv(state), self.num_ranks)
            for rank, kv in enumerate(stripes):
                self._parts[group.name, rank][pages[block]][:, :, :, within] = kv

    def read(self, pages: Sequence[int], token: int) -> Iterator[bytes]:
        """All KV that the token at this place looks at; the same however many ranks there are."""
        for group in self.groups:
            sees = group.sees(token)
            for block in range(sees.start // self.tokens_per_block, token // self.tokens_per_block + 1):
                first = block * self.tokens_per_block
                within = slice(max(sees.start - first, 0), sees.stop - first)
                for rank in range(self.num_ranks):
                    yield self._parts[group.name, rank][pages[block]][:, :, :, within].tobytes()

    def check(self, page: int, group: Group, states: Sequence[bytes]) -> None:
        """AssertionError unless the page holds the block whose tokens led to ``states``, in every rank."""
        right = np.split(group.block(states), self.num_ranks)
        for rank, part in enumerate(right):
            assert (self.part(page, group, rank) == part).all(), f"wrong bytes: group {group.name!r}, rank {rank}"
