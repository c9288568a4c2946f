"""Best fit: every document whole and once, no block too long, few blocks."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from optrun.data.examples import Examples
from optrun.data.packing import DOCUMENT_LENGTHS, Packed, best_fit


@given(
    st.integers(2, 300).flatmap(
        lambda room: st.tuples(st.just(room), st.lists(st.integers(1, room), max_size=60))
    )
)
def test_every_document_stands_in_one_block(drawn: tuple[int, list[int]]) -> None:
    room, found = drawn
    lengths = np.array(found, dtype=np.int64)
    order, borders = best_fit(lengths, room)
    assert sorted(order.tolist()) == list(range(len(lengths)))
    assert (borders[0], borders[-1]) == (0, len(lengths))
    fills = [int(lengths[order[a:b]].sum()) for a, b in pairwise(borders)]
    assert all(0 < fill <= room for fill in fills)
    assert not [
        (one, other)
        for place, one in enumerate(fills)
        for other in fills[place + 1 :]
        if one + other <= room
    ], "two blocks that would have gone into one"


def test_the_fullest_block_that_has_room_is_taken() -> None:
    order, borders = best_fit(np.array([6, 7, 3, 4, 2]), 10)
    blocks = [order[a:b].tolist() for a, b in pairwise(borders)]
    assert blocks == [[1, 2], [0, 3], [4]]


def test_a_block_says_where_its_documents_end() -> None:
    lengths = [3, 5, 2, 4]
    flat = np.arange(sum(lengths), dtype=np.int32)
    documents = Examples(
        np.cumsum([0, *lengths]),
        {"input_ids": flat, "targets": flat % 2},
        hashes=np.arange(4, dtype=np.uint64),
    )
    packed = Packed(documents, 8)
    assert [packed[number][DOCUMENT_LENGTHS].tolist() for number in range(len(packed))] == [
        [5, 3],
        [4, 2],
    ]
    assert packed[0]["input_ids"].tolist() == [3, 4, 5, 6, 7, 0, 1, 2]
    assert packed[0]["targets"].tolist() == [1, 0, 1, 0, 1, 0, 1, 0]
    assert packed.lengths.tolist() == [8, 6]
    assert packed.hashes is documents.hashes
    assert packed.fingerprint() == Packed(documents, 8).fingerprint()
    assert (
        len({packed.fingerprint(), documents.fingerprint(), Packed(documents, 9).fingerprint()})
        == 3
    )
