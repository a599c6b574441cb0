"""The wire and its pipelines, fed piece by piece: any chunking gives the same answers, and no junk gives a block."""

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.codecs.registry import CODECS
from kvstore.layout import Layout
from kvstore.tiers import redis_pipeline as pipeline
from kvstore.tiers.base import BlockMove
from kvstore.tiers.redis_value import seal
from kvstore.tiers.redis_wire import ServerError, Wire
from kvstore.types import Outcome
from tests.redis_blocks import are_right, empty, full, keys, soon

TINY = Layout(dtype="bfloat16", num_layers=1, num_heads=1, plane_dims=(8, 8), tokens_per_block=16)
"""512 bytes a block: the wire's peek holds more than one header and less than one block."""

OK, ABSENT = Outcome.OK, Outcome.ABSENT
EXAMPLES = settings(max_examples=150)


@contextmanager
def fed(chunks: Sequence[bytes]) -> Iterator[Wire]:
    """A wire whose other end sends ``chunks``, whatever it is asked, and hangs up."""
    ours, theirs = socket.socketpair()

    def send() -> None:
        for chunk in chunks:
            theirs.sendall(chunk)
        theirs.shutdown(socket.SHUT_WR)

    feeder = threading.Thread(target=send)
    feeder.start()
    wire = Wire(ours)
    try:
        yield wire
    finally:
        feeder.join()
        wire.close()
        theirs.close()


def value(move: BlockMove, codec: str) -> bytes:
    head, stored = seal(move, CODECS[codec])
    return b"$%d\r\n%b%b\r\n" % (len(head) + len(stored), head, bytes(stored))


def answers_to(ask: Callable[[], Iterator[object]]) -> list[object]:
    """What was yielded before the wire gave up, if it did."""
    answers: list[object] = []
    with suppress(OSError):
        answers.extend(ask())
    return answers


@EXAMPLES
@given(
    kinds=st.lists(st.sampled_from(["none", "zstd-planes", "absent", "error", "short"]), min_size=1, max_size=6),
    chunk_bytes=st.integers(1, 20) | st.integers(1, 700),
)
def test_values_are_found_however_they_are_chunked(kinds: list[str], chunk_bytes: int) -> None:
    moves = empty(keys(len(kinds)), TINY)
    replies = b""
    for kind, move in zip(kinds, full(keys(len(kinds)), TINY), strict=True):
        if kind == "absent":
            replies += b"$-1\r\n"
        elif kind == "error":
            replies += b"-LOADING not yet\r\n"
        elif kind == "short":
            replies += b"$5\r\nshort\r\n"
        else:
            replies += value(move, kind)
    expected = {"absent": ABSENT, "short": Outcome.DAMAGED, "error": ServerError}
    chunks = [replies[start : start + chunk_bytes] for start in range(0, len(replies), chunk_bytes)]
    with fed(chunks) as wire:
        answers = list(pipeline.read(wire, moves, soon()))
        for kind, answer, move in zip(kinds, answers, moves, strict=True):
            if kind == "error":
                assert isinstance(answer, ServerError)
                assert answer.code == "LOADING"
            else:
                assert answer is expected.get(kind, OK)
            assert answer is not OK or are_right([move])
        assert wire.is_clean


@EXAMPLES
@given(st.binary(max_size=2000), st.integers(0, 900))
def test_junk_is_never_a_block(junk: bytes, where: int) -> None:
    """CR-042: junk alone, and in the midst of a good reply."""
    (move,) = full(keys(1), TINY)
    good = value(move, "none")
    for data in (junk, good[:where] + junk + good[where:], good[:where] + junk):
        moves = empty(keys(2), TINY)
        with fed([data]) as wire:
            answers = answers_to(lambda wire=wire, moves=moves: pipeline.read(wire, moves, soon()))  # type: ignore[misc]  # mypy cannot infer a lambda with defaults
            for answer, got in zip(answers, moves, strict=False):
                assert answer is not OK or are_right([got])
            assert len(answers) == 2 or not wire.is_clean


@EXAMPLES
@given(
    st.lists(st.sampled_from([b"+OK\r\n", b":1\r\n", b"$-1\r\n", b"$2\r\nhi\r\n", b"-ERR x\r\n", b"junk"]), max_size=6)
)
def test_as_many_writes_are_confirmed_as_were_answered_ok(replies: list[bytes]) -> None:
    moves = full(keys(3), TINY)
    with fed([b"".join(replies)]) as wire:
        answers = answers_to(lambda: pipeline.write(wire, moves, CODECS["none"], 0, soon()))
        expected = 0
        for reply in replies[:3]:
            if reply not in (b"+OK\r\n", b"-ERR x\r\n"):
                break
            expected += 1
        assert len(answers) == expected or (len(answers) < expected and len(replies) > 3)
        assert all((answer is OK) == (reply == b"+OK\r\n") for answer, reply in zip(answers, replies, strict=False))
        assert wire.is_clean == (len(answers) == 3 and len(replies) == 3)
