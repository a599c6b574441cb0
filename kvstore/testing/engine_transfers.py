"""What the simulated engine asks of the store for its requests: hits to find, loads and stores under way.

It knows the leases of ``BlockStore``, not its lent buffers, and no planner: what it wants is simple. The store knows
nothing of groups, which are namespaces to it. How a hit is found:

Rule 1: a hit of so many leading blocks is legal when every group has what it needs of them; the longest one is taken.
Rule 2: all that a hit needs is prefetched, then pinned; where a group lacks a block, the next shorter one is tried.
Rule 3: a load is of all the hit's blocks or of none. From a block on that failed to load, a request loads nothing more.

And how it ends: a load keeps its pins, and a load or store its pages, until every rank's copy has returned, whatever
becomes of the request. A store is committed when every rank has done its part, aborted if one has failed; what an
aborted request was storing is quarantined first.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvstore.block_store import BlockStore
from kvstore.hashing import Identity
from kvstore.lease import LeaseState, ReadLease, WriteLease
from kvstore.namespace import Namespace
from kvstore.promotion import Prefetch
from kvstore.testing.engine_model import states_after
from kvstore.testing.engine_pages import Move, Pages, RankCopy, first_failed
from kvstore.types import BlockKey, Request


@dataclass(eq=False, slots=True)
class Hit:
    """So many leading blocks, of which each group's lease pins what it needs."""

    num_blocks: int
    leases: list[ReadLease]


@dataclass(eq=False, slots=True)
class Chains:
    """A request as the store knows it: a chain in each group, and how far it has come with them."""

    tokens: list[int]
    """The request's own, which grow."""
    announced: list[Request]
    keys: list[list[BlockKey]]
    """By group, root first."""
    keep: int = 0
    """Leading blocks of the prompt that the store's policies want."""
    max_hit: int | None = None
    """Where a load failed."""
    wanted: int = 0
    """The hit that is looked for."""
    deadline_s: float = 0.0
    prefetches: list[Prefetch] = field(default_factory=list)
    hit: Hit | None = None
    num_stored: int = 0
    """Leading blocks that the store has, or was asked to take."""


@dataclass(eq=False, slots=True)
class Load:
    """A hit on its way into pages."""

    chains: Chains
    hit: Hit
    pages: list[int]
    copies: list[RankCopy]


@dataclass(eq=False, slots=True)
class Storing:
    """Blocks from ``start`` on, on their way from pages into slots."""

    chains: Chains
    start: int
    pages: list[int]
    leases: list[WriteLease]
    """One for each group, of as many slots or more."""
    copies: list[RankCopy]


class Transfers:
    """The engine's side of the store; with None for it nothing is found and nothing stored."""

    def __init__(
        self, store: BlockStore | None, pages: Pages, *, prefetch_s: float, clock: Callable[[], float]
    ) -> None:
        """``prefetch_s`` is how long a request waits for its hit at most, on the store's ``clock``."""
        self._store = store
        self._pages = pages
        self._prefetch_s = prefetch_s
        self._clock = clock
        self._namespaces: list[Namespace] = []
        if store is not None:
            for group in pages.groups:
                identity = Identity(f"simulated {group.name}", b"weights")
                self._namespaces.append(store.open_namespace(identity, group.layout))
        self.loads: list[Load] = []
        self.storing: list[Storing] = []

    @property
    def copies(self) -> list[RankCopy]:
        """What has not returned, of all loads and stores."""
        jobs: list[Load | Storing] = [*self.loads, *self.storing]
        return [copy for job in jobs for copy in job.copies if not copy.has_returned]

    # ---- before a request computes

    def arrive(self, request_id: str, tokens: list[int]) -> Chains:
        """Announce a request in every group."""
        announced = [Request(request_id, self._clock(), ns.digest, len(tokens)) for ns in self._namespaces]
        chains = Chains(tokens, announced, [[] for _ in self._namespaces])
        self._grow(chains)
        if self._store is not None:
            keeps = [self._store.arrive(*said) for said in zip(announced, chains.keys, strict=True)]
            chains.keep = min(keeps)
        self.begin(chains)
        return chains

    def begin(self, chains: Chains) -> None:
        """The request begins to look for a hit, or does so again; it leaves itself a token to compute."""
        self._grow(chains)
        usable = (len(chains.tokens) - 1) // self._pages.tokens_per_block if self._namespaces else 0
        chains.wanted = usable if chains.max_hit is None else min(usable, chains.max_hit)
        chains.deadline_s = self._clock() + self._prefetch_s
        chains.num_stored = 0

    def seek(self, chains: Chains) -> bool:
        """Go on looking; True when it is known what there is: ``hit``, if anything."""
        while chains.hit is None and chains.wanted > 0:
            if not chains.prefetches:
                chains.prefetches = self._prefetch(chains)
            if not all(prefetch.done for prefetch in chains.prefetches):
                return False
            chains.prefetches = []
            self._pin(chains)
        return True

    def leave(self, chains: Chains) -> None:
        """The request has no use for a hit any more."""
        hit, chains.hit, chains.prefetches = chains.hit, None, []
        if hit is not None:
            self._release(hit)

    def load(self, chains: Chains, pages: list[int]) -> Load:
        """Begin to fill ``pages`` from the request's hit, which is the load's from now on."""
        hit, chains.hit = chains.hit, None
        assert hit is not None
        ranks = range(self._pages.num_ranks)
        load = Load(chains, hit, pages, [RankCopy(rank, self._moves_of(hit, pages, rank)) for rank in ranks])
        self._pages.hold(pages)
        self.loads.append(load)
        return load

    # ---- while it computes

    def store(self, chains: Chains, pages: list[int], num_computed_tokens: int) -> None:
        """Begin to store the blocks that have become complete, as far as there is room; the rest next time."""
        if self._store is None:
            return
        self._grow(chains)
        num_prompt_blocks = chains.announced[0].input_tokens // self._pages.tokens_per_block
        stop = num_computed_tokens // self._pages.tokens_per_block
        stop = min(stop, chains.keep) if chains.keep < num_prompt_blocks else stop
        if stop <= chains.num_stored:
            return
        leases = [self._store.reserve(ns, stop - chains.num_stored) for ns in self._namespaces]
        blocks = range(chains.num_stored, chains.num_stored + min(lease.num_blocks for lease in leases))
        if not blocks:
            self._abort(leases)
            return
        chains.num_stored = blocks.stop
        pages = pages[blocks.start : blocks.stop]
        self._pages.hold(pages)
        copies = [RankCopy(rank, self._moves_to(leases, blocks, pages, rank)) for rank in range(self._pages.num_ranks)]
        self.storing.append(Storing(chains, blocks.start, pages, leases, copies))

    # ---- what has come of it

    def poll(self) -> None:
        """Apply what has come in, and end the stores whose copies have returned."""
        if self._store is not None:
            self._store.poll()
        for storing in tuple(self.storing):
            if all(copy.has_returned for copy in storing.copies):
                self.storing.remove(storing)
                self._pages.drop(storing.pages)
                self._end(storing)

    def end_loads(self) -> list[tuple[Load, int | None]]:
        """Loads whose copies have returned, each with the first block that did not arrive.

        AssertionError if a byte of one that arrived is wrong.
        """
        ended = [load for load in self.loads if all(copy.has_returned for copy in load.copies)]
        self.loads = [load for load in self.loads if load not in ended]
        return [(load, self._end_load(load)) for load in ended]

    def give_up(self, chains: Chains) -> None:
        """What the request was storing is of no use any more, but copies may still write to its slots."""
        for storing in self.storing:
            if storing.chains is chains and self._store is not None:
                for lease in storing.leases:
                    self._store.quarantine(lease)

    def finish(self, chains: Chains, num_output_tokens: int) -> None:
        """The request has ended, in whatever state."""
        self.leave(chains)
        if self._store is not None:
            for request, keys in zip(chains.announced, chains.keys, strict=True):
                self._store.finish(request, keys, num_output_tokens)

    def check_stored(self, chains: Chains) -> int:
        """AssertionError if RAM has wrong bytes of the request's blocks; returns how many it has, of all groups."""
        self._grow(chains)
        num_checked = 0
        if self._store is not None:
            for group, keys in zip(self._pages.groups, chains.keys, strict=True):
                for block, key in enumerate(keys):
                    with self._store.pin([key]) as lease:
                        bytes_there = [bytes(view) for view in lease.views]
                        if bytes_there and lease.still_held():
                            right = group.block(self._states(chains, block)).tobytes()
                            assert bytes_there == [right], f"wrong bytes in RAM: group {group.name!r}, block {block}"
                            num_checked += 1
        return num_checked

    # ---- the inside

    def _grow(self, chains: Chains) -> None:
        """Keys of every block whose tokens are known by now."""
        for ns, keys in zip(self._namespaces, chains.keys, strict=True):
            rest = chains.tokens[len(keys) * self._pages.tokens_per_block :]
            keys.extend(ns.keys(rest, parent=keys[-1] if keys else None))

    def _prefetch(self, chains: Chains) -> list[Prefetch]:
        assert self._store is not None
        needs = [group.needs(chains.wanted) for group in self._pages.groups]
        return [
            self._store.prefetch(keys[blocks.start : blocks.stop], chains.deadline_s)
            for blocks, keys in zip(needs, chains.keys, strict=True)
        ]

    def _pin(self, chains: Chains) -> None:
        """Pin what a hit of ``wanted`` blocks needs; where it is not there, want the next shorter one it may be."""
        assert self._store is not None
        hit, shorter = Hit(chains.wanted, []), chains.wanted
        for group, keys in zip(self._pages.groups, chains.keys, strict=True):
            needs = group.needs(chains.wanted)
            lease = self._store.pin(keys[needs.start : needs.stop])
            hit.leases.append(lease)
            shorter = min(shorter, needs.start + lease.num_blocks)  # what it lacks is needed until there
        if shorter == chains.wanted:
            chains.hit = hit
            return
        chains.wanted = shorter
        self._release(hit)

    def _moves_of(self, hit: Hit, pages: Sequence[int], rank: int) -> list[Move]:
        """From slots to pages."""
        moves = []
        for group, lease in zip(self._pages.groups, hit.leases, strict=True):
            part = group.layout.bytes_of(rank, self._pages.num_ranks)
            for block, view in zip(group.needs(hit.num_blocks), lease.views, strict=True):
                source = np.frombuffer(view[part], np.uint8)
                moves.append(Move(block, source, self._pages.part(pages[block], group, rank)))
        return sorted(moves, key=lambda move: move.block)

    def _moves_to(self, leases: Sequence[WriteLease], blocks: range, pages: Sequence[int], rank: int) -> list[Move]:
        """From pages to slots."""
        moves = []
        for group, lease in zip(self._pages.groups, leases, strict=True):
            part = group.layout.bytes_of(rank, self._pages.num_ranks)
            for block, page, view in zip(blocks, pages, lease.views, strict=False):
                target = np.frombuffer(view[part], np.uint8)
                moves.append(Move(block, self._pages.part(page, group, rank), target))
        return sorted(moves, key=lambda move: move.block)

    def _end_load(self, load: Load) -> int | None:
        """The first block that did not arrive."""
        failed = first_failed(load.copies)
        if not all(lease.still_held() for lease in load.hit.leases):
            failed = 0  # the slots may have been others' while they were read
        if failed is None:
            for group in self._pages.groups:
                for block in group.needs(load.hit.num_blocks):
                    self._pages.check(load.pages[block], group, self._states(load.chains, block))
        self._release(load.hit)
        self._pages.drop(load.pages)
        return failed

    def _end(self, storing: Storing) -> None:
        assert self._store is not None
        if storing.leases[0].state is LeaseState.QUARANTINED:
            for lease in storing.leases:
                self._store.reclaim(lease)
            return
        if first_failed(storing.copies) is None:
            blocks = slice(storing.start, storing.start + len(storing.pages))
            for lease, keys in zip(storing.leases, storing.chains.keys, strict=True):
                self._store.commit(lease, keys[blocks], keys[blocks.start - 1] if blocks.start else None)
        self._abort([lease for lease in storing.leases if lease.state is LeaseState.HELD])

    def _abort(self, leases: Sequence[WriteLease]) -> None:
        assert self._store is not None
        for lease in leases:
            self._store.abort(lease)

    def _release(self, hit: Hit) -> None:
        assert self._store is not None
        for lease in hit.leases:
            self._store.release(lease)

    def _states(self, chains: Chains, block: int) -> list[bytes]:
        size = self._pages.tokens_per_block
        return states_after(b"", chains.tokens[: (block + 1) * size])[block * size :]
