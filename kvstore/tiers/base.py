"""The protocol of a tier: a place for bytes, reached by plain blocking calls from mover threads."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from kvstore.layout import Layout
from kvstore.types import BlockKey, Outcome


@dataclass(eq=False, slots=True)
class BlockMove:
    """One block's move between ``buffer`` and a tier.

    ``buffer`` holds at least ``layout.block_bytes``: the source of a write, the destination of a read. Where it starts
    on a page and is whole pages long (an arena slot), a tier may move it without a copy and may overwrite the padding.
    ``offset_bytes`` is where the block's slot starts in a slot tier's budget; a shared tier goes by ``key`` alone.
    """

    key: BlockKey
    parent: BlockKey | None
    layout: Layout
    buffer: memoryview
    offset_bytes: int
    created_unix_s: int
    """When the block was computed: given to a write; set by a read that finds another time in the header."""
    max_age_s: int = 0
    """Seconds after ``created_unix_s`` at which the block must be gone; 0: no limit."""


class StoredBlock(NamedTuple):
    """One block that a scan found, not yet verified against its payload."""

    key: BlockKey
    parent: BlockKey | None
    fingerprint: bytes
    block_bytes: int
    offset_bytes: int
    created_unix_s: int
    expires_unix_s: int = 0
    """When it must be gone, whoever opens its namespace again; 0: never."""


class Tier(Protocol):
    """Bytes of blocks. Thread-safe; knows no policy, pins or tables.

    Nothing here raises for a block's sake: each block of a batch gets an ``Outcome``. A call returns when no byte of
    the buffers will be touched any more. ``deadline_s`` is on the tier's clock (``time.monotonic``); a tier checks it
    between operations and gives what is left to any wait of its own.
    """

    name: str

    def slot_bytes(self, block_bytes: int) -> int:
        """Bytes of budget that one block of ``block_bytes`` takes here, headers included."""

    def write(self, moves: Sequence[BlockMove], deadline_s: float) -> list[Outcome]:
        """Store each block; OK means readable from now on, and after a restart of the process."""

    def read(self, moves: Sequence[BlockMove], deadline_s: float) -> list[Outcome]:
        """Fill each buffer; OK only for bytes that verified as this key's in this layout.

        A buffer whose outcome is not OK holds undefined bytes.
        """

    def erase(self, moves: Sequence[BlockMove]) -> None:
        """Make the blocks unreadable. Absent ones are no error; ``buffer`` is not used."""

    def scan(self) -> Iterator[StoredBlock]:
        """Every block that is there from before, newest first where the tier knows. Shared tiers yield nothing."""

    def close(self) -> None:
        """Let go of files and sockets; blocks stay. Safe to call twice."""


class SlotTier(Tier, Protocol):
    """A tier whose bytes lie in slots, at offsets that a pool of ours decides on."""

    capacity_bytes: int
    """The whole budget."""
    extent_bytes: int
    """How the budget is cut; see ``kvstore.extents``."""


@runtime_checkable
class Preparing(Protocol):
    """The further capability of a slot tier whose extents are not ready at once for whatever pool they are given to."""

    def base_bytes(self, fingerprint: bytes) -> int:
        """What is added to the offsets of a pool: it says which part of the tier the pool's extents are in."""

    def prepare(self, offset_bytes: int, num_bytes: int, fingerprint: bytes) -> bool:
        """Whether the extent at ``offset_bytes`` of the budget is ready for the pool; if not, it is being made so."""

    def prepared(self) -> list[int]:
        """The offsets of extents that have become ready since the last call."""


class NoteKeeper(Protocol):
    """The further capability of a tier that outlives the process. Thread-safe; nothing here raises."""

    def read_note(self) -> bytes:
        """What ``save_note`` saved last; empty if there is nothing, or too much."""

    def save_note(self, data: bytes) -> None:
        """Keep ``data`` over a restart, whole or not at all."""


@runtime_checkable
class Measured(Protocol):
    """The further capability of a tier that has tried out how fast it is."""

    def read_bytes_per_s(self) -> float | None:
        """What reading gave when the tier was opened; None if that could not be told."""


@runtime_checkable
class Spread(Protocol):
    """The further capability of a tier of several servers."""

    def is_down(self) -> bool:
        """Whether no server answers, as far as is known: asked where all of a copy failed, for it may be on one.

        Called by the owner; asks nobody.
        """


class Probing(Protocol):
    """The further capability of a shared tier."""

    def probe(self, keys: Sequence[BlockKey], deadline_s: float) -> list[Outcome]:
        """Which keys exist: OK or ABSENT, or why the tier cannot say."""

    def renew(self, keys: Sequence[BlockKey], deadline_s: float) -> list[Outcome]:
        """Start the time to live of each key afresh: OK or ABSENT, or why that failed."""

    def clear(self, namespace: bytes, deadline_s: float) -> int | None:
        """Erase every block of a namespace; returns how many, or None if some may be left."""
