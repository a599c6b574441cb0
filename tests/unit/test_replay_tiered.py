"""Tiers and engines: where a prefix is found, whether it is worth loading, and who gets a request."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from kvstore.errors import ConfigError
from kvstore.policy.lru import LRU
from kvstore.replay.fleet import COMMON, build_engines, cost_of
from kvstore.replay.hardware import HARDWARE, Hardware, Link, parse_hardware
from kvstore.replay.prefill import ATTENTION_TOKENS
from kvstore.replay.routing import ROUTERS, PrefixAware, RoundRobin, Router, Sticky
from kvstore.replay.rows import TieredRow, distribution
from kvstore.replay.simulator import replay
from kvstore.replay.tiered import Fleet, TieredResult, replay_tiered
from kvstore.replay.trace import Trace, TraceRequest
from kvstore.testing.traces import made_up_trace
from tests.unit.test_replay import trace_of

# A block of 10 tokens takes 1 s to compute, and 0.1, 0.5 and 2 s to load.
SLOW = Hardware("slow", 1, 10.0, 1e12, {"memory": Link(100.0, 0.0), "file": Link(20.0, 0.0), "shared": Link(5.0, 0.0)})
FREE = replace(SLOW, links={}, attention_tokens=ATTENTION_TOKENS)
ROOM = 1000


def run(
    trace: Trace,
    capacities: Mapping[str, int],
    *,
    engines: int = 1,
    share: str = "nothing",
    routing: str = "round-robin",
    hardware: Hardware = SLOW,
) -> TieredResult:
    return replay_tiered(trace, LRU, Fleet(capacities, engines, COMMON[share], ROUTERS[routing], hardware))


def hits(result: TieredResult) -> dict[str, int]:
    return {name: tier.hit_tokens for name, tier in result.tiers.items()}


def at(trace: Trace, *times_s: float) -> Trace:
    requests = [replace(request, now_s=now_s) for request, now_s in zip(trace.requests, times_s, strict=True)]
    return replace(trace, requests=requests)


@pytest.mark.parametrize("tier", ["hbm", "memory", "file", "shared"])
@pytest.mark.parametrize("capacity_blocks", [1, 20, 150])
def test_one_tier_is_the_simulator_where_loading_costs_nothing(tier: str, capacity_blocks: int) -> None:
    trace = made_up_trace(200)
    result = run(trace, {tier: capacity_blocks}, hardware=FREE)
    assert result.total == replay(trace, LRU(), capacity_blocks)
    assert result.tiers[tier].written_bytes == result.total.blocks_written * trace.tokens_per_block
    assert result.declined_tokens == 0


def test_a_block_is_loaded_from_the_nearest_tier_that_has_it() -> None:
    trace = trace_of("abc", "abc", "x", "abc")
    assert hits(run(trace, {"hbm": 3, "memory": ROOM})) == {"hbm": 30 + 20, "memory": 10}
    assert hits(run(trace, {"memory": 1, "file": 2, "hbm": 0})) == {"memory": 10, "file": 10 + 10}
    result = run(trace_of("abc", "abc"), {"memory": ROOM, "file": 1})
    assert (hits(result), result.declined_tokens) == ({"memory": 30, "file": 0}, 0)


def test_what_a_tier_adds_is_told_from_what_engines_have_themselves() -> None:
    """BN-008: with and without the engine's own cache, with and without the tier."""
    trace = trace_of("ab", "cd", "ab", "cd")
    matrix = {(hbm, file): hits(run(trace, {"hbm": hbm, "file": file})) for hbm in (0, ROOM) for file in (0, ROOM)}
    assert matrix == {
        (0, 0): {},
        (0, ROOM): {"file": 40},
        (ROOM, 0): {"hbm": 40},
        (ROOM, ROOM): {"hbm": 40, "file": 0},
    }


def test_a_tier_without_room_is_none() -> None:
    assert set(run(trace_of("a"), {"hbm": 0, "memory": 1}).tiers) == {"memory"}


def test_a_prefix_is_loaded_as_far_as_that_is_faster() -> None:
    """BN-007: where a tier does not pay, the replay says so and counts no hit."""
    result = run(trace_of("ab", "cd", "ab"), {"memory": 3, "shared": ROOM})
    assert hits(result) == {"memory": 10, "shared": 0}  # 2 s to load b, 1 s to compute it
    assert result.declined_tokens == 10
    assert result.service_s[2] == pytest.approx(0.1 + 1.0)
    assert result.total.token_hit_rate == 10 / 60


def test_the_last_token_is_computed_whatever_is_there() -> None:
    result = run(trace_of("abc", "abc"), {"memory": ROOM})
    assert list(result.service_s) == pytest.approx([3.0, 0.3 + 0.1])


def test_engines_find_what_others_computed_in_tiers_that_they_share() -> None:
    trace = trace_of("ab", "ab", "ab")
    everything = {"hbm": ROOM, "memory": ROOM, "shared": ROOM}
    assert hits(run(trace, everything, engines=2, hardware=FREE)) == {"hbm": 20, "memory": 0, "shared": 0}
    remote = run(trace, everything, engines=2, share="remote", hardware=FREE)
    assert hits(remote) == {"hbm": 20, "memory": 0, "shared": 20}
    sidecar = run(trace, everything, engines=2, share="sidecar", hardware=FREE)
    assert hits(sidecar) == {"hbm": 20, "memory": 20, "shared": 0}
    assert [tier.capacity_blocks for tier in sidecar.tiers.values()] == [2 * ROOM, ROOM, ROOM]
    assert [tier.written_bytes for tier in sidecar.tiers.values()] == [40, 20, 20]


def test_a_request_waits_for_those_before_it_on_its_engine() -> None:
    trace = at(trace_of("a", "b", "c", "d"), 0.0, 0.5, 0.5, 9.0)
    one, two = (run(trace, {"hbm": ROOM}, engines=engines) for engines in (1, 2))
    assert list(one.wait_s) == pytest.approx([0.0, 0.5, 1.5, 0.0])
    assert list(two.wait_s) == pytest.approx([0.0, 0.0, 0.5, 0.0])
    assert one.busy_share == pytest.approx(4 / 9)
    assert two.busy_share == pytest.approx(2 / 9)


def route(router: Router, trace: Trace, capacities: Mapping[str, int], num_engines: int) -> list[int]:
    """Where requests go when each engine keeps and computes what it gets."""
    engines = build_engines(num_engines, capacities, (), LRU)
    chosen = []
    for number, request in enumerate(trace.requests):
        chosen.append(router(request, engines))
        engine = engines[chosen[-1]]
        engine.free_at_s = max(engine.free_at_s, request.now_s) + cost_of(trace, request, engine, SLOW).service_s
        for cache in engine.tiers.values():
            cache.serve(request.announced(number), request.chain, 0)
    return chosen


def test_round_robin_goes_round() -> None:
    trace = trace_of(*"abcde")
    assert route(RoundRobin(trace, SLOW), trace, {}, 3) == [0, 1, 2, 0, 1]


def test_a_session_sticks_to_its_engine() -> None:
    trace = trace_of("s1", "s2", "s12", "s22", "s3", "s123")
    assert route(Sticky(trace, SLOW), trace, {}, 3) == [0, 1, 0, 1, 2, 0]
    sessions = [7, 7, 8, 7, 9, 8]
    requests = [TraceRequest(0.0, 10, 1, [index], hints={"session": session}) for index, session in enumerate(sessions)]
    told = Trace.of("t", 10, requests)
    assert route(Sticky(told, SLOW), told, {}, 3) == [0, 0, 1, 0, 2, 1]


def test_the_prefix_aware_go_where_the_first_token_comes_earliest() -> None:
    trace = at(trace_of("abc", "xyz", "abcd", "abce", "abcf"), 0.0, 0.0, 50.0, 50.5, 50.6)
    # Those that follow go where their prefix is, though that engine is busy for a while.
    assert route(PrefixAware(trace, SLOW), trace, {"hbm": ROOM}, 2) == [0, 1, 0, 0, 0]
    # Two blocks to compute each time, five elsewhere: the third of them would wait too long.
    crowded = at(trace_of("abc", "abc12", "abc34", "abc56", "abc78"), 0.0, *[50.0] * 4)
    assert route(PrefixAware(crowded, SLOW), crowded, {"hbm": ROOM}, 2) == [0, 0, 0, 1, 0]


def test_a_row_says_everything_in_json() -> None:
    trace = trace_of("ab", "ab")
    fleet = Fleet({"memory": ROOM}, 1, (), RoundRobin, SLOW)
    row = TieredRow(trace, "lru", fleet, "round-robin", replay_tiered(trace, LRU, fleet), 0.5).as_json()
    assert row["tiers"] == {"memory": {"capacity_blocks": ROOM, "token_hit_rate": 0.5, "written_bytes": 20}}
    assert row["ttft_s"] == {"mean": 1.15, "p50": 1.15, "p90": pytest.approx(1.83), "p99": pytest.approx(1.983)}
    assert (row["engines"], row["hardware"], row["token_hit_rate"]) == (1, "slow", 0.5)
    assert distribution([]) == {}


def test_loading_eight_thousand_tokens_breaks_even_where_it_was_measured() -> None:
    for name, bytes_per_s in (("h100-8b", 6.0e9), ("h100-32b", 2.8e9), ("4xh100-70b", 5.2e9)):
        profile = HARDWARE[name]
        found = profile.kv_bytes_per_token * 8192 / profile.prefill_s(0, 8192)
        assert found == pytest.approx(bytes_per_s, rel=0.01)


def test_a_profile_changes_what_it_names() -> None:
    text = 'kv_bytes_per_token = "1KiB"\n[file]\nbandwidth = "1GB"\nlatency = "2ms"\n'
    profile = parse_hardware("mine", text)
    assert (profile.name, profile.kv_bytes_per_token) == ("mine", 1024)
    assert profile.load_s("file", 10**6) == pytest.approx(0.002 + 1.024)
    assert profile.load_s("memory", 10**6) == replace(HARDWARE["h100-8b"], kv_bytes_per_token=1024).load_s(
        "memory", 10**6
    )
    assert profile.load_s("hbm", 10**6) == 0.0
    assert profile.prefill_s(0, 1000) == HARDWARE["h100-8b"].prefill_s(0, 1000)


@pytest.mark.parametrize(
    "text",
    [
        "kv_bytes_per_token",
        'kv_bytes_per_token = "much"',
        'kv_bytes_per_token = "0"',
        "prefill_tokens_per_s = -1",
        'prefill_tokens_per_s = "fast"',
        "color = 3",
        "file = 3",
        '[file]\nbandwidth = "1GB"',
        '[file]\nbandwidth = "0"\nlatency = "1ms"',
    ],
)
def test_half_a_profile_is_an_error(text: str) -> None:
    with pytest.raises(ConfigError, match="mine is no hardware profile"):
        parse_hardware("mine", text)
