"""A Redis or Valkey tier, shared by many hosts: one server, a Sentinel service or a Cluster.

Others write it too, and the server's memory limit and TTL decide what stays. Nothing in here remembers what is there,
and nothing is tried again but once after a MOVED: where a server fails, the block is a miss, and the next call finds a
server that is back. For operators: ``docs/redis.md``.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from kvstore.codecs.registry import CODECS
from kvstore.errors import ConfigError
from kvstore.header import HEADER_BYTES, Header, parse
from kvstore.tiers import redis_pipeline as pipeline
from kvstore.tiers import redis_value as value
from kvstore.tiers.base import BlockMove, StoredBlock
from kvstore.tiers.redis_log import Troubles, memory_advice
from kvstore.tiers.redis_node import Dialer, Node, tls_of
from kvstore.tiers.redis_pipeline import Command
from kvstore.tiers.redis_topology import open_topology
from kvstore.tiers.redis_url import parse_url
from kvstore.tiers.redis_wire import ServerError, Wire
from kvstore.types import BlockKey, Outcome

ERASE_TIMEOUT_S = 0.5
STEP_TIMEOUT_S = 2.0
"""Of one exchange while a namespace is cleared: there may be many, and a server that hangs shall hold up no thread."""
MAX_LANES = 8

_log = logging.getLogger(__name__)

T = TypeVar("T")
Work = Callable[[Wire, Sequence[int]], Iterator[T]]
"""Answers the indices it is given, in order, over one wire; may raise ``OSError`` any time."""


class RedisTier:
    """Blocks under their keys on a server. Construction connects to nothing, so servers may come later."""

    name = "redis"

    def __init__(
        self,
        url: str,
        *,
        ttl_s: int = 0,
        codec: str = "none",
        username: str = "",
        password: str = "",
        tls_ca_file: str = "",
        tls_cert_file: str = "",
        tls_key_file: str = "",
    ) -> None:
        """``ttl_s`` 0: blocks stay until the server evicts them. A login given here wins over the URL's.

        Raises ``ConfigError`` for a URL, codec or TLS file that cannot be used.
        """
        where = parse_url(url)
        if codec not in CODECS:
            raise ConfigError(f"redis codec {codec!r} is not known; use one of {', '.join(CODECS)}")
        dialer = Dialer(
            tls=tls_of(where, tls_ca_file, tls_cert_file, tls_key_file),
            username=username or where.username,
            password=password or where.password,
            db=where.db,
        )
        self._label = f"{where.mode} at {', '.join(map(str, where.endpoints))}"
        self._topology = open_topology(where, dialer)
        self._ttl_s = ttl_s
        self._codec = CODECS[codec]
        self._troubles = Troubles()
        self._advised: set[Node] = set()
        self._useless: set[Node] = set()
        """Servers whose last answers were none, or errors."""

    def __repr__(self) -> str:
        return f"RedisTier({self._label})"

    def slot_bytes(self, block_bytes: int) -> int:
        """The header and the plain payload; a codec may make it less."""
        return HEADER_BYTES + block_bytes

    def write(self, moves: Sequence[BlockMove], deadline_s: float) -> list[Outcome]:
        """SET every block. FULL: the server is out of memory; ABSENT: the block is past its age."""

        def work(wire: Wire, indices: Sequence[int]) -> Iterator[Outcome | ServerError]:
            return pipeline.write(wire, [moves[i] for i in indices], self._codec, self._ttl_s, deadline_s)

        return _outcomes(self._serve([move.key for move in moves], work, deadline_s))

    def read(self, moves: Sequence[BlockMove], deadline_s: float) -> list[Outcome]:
        """GET every block straight into its buffer, and verify it there."""

        def work(wire: Wire, indices: Sequence[int]) -> Iterator[Outcome | ServerError]:
            return pipeline.read(wire, [moves[i] for i in indices], deadline_s)

        return _outcomes(self._serve([move.key for move in moves], work, deadline_s))

    def erase(self, moves: Sequence[BlockMove]) -> None:
        """UNLINK every block with its parts, within half a second or not at all."""
        commands = [(b"UNLINK", *value.names(move.key, move.layout.block_bytes)) for move in moves]
        self._command([move.key for move in moves], commands, int, time.monotonic() + ERASE_TIMEOUT_S)

    def scan(self) -> Iterator[StoredBlock]:
        """Nothing: what is there belongs to everybody."""
        return iter(())

    def close(self) -> None:
        """Close the connections; every block fails from now on. Safe to call twice."""
        self._topology.close()

    def is_down(self) -> bool:
        """Whether every server failed when it was asked last: one of a Cluster costs its own blocks alone."""
        return self._useless.issuperset(self._topology.known())

    def probe(self, keys: Sequence[BlockKey], deadline_s: float) -> list[Outcome]:
        """Which blocks have a head on a server."""
        asked = [(b"EXISTS", value.name(key)) for key in keys]
        replies = self._command(keys, asked, int, deadline_s)
        return [
            _outcome(_EXISTENCE.get(reply, Outcome.FAILED) if isinstance(reply, int) else reply) for reply in replies
        ]

    def renew(self, keys: Sequence[BlockKey], deadline_s: float) -> list[Outcome]:
        """Start the TTL of each block and its parts afresh, never beyond the age that its writer gave it."""
        outcomes = dict.fromkeys(keys, Outcome.OK)
        if not self._ttl_s:
            return [Outcome.OK] * len(keys)
        asked = [(b"GETRANGE", value.name(key), 0, HEADER_BYTES - 1) for key in keys]
        now_s = time.time()
        owners: list[BlockKey] = []
        commands: list[Command] = []
        for key, head in zip(keys, self._command(keys, asked, bytes, deadline_s), strict=True):
            found = parse(head) if isinstance(head, bytes) else None
            if not isinstance(found, Header) or found.key != key or value.has_expired(found, now_s):
                outcomes[key] = Outcome.ABSENT if isinstance(head, bytes) else _outcome(head)
                continue
            left_s = min(self._ttl_s, found.expires_unix_s - now_s) if found.expires_unix_s else self._ttl_s
            for name in value.names(key, found.stored_bytes):
                owners.append(key)
                commands.append((b"PEXPIRE", name, int(left_s * 1000)))
        for key, reply in zip(owners, self._command(owners, commands, int, deadline_s), strict=True):
            if not isinstance(reply, int):
                outcomes[key] = _outcome(reply)
        return [outcomes[key] for key in keys]

    def clear(self, namespace: bytes, deadline_s: float) -> int | None:
        """SCAN every server for the namespace and UNLINK what is found; returns how many blocks that were.

        None, with what there is on the servers that answered erased, where one did not, or not within a moment.
        """
        try:
            nodes = self._topology.primaries(_soon(deadline_s))
        except OSError as error:
            self._troubles.note(self._label, "clear", f"a namespace cannot be cleared: {error}")
            return None
        erased = [self._clear(node, namespace, deadline_s) for node in nodes]
        return None if None in erased else sum(num_blocks or 0 for num_blocks in erased)

    def _clear(self, node: Node, namespace: bytes, deadline_s: float) -> int | None:
        num_erased = 0
        try:
            with node.wire(_soon(deadline_s)) as wire:
                names = value.pattern(namespace)
                for num_blocks in pipeline.clear(wire, names, lambda: _soon(deadline_s)):
                    num_erased += num_blocks
        except OSError as error:
            self._topology.lost(node)
            text = f"clearing a namespace ended early, after {num_erased} blocks: {error}"
            self._troubles.note(str(node.endpoint), "clear", text)
            return None
        return num_erased

    def _command(
        self, keys: Sequence[BlockKey], commands: Sequence[Command], expected: type[T], deadline_s: float
    ) -> list[T | ServerError | OSError]:
        """The replies to small commands, one for each key; errors among them."""

        def work(wire: Wire, indices: Sequence[int]) -> Iterator[T | ServerError]:
            return pipeline.command(wire, [commands[i] for i in indices], expected, deadline_s)

        return self._serve(keys, work, deadline_s)

    def _serve(self, keys: Sequence[BlockKey], work: Work[T], deadline_s: float) -> list[T | OSError]:
        """The answers of ``work`` for every key, asked server by server; keys that moved are asked for once more."""
        if time.monotonic() >= deadline_s:
            return [TimeoutError("the deadline had passed before anything was asked")] * len(keys)
        answers: dict[int, T | OSError] = {}
        moved = self._serve_once(keys, range(len(keys)), work, answers, deadline_s)
        if moved:
            self._serve_once(keys, moved, work, answers, deadline_s)
        return [answers[index] for index in range(len(keys))]

    def _serve_once(
        self,
        keys: Sequence[BlockKey],
        indices: Sequence[int],
        work: Work[T],
        answers: dict[int, T | OSError],
        deadline_s: float,
    ) -> list[int]:
        """Enter an answer for every index; returns those whose server said MOVED."""

        def serve(node: Node, members: Sequence[int]) -> list[int]:
            mine = self._ask(node, members, work, deadline_s)
            answers.update(mine)
            return self._heed(node, mine)

        groups = self._group(keys, indices, answers, deadline_s)
        if len(groups) > 1:
            with ThreadPoolExecutor(min(len(groups), MAX_LANES)) as lanes:  # a hung server keeps no other waiting
                return [index for moved in lanes.map(serve, groups, groups.values()) for index in moved]
        return [index for node, members in groups.items() for index in serve(node, members)]

    def _group(
        self, keys: Sequence[BlockKey], indices: Iterable[int], answers: dict[int, T | OSError], deadline_s: float
    ) -> dict[Node, list[int]]:
        """Indices by the server that holds their key; those that have none get their answer here."""
        try:
            nodes = {index: self._topology.node(keys[index], deadline_s) for index in indices}
        except OSError as error:
            self._troubles.note(self._label, type(error).__name__, str(error))
            answers.update(dict.fromkeys(indices, error))
            return {}
        groups: dict[Node, list[int]] = {}
        for index, node in nodes.items():
            if node is None:
                answers[index] = ConnectionError("no server holds the key's slot")
            else:
                groups.setdefault(node, []).append(index)
        if None in nodes.values():
            self._topology.lost(None)
        return groups

    def _ask(self, node: Node, members: Sequence[int], work: Work[T], deadline_s: float) -> dict[int, T | OSError]:
        """The answers of one server; what was not answered when the wire broke has its error for an answer."""
        answers: dict[int, T | OSError] = {}
        try:
            with node.wire(deadline_s) as wire:
                self._advise(node, wire, deadline_s)
                for index, answer in zip(members, work(wire, members), strict=True):
                    answers[index] = answer
        except OSError as error:
            self._troubles.note(str(node.endpoint), type(error).__name__, str(error))
            self._topology.lost(node)
            for index in members:
                answers.setdefault(index, error)
        if all(map(_is_failure, answers.values())):
            self._useless.add(node)
        else:
            self._useless.discard(node)
        return answers

    def _heed(self, node: Node, answers: dict[int, T | OSError]) -> list[int]:
        """Learn what a server's errors say of the topology; returns the indices that moved."""
        errors = {index: answer for index, answer in answers.items() if isinstance(answer, ServerError)}
        for code, text in {error.code: str(error) for error in errors.values()}.items():
            self._troubles.note(str(node.endpoint), code, text)
            if code in ("READONLY", "CLUSTERDOWN", "MASTERDOWN"):
                self._topology.lost(node)
        moved = [index for index, error in errors.items() if error.code == "MOVED"]
        return moved if moved and self._topology.moved(node) else []

    def _advise(self, node: Node, wire: Wire, deadline_s: float) -> None:
        """Once for each server: tell the operator if its memory settings do not suit a cache."""
        if node in self._advised:
            return
        (info,) = wire.ask([(b"INFO", b"memory")], deadline_s)
        self._advised.add(node)
        if isinstance(info, bytes) and (advice := memory_advice(info, self._ttl_s)):
            self._troubles.note(str(node.endpoint), "memory", advice)


def _soon(deadline_s: float) -> float:
    """The deadline of one step of a long errand."""
    return min(deadline_s, time.monotonic() + STEP_TIMEOUT_S)


def _outcomes(answers: Iterable[Outcome | ServerError | OSError]) -> list[Outcome]:
    return [_outcome(answer) for answer in answers]


def _outcome(answer: Outcome | ServerError | OSError) -> Outcome:
    """What an answer means for its block."""
    if isinstance(answer, Outcome):
        return answer
    if isinstance(answer, TimeoutError):
        return Outcome.LATE
    code = answer.code if isinstance(answer, ServerError) else ""
    return _OUTCOMES.get(code, Outcome.FAILED)


def _is_failure(answer: object) -> bool:
    """Whether an answer says that its server is of no use just now."""
    return isinstance(answer, OSError | ServerError) and _outcome(answer) in (Outcome.FAILED, Outcome.LATE)


_EXISTENCE = {0: Outcome.ABSENT, 1: Outcome.OK}

_OUTCOMES = {
    "OOM": Outcome.FULL,
    "ASK": Outcome.ABSENT,  # its slot is moving just now: a miss is cheaper than to follow
    "WRONGTYPE": Outcome.DAMAGED,  # something else under a block's name
}
