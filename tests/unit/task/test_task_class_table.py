"""Figures of each class, against scikit-learn and an entity count by hand.

Several parts are merged as ranks' are.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import classification_report, confusion_matrix
from transformers.utils.generic import ModelOutput

from optrun.task.class_table import ClassTable
from optrun.task.evaluation import EvaluationMetrics, MeanLoss, MetricAccumulator
from optrun.task.label_sets import LabelSetMetrics
from optrun.task.token_classification import WordMetrics

NAMES = ["red", "green", "blue", "never"]
KEYS = ("precision", "recall", "f1", "support")


def outputs(classes: np.ndarray | torch.Tensor, count: int = 4) -> Any:
    logits = torch.nn.functional.one_hot(torch.as_tensor(classes), count).float()
    return ModelOutput(loss=torch.tensor(0.5), logits=logits)


def table_of(*parts: MetricAccumulator) -> ClassTable:
    parts[0].merge([part.partial() for part in parts])
    table = parts[0].table()
    assert table is not None
    return table


def as_reported(table: ClassTable) -> dict[str, list[float]]:
    return {row.name: [getattr(row, key) for key in KEYS] for row in [*table.rows, *table.means]}


def as_wanted(
    table: ClassTable, report: dict[str, dict[str, float]], means: dict[str, str]
) -> None:
    found = as_reported(table)
    names = {**{name: name for name in NAMES}, **means}
    assert list(found) == list(names)
    for ours, theirs in names.items():
        assert found[ours] == pytest.approx(list(report[theirs].values())), ours


def test_classes() -> None:
    randomness = np.random.default_rng(1)
    made, there = randomness.integers(3, size=90), randomness.integers(3, size=90)

    def metrics(at: slice) -> EvaluationMetrics:
        found = EvaluationMetrics(
            MeanLoss(lambda batch: len(batch["labels"])),
            {"one": lambda *_: 1.0},
            lambda outputs, batch: (outputs.logits.argmax(-1).numpy(), batch["labels"].numpy()),
            len(NAMES),
            NAMES,
        )
        found.update(outputs(made[at]), {"labels": torch.tensor(there[at])})
        return found

    table = table_of(metrics(slice(0, 40)), metrics(slice(40, 90)))
    report = classification_report(
        there, made, labels=range(4), target_names=NAMES, output_dict=True, zero_division=0
    )
    as_wanted(table, report, {"macro mean": "macro avg", "weighted mean": "weighted avg"})
    assert table.confusion is not None
    assert table.confusion.tolist() == confusion_matrix(there, made, labels=range(4)).tolist()


def test_labels() -> None:
    randomness = np.random.default_rng(2)
    made, there = ((randomness.random((50, 4)) < share).astype(np.int64) for share in (0.3, 0.5))
    made[:, 3] = 0

    def metrics(at: slice) -> LabelSetMetrics:
        found = LabelSetMetrics(NAMES)
        logits = torch.tensor(made[at] * 2.0 - 1)
        found.update(
            ModelOutput(loss=torch.tensor(0.5), logits=logits),
            {"labels": torch.tensor(there[at]).float()},
        )
        return found

    report = classification_report(
        there, made, target_names=NAMES, output_dict=True, zero_division=0
    )
    means = {"micro mean": "micro avg", "macro mean": "macro avg", "weighted mean": "weighted avg"}
    as_wanted(table_of(metrics(slice(0, 20)), metrics(slice(20, 50))), report, means)


def words(
    labels: list[str], found: list[list[int]], right: list[list[int]], *, entities: bool
) -> ClassTable:
    parts = []
    for one, other in zip(found, right, strict=True):
        parts.append(WordMetrics(labels, whole_entities=entities))
        parts[-1].update(outputs(torch.tensor([one])), {"labels": torch.tensor([other])})
    return table_of(*parts)


RIGHT, FOUND = [[0, 1, 3, 2, -100], [3, 2, 3, 0, 1]], [[0, 1, 3, 0, 0], [2, 2, 3, 0, 3]]


def test_entities() -> None:
    table = as_reported(words(["B-LOC", "I-LOC", "B-PER", "O"], FOUND, RIGHT, entities=True))
    # Places: one of three predicted is right, one of two found. Persons: one of two, one of two.
    assert table["LOC"] == pytest.approx([1 / 3, 1 / 2, 2 / 5, 2])
    assert table["PER"] == pytest.approx([1 / 2, 1 / 2, 1 / 2, 2])
    assert table["micro mean"] == pytest.approx([2 / 5, 2 / 4, 4 / 9, 4])
    assert table["macro mean"] == pytest.approx([5 / 12, 1 / 2, 9 / 20, 4])


def test_words_by_label() -> None:
    table = words(NAMES, FOUND, RIGHT, entities=False)
    assert table.confusion is not None
    flat = [[label for row in side for label in row] for side in (RIGHT, FOUND)]
    known = [pair for pair in zip(*flat, strict=True) if pair[0] >= 0]
    assert (
        table.confusion.tolist()
        == confusion_matrix(*zip(*known, strict=True), labels=range(4)).tolist()
    )
