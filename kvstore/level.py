"""The protocol of a level: a tier together with the tables that say what is in it. Owner thread only, no I/O."""

from collections.abc import Sequence
from typing import Protocol

from kvstore.namespace import Namespace
from kvstore.tiers.base import Tier
from kvstore.types import BlockKey


class Level(Protocol):
    """What a copy needs of the level it reads from or writes to.

    A read is ``begin_reads``, the copy, ``end_reads``. A write is ``begin_write``, the copy, then ``commit_write``,
    ``abort_write`` or ``refuse_write`` for each slot; ``quarantine_write`` while a copy that nobody waits for may still
    touch the slot, and ``reclaim_write`` once that has returned. A shared level has no slots of its own; each is 0.
    """

    name: str

    @property
    def tier(self) -> Tier:
        """Where the bytes are."""

    def covered(self, ns: Namespace, chain: Sequence[BlockKey], start: int, oldest_unix_s: int) -> int:
        """How many blocks of ``chain`` from index ``start`` on are here, without a gap."""

    def missing(self, ns: Namespace, keys: Sequence[BlockKey]) -> list[int]:
        """Which of ``keys``, by index, are not here."""

    def offsets_bytes(self, fingerprint: bytes, slots: Sequence[int]) -> list[int]:
        """Where each slot starts in the tier's budget."""

    def begin_reads(self, ns: Namespace, keys: Sequence[BlockKey], oldest_unix_s: int) -> list[int]:
        """The slots to read ``keys`` from, pinned; those of as many leading ones as are here."""

    def end_reads(self, ns: Namespace, slots: Sequence[int]) -> None:
        """The reads are over: unpin."""

    def created_unix_s(self, ns: Namespace, slot: int) -> int:
        """When the block in a pinned slot was computed; 0 if only the tier knows."""

    def forget(self, ns: Namespace, key: BlockKey) -> None:
        """``key`` turned out not to be here, or not to be whole."""

    def begin_write(self, ns: Namespace, num_blocks: int) -> list[int]:
        """Slots for up to ``num_blocks`` new blocks, evicting others as needed; fewer when the rest is in use."""

    def commit_write(
        self, ns: Namespace, slot: int, key: BlockKey, parent: BlockKey | None, created_unix_s: int
    ) -> None:
        """The bytes of ``key`` are in ``slot``."""

    def abort_write(self, ns: Namespace, slot: int) -> None:
        """Nothing was written that counts."""

    def refuse_write(self, ns: Namespace, slot: int) -> None:
        """Nothing was written: the tier has no room there, so do not try that place again for a while."""

    def quarantine_write(self, ns: Namespace, slot: int) -> None:
        """The write is given up, but its copy may still touch ``slot``."""

    def reclaim_write(self, ns: Namespace, slot: int) -> None:
        """That copy has returned."""

    def begin_erase(self, ns: Namespace, key: BlockKey) -> int | None:
        """``key`` is gone at once; its slot is held until ``end_erase``. None if it is not here."""

    def end_erase(self, ns: Namespace, slot: int) -> None:
        """The bytes in ``slot`` are gone too."""
