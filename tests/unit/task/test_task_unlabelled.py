"""One rule for rows and words without a label, in every task: refused with their number."""

from __future__ import annotations

from typing import Any

import pytest

from optrun.base.errors import ConfigError

Make = Any
TEXTS = [f"text {number}" for number in range(40)]


@pytest.mark.parametrize(
    ("labels", "told"),
    [
        ([0, 1, 2, -1], "10 labels in column label are '-1'"),
        (["0", "1", "2", "-1"], "10 labels in column label are '-1'"),
        ([0, 1, -100, 1], "10 labels in column label are '-100'"),
        (["entailment", "neutral", "contradiction", "-"], "10 labels in column label are '-'"),
        (["a", "b", " ", "a"], "row 3 has an empty label in column label"),
        ([-1, 0, 1, 0], None),
        ([-1, 1, 1, -1], None),
        (["+", "-", "+", "-"], None),
    ],
)
def test_rows_without_a_label(
    make_source: Make, make_task: Make, labels: list[Any], told: str | None
) -> None:
    source = make_source({"text": TEXTS, "label": labels * 10})
    if told is None:
        make_task("sequence_classification", source)
        return
    with pytest.raises(ConfigError, match=told):
        make_task("sequence_classification", source)


@pytest.mark.parametrize(
    ("task", "column", "cell", "options"),
    [
        ("sequence_classification", "label", lambda label: label, {}),
        (
            "sequence_classification",
            "labels",
            lambda label: [label],
            {"problem_type": "multi_label_classification"},
        ),
        ("token_classification", "tags", lambda label: [label, label], {}),
    ],
)
def test_minus_one_beside_0_and_1_is_told_with_its_number(
    make_source: Make, make_task: Make, task: str, column: str, cell: Any, options: Any
) -> None:
    """A sentiment, or SNLI's sign for no label: only a person knows."""
    rows: dict[str, list[Any]] = {column: [cell(label) for label in [-1, 0, 1, 0] * 10]}
    is_tagged = task == "token_classification"
    rows["tokens" if is_tagged else "text"] = [["a", "b"]] * 40 if is_tagged else TEXTS
    source = make_source(rows)
    made = make_task(task, source, **options)
    assert made.labels == ["-1", "0", "1"]
    count = 20 if is_tagged else 10
    told = f"data.train: {count} labels in column {column} are -1, a class like 0 and 1"
    assert [note for note in source.notes if told in note]


@pytest.mark.parametrize("tags", [[0, 1, -100], ["O", "B-X", "-100"]])
def test_words_without_a_label(make_source: Make, make_task: Make, tags: list[Any]) -> None:
    source = make_source({"tokens": [["a", "b", "c"]] * 8, "tags": [tags] * 8})
    with pytest.raises(ConfigError, match="labels in column tags are '-100'"):
        make_task("token_classification", source)


@pytest.mark.parametrize("kind", [float, int, bool])
def test_lists_of_0_and_1_for_each_label_are_refused(
    make_source: Make, make_task: Make, kind: type
) -> None:
    rows = [[1, 0, 1], [0, 0, 1], [0, 0, 0], [1, 1, 0]] * 10
    labels = [[kind(value) for value in row] for row in rows]
    source = make_source({"text": TEXTS, "labels": labels})
    with pytest.raises(ConfigError, match="for each of 3 labels"):
        make_task("sequence_classification", source, problem_type="multi_label_classification")


def test_numbers_of_minus_100_are_told(make_source: Make, make_task: Make) -> None:
    """They may be numbers, such as temperatures."""
    source = make_source({"text": TEXTS, "label": [0.5, -100.0, 2.0, 1.0] * 10})
    make_task("sequence_classification", source, problem_type="regression")
    assert source.notes[0].startswith("data.train: 10 of the numbers to learn are -100")


@pytest.mark.parametrize(
    "pair", ["01", ["0.0", "1.0"], ["-1", "1"], ["False", "True"], ["no", "Yes"]]
)
def test_indicators_in_any_spelling_are_no_names(
    make_source: Make, make_task: Make, pair: Any
) -> None:
    labels = [[pair[row % 2], pair[1], pair[0]] for row in range(40)]
    source = make_source({"text": TEXTS, "labels": labels})
    with pytest.raises(ConfigError, match="a 0 or 1 for each of 3 labels"):
        make_task("sequence_classification", source, problem_type="multi_label_classification")
