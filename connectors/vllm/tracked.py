"""What the scheduler half knows of requests, loads and stores: data, of which it is the only owner."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from connectors.plan import HitSearch
from connectors.vllm.messages import LoadJob
from connectors.vllm.request import EngineRequest, Page
from kvstore.lease import ReadLease, WriteLease
from kvstore.namespace import Namespace
from kvstore.promotion import Prefetch
from kvstore.types import BlockKey, Request


@dataclass(eq=False, slots=True)
class Chain:
    """A request's blocks in one group."""

    ns: Namespace
    announced: Request
    keys: list[BlockKey] = field(default_factory=list)

    def grow(self, hashes: Sequence[bytes]) -> list[BlockKey]:
        """Keys of every block whose tokens are known by now. A session may have dropped tokens since the last time."""
        del self.keys[len(hashes) :]
        while self.keys and self.keys[-1] != self.ns.key(hashes[len(self.keys) - 1]):
            self.keys.pop()
        self.keys += [self.ns.key(digest) for digest in hashes[len(self.keys) :]]
        return self.keys


@dataclass(frozen=True, slots=True)
class Pin:
    """Of a group: its blocks from ``start`` on."""

    start: int
    lease: ReadLease


@dataclass(eq=False, slots=True)
class Tracked:
    """A request that has not ended."""

    request: EngineRequest
    chains: list[Chain]
    """Of each group."""
    keep: int = 0
    """Leading blocks of the prompt that the store's policy wants."""
    is_stored: bool = True
    search: HitSearch = field(default_factory=lambda: HitSearch(0, ()))
    """Of what is to be brought up."""
    prefetches: dict[int, tuple[range, Prefetch]] = field(default_factory=dict)
    """By group: what was asked for last."""
    prefetch_until_s: float = 0.0
    pins: dict[int, Pin] = field(default_factory=dict)
    """By group."""
    hit: int = 0
    """Leading blocks that the pins serve."""
    pinned_until_s: float = 0.0
    offered: int = 0
    """Leading blocks that were offered, the engine's own among them."""
    has_pages: bool = False

    def grow(self) -> int:
        """How many blocks' tokens are known by now; every chain has their keys."""
        for chain in self.chains:
            chain.grow(self.request.block_hashes)
        return len(self.request.block_hashes)

    @property
    def is_waiting(self) -> bool:
        """Whether something is on its way up."""
        return not all(prefetch.done for _, prefetch in self.prefetches.values())


@dataclass(eq=False, slots=True)
class Loading:
    """A load under way, a job for each group; no ``leases`` once it was found lost or outdated."""

    jobs: list[LoadJob]
    leases: list[ReadLease]
    start: int
    served: dict[str, int]
    is_outdated: bool = False
    """Whether the weights may have changed since it began."""


@dataclass(eq=False, slots=True)
class Run:
    """Blocks of one request and group that follow one another, and the pages they are in, which are held."""

    ns: Namespace
    request_id: str
    group: int
    start: int
    keys: list[BlockKey]
    parent: BlockKey | None
    pages: list[Page]


@dataclass(eq=False, slots=True)
class Storing:
    """A store job under way."""

    lease: WriteLease
    runs: list[Run]
    num_ranks_done: int = 0
    failed: bool = False
