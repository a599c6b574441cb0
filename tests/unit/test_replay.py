"""The simulator and the bounds: small cases by hand, and the published numbers on the published traces."""

import gzip
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import ConfigError
from kvstore.policy.lru import LRU
from kvstore.replay.bounds import replay_belady, replay_infinite
from kvstore.replay.capacity import parse_capacity, split_list
from kvstore.replay.formats import read_trace
from kvstore.replay.runs import all_runs, run_of
from kvstore.replay.simulator import replay
from kvstore.replay.trace import BlockNumbers, Trace, TraceRequest
from kvstore.testing.traces import made_up_trace

TRACES = Path(__file__).parents[2] / "bench" / "traces"
FILES = {
    "conversation": "conversation_trace.jsonl.gz",
    "synthetic": "synthetic_trace.jsonl.gz",
    "agents": "lmcache_agent.csv.gz",
}


def trace_of(*chains: str) -> Trace:
    """A letter is a block of 10 tokens, after all that precedes it."""
    numbers = BlockNumbers()
    requests = [TraceRequest(float(i), 10 * len(chain), 1, numbers.chain(chain)) for i, chain in enumerate(chains)]
    return Trace.of("t", 10, requests)


@cache
def published(name: str) -> Trace:
    with gzip.open(TRACES / FILES[name], "rt") as lines:
        return read_trace(name, lines)


def test_a_hit_is_the_longest_resident_prefix() -> None:
    result = replay(trace_of("abc", "abd", "abc"), LRU(), 10)
    assert result.token_hit_rate == (0 + 2 + 3) / 9
    assert result.blocks_written_per_referenced == 4 / 9


@pytest.mark.parametrize("policy", ["hix", "lru", "arc", "lecar", "belady"])
def test_every_replay_starts_cold_and_finds_the_same(policy: str) -> None:
    """BN-004, BN-005: nothing is left of the one before, and nothing is drawn anew."""
    trace, run = made_up_trace(120), all_runs()[policy]
    assert run(trace, 60) == run(trace, 60)
    first = replace(trace, requests=list(trace.requests)[:1])
    assert run(first, 60).hit_tokens == 0


def test_the_cache_holds_no_more_than_its_capacity() -> None:
    assert replay(trace_of("ab", "cd", "ab"), LRU(), 3).hit_tokens == 10  # a is there, its child b left first
    assert replay(trace_of("ab", "cd", "ab"), LRU(), 2).hit_tokens == 0


def test_of_a_request_longer_than_the_cache_the_head_stays() -> None:
    assert replay(trace_of("abcd", "abcd"), LRU(), 3).hit_tokens == 30


def test_nothing_is_kept_where_there_is_no_room() -> None:
    trace = trace_of("a", "a")
    assert replay(trace, LRU(), 0).hit_tokens == 0
    assert replay_belady(trace, 0).hit_tokens == 0


def test_the_last_block_may_be_partial() -> None:
    request = TraceRequest(0.0, 15, 1, [0, 1])
    assert replay(Trace.of("t", 10, [request, request]), LRU(), 2).hit_tokens == 15


def test_work_spared_late_in_a_prompt_weighs_more_than_early() -> None:
    whole = replay(trace_of("abcd", "abcd"), LRU(), 4)
    head = replay(trace_of("abcd", "abef"), LRU(), 8)
    assert whole.compute_weighted_hit_rate == pytest.approx(0.5)
    assert 0.24 < head.compute_weighted_hit_rate < head.token_hit_rate == 0.25


def test_belady_keeps_what_is_used_next() -> None:
    trace = trace_of("a", "b", "c", "b", "a")
    assert replay(trace, LRU(), 2).hit_tokens == 10
    assert replay_belady(trace, 2).hit_tokens == 20
    assert replay_belady(trace, 1).hit_tokens == 10


def test_belady_writes_nothing_that_is_not_used_again() -> None:
    assert replay_belady(trace_of("ab", "c", "ab"), 9).blocks_written == 2
    assert replay_infinite(trace_of("ab", "c", "ab")).blocks_written == 3


chains = st.lists(st.text("ab", max_size=4), max_size=12).map(lambda texts: trace_of(*texts))


@given(chains, st.integers(0, 6))
def test_no_policy_beats_the_bounds(trace: Trace, capacity_blocks: int) -> None:
    bound = replay_belady(trace, capacity_blocks)
    for name, run in all_runs().items():
        assert run(trace, capacity_blocks).hit_tokens <= bound.hit_tokens or name == "infinite"
    assert bound.hit_tokens <= replay_infinite(trace).hit_tokens


@given(chains)
def test_with_room_for_all_every_policy_is_the_infinite_cache(trace: Trace) -> None:
    everything = replay_infinite(trace)
    for name, run in all_runs().items():
        assert run(trace, trace.num_unique_blocks).hit_tokens == everything.hit_tokens, name


@pytest.mark.parametrize(("name", "percent"), [("conversation", 37.4), ("synthetic", 65.1), ("agents", 89.5)])
def test_infinite_cache_on_published_traces(name: str, percent: float) -> None:
    assert 100 * replay_infinite(published(name)).token_hit_rate == pytest.approx(percent, abs=0.1)


@pytest.mark.parametrize(
    ("name", "share", "policy", "percent"),
    [
        ("conversation", "1%", "belady", 25.12),
        ("conversation", "1%", "lru", 5.35),
        ("conversation", "10%", "lru", 28.44),
        ("synthetic", "0.5%", "belady", 12.70),
        ("synthetic", "20%", "belady", 61.91),
        ("synthetic", "1%", "lru", 3.89),
        ("synthetic", "20%", "lru", 40.03),
        ("agents", "0.5%", "belady", 26.54),
        ("agents", "2%", "belady", 59.04),
        ("agents", "0.5%", "lru", 15.50),
        ("agents", "2%", "lru", 45.75),
        ("agents", "10%", "lru", 88.93),
        ("conversation", "1%", "lru-2", 10.83),
        ("synthetic", "1%", "lru-2", 4.78),
        ("synthetic", "20%", "lru-2", 42.11),
        ("agents", "0.5%", "lru-2", 20.48),
        ("agents", "10%", "lru-2", 82.56),
    ],
)
def test_published_numbers_are_reproduced(name: str, share: str, policy: str, percent: float) -> None:
    """An independent simulator's numbers, to a tenth of a point."""
    assert_percent(name, share, policy, percent, 0.1)


@pytest.mark.parametrize(
    ("name", "share", "policy", "percent"),
    [
        ("conversation", "5%", "s3fifo", 19.11),
        ("synthetic", "1%", "s3fifo", 3.91),
        ("synthetic", "20%", "s3fifo", 39.01),
        ("agents", "0.5%", "s3fifo", 7.67),
        ("agents", "5%", "s3fifo", 65.04),
        ("conversation", "5%", "arc", 21.43),
        ("synthetic", "1%", "arc", 4.30),
        ("synthetic", "20%", "arc", 41.34),
        ("agents", "0.5%", "arc", 12.43),
        ("agents", "2%", "arc", 50.77),
        ("agents", "10%", "arc", 88.18),
    ],
)
def test_published_numbers_are_reproduced_where_the_algorithm_leaves_choices_open(
    name: str, share: str, policy: str, percent: float
) -> None:
    assert_percent(name, share, policy, percent, 1.0)


def assert_percent(name: str, share: str, policy: str, percent: float, points: float) -> None:
    trace = published(name)
    result = run_of(policy, "lru")(trace, parse_capacity(share, trace.num_unique_blocks, 1))
    assert 100 * result.token_hit_rate == pytest.approx(percent, abs=points)


@pytest.mark.parametrize(
    ("text", "blocks"), [("1%", 2), ("0.5 %", 1), ("100%", 250), ("17", 17), ("0", 0), ("1kB", 10), ("1KiB", 10)]
)
def test_capacities_are_shares_blocks_or_sizes(text: str, blocks: int) -> None:
    assert parse_capacity(text, 250, 100) == blocks


@pytest.mark.parametrize("text", ["", "x", "1.5", "-1", "-1%", "%", "1/0%", "nan%", "5 parsecs"])
def test_what_is_no_capacity_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="capacity"):
        parse_capacity(text, 250, 100)


def test_a_list_names_each_once() -> None:
    assert split_list("b, a,,b") == ["b", "a"]


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'fancy'.*belady.*lru"):
        run_of("fancy", "lru")


def test_default_is_the_stores_own() -> None:
    trace = trace_of("ab", "cd", "ab")
    assert run_of("default", "belady")(trace, 2) == replay_belady(trace, 2) != run_of("default", "lru")(trace, 2)
