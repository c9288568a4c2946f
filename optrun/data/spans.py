"""Ranges over consecutive parts, and a cache of the parts that were read last."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TypeVar

import numpy as np

Key = TypeVar("Key", bound=Hashable)
Part = TypeVar("Part")


def spans(ends: np.ndarray | Sequence[int], begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Split a range at the borders of consecutive parts.

    Args:
        ends: Where each part ends and the next one begins; ascending. Parts may be empty.
        begin: First position of the range.
        end: One past its last position; at most the end of the last part. The range is empty if it
            is not above `begin`.

    Yields:
        The number of a part, and begin and end of the range inside of it.

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
    """A cache of the parts that were read last.

    Args:
        capacity: How many stay; it may be changed later.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity

    def read(self, key: Key, read: Callable[[], Part]) -> Part:
        """Return a part, by `read` if it is not here; then drop the least recently used ones."""
        if key not in self:
            self[key] = read()
            while len(self) > self.capacity:
                self.popitem(last=False)
        self.move_to_end(key)
        return self[key]
