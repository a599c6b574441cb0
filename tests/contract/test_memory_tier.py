"""RAM passes the suite of every tier; what is only for tiers that verify does not concern it, for RAM is trusted."""

import mmap
import os
from collections.abc import Iterator

import pytest

from kvstore.errors import ConfigError
from kvstore.testing.sidecar import eventually
from kvstore.testing.tier_contract import CAPACITY_BYTES, TierContract
from kvstore.tiers import memory
from kvstore.tiers.base import Tier
from kvstore.tiers.domains import Arenas, DomainMemoryTier
from kvstore.tiers.memory import HUGE_PAGE_BYTES, Arena, MemoryTier


class TestMemoryTier(TierContract):
    @pytest.fixture
    def tier(self) -> Iterator[Tier]:
        tier = MemoryTier(Arena(CAPACITY_BYTES))
        yield tier
        tier.close()


class TestDomainMemoryTier(TierContract):
    @pytest.fixture
    def tier(self) -> Iterator[Tier]:
        tier = DomainMemoryTier(Arenas(CAPACITY_BYTES, 2))
        yield tier
        tier.close()


def test_an_extent_takes_no_bytes_along_when_it_moves() -> None:
    size = 1 << 20
    tier = DomainMemoryTier(Arenas(4 * size, 2), extent_bytes=size)
    tier.assign(b"blue", 1)
    for fingerprint, other in ((b"red", b"blue"), (b"blue", b"red"), (b"red", b"blue")):
        if not tier.prepare(size, size, fingerprint):
            eventually(lambda: size in tier.prepared())
        assert tier.prepare(size, size, fingerprint)
        here = tier.arena.view(tier.base_bytes(fingerprint) + size, size)
        there = tier.arena.view(tier.base_bytes(other) + size, size)
        assert not any(here)
        here[:] = b"x" * size
        assert not any(there)
    assert tier.usable_bytes == size
    del here, there
    tier.close()


def test_an_arena_is_zero_and_writable_to_its_last_byte() -> None:
    arena = Arena(3 * mmap.PAGESIZE + 5)
    view = arena.view(0, arena.capacity_bytes)
    assert not any(view)
    view[-1:] = b"x"
    assert bytes(arena.view(arena.capacity_bytes - 1, 1)) == b"x"
    view.release()
    arena.close()
    arena.close()


def test_a_view_outlives_the_arena() -> None:
    """An engine that still copies when the store is closed reads stale bytes and does not crash."""
    arena = Arena(mmap.PAGESIZE)
    view = arena.view(0, 4)
    view[:] = b"abcd"
    arena.close()
    assert bytes(view) == b"abcd"


def test_nobody_with_the_descriptor_can_change_its_size() -> None:
    arena = Arena(4 * mmap.PAGESIZE)
    for size in (0, 8 * mmap.PAGESIZE):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fd, size)
    arena.close()


def test_huge_pages_are_taken_only_if_enough_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    if memory._num_free_huge_pages() >= 2:
        arena = Arena(2 * HUGE_PAGE_BYTES)
        assert arena.page_bytes == HUGE_PAGE_BYTES
        arena.close()
    monkeypatch.setattr(memory, "_num_free_huge_pages", lambda: 1)
    arena = Arena(2 * HUGE_PAGE_BYTES)
    assert arena.page_bytes == mmap.PAGESIZE
    arena.close()


def test_memory_that_the_kernel_refuses_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"lower memory\.capacity"):
        Arena(1 << 62)
