"""RAM of several trust domains over one budget: an arena for each, and extents that move between them.

Whoever maps an arena can read all of it, so processes that must not read each other's blocks have an arena each. Every
arena is as large as the whole budget and sparse: an extent has its pages in the arena of the domain that owns it, at
the same offset in each. When it moves, the pages of the old place are given back before those of the new one are made.

Invariant: the pages of an extent are in at most one arena. Offsets of domain ``d`` start at ``d * capacity_bytes``.
"""

import ctypes
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

from kvstore.tiers.memory import Arena, MemoryTier

_LIBC = ctypes.CDLL(None, use_errno=True)
_FALLOC_FL_KEEP_SIZE, _FALLOC_FL_PUNCH_HOLE = 0x01, 0x02  # linux/falloc.h


class Arenas:
    """The arenas of all domains as one region."""

    def __init__(self, capacity_bytes: int, num_domains: int) -> None:
        """Make them, without pages. Raises ``ConfigError`` if the kernel refuses."""
        self.capacity_bytes = capacity_bytes
        # Sparse huge pages would be reserved for every arena in full, so they are for a domain that is alone.
        self.domains = [Arena(capacity_bytes, prefault=False, may_be_huge=num_domains == 1) for _ in range(num_domains)]

    @property
    def pages_stay(self) -> bool:
        """Whether an extent never moves from one arena to another, so that its pages are the same ones for good."""
        return len(self.domains) == 1

    def view(self, offset_bytes: int, num_bytes: int) -> memoryview:
        """Writable bytes of one domain's arena."""
        domain, within = divmod(offset_bytes, self.capacity_bytes)
        return self.domains[domain].view(within, num_bytes)

    def views(self, offsets_bytes: Sequence[int], num_bytes: int) -> list[memoryview]:
        """As many writable bytes from each offset on, all of one domain."""
        if not offsets_bytes:
            return []
        domain = offsets_bytes[0] // self.capacity_bytes
        base_bytes = domain * self.capacity_bytes
        return self.domains[domain].views([offset - base_bytes for offset in offsets_bytes], num_bytes)

    def close(self) -> None:
        """Give all memory back."""
        for arena in self.domains:
            arena.close()


@dataclass(frozen=True, slots=True)
class _Move:
    """An extent's pages are to be in the arena of ``to``; they are in that of ``origin``, or None's."""

    offset_bytes: int
    num_bytes: int
    origin: int | None
    to: int


class DomainMemoryTier(MemoryTier):
    """A ``MemoryTier`` over ``Arenas``: a thread of its own makes pages, so that no copy has to."""

    def __init__(
        self,
        arenas: Arenas,
        *,
        extent_bytes: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(arenas, extent_bytes=extent_bytes, clock=clock)
        self.arenas = arenas
        self._domain_of: dict[bytes, int] = {}
        self._place: dict[int, int] = {}
        """The domain that an extent's pages are in, or on their way to, by its offset."""
        self._ready: dict[int, int] = {}
        self._arrived: list[int] = []
        self._moves: SimpleQueue[_Move | None] = SimpleQueue()
        self._moved: deque[_Move] = deque()  # append and popleft are atomic
        if len(arenas.domains) == 1:
            for offset_bytes in range(0, self.capacity_bytes, self.extent_bytes):
                self._move(offset_bytes, min(self.extent_bytes, self.capacity_bytes - offset_bytes), 0)
        self._mover = threading.Thread(target=self._run, name="kvstore-extents", daemon=True)
        self._mover.start()

    @property
    def usable_bytes(self) -> int:
        """Bytes whose pages are there."""
        self._note_moved()
        return sum(min(self.extent_bytes, self.capacity_bytes - offset) for offset in self._ready)

    def assign(self, fingerprint: bytes, domain: int) -> None:
        """The pool of this layout is ``domain``'s; to be called before it is opened."""
        self._domain_of[fingerprint] = domain

    def base_bytes(self, fingerprint: bytes) -> int:
        """Where the pool's arena begins."""
        return self._domain_of.get(fingerprint, 0) * self.capacity_bytes

    def prepare(self, offset_bytes: int, num_bytes: int, fingerprint: bytes) -> bool:
        """Whether the extent's pages are in the pool's arena; if not, they are on their way."""
        self._note_moved()
        domain = self._domain_of.get(fingerprint, 0)
        if self._place.get(offset_bytes) != domain:
            self._move(offset_bytes, num_bytes, domain)
        return self._ready.get(offset_bytes) == domain

    def prepared(self) -> list[int]:
        """Extents whose pages have arrived."""
        self._note_moved()
        arrived, self._arrived = self._arrived, []
        return arrived

    def close(self) -> None:
        """Give the arenas back."""
        self._moves.put(None)
        for arena in self.arenas.domains:
            arena.stop_populating()
        self._mover.join()
        super().close()

    # ---- the inside

    def _move(self, offset_bytes: int, num_bytes: int, to: int) -> None:
        self._ready.pop(offset_bytes, None)
        self._moves.put(_Move(offset_bytes, num_bytes, self._place.get(offset_bytes), to))
        self._place[offset_bytes] = to

    def _note_moved(self) -> None:
        while self._moved:
            move = self._moved.popleft()
            if self._place[move.offset_bytes] == move.to:
                self._ready[move.offset_bytes] = move.to
                self._arrived.append(move.offset_bytes)

    def _run(self) -> None:
        """In the thread: make the moves, in order."""
        while (move := self._moves.get()) is not None:
            if move.origin is not None and move.origin != move.to:
                _punch(self.arenas.domains[move.origin].fd, move.offset_bytes, move.num_bytes)
            self.arenas.domains[move.to].populate(move.offset_bytes, move.num_bytes)
            self._moved.append(move)


def _punch(fd: int, offset_bytes: int, num_bytes: int) -> None:
    """Give the pages of a range back to the kernel; raises ``OSError`` if it refuses, which would be a bug."""
    mode = _FALLOC_FL_KEEP_SIZE | _FALLOC_FL_PUNCH_HOLE
    length = ctypes.c_longlong(num_bytes)
    if _LIBC.fallocate(fd, mode, ctypes.c_longlong(offset_bytes), length) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
