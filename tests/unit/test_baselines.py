"""Published caches: who leaves when, by hand; and what holds for every one of them."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.replay.baselines import BLOCK_CACHES
from kvstore.replay.baselines.arc import ARC
from kvstore.replay.baselines.base import BlockCache
from kvstore.replay.baselines.fifo import FIFO
from kvstore.replay.baselines.gdsf import GDSF
from kvstore.replay.baselines.lecar import LeCaR
from kvstore.replay.baselines.lfu import LFU
from kvstore.replay.baselines.lirs import LIRS
from kvstore.replay.baselines.lru_2 import LRU2
from kvstore.replay.baselines.s3fifo import S3FIFO
from kvstore.replay.baselines.sieve import SIEVE
from kvstore.replay.baselines.two_q import TwoQ
from kvstore.replay.baselines.w_tinylfu import WTinyLFU
from kvstore.replay.baselines.workload_aware import WorkloadAware
from kvstore.types import Request

BLOCKS = range(12)


def departures(cache: BlockCache, blocks: str) -> str:
    """Who leaves at each reference, ``.`` where nobody does. A letter is a block."""
    alphabet = sorted(set(blocks))
    left = ""
    for block in blocks:
        before = [other for other in alphabet if ord(other) in cache]
        cache.access(ord(block))
        left += "".join(other for other in before if ord(other) not in cache) or "."
    return left


@pytest.mark.parametrize(
    ("make", "capacity", "blocks", "expected"),
    [
        # A hit does not save the oldest.
        (FIFO, 2, "abac", "...a"),
        # The less used leaves; among equals the one used longer ago; a block that comes back begins anew.
        (LFU, 2, "aabcbb", "...bc."),
        (LFU, 3, "abcad", "....b"),
        # b was used twice, c and d once: they leave before it, though it is the oldest.
        (LRU2, 2, "bbcde", "...cd"),
        # a had left, but its first use is remembered: d, newer and used once, leaves before it.
        (LRU2, 2, "abcade", "..abcd"),
        # The hand spares visited a once, where it is; then takes b, and goes on from there.
        (SIEVE, 3, "abcadef", "....bcd"),
        # A hit in the queue of the new does not make a block one of those that stay.
        (TwoQ, 4, "aabcde", ".....a"),
        # a comes back as a ghost: it is in the main list from now on, and the new leave before it.
        (TwoQ, 4, "abcdeafghi", "....abcdef"),
        # Used twice is safe from a scan.
        (ARC, 2, "aabcde", "...bcd"),
        # The ghost of b says that the list of the new is too short: now those used often go, and not c.
        (ARC, 2, "aabcbd", "...bab"),
        # One block of long distance at a time: a scan passes through it.
        (LIRS, 3, "abcdef", "...cde"),
        # c comes back while it is on the stack: it trades places with a, the oldest of the short ones.
        (LIRS, 3, "abcdcef", "...cdae"),
        # Two reuses bring a block from the small queue to main; one does not.
        (S3FIFO, 10, "aaabcdefghijklm", "............bcd"),
        (S3FIFO, 10, "aabcdefghijklm", "...........abc"),
        # The ghost of a comes in to main, where it outlives those of the small queue.
        (S3FIFO, 4, "abcdeafghi", "....abcdef"),
        # The window holds one; the newcomer must be asked for more often than the victim of the others.
        (WTinyLFU, 3, "aabbcde", ".....cd"),
        # By turns: LFU, LRU, LFU; a was used most, but it is the oldest.
        (LeCaR, 3, "aabcdef", "....bac"),
    ],
)
def test_who_leaves_when(make: Callable[[int], BlockCache], capacity: int, blocks: str, expected: str) -> None:
    assert departures(make(capacity), blocks) == expected


@pytest.mark.parametrize("name", BLOCK_CACHES)
@given(blocks=st.lists(st.sampled_from(BLOCKS), max_size=80), capacity=st.integers(1, 7))
def test_a_cache_holds_what_it_was_just_asked_for_and_no_more_than_it_may(
    name: str, blocks: list[int], capacity: int
) -> None:
    cache = BLOCK_CACHES[name](capacity)
    for block in blocks:
        resident = {other for other in BLOCKS if other in cache}
        cache.access(block)
        now = {other for other in BLOCKS if other in cache}
        assert block in now
        assert now <= resident | {block}
        assert len(now) <= capacity
        assert len(resident | {block}) > capacity or now == resident | {block}, "somebody left without need"


REQUEST = Request("r", 0.0, b"", 40)


def test_gdsf_keeps_what_is_used_most_and_costs_most() -> None:
    policy = GDSF[str]()
    policy.arrive(REQUEST, "abcd")
    for parent, key in ((None, "a"), ("a", "b"), ("b", "c"), (None, "x")):
        policy.insert(key, parent)
    assert policy.victim(bool) == "x"  # as often as c, and cheaper; a and b have children
    policy.arrive(REQUEST, "x")
    assert policy.victim(bool) == "c"
    policy.remove("c")
    assert policy.victim(lambda key: key != "b") == "x"
    policy.insert("y", None)
    assert policy.victim(bool) == "b"  # newer ones start from the rank of who was to leave last


def test_workload_aware_learns_what_comes_back() -> None:
    policy = WorkloadAware[str]()

    def ask(at_s: float, kind: str, key: str) -> None:
        policy.arrive(Request("r", at_s, b"", 10, {"kind": kind}), [key])

    for number in range(50):
        at_s = 10.0 * number
        ask(at_s, "once", f"o{number}")
        policy.insert(f"o{number}", None)
        ask(at_s + 1, "chat", f"c{number}")
        policy.insert(f"c{number}", None)
        ask(at_s + 2, "chat", f"c{number}")
        policy.remove(f"o{number}")
        policy.remove(f"c{number}")
    ask(1000.0, "chat", "old chat")
    policy.insert("old chat", None)
    ask(1001.0, "once", "new once")
    policy.insert("new once", None)
    assert policy.victim(bool) == "new once"
    assert policy.victim(lambda key: key != "new once") == "old chat"


def test_workload_aware_lets_the_deeper_leave_first() -> None:
    policy = WorkloadAware[str]()
    policy.arrive(REQUEST, "abc")
    for parent, key in ((None, "x"), (None, "a"), ("a", "b"), ("b", "c")):
        policy.insert(key, parent)
    assert policy.victim(bool) == "c"
    policy.remove("c")
    assert policy.victim(bool) == "b"
