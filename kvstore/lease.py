"""The two leases, the only ways to write and to read, and what the store answers. Single-owner; each ends once.

A lease is also a context manager, so that it ends with its scope whatever happens in there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from kvstore.errors import LeaseError
from kvstore.namespace import Namespace
from kvstore.types import BlockKey

Look = Callable[[Namespace, Sequence[int]], list[memoryview]]
"""The bytes of slots, for whoever asks for them."""


def _always() -> bool:
    return True


class LeaseState(Enum):
    """HELD, then ENDED; a write lease may be QUARANTINED in between, while a copy may still touch its slots."""

    HELD = "held"
    QUARANTINED = "quarantined"
    ENDED = "ended"


@dataclass(eq=False, slots=True)
class WriteLease:
    """Slots reserved for blocks to come."""

    ns: Namespace
    slots: list[int]
    look: Look
    end: Callable[["WriteLease"], None]
    num_named: int = 0
    state: LeaseState = LeaseState.HELD
    _views: list[memoryview] | None = None

    def __enter__(self) -> "WriteLease":
        return self

    def __exit__(self, *_: object) -> None:
        """Abort what no commit has named; a lease that has ended is left as it is."""
        if self.state is LeaseState.HELD:
            self.end(self)

    @property
    def views(self) -> list[memoryview]:
        """The slots' bytes in RAM, ``block_bytes`` each; made when first asked for, since a DMA goes by slots."""
        if self._views is None:
            self._views = self.look(self.ns, self.slots)
        return self._views

    @property
    def num_blocks(self) -> int:
        """How many blocks were reserved, which may be fewer than asked for."""
        return len(self.slots)

    @property
    def unnamed(self) -> list[int]:
        """Slots that no commit has named yet."""
        return self.slots[self.num_named :]

    def split(self) -> list["WriteLease"]:
        """A lease for each slot that has no name yet, instead of this one."""
        self.require(LeaseState.HELD, "split")
        self.state = LeaseState.ENDED
        return [WriteLease(self.ns, [slot], self.look, self.end) for slot in self.unnamed]

    def require(self, state: LeaseState, call: str) -> None:
        """Raises ``LeaseError`` unless the lease is in ``state``."""
        _require(self.state, state, call)


@dataclass(eq=False, slots=True)
class StripeLease(WriteLease):
    """Slots that every rank of an engine writes its stripe to."""

    keys: Sequence[BlockKey] = ()
    """What each slot is for."""


@dataclass(eq=False, slots=True)
class ReadLease:
    """Pinned blocks, the longest READY prefix of what was asked for."""

    ns: Namespace
    keys: Sequence[BlockKey]
    slots: list[int]
    look: Look
    end: Callable[["ReadLease"], None]
    still_held: Callable[[], bool] = _always
    """Whether the bytes are the blocks' to this moment: to be asked after the last copy. A store behind a wire takes a
    lease back from a process that it has not heard of for long."""
    state: LeaseState = LeaseState.HELD
    _views: list[memoryview] | None = None

    def __enter__(self) -> "ReadLease":
        return self

    def __exit__(self, *_: object) -> None:
        """Release it, unless that was done."""
        if self.state is LeaseState.HELD:
            self.end(self)

    @property
    def views(self) -> list[memoryview]:
        """The blocks' bytes in RAM, ``block_bytes`` each, made when first asked for; none once the lease has ended."""
        if self.state is not LeaseState.HELD:
            return []
        if self._views is None:
            self._views = self.look(self.ns, self.slots)
        return self._views

    @property
    def num_blocks(self) -> int:
        """How many leading blocks are pinned; may be none."""
        return len(self.slots)

    def require(self, state: LeaseState, call: str) -> None:
        """Raises ``LeaseError`` unless the lease is in ``state``."""
        _require(self.state, state, call)


@dataclass(frozen=True, slots=True)
class Location:
    """Where the slots of a lease lie, for the other processes of an engine that hold them with its owner.

    ``descriptors``, the owner's, are all that a process needs to have: the memory to map, and what keeps it from being
    handed out again for as long as anybody has it open. ``offsets_bytes`` are those of the slots in that memory.
    """

    descriptors: tuple[int, ...]
    offsets_bytes: list[int]
    pages_stay: bool = False
    """Whether a page of the memory is the same one for as long as it is mapped, so that a device may be given it."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """What the tables say of a chain."""

    ready: int
    """Leading blocks READY in RAM."""
    found: int
    """Leading blocks in any level."""
    pending: bool
    """A better answer is on its way: ask again."""


class Committed:
    """What a commit came to. Behind a wire the answer is on its way: whoever asks waits, as the budget allows."""

    def __init__(
        self, slots: list[int], accepted: frozenset[BlockKey], ask: Callable[[], "Committed"] | None = None
    ) -> None:
        """``ask``, if given, is called once, when somebody wants to know."""
        self._slots = slots
        self._accepted = accepted
        self._ask = ask

    @property
    def slots(self) -> list[int]:
        """The slots that have the keys; none if the lease was lost."""
        self._settle()
        return self._slots

    @property
    def accepted(self) -> frozenset[BlockKey]:
        """Blocks that are being copied down: pinned until they are in a lower tier."""
        self._settle()
        return self._accepted

    def _settle(self) -> None:
        if self._ask is not None:
            answer, self._ask = self._ask(), None
            self._slots, self._accepted = answer.slots, answer.accepted


def too_many_keys(num_keys: int, lease: WriteLease) -> LeaseError:
    """What to raise where a commit names more blocks than were reserved."""
    return LeaseError(
        f"commit of {num_keys} keys for {len(lease.unnamed)} slots: nothing was committed; reserve may give fewer slots"
        " than it was asked for, so commit as many keys as the lease has blocks"
    )


def _require(actual: LeaseState, wanted: LeaseState, call: str) -> None:
    if actual is not wanted:
        raise LeaseError(f"{call} of a lease that is {actual.value} and not {wanted.value}: a lease ends once")
