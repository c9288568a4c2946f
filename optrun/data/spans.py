"""The one reader of what lies in parts, one behind the other.

Which of them a range needs, and those used last.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TypeVar

import numpy as np

Place = TypeVar("Place", bound=Hashable)
Part = TypeVar("Part")


def spans(ends: np.ndarray | Sequence[int], begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield the parts that a range reaches into.

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


class RecentlyRead(OrderedDict[Place, Part]):
    """The parts that were used last, each read again once it was dropped.

    None of them goes to another process.

    Args:
        most: How many stay.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def __reduce__(self) -> tuple[type[RecentlyRead[Place, Part]], tuple[int]]:
        """Leave the parts out."""
        return type(self), (self.most,)

    def read(self, place: Place, read: Callable[[], Part]) -> Part:
        """Return the part at a place, and drop those that were not used for longest."""
        if place not in self:
            self[place] = read()
            while len(self) > self.most:
                self.popitem(last=False)
        self.move_to_end(place)
        return self[place]
