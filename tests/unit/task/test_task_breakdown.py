"""Figures of each class, against scikit-learn and an entity count by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.metrics import classification_report, confusion_matrix
from transformers.utils.generic import ModelOutput

from optrun.task.breakdown import ClassBreakdown, ClassTable, EntityBreakdown, LabelBreakdown

NAMES = ["red", "green", "blue", "never"]


KEYS = ("precision", "recall", "f1", "support")


def as_reported(table: ClassTable) -> dict[str, list[float]]:
    return {row.name: [getattr(row, key) for key in KEYS] for row in [*table.rows, *table.means]}


def as_wanted(table: ClassTable, report: dict[str, dict[str, float]], means: dict[str, str]) -> None:
    found = as_reported(table)
    names = {**{name: name for name in NAMES}, **means}
    assert list(found) == list(names)
    for ours, theirs in names.items():
        assert found[ours] == pytest.approx(list(report[theirs].values())), ours


def test_classes() -> None:
    randomness = np.random.default_rng(1)
    made, there = randomness.integers(3, size=90), randomness.integers(3, size=90)
    breakdown = ClassBreakdown(NAMES, lambda outputs, batch: (outputs.made, batch["there"]))
    for at in (slice(0, 40), slice(40, 90)):
        breakdown.update(ModelOutput(made=made[at]), {"there": there[at]})  # type: ignore[dict-item]
    table = breakdown.table()
    report = classification_report(there, made, labels=range(4), target_names=NAMES, output_dict=True, zero_division=0)
    means = {"macro mean": "macro avg", "weighted mean": "weighted avg"}
    as_wanted(table, report, means)
    assert table.confusion is not None
    assert table.confusion.tolist() == confusion_matrix(there, made, labels=range(4)).tolist()


def test_labels() -> None:
    randomness = np.random.default_rng(2)
    made, there = ((randomness.random((50, 4)) < share).astype(np.int64) for share in (0.3, 0.5))
    made[:, 3] = 0
    breakdown = LabelBreakdown(NAMES, lambda outputs, batch: (outputs.made, batch["there"]))
    breakdown.update(ModelOutput(made=made), {"there": there})  # type: ignore[dict-item]
    report = classification_report(there, made, target_names=NAMES, output_dict=True, zero_division=0)
    means = {"micro mean": "micro avg", "macro mean": "macro avg", "weighted mean": "weighted avg"}
    as_wanted(breakdown.table(), report, means)


def test_entities() -> None:
    labels = ["B-LOC", "I-LOC", "B-PER", "O"]
    right = torch.tensor([[0, 1, 3, 2, -100], [3, 2, 3, 0, 1]])
    found = torch.tensor([[0, 1, 3, 0, 0], [2, 2, 3, 0, 3]])
    breakdown = EntityBreakdown(labels)
    breakdown.update(ModelOutput(logits=torch.nn.functional.one_hot(found, 4).float()), {"labels": right})
    table = as_reported(breakdown.table())
    # Places: one of three predicted is right, one of two found. Persons: one of two, one of two.
    assert table["LOC"] == pytest.approx([1 / 3, 1 / 2, 2 / 5, 2])
    assert table["PER"] == pytest.approx([1 / 2, 1 / 2, 1 / 2, 2])
    assert table["micro mean"] == pytest.approx([2 / 5, 2 / 4, 4 / 9, 4])
    assert table["macro mean"] == pytest.approx([5 / 12, 1 / 2, 9 / 20, 4])
