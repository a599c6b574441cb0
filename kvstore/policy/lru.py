"""Least recently used, leaf-first by structure: a block ranks just below its parent."""

from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

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
        """Touch ``chain`` tail first, so that its root is hottest. Everything is worth keeping."""
        nodes = self._nodes
        for key in reversed(chain):
            node = nodes.get(key)
            if node is not None:
                _unlink(node)
                _link(node, colder_than=self._root)
        return len(chain)

    def finish(self, request: Request, output_tokens: int) -> None:
        """LRU does not care."""

    def insert(self, key: K, parent: K | None) -> None:
        """Just below the parent, or hottest of all."""
        node = _Node(key)
        self._nodes[key] = node
        above = self._root if parent is None else self._nodes.get(parent, self._root)
        _link(node, colder_than=above)

    def remove(self, key: K) -> None:
        """Take it out of the ring."""
        _unlink(self._nodes.pop(key))

    def victim(self, may_leave: Callable[[K], bool]) -> K | None:
        """The coldest key that may leave; those before it are in use, so they become the hottest."""
        for _ in range(len(self._nodes)):
            node = self._root.hotter
            assert node.key is not None
            if may_leave(node.key):
                return node.key
            _unlink(node)
            _link(node, colder_than=self._root)
        return None


def _link(node: _Node[K], *, colder_than: _Node[K]) -> None:
    node.hotter = colder_than
    node.colder = colder_than.colder
    node.colder.hotter = node
    colder_than.colder = node


def _unlink(node: _Node[K]) -> None:
    node.colder.hotter = node.hotter
    node.hotter.colder = node.colder
