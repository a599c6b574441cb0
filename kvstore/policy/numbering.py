"""Small numbers for the keys seen last, the same whatever the keys are. Pure."""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Numbering(Generic[K]):
    """A key keeps its number while it is among the last ``size`` distinct ones."""

    def __init__(self, size: int, first: int = 0) -> None:
        """Numbers begin with ``first``."""
        self._size = size
        self._first = first
        self._numbers: OrderedDict[K, int] = OrderedDict()

    def number(self, key: K) -> int:
        """The number of ``key``; a new one gets that of the key that was not seen for longest."""
        number = self._numbers.get(key)
        if number is None:
            number = self._first + len(self._numbers)
            if len(self._numbers) == self._size:
                _, number = self._numbers.popitem(last=False)
            self._numbers[key] = number
        self._numbers.move_to_end(key)
        return number

    def entries(self) -> list[tuple[K, int]]:
        """Keys and their numbers, seen last at the end."""
        return list(self._numbers.items())
