from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optrun.task.class_table import ClassFigures, table_of_counts
from optrun.task.entities import count_entities, entities, scheme_of
from tests.reference.record_entities import FILE, PREFIXES, drawn_entities, written

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
        ("I-PER I-PER B-PER", [("PER", 0, 2), ("PER", 2, 3)]),
        ("I-PER E-PER E-PER I-PER", [("PER", 0, 2), ("PER", 2, 3), ("PER", 3, 4)]),
        ("S-PER B-PER I-PER E-PER O S-LOC", [("PER", 0, 1), ("PER", 1, 4), ("LOC", 5, 6)]),
        ("U-PER B-PER L-PER U-PER", [("PER", 0, 1), ("PER", 1, 3), ("PER", 3, 4)]),
    ],
)
def test_entities(given: str, expected: list[tuple[str, int, int]]) -> None:
    assert entities(given.split()) == expected


@given(labels)
def test_entities_cover_what_is_not_o(row: list[str]) -> None:
    covered = [place for _, begin, end in entities(row) for place in range(begin, end)]
    assert covered == [place for place, label in enumerate(row) if label != "O"]


def micro(texts: list[tuple[list[str], list[str]]]) -> ClassFigures:
    """Figures over the entities of all types."""
    counts = count_entities(texts)
    types = sorted({kind for kind, _ in counts})
    columns = np.array([[counts[kind, at] for kind in types] for at in range(3)], dtype=int)
    return table_of_counts("entity", types, columns).means[0]


def test_counts_by_hand() -> None:
    actual = ["B-PER", "I-PER", "O", "B-LOC", "O", "B-LOC"]
    first = (
        ["B-PER", "I-PER", "O", "B-PER", "O", "O"],
        actual,
    )  # one right, one of the wrong type, one missed
    second = (["B-PER", "O"], ["B-PER", "I-PER"])  # a wrong border is wrong
    counts = count_entities([first, second])
    assert counts == {("PER", 0): 1, ("PER", 1): 3, ("PER", 2): 2, ("LOC", 2): 2}
    assert counts == count_entities([first]) + count_entities([second])
    found = micro([first, second])
    assert (found.precision, found.recall, found.support) == (1 / 3, 1 / 4, 4)
    assert found.f1 == pytest.approx(2 / 7)


def test_counts_of_nothing() -> None:
    found = micro([(["O"], ["O"])])
    assert (found.precision, found.recall, found.f1) == (0.0, 0.0, 0.0)


@given(labels)
def test_a_perfect_prediction(row: list[str]) -> None:
    assert micro([(row, row)]).f1 == (1.0 if any(label != "O" for label in row) else 0.0)


@pytest.mark.parametrize(
    "case", json.loads(FILE.read_text(encoding="utf-8"))["cases"], ids=lambda case: case["scheme"]
)
def test_what_seqeval_counts(case: dict[str, Any]) -> None:
    """Its default on all labels; its strict mode, too, where the labels are those of a scheme."""
    tally = micro(list(zip(case["predicted"], case["actual"], strict=True)))
    for mode in ("default", "strict"):
        if mode in case:
            assert (tally.precision, tally.recall, tally.f1) == pytest.approx(
                case[mode], abs=1e-12
            ), mode


@pytest.mark.parametrize("scheme", PREFIXES)
def test_a_sentence_has_the_entities_it_was_written_with(scheme: str) -> None:
    draw = random.Random(1)
    for _ in range(200):
        stretches, wanted, place = drawn_entities(draw), [], 0
        for kind, length in stretches:
            wanted += [] if kind is None else [(kind, place, place + length)]
            place += length
        assert entities(written(stretches, scheme)) == wanted


@pytest.mark.parametrize(
    ("labels", "scheme"),
    [
        ("O B-X I-X", "IOB"),
        ("O B-X", "IOB"),
        ("B-X I-X", "IOB"),  # a file without any O
        ("O I-X I-Y", "IOB"),
        ("I-X E-X", "IOE"),
        ("O S-X B-X", "IOBES"),
        ("S-X S-Y", "IOBES"),
        ("B-X E-X", "IOBES"),
        ("O B-X L-X U-X", "BILOU"),
        ("O B-X L-X E-X", None),  # of two schemes at once
        ("O B- I-", None),
        ("O", None),
        ("B I O", None),
        ("NOUN VERB", None),
        ("O B-X ADJ", None),
    ],
)
def test_schemes(labels: str, scheme: str | None) -> None:
    assert scheme_of(labels.split()) == scheme
