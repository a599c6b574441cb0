"""Copiers move blocks between an engine's pages and slots in host RAM, asynchronously: what every one promises.

One thread owns a copier. What a ticket copies between is not to be touched until it is ``done``: pages and slots belong
to the copy. Ordering with compute is the copier's: an offload reads what the compute submitted before it wrote, an
onboard writes after the compute submitted before it has read.
"""

from collections.abc import Sequence
from typing import Protocol

COPY_TIMEOUT_S = 30.0
"""How long anybody waits for one ticket; RAM copies far more than an engine's pages in that time."""


class Ticket(Protocol):
    """A copy in flight."""

    @property
    def failed(self) -> bool:
        """Whether bytes did not arrive, or not within ``COPY_TIMEOUT_S`` of a wait: its destination holds anything.

        While it is not ``done`` as well, the copy may still touch both sides: they stay in quarantine.
        """

    def done(self) -> bool:
        """Whether the copy touches nothing any more. Never waits, but does the host's part of it, if there is one."""

    def pages_free(self) -> bool:
        """Whether it touches its pages no more, so that compute may write to them; for an offload well before the end.

        Never waits.
        """

    def wait(self) -> None:
        """Wait until the copy is done, or ``failed`` because it takes too long."""

    def wait_layer(self, layer: int) -> None:
        """Compute submitted after this call finds the bytes of ``layer`` in place, unless the ticket ``failed``.

        On an accelerator the current stream waits, and the host only for what it has a part in (``bounced_ticket``).
        ``failed`` is to be asked after the last layer: a copy can fail at any time until it is done.
        """


class Copier(Protocol):
    """Copies between the pages of one ``PagedKV`` and slots of its layout.

    ``pages`` are ids, ``pages_per_block`` for each of ``slots`` in a block's order; a slot is exactly ``block_bytes``.
    None is the answer when too much is in flight: nothing was started, ask again later. Both calls raise
    ``LayoutError`` for pages or slots that do not fit and ``ClosedError`` after ``close``; nothing was started then.
    """

    def offload(self, pages: Sequence[int], slots: Sequence[memoryview]) -> Ticket | None:
        """Start to copy pages into slots."""

    def onboard(self, slots: Sequence[memoryview], pages: Sequence[int]) -> Ticket | None:
        """Start to copy slots into pages, the first layers first."""

    def reach(self, memory: memoryview | None) -> None:
        """All slots lie in ``memory``, whose pages stay what they are: make copies fast. None: that is not known.

        To be said again and again, since it costs nothing when nothing has changed. It never waits, and is about speed
        alone: any slots can be copied from and to at any time. The bytes stay mapped as long as the copier uses them.
        """

    def close(self) -> None:
        """Wait for what is in flight, at most ``COPY_TIMEOUT_S``, and let go. Safe to call twice."""
