"""Chats as traces: what is a request, what it shares with others, and how far a broken file is read."""

import itertools
import json
import tracemalloc
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.replay.chat import estimate
from kvstore.replay.formats import TraceError, read_trace
from kvstore.replay.json_stream import JsonStreamError, read_objects
from kvstore.replay.trace import TraceRequest


def chat(*texts: str, first: str = "human") -> dict[str, object]:
    other = {"human": "gpt", "gpt": "human"}[first]
    return {"id": "x", "conversations": [{"from": (first, other)[i % 2], "value": t} for i, t in enumerate(texts)]}


def requests(*chats: object) -> list[TraceRequest]:
    return list(read_trace("t", [json.dumps(list(chats))]).requests)


def text_of(num_tokens: int, letter: str) -> str:
    """Its estimated tokens, without the 11 bytes of a person's role."""
    return letter * (4 * num_tokens - 11)


def test_every_answer_is_a_request_that_holds_all_before_it() -> None:
    first, second = requests(chat(text_of(40, "a"), "b" * 391, text_of(20, "c"), "d" * 30))
    assert (first.input_tokens, first.output_tokens) == (40, 100)
    assert second.input_tokens == 40 + 100 + 20
    assert len(first.chain) == 3
    assert len(second.chain) == 10
    assert second.chain[:2] == first.chain[:2]
    assert second.now_s > first.now_s + 100 / 50


def test_a_common_beginning_is_shared_up_to_the_last_whole_block() -> None:
    one, two = requests(chat(text_of(40, "a"), "x"), chat("a" * 149 + "b" * 100, "x"))
    assert one.chain[:2] == two.chain[:2]
    assert set(one.chain[2:]).isdisjoint(two.chain[2:])


def test_who_speaks_is_part_of_the_prompt() -> None:
    one, two = requests(
        {"messages": [{"role": "system", "content": "a" * 200}, {"role": "assistant", "content": "x"}]},
        {"messages": [{"role": "user", "content": "a" * 200}, {"role": "assistant", "content": "x"}]},
    )
    assert set(one.chain).isdisjoint(two.chain)


def test_parts_of_a_message_are_put_together() -> None:
    parts = [{"type": "text", "text": "a" * 100}, {"type": "image"}, {"type": "text", "text": "a" * 100}]
    one, two = requests(
        {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "x"}]},
        {"messages": [{"role": "user", "content": "a" * 200}, {"role": "assistant", "content": "x"}]},
    )
    assert one.chain == two.chain


def test_an_answer_to_nothing_is_no_request_and_neither_is_an_open_question() -> None:
    assert requests(chat(), chat("a"), chat("a", first="gpt")) == []
    assert len(requests(chat("greeting", "a", "b", first="gpt"))) == 1


def test_conversations_overlap_and_requests_come_in_order_of_time() -> None:
    times = [request.now_s for request in requests(*[chat(*"abcdefgh") for _ in range(50)])]
    assert len(times) == 200
    assert times == sorted(times)
    assert requests(chat("a", "b")) == requests(chat("a", "b"))


def test_what_is_estimated_is_said() -> None:
    lines = [json.dumps(chat("a", "b"))]
    assert "estimated" in read_trace("t", lines).note
    exact = read_trace("t", lines, encode=lambda text: b"1234" * len(text))
    assert "estimated" not in exact.note
    assert "made up" in exact.note
    assert [request.input_tokens for request in exact.requests] == [len("<|human|>a\n")]


@given(st.text())
def test_an_estimate_is_whole_tokens(text: str) -> None:
    assert len(estimate(text)) % 4 == 0


@pytest.mark.parametrize(
    "bad", [7, "text", {}, {"messages": 3}, {"messages": [7]}, {"messages": [{"role": "user"}, {"content": "a"}]}]
)
def test_what_is_no_chat_is_reported_by_its_line(bad: object) -> None:
    text = "[\n" + ",\n".join(json.dumps(value) for value in (chat("a", "b"), bad, chat("a", "b"))) + "\n]\n"
    reported: list[int] = []
    lines = text.splitlines(keepends=True)
    trace = read_trace("t", lines, report=lambda number, _: reported.append(number))
    assert (reported, len(trace.requests)) == ([3], 2)
    with pytest.raises(TraceError, match="line 3: no chat"):
        read_trace("t", lines)


def test_after_broken_json_nothing_can_be_read_and_that_is_said() -> None:
    lines = ["[\n", json.dumps(chat("a", "b")) + ",\n", '{"conversations": [{"from": nonsense}]},\n', "{}]\n"]
    reported: list[tuple[int, str]] = []
    trace = read_trace("t", lines, report=lambda number, why: reported.append((number, why)))
    assert len(trace.requests) == 1
    [(line, why)] = reported
    assert line == 3
    assert "nothing after it" in why


def test_a_file_that_ends_in_the_middle_is_told() -> None:
    with pytest.raises(TraceError, match="line 2: no JSON"):
        read_trace("t", ["[\n", json.dumps(chat("a", "b"))[:-9]])


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
objects = st.lists(st.dictionaries(st.text(), values, max_size=4), max_size=6)


@given(objects, st.integers(1, 30), st.sampled_from([None, 1]), st.booleans())
def test_objects_are_read_wherever_the_text_is_cut(
    expected: list[object], size: int, indent: int | None, as_array: bool
) -> None:
    text = json.dumps(expected, indent=indent)
    if not as_array:
        text = "\n".join(json.dumps(value, indent=indent) for value in expected)
    pieces = [text[begin : begin + size] for begin in range(0, len(text), size)]
    found = list(read_objects(pieces, read_chars=1))
    assert [value for _, value in found] == expected
    for line, value in found:
        rest = "\n".join(text.split("\n")[line - 1 :])
        assert json.dumps(value, indent=indent)[:2] in rest


def test_of_many_objects_only_one_is_held() -> None:
    def many() -> Iterator[str]:
        for _ in range(20_000):
            yield '{"a": "' + "x" * 1000 + '"},\n'

    tracemalloc.start()
    try:
        for line, (number, _) in enumerate(read_objects(many()), start=1):
            assert number == line
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()
    assert line == 20_000


def test_what_is_no_json_stops_at_once() -> None:
    def endless() -> Iterator[str]:
        yield '{"a": 1}\n{"b": oops, '
        yield from itertools.repeat(" " * 1000)

    with pytest.raises(JsonStreamError) as caught:
        list(read_objects(endless()))
    assert caught.value.line == 2
