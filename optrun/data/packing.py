"""Documents of unequal length in few blocks: each whole, none cut, as little left empty as can be."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

from optrun.data.cache import digest
from optrun.data.examples import Example

SIZES = "sizes"
"""Name under which a packed example says how long its documents are."""


def best_fit(lengths: np.ndarray, room: int) -> tuple[np.ndarray, np.ndarray]:
    """Put documents into blocks by best fit, longest first (Johnson 1973).

    Args:
        lengths: Of each document, from 1 to `room`; shape (n,), int64.
        room: Of a block.

    Returns:
        The documents in the order in which they stand in the blocks, shape (n,), and where in it each block begins and
        the last one ends, shape (blocks + 1,), int64. A pure function of the lengths.

    Example:
        >>> order, borders = best_fit(np.array([5, 3, 8, 2]), 8)
        >>> [order[a:b].tolist() for a, b in zip(borders, borders[1:])]
        [[2], [0, 1], [3]]
    """
    blocks: list[list[int]] = []
    by_space: dict[int, list[int]] = defaultdict(list)
    spaces = 0  # bit s: there is a block with s tokens of space
    for index in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[index])
        enough = spaces >> length
        if enough:
            space = length + (enough & -enough).bit_length() - 1
            block = by_space[space].pop()
            if not by_space[space]:
                spaces &= ~(1 << space)
        else:
            space, block = room, len(blocks)
            blocks.append([])
        blocks[block].append(index)
        if space > length:
            by_space[space - length].append(block)
            spaces |= 1 << (space - length)
    order = np.array([index for block in blocks for index in block], dtype=np.int64)
    return order, np.cumsum([0, *map(len, blocks)], dtype=np.int64)


class Packed:
    """Examples of several documents each.

    Args:
        documents: One each, with flat values of one length alone, and `lengths`.
        room: Tokens of a block, at most.

    Attributes:
        documents: As given.
        lost: None: what was cut, was cut from the documents.
    """

    lost: np.ndarray | None = None

    def __init__(self, documents: Any, room: int) -> None:
        self.documents = documents
        self.room = room
        self._sizes: np.ndarray = np.asarray(documents.lengths)
        self._order, self._borders = best_fit(self._sizes, room)

    def __len__(self) -> int:
        return len(self._borders) - 1

    def __getitem__(self, index: int) -> Example:
        inside = self._order[self._borders[index] : self._borders[index + 1]]
        parts = [self.documents[int(number)] for number in inside]
        example: Example = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        return {**example, SIZES: self._sizes[inside]}

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each block; shape (blocks,), int64."""
        found: np.ndarray = np.add.reduceat(self._sizes[self._order], self._borders[:-1])
        return found

    @property
    def hashes(self) -> np.ndarray | None:
        """Of the documents."""
        found: np.ndarray | None = self.documents.hashes
        return found

    def fingerprint(self) -> str:
        """Digest of the documents and of how they are packed."""
        return digest("packed", self.documents.fingerprint(), str(self.room), self._order.tobytes())
