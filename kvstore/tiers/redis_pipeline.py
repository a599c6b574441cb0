"""Pipelines of blocks and commands over one wire, never with MULTI: each answer stands for itself.

Every function yields one answer per item, in order, as soon as it is known, and lets the wire's ``OSError`` through:
what was yielded before holds. Not more than ``PIPELINE_BYTES`` are on their way at a time: a bound on what a server
must hold for us, and a deadline is noticed soon.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from kvstore.codecs.base import Buffer, Codec
from kvstore.header import HEADER_BYTES, Header
from kvstore.tiers import redis_value as value
from kvstore.tiers.base import BlockMove
from kvstore.tiers.redis_wire import ServerError, Wire, pack
from kvstore.types import BlockKey, Outcome

PIPELINE_BYTES = 8 << 20
PIPELINE_COMMANDS = 1024
_SCAN_COUNT = 1000

Command = Sequence[bytes | int]
Answer = Outcome | ServerError
T = TypeVar("T")


def command(wire: Wire, commands: Sequence[Command], expected: type[T], deadline_s: float) -> Iterator[T | ServerError]:
    """The replies to small commands, each of the ``expected`` type."""
    for first in range(0, len(commands), PIPELINE_COMMANDS):
        for reply in wire.ask(commands[first : first + PIPELINE_COMMANDS], deadline_s):
            if not isinstance(reply, (expected, ServerError)):
                raise wire.wrong(f"expected {expected.__name__}, got {reply!r:.80}")
            yield reply


def clear(wire: Wire, pattern: bytes, deadline_s: Callable[[], float]) -> Iterator[int]:
    """UNLINK every name like ``pattern``, each step by the ``deadline_s`` of then; yields how many blocks went."""
    cursor = b"0"
    while True:
        (reply,) = wire.ask([(b"SCAN", cursor, b"MATCH", pattern, b"COUNT", _SCAN_COUNT)], deadline_s())
        match reply:
            case [bytes(cursor), list(names)]:
                gone = list(command(wire, [(b"UNLINK", name) for name in names], int, deadline_s()))
                if errors := [reply for reply in gone if not isinstance(reply, int)]:
                    raise OSError(f"{len(errors)} names were not unlinked: {errors[0]}")
                yield sum(reply == 1 and value.is_head(name) for name, reply in zip(names, gone, strict=True))
            case _:
                raise wire.wrong(f"SCAN was answered with {reply!r:.80}")
        if cursor == b"0":
            return


def write(wire: Wire, moves: Sequence[BlockMove], codec: Codec, ttl_s: int, deadline_s: float) -> Iterator[Answer]:
    """SET every block; after the first one for which the server has no memory, none is sent any more.

    Half a pipeline is on its way while the other half is answered, so that the server always has something to do.
    """
    sent: deque[Sequence[int]] = deque()
    start = num_answered = 0
    is_full = False
    while sent or (start < len(moves) and not is_full):
        while start < len(moves) and not is_full and len(sent) < 2:
            batch = _first(moves, start, PIPELINE_BYTES // 2)
            sent.append(_send_blocks(wire, batch, codec, ttl_s, deadline_s))
            start += len(batch)
        for num_commands in sent.popleft():
            replies = [wire.reply(deadline_s) for _ in range(num_commands)]
            answer = _written(wire, replies) if replies else Outcome.ABSENT  # too old: it would be gone by now
            is_full = is_full or (isinstance(answer, ServerError) and answer.code == "OOM")
            num_answered += 1
            yield answer
    yield from [Outcome.FULL] * (len(moves) - num_answered)


def read(wire: Wire, moves: Sequence[BlockMove], deadline_s: float) -> Iterator[Answer]:
    """GET every block into its buffer and verify it there; the next ones are on their way meanwhile."""
    num_asked = 0
    bytes_due = 0
    for index, move in enumerate(moves):
        ahead: Sequence[BlockMove] = ()
        if num_asked == index or bytes_due <= PIPELINE_BYTES // 2:  # many at a time, so that the server wakes up less
            ahead = _first(moves, num_asked, PIPELINE_BYTES - bytes_due)
        if ahead:
            names = [name for later in ahead for name in value.names(later.key, later.layout.block_bytes)]
            wire.send([b"".join(pack((b"GET", name)) for name in names)], len(names), deadline_s)
            num_asked += len(ahead)
            bytes_due += sum(later.layout.block_bytes for later in ahead)
        yield _receive(wire, move, deadline_s)
        bytes_due -= move.layout.block_bytes


def _first(moves: Sequence[BlockMove], start: int, max_bytes: int) -> Sequence[BlockMove]:
    """The moves from ``start`` on that fit into ``max_bytes``, one at least if any is left."""
    end = start
    while end < len(moves) and (end == start or max_bytes >= moves[end].layout.block_bytes):
        max_bytes -= moves[end].layout.block_bytes
        end += 1
    return moves[start:end]


def _send_blocks(wire: Wire, batch: Sequence[BlockMove], codec: Codec, ttl_s: int, deadline_s: float) -> Sequence[int]:
    """Send the SET commands of the blocks; returns how many each block took, 0 for one that is too old."""
    now_s = time.time()
    buffers: list[Buffer] = []
    commands_of = []
    for move in batch:
        lifetime_ms = value.lifetime_ms(move, ttl_s, now_s)
        if lifetime_ms is not None and lifetime_ms <= 0:
            commands_of.append(0)
            continue
        head, stored = value.seal(move, codec)
        buffers += _set_block(move.key, head, stored, lifetime_ms)
        commands_of.append(value.num_parts(len(stored)))
    wire.send(buffers, sum(commands_of), deadline_s)
    return commands_of


def _written(wire: Wire, replies: Sequence[object]) -> Answer:
    for reply in replies:
        if isinstance(reply, ServerError):
            return reply
        if reply != b"OK":
            raise wire.wrong(f"SET was answered with {reply!r:.80}")
    return Outcome.OK


def _set_block(key: BlockKey, head: bytes, stored: memoryview, lifetime_ms: int | None) -> list[Buffer]:
    """The SET commands of one block, last part first and the head last, with the payload where it lies."""
    options = b"" if lifetime_ms is None else b"$2\r\nPX\r\n" + _bulk(b"%d" % lifetime_ms)
    buffers: list[Buffer] = []
    for part in range(value.num_parts(len(stored)) - 1, -1, -1):
        body = stored[value.part_slice(len(stored), part)]
        start = head if part == 0 else b""
        set_name = b"*%d\r\n$3\r\nSET\r\n%b" % (5 if options else 3, _bulk(value.name(key, part)))
        buffers += [b"%b$%d\r\n%b" % (set_name, len(start) + len(body), start), body, b"\r\n" + options]
    return buffers


def _bulk(text: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(text), text)


def _receive(wire: Wire, move: BlockMove, deadline_s: float) -> Answer:
    """The replies for a block's head and all its possible parts, verified and decoded into the move's buffer."""
    head = _receive_head(wire, move, deadline_s)
    stored = head[1] if isinstance(head, tuple) else memoryview(b"")
    parts = [
        _receive_part(wire, stored[value.part_slice(len(stored), part)], deadline_s)
        for part in range(1, value.num_parts(move.layout.block_bytes))
    ]
    if not isinstance(head, tuple):
        return head
    for answer in parts:
        if answer is not Outcome.OK:
            return answer
    return value.unseal(head[0], stored, move)


def _receive_head(wire: Wire, move: BlockMove, deadline_s: float) -> tuple[Header, memoryview] | Answer:
    """The header and where the stored payload goes, the first part of it there already; or why there is none."""
    length = wire.value(deadline_s)
    if length is None:
        return Outcome.ABSENT
    if isinstance(length, ServerError):
        return length
    if length < HEADER_BYTES:
        wire.skip(length, deadline_s)
        wire.end_value(deadline_s)
        return Outcome.DAMAGED
    head = bytearray(HEADER_BYTES)
    wire.take(memoryview(head), deadline_s)
    body_bytes = length - HEADER_BYTES
    found = value.admit(head, move, time.time())
    if isinstance(found, Header):
        stored = value.destination(found, move)
        body = stored[value.part_slice(len(stored), 0)]
        if len(body) == body_bytes:
            wire.take(body, deadline_s)
            wire.end_value(deadline_s)
            return found, stored
        found = Outcome.DAMAGED
    wire.skip(body_bytes, deadline_s)
    wire.end_value(deadline_s)
    return found


def _receive_part(wire: Wire, body: memoryview, deadline_s: float) -> Answer:
    """A further part into ``body``; where that is empty, whatever is there is from a longer payload of before."""
    length = wire.value(deadline_s)
    if isinstance(length, ServerError):
        return length
    if length is None:
        return Outcome.ABSENT if body else Outcome.OK
    fits = length == len(body)
    if fits:
        wire.take(body, deadline_s)
    else:
        wire.skip(length, deadline_s)
    wire.end_value(deadline_s)
    return Outcome.OK if fits or not body else Outcome.DAMAGED
