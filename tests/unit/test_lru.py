"""LRU: the order of leaving after every step, beside a list that is moved about block by block."""

from hypothesis import given
from hypothesis import strategies as st

from kvstore.policy.lru import LRU
from kvstore.types import Request

REQUEST = Request("r", 0.0, b"", 0)
BLOCKS = range(8)


def order(policy: LRU[int]) -> list[int]:
    """From the coldest to the hottest."""
    seen: list[int] = []

    def may_leave(key: int) -> bool:
        seen.append(key)
        return False

    assert policy.victim(may_leave) is None
    return seen


def filled(*chain: int) -> LRU[int]:
    policy = LRU[int]()
    for above, block in zip([None, *chain], chain, strict=False):
        policy.insert(block, above)
    return policy


def test_a_chain_leaves_from_its_tail() -> None:
    assert order(filled(0, 1, 2, 3)) == [3, 2, 1, 0]


def test_a_new_chain_is_hotter_than_an_old_one() -> None:
    policy = filled(0, 1)
    policy.insert(5, None)
    policy.insert(6, 5)
    assert order(policy) == [1, 0, 6, 5]


def test_a_touched_chain_is_hottest_and_keeps_its_order() -> None:
    policy = filled(0, 1, 2)
    policy.insert(5, None)
    assert policy.arrive(REQUEST, [0, 1, 9]) == 3
    assert order(policy) == [2, 5, 1, 0]


def test_what_may_not_leave_is_passed_over() -> None:
    assert filled(0, 1, 2).victim(lambda key: key != 2) == 1


insertions = st.tuples(st.just("insert"), st.sampled_from(BLOCKS), st.none() | st.sampled_from(BLOCKS))
removals = st.tuples(st.just("remove"), st.sampled_from(BLOCKS), st.none())
arrivals = st.tuples(st.just("arrive"), st.permutations(BLOCKS), st.integers(0, len(BLOCKS)))


@given(st.lists(insertions | removals | arrivals, max_size=40))
def test_every_step_gives_the_order_of_a_plain_list(steps: list[tuple[str, object, int | None]]) -> None:
    policy, hottest_first = LRU[int](), list[int]()
    for kind, subject, detail in steps:
        if kind == "arrive" and isinstance(subject, list):
            chain = subject[:detail]
            policy.arrive(REQUEST, chain)
            touched = [key for key in chain if key in hottest_first]
            hottest_first = touched + [key for key in hottest_first if key not in touched]
        elif isinstance(subject, int) and kind == "insert" and subject not in [*hottest_first, detail]:
            policy.insert(subject, detail)
            below = hottest_first.index(detail) + 1 if detail in hottest_first else 0
            hottest_first.insert(below, subject)
        elif isinstance(subject, int) and kind == "remove" and subject in hottest_first:
            policy.remove(subject)
            hottest_first.remove(subject)
        assert order(policy) == hottest_first[::-1]
