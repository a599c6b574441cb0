"""The protocol of a published cache algorithm: blocks of equal size, one reference at a time, no prefixes."""

from typing import Protocol


class BlockCache(Protocol):
    """Holds up to a number of blocks, at least one, that it is made with."""

    def __contains__(self, block: int) -> bool:
        """Whether ``block`` is here; not a reference."""

    def access(self, block: int) -> None:
        """A reference to ``block``: a hit, or it comes in and another may leave."""
