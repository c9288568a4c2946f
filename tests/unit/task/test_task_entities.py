from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optrun.task.entities import Tally, continuations, entities, is_iob2

labels = st.lists(st.sampled_from(["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]), max_size=12)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("O O", []),
        ("B-PER I-PER O", [("PER", 0, 2)]),
        ("B-PER B-PER", [("PER", 0, 1), ("PER", 1, 2)]),
        ("O I-PER I-PER", [("PER", 1, 3)]),  # an I- that follows nothing begins one
        ("B-PER I-LOC", [("PER", 0, 1), ("LOC", 1, 2)]),
        ("B-PER O I-PER", [("PER", 0, 1), ("PER", 2, 3)]),
        ("B-a-b I-a-b", [("a-b", 0, 2)]),
    ],
)
def test_entities(given: str, expected: list[tuple[str, int, int]]) -> None:
    assert entities(given.split()) == expected


@given(labels)
def test_entities_cover_what_is_not_o(row: list[str]) -> None:
    covered = [place for _, begin, end in entities(row) for place in range(begin, end)]
    assert covered == [place for place, label in enumerate(row) if label != "O"]


def test_tally_by_hand() -> None:
    tally = Tally()
    actual = ["B-PER", "I-PER", "O", "B-LOC", "O", "B-LOC"]
    tally.add(["B-PER", "I-PER", "O", "B-PER", "O", "O"], actual)  # one right, one of the wrong type, one missed
    tally.add(["B-PER", "O"], ["B-PER", "I-PER"])  # a wrong border is wrong
    assert (tally.predicted, tally.actual, tally.right) == (3, 4, 1)
    assert (tally.precision, tally.recall) == (1 / 3, 1 / 4)
    assert tally.f1 == pytest.approx(2 / 7)


def test_tally_of_nothing() -> None:
    assert (Tally().precision, Tally().recall, Tally().f1) == (0.0, 0.0, 0.0)


@given(labels)
def test_a_perfect_prediction(row: list[str]) -> None:
    tally = Tally()
    tally.add(row, row)
    assert tally.f1 == (1.0 if any(label != "O" for label in row) else 0.0)


def test_schemes() -> None:
    assert is_iob2(["O", "B-X", "I-X"])
    assert is_iob2(["O", "B-X"])
    assert not is_iob2(["B-X", "I-X"])
    assert not is_iob2(["O", "S-X", "B-X"])
    assert not is_iob2(["O", "I-X"])
    assert continuations(["O", "B-X", "I-X", "B-Y"]) == [0, 2, 2, 3]
