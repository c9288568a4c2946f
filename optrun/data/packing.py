"""Pack documents of unequal length into few blocks, without cutting any."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from optrun.data.cache import cached_result, digest
from optrun.data.cached_arrays import cached_arrays
from optrun.data.examples import Example, Examples, Selected
from optrun.data.heartbeat import send_heartbeat

DOCUMENT_LENGTHS = "sizes"
"""Name under which a packed example says how long its documents are."""
_VALUES_AT_ONCE = 1 << 16


def best_fit(lengths: np.ndarray, room: int) -> tuple[np.ndarray, np.ndarray]:
    """Assign documents to blocks by best-fit decreasing (Johnson 1973).

    The longest document comes first; each goes into the fullest block that has space for it, else
    into a new one.

    Args:
        lengths: Tokens of each document, from 1 to `room`; shape (n,), int64.
        room: Tokens of a block.

    Returns:
        Numbers of the documents, block after block, shape (n,); and where in it each block begins
        and the last one ends, shape (blocks + 1,), int64.

    Example:
        >>> order, borders = best_fit(np.array([5, 3, 8, 2]), 8)
        >>> [order[a:b].tolist() for a, b in zip(borders, borders[1:])]
        [[2], [0, 1], [3]]
    """
    by_length = np.argsort(-lengths, kind="stable")  # documents, longest first
    block_of = np.empty(len(lengths), dtype=np.int64)  # the block of each of these
    blocks_by_space: dict[int, list[int]] = defaultdict(list)  # by their free tokens
    spaces: list[int] = []  # numbers of free tokens that a block has, ascending, each once
    blocks = 0
    for rank, length in enumerate(_whole_numbers(lengths[by_length])):
        # 1. Take a block out of those with the smallest space that is enough, else a new one.
        smallest = bisect_left(spaces, length)
        if smallest < len(spaces):
            space = spaces[smallest]
            block = blocks_by_space[space].pop()
            if not blocks_by_space[space]:
                del spaces[smallest]
        else:
            space = room
            block = blocks
            blocks += 1
        # 2. Put the document into it, and the block back by its new space, unless it is full.
        block_of[rank] = block
        space -= length
        if space:
            if not blocks_by_space[space]:
                insort(spaces, space)
            blocks_by_space[space].append(block)
    # 3. Sort the documents by their blocks; within a block the longest stays first.
    order = by_length[np.argsort(block_of, kind="stable")]
    sizes = np.bincount(block_of, minlength=blocks)
    borders = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    return order, borders


def _whole_numbers(values: np.ndarray) -> Iterator[int]:
    """Yield the numbers of an array as Python integers, few in memory at a time.

    A list of all would take four times the memory of the array.
    """
    for at in range(0, len(values), _VALUES_AT_ONCE):
        send_heartbeat()
        yield from values[at : at + _VALUES_AT_ONCE].tolist()


class Packed:
    """Examples of several documents each; the plan of the blocks is cached.

    An example has the values of its documents one behind the other, and their lengths as `sizes`.

    Args:
        documents: Examples of one document each, whose values all have the length of the document.
        room: Largest number of tokens of a block.

    Attributes:
        documents: The documents.
        lengths: Tokens of each block; shape (blocks,), int64.
        lost: None, since packing cuts nothing.
    """

    lost: np.ndarray | None = None

    def __init__(self, documents: Examples | Selected, room: int) -> None:
        self.documents = documents
        self.room = room
        self._key = digest("best-fit-1", documents.fingerprint(), str(room))
        plan = cached_arrays("packing", self._key, self._plan)
        self._order = plan["order"]
        self._borders = plan["borders"]
        self.lengths = plan["lengths"]

    def _plan(self) -> dict[str, np.ndarray]:
        """Assign documents to blocks, and count the tokens of each block.

        Returns:
            What `best_fit` returns, as `order` and `borders`, and `lengths`, shape (blocks,).
        """
        sizes = np.asarray(self.documents.lengths)
        order, borders = best_fit(sizes, self.room)
        lengths = sizes
        if len(order):  # the sums between the borders
            lengths = np.add.reduceat(sizes[order], borders[:-1])
        return {"order": order, "borders": borders, "lengths": lengths}

    def __len__(self) -> int:
        return len(self._borders) - 1

    def __getitem__(self, index: int) -> Example:
        inside = self._order[self._borders[index] : self._borders[index + 1]]
        parts = [self.documents[int(number)] for number in inside]
        example: Example = {
            name: np.concatenate([part[name] for part in parts]) for name in parts[0]
        }
        sizes = [len(next(iter(part.values()))) for part in parts]
        return {**example, DOCUMENT_LENGTHS: np.array(sizes, dtype=np.int64)}

    @property
    def hashes(self) -> np.ndarray | None:
        """Of the documents."""
        return self.documents.hashes

    @property
    def origin(self) -> str | None:
        """Digest of the origin of the documents."""
        return self.documents.origin

    def fingerprint(self) -> str:
        """Digest of the documents and of how they are packed."""
        return cached_result(self._key, self._fingerprint)

    def _fingerprint(self) -> str:
        return digest("packed", self.documents.fingerprint(), str(self.room), self._order.tobytes())
