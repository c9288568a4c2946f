"""Ranges over parts that lie one behind the other, and a memory of the parts read last."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TypeVar

import numpy as np

Key = TypeVar("Key", bound=Hashable)
Part = TypeVar("Part")


def spans(ends: np.ndarray | Sequence[int], begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Split a range at the borders of parts.

    Args:
        ends: Where each part ends, and the next one begins; in order.
        begin: Of the range.
        end: One past its last place; no further than the last part.

    Yields:
        The number of a part, and the range inside of it.

    Example:
        >>> list(spans([3, 3, 10], 1, 5))
        [(0, 1, 3), (2, 0, 2)]
    """
    while begin < end:
        number = bisect_right(ends, begin)
        before = int(ends[number - 1]) if number else 0
        last = min(end, int(ends[number]))
        yield number, begin - before, last - before
        begin = last


class RecentlyRead(OrderedDict[Key, Part]):
    """A memory of the parts read last; a dropped one is read again.

    Args:
        most: How many stay.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def read(self, key: Key, read: Callable[[], Part]) -> Part:
        """Return a part, and drop the least recently used ones."""
        if key not in self:
            self[key] = read()
            while len(self) > self.most:
                self.popitem(last=False)
        self.move_to_end(key)
        return self[key]
