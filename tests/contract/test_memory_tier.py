"""RAM passes the suite of every tier; what is only for tiers that verify does not concern it, for RAM is trusted."""

import mmap
import os
import platform
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore.errors import ConfigError
from kvstore.mapping import HUGE_PAGE_BYTES, Mapping
from kvstore.testing.sidecar import eventually
from kvstore.testing.tier_contract import CAPACITY_BYTES, TierContract
from kvstore.tiers import memory
from kvstore.tiers.base import Tier
from kvstore.tiers.domains import Arenas, DomainMemoryTier
from kvstore.tiers.memory import Arena, MemoryTier


def _can_collapse() -> bool:
    """Whether the kernel should be able to put pages of shared memory together."""
    setting = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    major, minor = (int(part) for part in platform.release().split(".")[:2])
    return (major, minor) >= (6, 1) and setting.exists() and "[deny]" not in setting.read_text()


def _fields_of_mapping(address: int) -> dict[str, int]:
    """Bytes by name of what the kernel says of the mapping that begins at ``address``."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(f"{address:x}-"))
    fields = (line.split() for line in lines[start + 1 : start + 24])
    return {name.rstrip(":"): 1024 * int(value) for name, value, *_ in fields if value.isdigit()}


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


def test_populating_makes_huge_pages_and_leaves_bytes_as_they_are() -> None:
    """As far as the kernel can; where it cannot, every page is there all the same."""
    arena = Arena(4 * HUGE_PAGE_BYTES + mmap.PAGESIZE, prefault=False, may_be_huge=False)
    for offset in (0, HUGE_PAGE_BYTES + 5, arena.capacity_bytes - 3):
        arena.view(offset, 3)[:] = b"abc"
    arena.populate(0, arena.capacity_bytes)
    address = np.frombuffer(arena.view(0, 1), dtype=np.uint8).ctypes.data
    assert address % HUGE_PAGE_BYTES == 0
    fields = _fields_of_mapping(address)
    assert fields["Rss"] == arena.capacity_bytes
    assert fields["ShmemPmdMapped"] == arena.collapsed_bytes
    assert arena.collapsed_bytes == (4 * HUGE_PAGE_BYTES if _can_collapse() else 0)
    for offset in (0, HUGE_PAGE_BYTES + 5, arena.capacity_bytes - 3):
        assert bytes(arena.view(offset, 3)) == b"abc"
    assert bytes(arena.view(HUGE_PAGE_BYTES + 8, 100)) == bytes(100)
    arena.close()


def test_who_computes_goes_before_the_prefault() -> None:
    """On fragmented memory it keeps a core busy for many seconds."""
    priorities: list[int] = []
    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    class Observed(Arena):
        def populate(self, offset_bytes: int, num_bytes: int) -> None:
            priorities.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    Observed(HUGE_PAGE_BYTES, may_be_huge=False).close()
    assert priorities == [19]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == own


@pytest.mark.skipif(not _can_collapse(), reason="this kernel puts no pages of shared memory together; Linux 6.1 does")
def test_another_process_sees_the_same_huge_pages() -> None:
    arena = Arena(2 * HUGE_PAGE_BYTES, prefault=False, may_be_huge=False)
    arena.populate(0, arena.capacity_bytes)
    other = Mapping(os.dup(arena.fd), arena.capacity_bytes, prefault=False)
    address = np.frombuffer(other.view(0, 1), dtype=np.uint8).ctypes.data
    other.view(0, other.capacity_bytes)[:] = b"x" * other.capacity_bytes
    assert _fields_of_mapping(address)["ShmemPmdMapped"] == other.capacity_bytes
    other.close()
    arena.close()


def test_memory_that_the_kernel_refuses_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"lower memory\.capacity"):
        Arena(1 << 62)
