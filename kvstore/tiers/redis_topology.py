"""Which server holds a key: a single one, the primary that Sentinels name, or the primary of a Cluster's slot.

What was learnt is kept until ``moved`` or ``lost`` says otherwise, and then learnt again at the next use, so that a
failover costs one failed batch. Lock-free: two threads may learn at once, and each stores a whole new answer.
"""

import binascii
import time
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Protocol

from kvstore.tiers.redis_node import CONNECT_TIMEOUT_S, Dialer, Node
from kvstore.tiers.redis_url import Endpoint, RedisUrl
from kvstore.tiers.redis_value import hash_tag
from kvstore.tiers.redis_wire import ServerError
from kvstore.types import BlockKey

NUM_SLOTS = 16384


class Topology(Protocol):
    """The servers of a tier. Every method may raise ``OSError``, as long as nobody knows where the servers are."""

    def node(self, key: BlockKey, deadline_s: float) -> Node | None:
        """The server that holds ``key``; None where no server does."""

    def primaries(self, deadline_s: float) -> Sequence[Node]:
        """Every server that holds keys."""

    def known(self) -> Sequence[Node]:
        """Every server that holds keys, as it was last learnt; asks nobody."""

    def moved(self, informant: Node) -> bool:
        """``informant`` does not hold a key that it was asked for, and knows who does; whether to ask again."""

    def lost(self, suspect: Node | None) -> None:
        """``suspect`` did not answer, or not as a primary does; None: a key has no server."""

    def close(self) -> None:
        """Close idle connections. Safe to call twice."""


def open_topology(url: RedisUrl, dialer: Dialer) -> Topology:
    """The topology that ``url`` names; connects to nothing yet."""
    if url.mode == "cluster":
        return Cluster(url.endpoints, dialer)
    if url.mode == "sentinel":
        return Sentinels(url.endpoints, url.service, dialer)
    return Single(url.endpoints[0], dialer)


class Single:
    """One server, for good."""

    def __init__(self, endpoint: Endpoint, dialer: Dialer) -> None:
        self._node = Node(endpoint, dialer)

    def node(self, key: BlockKey, deadline_s: float) -> Node:
        """The server."""
        return self._node

    def primaries(self, deadline_s: float) -> Sequence[Node]:
        """The server."""
        return (self._node,)

    def known(self) -> Sequence[Node]:
        """The server."""
        return (self._node,)

    def moved(self, informant: Node) -> bool:
        """There is no other: the server belongs to a Cluster, which a single server's URL cannot serve."""
        return False

    def lost(self, suspect: Node | None) -> None:
        """There is no other."""

    def close(self) -> None:
        """Close its idle connections."""
        self._node.close()


class _Nodes:
    """The nodes met so far, so that their idle connections outlive what was learnt."""

    def __init__(self, dialer: Dialer) -> None:
        self._dialer = dialer
        self._by_endpoint: dict[Endpoint, Node] = {}

    def at(self, endpoint: Endpoint) -> Node:
        """The one node of ``endpoint``."""
        return self._by_endpoint.setdefault(endpoint, Node(endpoint, self._dialer))

    def close(self) -> None:
        """Close the idle connections of all."""
        for node in list(self._by_endpoint.values()):
            node.close()


class Sentinels:
    """The primary of ``service``, as the first Sentinel that answers names it.

    Sentinels are asked without a login, and with the servers' own where they demand one.
    """

    def __init__(self, sentinels: Sequence[Endpoint], service: str, dialer: Dialer) -> None:
        self._sentinels = sentinels
        self._service = service
        self._dialer = dialer
        self._nodes = _Nodes(dialer)
        self._primary: Node | None = None

    def node(self, key: BlockKey, deadline_s: float) -> Node:
        """The primary."""
        return self._learn(deadline_s)

    def primaries(self, deadline_s: float) -> Sequence[Node]:
        """The primary."""
        return (self._learn(deadline_s),)

    def known(self) -> Sequence[Node]:
        """The primary, if a Sentinel has named one."""
        primary = self._primary
        return () if primary is None else (primary,)

    def moved(self, informant: Node) -> bool:
        """The same as for a single server."""
        return False

    def lost(self, suspect: Node | None) -> None:
        """Ask the Sentinels again."""
        self._primary = None

    def close(self) -> None:
        """Close idle connections."""
        self._nodes.close()

    def _learn(self, deadline_s: float) -> Node:
        primary = self._primary
        if primary is not None:
            return primary
        trouble: OSError = ConnectionError("no sentinel was asked")
        for sentinel in self._sentinels:
            try:
                primary = self._nodes.at(self._ask(sentinel, _share(deadline_s)))
            except OSError as error:
                trouble = error
            else:
                self._primary = primary
                return primary
        raise ConnectionError(f"no sentinel names a primary of {self._service!r}; the last said: {trouble}")

    def _ask(self, sentinel: Endpoint, deadline_s: float) -> Endpoint:
        question = (b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", self._service.encode())
        wire = self._dialer.dial_anonymous(sentinel, deadline_s)
        try:
            (reply,) = wire.ask([question], deadline_s)
            if isinstance(reply, ServerError) and reply.code == "NOAUTH":
                self._dialer.log_in(wire, deadline_s)
                (reply,) = wire.ask([question], deadline_s)
        finally:
            wire.close()
        match reply:
            case [bytes(host), bytes(port)]:
                return Endpoint(host.decode(), int(port))
        raise ConnectionError(f"sentinel {sentinel} knows no primary of {self._service!r}: {reply}")


@dataclass(frozen=True, slots=True)
class _SlotMap:
    """Ranges of slots by their first one, in order."""

    firsts: list[int]
    lasts: list[int]
    nodes: list[Node]

    def find(self, slot: int) -> Node | None:
        index = bisect_right(self.firsts, slot) - 1
        return self.nodes[index] if index >= 0 and slot <= self.lasts[index] else None


class Cluster:
    """The primary of a key's hash slot. Reads never go to replicas: those lag behind and know less."""

    def __init__(self, seeds: Sequence[Endpoint], dialer: Dialer) -> None:
        self._nodes = _Nodes(dialer)
        self._seeds = [self._nodes.at(seed) for seed in seeds]
        self._map: _SlotMap | None = None
        self._is_outdated = False
        self._informant: Node | None = None
        self._suspect: Node | None = None

    def node(self, key: BlockKey, deadline_s: float) -> Node | None:
        """The primary of the key's slot."""
        return self._learn(deadline_s).find(key_slot(key))

    def primaries(self, deadline_s: float) -> Sequence[Node]:
        """Every server that has slots."""
        return list(dict.fromkeys(self._learn(deadline_s).nodes))

    def known(self) -> Sequence[Node]:
        """The servers that had slots when somebody told."""
        known = self._map
        return () if known is None else list(dict.fromkeys(known.nodes))

    def moved(self, informant: Node) -> bool:
        """Learn the slots again, from ``informant`` first: word travels slowly between servers."""
        self._informant = informant
        self._is_outdated = True
        return True

    def lost(self, suspect: Node | None) -> None:
        """Learn the slots again, from ``suspect`` last: it may hang."""
        self._suspect = suspect
        self._is_outdated = True

    def close(self) -> None:
        """Close idle connections."""
        self._nodes.close()

    def _learn(self, deadline_s: float) -> _SlotMap:
        known = self._map
        if known is not None and not self._is_outdated:
            return known
        trouble: OSError = ConnectionError("no server was asked")
        for node in self._informants(known):
            try:
                learnt = self._ask(node, _share(deadline_s))
            except OSError as error:
                trouble = error
            else:
                self._is_outdated, self._informant, self._suspect, self._map = False, None, None, learnt
                return learnt
        if known is not None:
            return known  # each server will speak for itself
        raise ConnectionError(f"no server of the cluster tells its slots; the last said: {trouble}")

    def _informants(self, known: _SlotMap | None) -> Sequence[Node]:
        """Whom to ask, in order."""
        nodes = dict.fromkeys([*self._seeds, *(known.nodes if known else [])])
        return sorted(nodes, key=lambda node: (node is not self._informant, node is self._suspect))

    def _ask(self, node: Node, deadline_s: float) -> _SlotMap:
        with node.wire(deadline_s) as wire:
            (reply,) = wire.ask([(b"CLUSTER", b"SLOTS")], deadline_s)
        if not isinstance(reply, list):
            raise ConnectionError(f"{node.endpoint} is no cluster node: {reply}")
        ranges = sorted((self._range(row, node) for row in reply), key=itemgetter(0))
        if not ranges:
            raise ConnectionError(f"{node.endpoint} knows of no slots")
        return _SlotMap(
            firsts=[first for first, _, _ in ranges],
            lasts=[last for _, last, _ in ranges],
            nodes=[self._nodes.at(endpoint) for _, _, endpoint in ranges],
        )

    def _range(self, row: object, node: Node) -> tuple[int, int, Endpoint]:
        match row:
            case [int(first), int(last), [(bytes() | None) as host, int(port), *_], *_]:
                # a server that does not know its own address means the one it was asked at
                return first, last, Endpoint(host.decode() if host else node.endpoint.host, port)
        raise ConnectionError(f"{node.endpoint} tells slots in a way that makes no sense: {row!r}")


def key_slot(key: BlockKey) -> int:
    """The hash slot of ``key``'s names: CRC16 (XMODEM) of their hash tag, by the Redis Cluster specification."""
    return binascii.crc_hqx(hash_tag(key), 0) % NUM_SLOTS


def _share(deadline_s: float) -> float:
    """A deadline for one of several servers that may be asked: a hung one leaves time for the next."""
    now_s = time.monotonic()
    return now_s + min(CONNECT_TIMEOUT_S, (deadline_s - now_s) / 2)
