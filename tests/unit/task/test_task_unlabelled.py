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
