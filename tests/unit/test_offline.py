"""The order in which blocks are freed: oldest first, children before parents."""

from hypothesis import given
from hypothesis import strategies as st

from kvstore.offline import oldest_leaves
from kvstore.tiers.base import StoredBlock
from kvstore.types import BlockKey


def block(name: int, parent: int | None, created_unix_s: int) -> StoredBlock:
    return StoredBlock(
        key=BlockKey(name.to_bytes(48, "big")),
        parent=None if parent is None else BlockKey(parent.to_bytes(48, "big")),
        fingerprint=bytes(16),
        block_bytes=4096,
        offset_bytes=name * 4096,
        created_unix_s=created_unix_s,
    )


def names(blocks: list[StoredBlock]) -> list[int]:
    return [int.from_bytes(block.key, "big") for block in oldest_leaves(blocks)]


def test_the_oldest_goes_first_and_a_parent_after_its_children() -> None:
    # 0 - 1 - 2     3 - 4, with 5 beside 4
    #       a second branch of 3 that is the oldest of all
    blocks = [block(0, None, 10), block(1, 0, 11), block(2, 1, 30), block(3, None, 5), block(4, 3, 6), block(5, 3, 1)]
    assert names(blocks) == [5, 4, 3, 2, 1, 0]


def test_a_block_whose_parent_is_not_there_is_as_good_as_a_root() -> None:
    assert names([block(1, 0, 2), block(2, 7, 1)]) == [2, 1]


@given(st.lists(st.tuples(st.integers(-1, 20), st.integers(0, 5)), max_size=20))
def test_every_block_comes_once_and_no_parent_before_its_child(draws: list[tuple[int, int]]) -> None:
    blocks = [
        block(name, parent if 0 <= parent < name else None, created) for name, (parent, created) in enumerate(draws)
    ]
    order = names(blocks)
    assert sorted(order) == list(range(len(blocks)))
    for name, (parent, _) in enumerate(draws):
        if 0 <= parent < name:
            assert order.index(name) < order.index(parent)
