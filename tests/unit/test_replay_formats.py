"""Reading traces: every format, and what becomes of lines that are none."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.replay.formats import TraceError, read_trace
from kvstore.replay.spool import MEMORY_BYTES, RequestSpool
from kvstore.replay.trace import Trace, TraceRequest

TRACES = Path(__file__).parents[2] / "bench" / "traces"


def line(timestamp: float, input_length: int, hash_ids: list[int | str], **more: object) -> str:
    record = {"timestamp": timestamp, "input_length": input_length, "output_length": 7, "hash_ids": hash_ids}
    return json.dumps(record | more) + "\n"


def chains(trace: Trace) -> list[list[int]]:
    return [list(request.chain) for request in trace.requests]


def test_mooncake_has_blocks_of_512_tokens_and_milliseconds() -> None:
    trace = read_trace("t", [line(1500, 1025, [7, 9, 4]), line(2000, 1024, [7, 9])])
    assert trace.tokens_per_block == 512
    assert list(trace.requests) == [TraceRequest(1.5, 1025, 7, [0, 1, 2]), TraceRequest(2.0, 1024, 7, [0, 1])]
    assert (trace.num_unique_blocks, trace.num_referenced_blocks) == (3, 5)


def test_bailian_has_blocks_of_16_tokens_and_seconds() -> None:
    first, later = {"chat_id": 4, "parent_chat_id": -1}, {"chat_id": 9, "parent_chat_id": 4}
    last = {"chat_id": 11, "parent_chat_id": 9}
    trace = read_trace("t", [line(1.5, 33, [5, 6, 7], type="text", **more) for more in (first, later, last)])
    assert trace.tokens_per_block == 16
    expected = TraceRequest(1.5, 33, 7, [0, 1, 2], hints={"session": 4, "kind": "text"})
    assert list(trace.requests) == [expected] * 3


def test_a_recording_knows_its_blocks_namespaces_and_hints() -> None:
    more = {"tokens_per_block": 64, "namespace": "ab" * 16, "hints": {"session_end": True}}
    trace = read_trace("t", [line(1500, 128, ["f0", "f1"], **more)])
    assert trace.tokens_per_block == 64
    assert list(trace.requests) == [TraceRequest(1.5, 128, 7, [0, 1], b"\xab" * 16, {"session_end": True})]
    with pytest.raises(TraceError, match="line 2: blocks of 16 tokens among blocks of 64"):
        read_trace("t", [line(0, 64, [1], **more), line(0, 64, [1], tokens_per_block=16)])


def test_hashes_may_be_texts_and_leave_out_the_partial_block() -> None:
    assert chains(read_trace("t", [line(0, 600, ["ab"]), line(0, 600, ["ab", "cd"])])) == [[0], [0, 1]]


def test_a_block_is_what_it_holds_and_all_that_precedes_it() -> None:
    trace = read_trace(
        "t", [line(0, 1024, [1, 2]), line(0, 1024, [3, 2]), line(0, 1024, [1, 1]), line(0, 1024, [1, 2])]
    )
    assert chains(trace) == [[0, 1], [2, 3], [0, 4], [0, 1]]


def test_blocks_of_another_size_need_to_be_told() -> None:
    with pytest.raises(TraceError, match=r"line 1: 64 tokens are not 2 blocks of 512.*--block-tokens"):
        read_trace("t", [line(0, 64, [1, 2])])
    assert read_trace("t", [line(0, 64, [1, 2])], tokens_per_block=32).tokens_per_block == 32


def test_compact_shares_blocks_with_earlier_requests() -> None:
    text = "# agent block=10 columns: ms,in,out,parent,shared\n0,30,5,-1,0\n10,35,5,0,2\n20,40,5,1,4\n30,10,5,1,1\n"
    trace = read_trace("t", text.splitlines())
    assert trace.tokens_per_block == 10
    assert chains(trace) == [[0, 1, 2], [0, 1, 3, 4], [0, 1, 3, 4], [0]]
    assert [request.now_s for request in trace.requests] == [0, 0.01, 0.02, 0.03]


GOOD = line(0, 512, [1])


@pytest.mark.parametrize(
    "bad",
    [
        "{",
        "[]",
        "null",
        "7",
        '"text"',
        '{"timestamp": 0}',
        line(0, 512, [1]).replace("512", '"512"'),
        line(0, 512, [1]).replace("512", "-512"),
        line(0, 512, [1]).replace("512", "true"),
        line(0, 512, [1]).replace("512", "5e2"),
        line(0, 512, [1, 2]),
        line(0, 512, []).replace("[]", "null"),
        line(0, 512, []).replace("[]", "[[1]]"),
        line(0, 512, [1]).replace('"timestamp": 0', '"timestamp": null'),
        line(0, 512, [1]).replace('"timestamp": 0', '"timestamp": NaN'),
        GOOD[:-10],
        line(0, 512, [1], namespace="xyz"),
        line(0, 512, [1], hints=[1]),
    ],
)
def test_a_bad_line_is_named_and_the_others_are_read(bad: str) -> None:
    lines = [GOOD, bad, "\n", GOOD]
    with pytest.raises(TraceError, match="line 2: "):
        read_trace("t", lines)
    reported: list[int] = []
    trace = read_trace("t", lines, report=lambda number, _: reported.append(number))
    assert reported == [2]
    assert chains(trace) == [[0], [0]]


@pytest.mark.parametrize(
    "bad", ["", "0,30", "0,30,5,-1,x", "0,-1,5,-1,0", "0,30,5,9,0", "0,30,5,0,9", "0,10,5,0,2", "0,30,5,-1,1"]
)
def test_a_bad_line_of_a_compact_file_takes_its_followers_along(bad: str) -> None:
    lines = [
        "# t block=10 columns: \n",
        "0,30,5,-1,0\n",
        f"{bad or 'x'}\n",
        "0,30,5,1,0\n",
        "0,30,5,0,3\n",
        "0,9,5,3,1\n",
    ]
    reported: list[int] = []
    trace = read_trace("t", lines, report=lambda number, _: reported.append(number))
    assert reported == [3, 4]
    assert chains(trace) == [[0, 1, 2], [0, 1, 2], [0]]


def test_lines_longer_than_memory_come_in_pieces_and_are_bad_but_counted() -> None:
    reported: list[int] = []
    trace = read_trace("t", [GOOD, GOOD[:40], GOOD[40:], GOOD], report=lambda number, _: reported.append(number))
    assert reported == [2, 2]
    assert len(trace.requests) == 2


@pytest.mark.parametrize("head", ["TIMESTAMP,ContextTokens,GeneratedTokens", "Timestamp,Model,Request tokens,Log Type"])
def test_lengths_alone_are_no_trace(head: str) -> None:
    with pytest.raises(TraceError, match="lengths only"):
        read_trace("t", [head, "2023-11-16 18:15:46.6805900,374,44"])


def test_an_empty_file_is_no_trace() -> None:
    with pytest.raises(TraceError, match="t is empty"):
        read_trace("t", ["\n"])


@given(st.lists(st.lists(st.integers(0, 2**62), max_size=5), max_size=20), st.integers(0, 200))
def test_a_spool_gives_back_what_it_took_again_and_again(chains: list[list[int]], memory_bytes: int) -> None:
    requests = [
        TraceRequest(
            index / 3, index, 2 * index, chain, bytes([index]) * (index % 2), {"n": index} if index % 3 else {}
        )
        for index, chain in enumerate(chains)
    ]
    spool = RequestSpool(iter(requests), memory_bytes)
    assert len(spool) == len(requests)
    assert list(spool) == requests
    assert list(zip(spool, spool, strict=True)) == list(zip(requests, requests, strict=True))


def test_a_long_trace_is_not_held_in_memory() -> None:
    num_blocks, num_requests = 10_000, 2 * MEMORY_BYTES // 80_000

    def requests() -> Iterator[TraceRequest]:
        for _ in range(num_requests):
            yield TraceRequest(0.0, 0, 0, range(num_blocks))

    spool = RequestSpool(requests())
    assert spool.is_on_file
    assert sum(len(request.chain) for request in spool) == num_blocks * num_requests


def test_the_traces_of_the_repository_are_whole() -> None:
    """Requests, distinct blocks and input tokens as the publishers' files have them."""
    expected = {
        "synthetic_trace.jsonl.gz": (3993, 43924),
        "lmcache_agent.csv.gz": (1566, 6903),
    }
    for name, counts in expected.items():
        with gzip.open(TRACES / name, "rt") as lines:
            trace = read_trace(name, lines)
        assert (len(trace.requests), trace.num_unique_blocks) == counts
