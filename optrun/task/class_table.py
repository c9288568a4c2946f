"""Figures of each class over an evaluation set.

Precision, recall, f1 and support, and which was taken for which.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class ClassFigures:
    """One class, or a mean over classes."""

    name: str
    precision: float
    """Share of what was predicted as it that is right; 0 where nothing was."""
    recall: float
    """Share of what is it that was found; 0 where there is none."""
    f1: float
    support: int
    """How many there are."""


@dataclass(frozen=True)
class ClassTable:
    """All classes of an evaluation set.

    Attributes:
        noun: What a row is: `class`, `label` or `entity`.
        rows: In the order of the classes.
        means: `micro` where one example may have any number of them, `macro`, `weighted` by
            support.
        labels: Of the confusion matrix.
        confusion: Counts, rows are true classes, columns predicted ones; shape (labels, labels).
            None: there is none.
    """

    noun: str
    rows: list[ClassFigures]
    means: list[ClassFigures]
    labels: list[str]
    confusion: np.ndarray | None


def table_of_classes(labels: Sequence[str], counts: np.ndarray) -> ClassTable:
    """Tabulate counts if each example, or word, is of one class.

    Args:
        labels: Names by number.
        counts: Rows are true classes, columns predicted ones; shape (classes, classes).
    """
    right = np.diag(counts)
    predicted = counts.sum(axis=0)
    actual = counts.sum(axis=1)
    columns = zip(labels, right.tolist(), predicted.tolist(), actual.tolist(), strict=True)
    rows = [_figures(*column) for column in columns]
    return ClassTable("class", rows, _means(rows), list(labels), counts)


def table_of_labels(labels: Sequence[str], counts: np.ndarray) -> ClassTable:
    """Tabulate counts of multi-label examples, without confusions between labels.

    Args:
        labels: Names by number.
        counts: Right, predicted and true ones; shape (3, labels).
    """
    return _table_of_counts("label", dict(zip(labels, counts.T.tolist(), strict=True)))


def table_of_entities(counts: Mapping[str, Sequence[int]]) -> ClassTable:
    """Tabulate whole entities by type; right if type and both borders are.

    Args:
        counts: Right, predicted and true ones of each type.
    """
    return _table_of_counts("entity", counts)


def _table_of_counts(noun: str, counts: Mapping[str, Sequence[int]]) -> ClassTable:
    rows = [_figures(name, *column) for name, column in counts.items()]
    columns = np.array(list(counts.values()), dtype=np.int64).reshape(-1, 3)
    right, predicted, actual = columns.sum(axis=0).tolist()
    micro = _figures("micro mean", right, predicted, actual)
    return ClassTable(noun, rows, [micro, *_means(rows)], [], None)


def _figures(name: str, right: int, predicted: int, actual: int) -> ClassFigures:
    """Compute precision, recall and f1 of counts; 0/0 is 0, as in scikit-learn."""
    return ClassFigures(
        name,
        precision=right / predicted if predicted else 0.0,
        recall=right / actual if actual else 0.0,
        f1=2 * right / (predicted + actual) if predicted + actual else 0.0,
        support=actual,
    )


def _means(rows: Sequence[ClassFigures]) -> list[ClassFigures]:
    """Compute the plain mean over classes, and the one weighted by support."""
    total = sum(row.support for row in rows)

    def mean(name: str, weights: Sequence[float]) -> ClassFigures:
        total_weight = sum(weights)

        def weighted(figures: Sequence[float]) -> float:
            if not total_weight:
                return 0.0
            pairs = zip(weights, figures, strict=True)
            return sum(weight * figure for weight, figure in pairs) / total_weight

        precision = weighted([row.precision for row in rows])
        recall = weighted([row.recall for row in rows])
        f1 = weighted([row.f1 for row in rows])
        return ClassFigures(name, precision, recall, f1, total)

    return [
        mean("macro mean", [1.0] * len(rows)),
        mean("weighted mean", [row.support for row in rows]),
    ]
