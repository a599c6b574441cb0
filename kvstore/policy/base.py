"""The protocol of an eviction policy: what is worth keeping and who leaves.

A policy sees keys and requests. It knows no slots, pins, bytes or clocks, does no I/O and is used by one thread. The
very same object serves a pool of the store and the replay simulator.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Protocol, TypeVar, runtime_checkable

from kvstore.policy.learned import Learned
from kvstore.types import Request

K = TypeVar("K", bound=Hashable)


Refit = Callable[[], Callable[[], None]]
"""Learns from a copy, which may take a while; what it returns applies that, in the owner thread."""


class Policy(Protocol[K]):
    """Order of leaving, over the keys that are resident.

    Rule 1: ``insert`` is called once when a key becomes resident and ``remove`` once when it leaves, for any reason.
    Rule 2: ``arrive`` comes once per request, before its blocks are inserted; ``finish`` once after.
    Rule 3: a parent is in use whenever its child is: a policy keeps a parent no colder than its children.
    """

    def resize(self, capacity_blocks: int) -> None:
        """The pool now holds at most this many blocks. Called before the first ``insert`` and when extents move."""

    def arrive(self, request: Request, chain: Sequence[K]) -> int:
        """A request refers to ``chain``, root first, resident or not: touch what is resident.

        Returns how many leading blocks are worth keeping; blocks beyond need not be stored here.
        """

    def finish(self, request: Request, output_tokens: int) -> None:
        """The request ended after ``output_tokens``."""

    def insert(self, key: K, parent: K | None) -> None:
        """``key`` is now resident; it ranks just below its ``parent`` if that is resident, else as newly used."""

    def remove(self, key: K) -> None:
        """``key`` is no longer resident."""

    def refit(self) -> Refit | None:
        """A pure job for another thread, where there is something to learn: asked for whenever none is at work."""

    def victim(self, may_leave: Callable[[K], bool]) -> K | None:
        """The resident key to leave first among those that ``may_leave``, all of them leaves; None if there is none.

        The caller then calls ``remove`` for it, or does nothing.
        """


@runtime_checkable
class Learner(Protocol[K]):
    """The further capability of a policy whose habits can be kept over a restart."""

    def learned(self) -> Learned[K]:
        """A copy of what it has learned so far."""

    def resume(self, learned: Learned[K]) -> None:
        """Know from now on what another one had learned."""
