"""Precision, recall, F1 and support of each class over an evaluation set, and the confusion matrix.

0/0 is 0 everywhere, as in scikit-learn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class ClassFigures:
    """One class, or a mean over classes."""

    name: str
    precision: float
    """Share of the predictions of this class that are right; 0 if it is never predicted."""
    recall: float
    """Share of the examples of this class that are predicted right; 0 if there are none."""
    f1: float
    support: int
    """Number of examples of this class."""


@dataclass(frozen=True)
class ClassTable:
    """All classes of an evaluation set.

    Attributes:
        noun: What a row is: `class`, `label` or `entity`.
        rows: In the order of the classes.
        means: `micro mean` if an example may have any number of labels, then `macro mean` (plain)
            and `weighted mean` (by support).
        labels: Labels of the confusion matrix; empty if there is none.
        confusion: Counts, shape (labels, labels): rows are true classes, columns predicted ones.
            None: an example may have any number of labels.
    """

    noun: str
    rows: list[ClassFigures]
    means: list[ClassFigures]
    labels: list[str]
    confusion: np.ndarray | None


def table_of_classes(labels: Sequence[str], counts: np.ndarray) -> ClassTable:
    """Tabulate a confusion matrix: each example, or word, has exactly one class.

    Args:
        labels: Names by class number.
        counts: Confusion matrix, shape (classes, classes): rows are true classes, columns
            predicted ones.
    """
    right = np.diag(counts)
    predicted = counts.sum(axis=0)
    actual = counts.sum(axis=1)
    rows = _figures(labels, np.stack([right, predicted, actual]))
    return ClassTable("class", rows, _means(rows), list(labels), counts)


def table_of_counts(noun: str, names: Sequence[str], counts: np.ndarray) -> ClassTable:
    """Tabulate counts if an example may have any number of labels, or of entities.

    The table has a `micro mean`, over all labels together, and no confusion matrix.

    Args:
        noun: `label` or `entity`.
        names: The labels, or the types of entities.
        counts: Right, predicted and true ones; shape (3, names).
    """
    rows = _figures(names, counts)
    micro = _figures(["micro mean"], counts.sum(axis=1, keepdims=True))
    return ClassTable(noun, rows, [*micro, *_means(rows)], [], None)


def _figures(names: Sequence[str], counts: np.ndarray) -> list[ClassFigures]:
    """Compute precision, recall, F1 and support of each name.

    counts: Right, predicted and true ones; shape (3, names).
    """
    right, predicted, actual = counts
    precision = _ratio(right, predicted)
    recall = _ratio(right, actual)
    f1 = _ratio(2 * right, predicted + actual)
    columns = (precision.tolist(), recall.tolist(), f1.tolist(), actual.tolist())
    return [ClassFigures(*row) for row in zip(names, *columns, strict=True)]


def _ratio(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    """Divide in float64; 0 where the denominator is 0.

    Example:
        >>> _ratio(np.array([1, 0]), np.array([2, 0])).tolist()
        [0.5, 0.0]
    """
    zeros = np.zeros(len(numerator))
    ratio: np.ndarray = np.divide(numerator, denominator, out=zeros, where=denominator > 0)
    return ratio


def _means(rows: Sequence[ClassFigures]) -> list[ClassFigures]:
    """Compute the plain mean over classes, and the mean weighted by support.

    Their support is the sum over the classes; without any support both means are 0.
    """
    support = np.array([row.support for row in rows])
    total = int(support.sum())
    means = np.zeros((2, 3))  # macro and weighted; precision, recall and F1
    if total:
        scores = [(row.precision, row.recall, row.f1) for row in rows]
        means[0] = np.mean(scores, axis=0)
        means[1] = np.average(scores, axis=0, weights=support)
    return [
        ClassFigures(name, precision, recall, f1, total)
        for name, (precision, recall, f1) in zip(
            ("macro mean", "weighted mean"), means.tolist(), strict=True
        )
    ]
