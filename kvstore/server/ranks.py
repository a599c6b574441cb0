"""Engines of several worker processes: blocks whose stripes come one by one, and the same answers for all ranks.

A *gathering* is one block whose stripes are arriving: every rank writes its own part of the same slot. It is complete,
and the block READY, when all ranks have committed; it is given up when one of them aborts, dies or lets it wait for too
long. The slot of one that was given up is free when no rank is left that may write to it.

Invariant: a gathering is in ``_gatherings`` until it is complete or given up; after that only its writers know it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstore.errors import WireError
from kvstore.lease import ReadLease, WriteLease
from kvstore.namespace import Namespace
from kvstore.store import Store
from kvstore.types import BlockKey, Rank

PATIENCE_TICKS = 30
"""Ranks run in step: one that is so much later than another one is not coming."""
MAX_RANKS = 1024


@dataclass(eq=False, slots=True)
class Gathering:
    """One block whose stripes are arriving."""

    lease: WriteLease
    key: BlockKey
    parent: BlockKey | None
    num_ranks: int
    arrived: set[int] = field(default_factory=set)
    writers: set[int] = field(default_factory=set)
    """Ranks that may write to the slot."""
    is_over: bool = False
    num_ticks: int = 0


@dataclass(eq=False, slots=True)
class Stripes:
    """What one rank has reserved in one call."""

    rank: Rank
    gatherings: list[Gathering]
    indices: list[int]
    """Which of the keys of the call each is for."""


@dataclass(eq=False, slots=True)
class _JointPin:
    """The first rank's pin, kept until all ranks have theirs."""

    lease: ReadLease
    seen: set[int] = field(default_factory=set)
    num_ticks: int = 0


class Ranks:
    """Gatherings and joint pins of all engines. Owner thread only."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._gatherings: dict[tuple[str, BlockKey], Gathering] = {}
        self._pins: dict[tuple[str, str, bytes], _JointPin] = {}

    # ---- writing

    def reserve(self, rank: Rank, ns: Namespace, keys: Sequence[BlockKey], parent: BlockKey | None) -> Stripes:
        """Join the gatherings of ``keys``, and begin those that nobody has begun, as far as there is room.

        A key is left out where this rank has reserved it before and the others have not all arrived.
        """
        _require_rank(rank)
        known = [gathering for key in keys if (gathering := self._gatherings.get((rank.engine, key))) is not None]
        if any(gathering.num_ranks != rank.num_ranks for gathering in known):
            raise WireError(f"the ranks of engine {rank.engine!r} do not agree on how many they are")
        new = [key for key in dict.fromkeys(keys) if (rank.engine, key) not in self._gatherings]
        leases = self._store.reserve(ns, len(new)).split()
        parents = dict(zip(keys, [parent, *keys[:-1]], strict=True))
        for key, lease in zip(new, leases, strict=False):
            self._gatherings[rank.engine, key] = Gathering(lease, key, parents[key], rank.num_ranks)
        stripes = Stripes(rank, [], [])
        for index, key in enumerate(keys):
            gathering = self._gatherings.get((rank.engine, key))
            if gathering is None or rank.index in gathering.arrived | gathering.writers:
                continue
            gathering.writers.add(rank.index)
            stripes.gatherings.append(gathering)
            stripes.indices.append(index)
        return stripes

    def commit(self, stripes: Stripes) -> int:
        """The rank has written all its stripes; returns how many blocks are READY now."""
        num_complete = 0
        for gathering in stripes.gatherings:
            gathering.arrived.add(stripes.rank.index)
            if not gathering.is_over and len(gathering.arrived) == gathering.num_ranks:
                del self._gatherings[stripes.rank.engine, gathering.key]
                gathering.writers.clear()
                self._store.commit(gathering.lease, [gathering.key], gathering.parent)
                num_complete += 1
            else:
                self._leave(gathering, stripes.rank)
        return num_complete

    def give_up(self, stripes: Stripes) -> None:
        """These blocks will not be complete; the rank may still write until ``let_go``."""
        for gathering in stripes.gatherings:
            self._end(stripes.rank.engine, gathering)

    def let_go(self, stripes: Stripes) -> None:
        """The rank writes to none of the slots any more."""
        for gathering in stripes.gatherings:
            self._leave(gathering, stripes.rank)

    # ---- reading

    def pin(self, rank: Rank, request_id: str, ns: Namespace, chain: Sequence[BlockKey]) -> ReadLease:
        """Pin what the first rank that asked about this request got, so that all get the same."""
        _require_rank(rank)
        name = rank.engine, request_id, ns.digest
        joint = self._pins.get(name)
        if joint is None:
            joint = self._pins[name] = _JointPin(self._store.pin(chain))
        if list(chain[: joint.lease.num_blocks]) != list(joint.lease.keys):
            raise WireError(f"ranks of engine {rank.engine!r} ask about different chains for request {request_id!r}")
        lease = self._store.pin(joint.lease.keys)
        joint.seen.add(rank.index)
        if len(joint.seen) == rank.num_ranks:
            self._end_pin(name)
        return lease

    # ---- time passes

    def tick(self) -> None:
        """Give up what has waited for too long."""
        for (engine, _), gathering in list(self._gatherings.items()):
            gathering.num_ticks += 1
            if gathering.num_ticks > PATIENCE_TICKS:
                self._end(engine, gathering)
        for name, joint in list(self._pins.items()):
            joint.num_ticks += 1
            if joint.num_ticks > PATIENCE_TICKS:
                self._end_pin(name)

    # ---- the inside

    def _end(self, engine: str, gathering: Gathering) -> None:
        if gathering.is_over or self._gatherings.get((engine, gathering.key)) is not gathering:
            return
        del self._gatherings[engine, gathering.key]
        gathering.is_over = True
        self._store.quarantine(gathering.lease)
        if not gathering.writers:
            self._store.reclaim(gathering.lease)

    def _leave(self, gathering: Gathering, rank: Rank) -> None:
        if rank.index in gathering.writers:
            gathering.writers.discard(rank.index)
            if gathering.is_over and not gathering.writers:
                self._store.reclaim(gathering.lease)

    def _end_pin(self, name: tuple[str, str, bytes]) -> None:
        self._store.release(self._pins.pop(name).lease)


def _require_rank(rank: Rank) -> None:
    if not 0 <= rank.index < rank.num_ranks <= MAX_RANKS:
        raise WireError(f"rank {rank.index} of {rank.num_ranks} is none")
