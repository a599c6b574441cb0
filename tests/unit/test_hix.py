"""HIX: who leaves first, what is not kept at all, and that nothing it is told breaks it or makes it grow."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.made_traces import made_traces
from kvstore.policy.history import History, Visit, marker_depths
from kvstore.policy.hix import HIX, MAX_EXPECTED, MAX_LEAD_S, MAX_LEAP_S, MAX_RUNNING_S, NUM_LOWEST
from kvstore.policy.life_table import UNKNOWN, Kind, Traits
from kvstore.policy.lru import LRU
from kvstore.policy.retention import NUM_AGES
from kvstore.policy.segments import Segment, Segments
from kvstore.replay.simulator import Cache, replay
from kvstore.replay.trace import Trace, TraceRequest
from kvstore.types import Request


def request(number: int, now_s: float, **hints: object) -> Request:
    return Request(str(number), now_s, b"", 1000, hints)


def serve(cache: Cache, number: int, now_s: float, chain: Sequence[int], output_tokens: int = 100) -> int:
    """A request from arrival to end; returns how many blocks it found."""
    num_hit = cache.hit_blocks(chain)
    cache.serve(request(number, now_s), chain, output_tokens)
    return num_hit


def begin(policy: HIX[int], number: int, now_s: float, chain: Sequence[int]) -> None:
    """A request arrives, and all of its blocks are stored."""
    policy.arrive(request(number, now_s), chain)
    for parent, key in zip([None, *chain], chain, strict=False):
        policy.insert(key, parent)


def leave(policy: HIX[int]) -> int:
    """Whoever is the first to go, goes."""
    key = policy.victim(lambda _: True)
    assert key is not None
    policy.remove(key)
    return key


def learn(policy: HIX[int]) -> None:
    """Run what the store would run in the background."""
    job = policy.refit()
    if job is not None:
        job()()


def trace_of(requests: Sequence[TraceRequest]) -> Trace:
    return Trace.of("made", 64, list(requests))


def hit_rates(requests: Sequence[TraceRequest], capacity_blocks: int) -> tuple[float, float]:
    """Of HIX and of LRU."""
    trace = trace_of(requests)
    return (
        replay(trace, HIX(), capacity_blocks).token_hit_rate,
        replay(trace, LRU(), capacity_blocks).token_hit_rate,
    )


def of_blocks(now_s: float, chain: Sequence[int]) -> TraceRequest:
    return TraceRequest(now_s, 64 * len(chain), 100, tuple(chain))


def sessions_and_scans(num_sessions: int) -> list[TraceRequest]:
    """Sessions that come back every minute, among single requests that never do."""
    requests, fresh = [], itertools.count(1_000_000)
    for turn in range(40):
        for session in range(num_sessions):
            chain = [1000 * session + depth for depth in range(10 + turn)]
            requests.append(of_blocks(60.0 * turn + session, chain))
            for scan in range(3):
                chain = [next(fresh) for _ in range(20)]
                requests.append(of_blocks(60.0 * turn + session + 0.2 * (scan + 1), chain))
    return requests


def test_what_comes_back_is_kept_from_what_does_not() -> None:
    """LRU lets every session go before it returns."""
    hix, lru = hit_rates(sessions_and_scans(8), 400)
    assert lru == 0
    assert hix > 0.15


def test_what_does_not_come_back_is_not_even_written() -> None:
    """Flash is spared by that."""
    trace = trace_of(sessions_and_scans(8))
    written = replay(trace, HIX(), 100).blocks_written
    assert written < replay(trace, LRU(), 100).blocks_written / 2


def test_before_it_has_learned_it_orders_as_lru_does() -> None:
    policy: HIX[int] = HIX()
    cache = Cache(policy, 30)
    for number in range(3):
        serve(cache, number, 10.0 * number, [100 * number + depth for depth in range(10)])
    serve(cache, 3, 30.0, [100, 101, 102, 103])
    leaves = [9, 109, 209]
    assert policy.victim(lambda key: key in leaves) == 9


def test_a_segment_leaves_from_its_tail_and_never_below_a_child() -> None:
    policy: HIX[int] = HIX()
    cache = Cache(policy, 10)
    serve(cache, 0, 0.0, [1, 2, 3, 4])
    serve(cache, 1, 5.0, [1, 2, 7, 8])
    children = {1: 1, 2: 2, 3: 1, 7: 1}
    for expected in (4, 3):
        assert policy.victim(lambda key: not children.get(key)) == expected
        policy.remove(expected)
        children[expected - 1] -= 1


def test_a_block_that_is_in_use_is_passed_over() -> None:
    policy: HIX[int] = HIX()
    cache = Cache(policy, 10)
    serve(cache, 0, 0.0, [1, 2])
    serve(cache, 1, 9.0, [5, 6])
    assert policy.victim(lambda key: key == 6) == 6
    assert policy.victim(lambda _: False) is None
    assert policy.victim(lambda key: key in (2, 6)) == 2


@pytest.mark.parametrize("others", [1, 40])
def test_what_a_running_request_uses_outranks_everything_until_it_ends(others: int) -> None:
    """Whatever has been learned of requests like it: an engine without pins does not lose what it goes on from."""
    policy: HIX[int] = HIX()
    policy.resize(20)
    begin(policy, 0, 0.0, list(range(8)))
    for number in range(1, 1 + others):  # of which each ends
        chain = [100 * number + depth for depth in range(2)]
        begin(policy, number, float(number), chain)
        policy.finish(request(number, float(number)), 10)
    leaving = [leave(policy) for _ in range(2)]
    assert all(key >= 100 for key in leaving)
    policy.finish(request(0, 50.0), 10)
    begin(policy, 1000, MAX_RUNNING_S, [7000])
    assert leave(policy) != 7000


def test_a_request_that_never_ends_does_not_stay_for_ever() -> None:
    policy: HIX[int] = HIX()
    policy.resize(20)
    begin(policy, 0, 0.0, [1, 2])
    begin(policy, 1, MAX_RUNNING_S + 1, [11, 12])
    policy.finish(request(1, MAX_RUNNING_S + 1), 10)
    left = leave(policy)
    assert left in (1, 2)
    for number in range(2 * MAX_EXPECTED):  # on a clock that stands
        policy.arrive(request(10 + number, MAX_RUNNING_S + 1), [1000 + number])
    policy.check({1, 2, 11, 12} - {left})


def test_a_session_that_ends_is_told_by_a_hint() -> None:
    """The engine says which sessions end; those leave first, as soon as a few have shown what that means."""
    policy: HIX[int] = HIX()
    cache = Cache(policy, 10_000)
    numbers = itertools.count()
    for round_ in range(60):
        for ends in (False, True):
            chain = [round_ * 1000 + 500 * ends + depth for depth in range(5)]
            for turn in range(1 if ends else 3):
                hinted = request(next(numbers), 300.0 * round_ + 30 * turn, session_end=ends)
                cache.serve(hinted, chain[: 3 + turn], 10)
        learn(policy)
    cache.serve(request(next(numbers), 18_000.0, session_end=False), [91, 92, 93], 10)
    cache.serve(request(next(numbers), 18_001.0, session_end=True), [95, 96, 97], 10)
    fresh = [91, 92, 93, 95, 96, 97]
    assert policy.victim(lambda key: key in fresh) == 97


@cache
def hit_rate_without_jumps() -> float:
    return hit_rates(sessions_and_scans(8), 400)[0]


@pytest.mark.parametrize("leap_s", [-1e6, 1e6, 1e12])
def test_a_clock_that_jumps_costs_little(leap_s: float) -> None:
    requests = sessions_and_scans(8)
    middle = len(requests) // 2
    jumped = [
        TraceRequest(r.now_s + leap_s * (index > middle), r.input_tokens, r.output_tokens, r.chain)
        for index, r in enumerate(requests)
    ]
    hix, _ = hit_rates(jumped, 400)
    assert hix > 0.6 * hit_rate_without_jumps()
    assert MAX_LEAP_S < 1e6


def test_where_the_clock_stands_time_goes_by_requests() -> None:
    """A trace without times, or a clock that is too coarse: what is long ago is told from what is not."""
    requests = [replace(one, now_s=0.0) for one in sessions_and_scans(8)]
    hix, lru = hit_rates(requests, 400)
    assert lru == 0
    assert hix > 0.1
    untimed = next(trace for trace in made_traces(800) if trace.name == "made: untimed")
    capacity_blocks = untimed.num_unique_blocks // 20
    ahead = (
        replay(untimed, HIX(), capacity_blocks).token_hit_rate - replay(untimed, LRU(), capacity_blocks).token_hit_rate
    )
    assert ahead > 0.05


def test_a_burst_in_one_moment_does_not_make_what_follows_older() -> None:
    policy: HIX[int] = HIX()
    for number in range(5000):
        policy.arrive(request(number, 7.0), [number])
    policy.arrive(request(5000, 7.0), [10_000, 10_001])
    policy.arrive(request(5001, 7.0 + 60.0), [10_000, 10_001])
    learned = policy.learned().observations
    (age_s,) = (learned.ended_s - learned.began_s)[learned.state == 1][-1:]
    assert 60.0 - MAX_LEAD_S <= age_s <= 60.1


def test_of_what_many_share_it_is_known_how_often_and_how_long_ago_it_was_used() -> None:
    """Whoever used it: in retrieval no session goes on."""
    policy: HIX[int] = HIX()
    for number, now_s in enumerate([0.0, 10.0, 1010.0, 1020.0]):
        policy.arrive(request(number, now_s), [1, 2, 3, *range(100 * number + 10, 100 * number + 14)])
    traits = policy.learned().observations.traits
    shared = traits[traits[:, Traits._fields.index("kind")] == Kind.SHARED]
    uses = shared[:, Traits._fields.index("turn")].tolist()
    gaps = shared[:, Traits._fields.index("shape")].tolist()
    assert uses == sorted(set(uses))
    assert len(uses) == 3
    assert gaps[0] == gaps[2] < gaps[1]


@pytest.mark.parametrize(("num_shared", "num_used"), [(10, 1), (3, 0)])
def test_what_another_question_used_most_of_was_used(num_shared: int, num_used: int) -> None:
    """Though a branch leaves the end of it behind."""
    policy: HIX[int] = HIX()
    policy.arrive(request(0, 0.0), range(12))
    policy.arrive(request(1, 30.0), [*range(num_shared), 50, 51, 52])
    learned = policy.learned().observations
    own = learned.traits[:, Traits._fields.index("kind")] == Kind.OWN
    assert (learned.state[own] == 1).sum() == num_used


def test_repeating_a_loop_longer_than_the_cache_keeps_a_part_of_it() -> None:
    """LRU loses all of it, again and again."""
    loop = [of_blocks(2.0 * index, [1000 * (index % 12) + depth for depth in range(10)]) for index in range(1200)]
    hix, lru = hit_rates(loop, 60)
    assert lru == 0
    assert hix > 0.3


def test_memory_is_bounded_whatever_comes() -> None:
    policy: HIX[int] = HIX()
    cache = Cache(policy, 50)
    base = 0
    for number in range(MAX_EXPECTED + 200):
        base = number * 10
        cache.serve(request(number, 0.1 * number), [base, base + 1, base + 2], 5)
    policy.check({key for key in range(base + 3) if cache.hit_blocks([key])})


def test_history_forgets_the_oldest_markers() -> None:
    history: History[int] = History(max_markers=10)
    for number in range(5):
        history.remember(Visit(float(number), 4, 2), [number * 10 + depth for depth in range(4)])
    assert history.find([0, 1, 2, 3], range(4)) == (None, 0)
    visit, num_known = history.find([40, 41, 99], range(3))
    assert num_known == 2
    assert visit is not None
    assert visit.now_s == 4.0


@given(st.integers(1, 100_000), st.integers(1, 100_000))
def test_two_chains_have_the_same_markers_in_what_they_share(short: int, long: int) -> None:
    short, long = min(short, long), max(short, long)
    assert marker_depths(long)[: len(marker_depths(short))] == marker_depths(short)
    assert len(marker_depths(long)) <= 64 + 32 * max(0, long.bit_length() - 6)


steps = st.lists(
    st.tuples(
        st.sampled_from(["serve", "arrive", "insert", "remove", "victim", "finish", "learn"]),
        st.integers(0, 5),
        st.integers(1, 9),
        st.floats(-100, 1000),
    ),
    max_size=80,
)


@settings(max_examples=150)
@given(steps)
def test_no_order_of_calls_loses_a_key(actions: list[tuple[str, int, int, float]]) -> None:
    """Requests that overlap, blocks that come without one, blocks that vanish from the middle of a chain."""
    policy: HIX[int] = HIX()
    policy.resize(12)
    resident: dict[int, int | None] = {}
    now_s, numbers = 0.0, itertools.count()
    for action, session, length, delta_s in actions:
        now_s += delta_s
        chain = [100 * session * (depth >= session) + depth for depth in range(length)]
        if action == "serve":
            assert 0 <= policy.arrive(request(next(numbers), now_s), chain) <= length
            for index, key in enumerate(chain):
                if key not in resident:
                    resident[key] = chain[index - 1] if index else None
                    policy.insert(key, resident[key])
        elif action == "arrive":
            policy.arrive(request(next(numbers), now_s), chain)
        elif action == "insert" and chain[-1] not in resident:
            parent = chain[-2] if length > 1 and chain[-2] in resident else None
            resident[chain[-1]] = parent
            policy.insert(chain[-1], parent)
        elif action == "remove" and resident:
            key = sorted(resident)[session % len(resident)]
            del resident[key]
            policy.remove(key)
        elif action == "victim":
            leaves = {key for key in resident.keys() - set(resident.values()) if key % 3}
            victim = policy.victim(leaves.__contains__)
            assert victim in leaves or (victim is None and not leaves)
        elif action == "finish":
            policy.finish(request(session, now_s), length * 100)
        else:
            learn(policy)
        policy.check(set(resident))


def test_a_job_that_came_to_nothing_is_followed_by_another() -> None:
    """Learning fails once, or its thread is gone: that is no reason to know nothing for ever."""
    policy: HIX[int] = HIX()
    jobs = 0
    for number in range(100):
        policy.arrive(request(number, 5.0 * number), [number, 1000 + number])
        jobs += policy.refit() is not None
    assert jobs > 3


def test_what_was_learned_while_blocks_moved_is_applied_to_those_that_did_not() -> None:
    policy: HIX[int] = HIX()
    resident: set[int] = set()
    job = None
    for number in range(16):
        chain = [100 * (number % 4) + depth for depth in range(8)]
        policy.arrive(request(number, 5.0 * number), chain)
        for index, key in enumerate(chain):
            if key not in resident:
                policy.insert(key, chain[index - 1] if index else None)
                resident.add(key)
        job = policy.refit()
    assert job is not None
    assert policy.refit() is None, "nothing new to learn yet"
    policy.arrive(request(20, 101.0), [0, 1, 2, 900])
    apply = job()
    policy.remove(107)
    policy.insert(900, 2)
    apply()
    policy.check(resident - {107} | {900})
    assert policy.victim(lambda key: key == 207) == 207


def test_who_may_leave_is_found_however_many_before_may_not() -> None:
    policy: HIX[int] = HIX()
    cache = Cache(policy, 1000)
    for number in range(3 * NUM_LOWEST):
        serve(cache, number, 1.0 * number, [10 * number, 10 * number + 1])
    newest = 10 * (3 * NUM_LOWEST - 1) + 1
    assert policy.victim(newest.__eq__) == newest


def test_the_lowest_are_the_same_whether_all_are_put_in_order_or_not() -> None:
    segments: Segments[int] = Segments(np.linspace(1.0, 0.0, NUM_AGES))
    for number in range(50):
        segment: Segment[int] = Segment(0, 2, UNKNOWN, 199.0 * (number * 7 % 6))
        segments.give(segment, [2 * number, 2 * number + 1])
    everyone, _, _ = segments.ranked(1000.0)
    lowest, indices, lengths = segments.ranked(1000.0, 10)
    assert 10 <= len(lowest) < 50
    assert lowest == everyone[: len(lowest)]
    assert indices.tolist() == sorted(indices)
    assert set(lengths.tolist()) == {2}
