"""Least recently used, leaf-first by structure: a block ranks just below its parent."""

from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

from kvstore.policy.base import Refit
from kvstore.types import Request

K = TypeVar("K", bound=Hashable)


class _Node(Generic[K]):
    """A key and its neighbours in a ring; the ring's root has no key."""

    __slots__ = ("colder", "hotter", "key")

    def __init__(self, key: K | None) -> None:
        self.key = key
        self.colder = self
        self.hotter = self


class LRU(Generic[K]):
    """A doubly linked ring from the coldest key to the hottest, and a dict into it. Every call is O(1) per block."""

    def __init__(self) -> None:
        self._nodes: dict[K, _Node[K]] = {}
        self._root: _Node[K] = _Node(None)

    def resize(self, capacity_blocks: int) -> None:
        """LRU does not depend on the capacity."""

    def arrive(self, request: Request, chain: Sequence[K]) -> int:
        """Touch ``chain`` tail first, so that its root is hottest. Everything is worth keeping.

        A chain mostly lies in the ring as it is, and then moves as a whole.
        """
        get = self._nodes.get
        coldest = hottest = None
        for key in reversed(chain):
            node = get(key)
            if node is None:
                continue
            if hottest is None or coldest is None:
                coldest = node
            elif hottest.hotter is not node:
                self._heat(coldest, hottest)
                coldest = node
            hottest = node
        if coldest is not None and hottest is not None:
            self._heat(coldest, hottest)
        return len(chain)

    def finish(self, request: Request, output_tokens: int) -> None:
        """LRU does not care."""

    def refit(self) -> Refit | None:
        """LRU learns nothing."""
        return None

    def insert(self, key: K, parent: K | None) -> None:
        """Just below the parent, or hottest of all."""
        node = _Node(key)
        self._nodes[key] = node
        above = self._root if parent is None else self._nodes.get(parent, self._root)
        _link(node, node, colder_than=above)

    def remove(self, key: K) -> None:
        """Take it out of the ring."""
        node = self._nodes.pop(key)
        _unlink(node, node)

    def victim(self, may_leave: Callable[[K], bool]) -> K | None:
        """The coldest key that may leave; those before it are in use, so they become the hottest."""
        for _ in range(len(self._nodes)):
            node = self._root.hotter
            assert node.key is not None
            if may_leave(node.key):
                return node.key
            self._heat(node, node)
        return None

    def _heat(self, coldest: _Node[K], hottest: _Node[K]) -> None:
        """The nodes from ``coldest`` to ``hottest`` are now the hottest of all, in the order that they have."""
        _unlink(coldest, hottest)
        _link(coldest, hottest, colder_than=self._root)


def _link(coldest: _Node[K], hottest: _Node[K], *, colder_than: _Node[K]) -> None:
    """Put a run of nodes just below one."""
    hottest.hotter = colder_than
    coldest.colder = colder_than.colder
    coldest.colder.hotter = coldest
    colder_than.colder = hottest


def _unlink(coldest: _Node[K], hottest: _Node[K]) -> None:
    """Take a run of nodes out of the ring."""
    coldest.colder.hotter = hottest.hotter
    hottest.hotter.colder = coldest.colder
