"""Figures of each class over an evaluation set: precision, recall, f1 and support, and which was taken for which."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from optrun.data.loader import Batch
from optrun.task import entities
from optrun.task.evaluation import IGNORED
from optrun.task.metrics import confusion

if TYPE_CHECKING:
    from transformers.utils.generic import ModelOutput

Predictions = Callable[["ModelOutput", Batch], tuple[np.ndarray, np.ndarray]]


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
        means: `micro` where one example may have any number of them, `macro`, `weighted` by support.
        labels: Of the confusion matrix.
        confusion: Counts, rows are true classes, columns predicted ones; shape (labels, labels). None: there is none.
    """

    noun: str
    rows: list[ClassFigures]
    means: list[ClassFigures]
    labels: list[str]
    confusion: np.ndarray | None


class Breakdown(ABC):
    """Counts by class, batch by batch."""

    @abstractmethod
    def update(self, outputs: ModelOutput, batch: Batch) -> None:
        """Take in one batch."""

    @abstractmethod
    def table(self) -> ClassTable:
        """Over all batches."""


def figures(name: str, right: float, predicted: float, there: float) -> ClassFigures:
    """Precision, recall and f1 of counts; 0/0 is 0, as in scikit-learn."""
    return ClassFigures(
        name,
        precision=right / predicted if predicted else 0.0,
        recall=right / there if there else 0.0,
        f1=2 * right / (predicted + there) if predicted + there else 0.0,
        support=int(there),
    )


def means_of(rows: Sequence[ClassFigures]) -> list[ClassFigures]:
    """The plain mean over classes, and the one weighted by support."""
    total = sum(row.support for row in rows)

    def mean(name: str, weights: Sequence[float]) -> ClassFigures:
        whole = sum(weights)
        values = [
            sum(weight * getattr(row, key) for weight, row in zip(weights, rows, strict=True)) / whole if whole else 0.0
            for key in ("precision", "recall", "f1")
        ]
        return ClassFigures(name, values[0], values[1], values[2], total)

    return [mean("macro mean", [1.0] * len(rows)), mean("weighted mean", [row.support for row in rows])]


class ClassBreakdown(Breakdown):
    """Each example, or word, is of one class.

    Args:
        labels: Names by number.
        predictions: A batch to predicted and true classes, shape (targets,) each.
    """

    def __init__(self, labels: Sequence[str], predictions: Predictions) -> None:
        self.labels = list(labels)
        self.predictions = predictions
        self.counts = np.zeros((len(labels), len(labels)), dtype=np.int64)

    def update(self, outputs: ModelOutput, batch: Batch) -> None:
        """Count one batch."""
        made, there = self.predictions(outputs, batch)
        self.counts += confusion(made, there, len(self.labels))

    def table(self) -> ClassTable:
        """Figures and confusion matrix."""
        right, predicted, there = np.diag(self.counts), self.counts.sum(axis=0), self.counts.sum(axis=1)
        rows = [
            figures(*row) for row in zip(self.labels, right.tolist(), predicted.tolist(), there.tolist(), strict=True)
        ]
        return ClassTable("class", rows, means_of(rows), self.labels, self.counts)


class LabelBreakdown(Breakdown):
    """Each example has any number of labels.

    Args:
        labels: Names by number.
        predictions: A batch to predicted and true labels, 0 or 1, shape (examples, labels) each.
    """

    def __init__(self, labels: Sequence[str], predictions: Predictions) -> None:
        self.labels = list(labels)
        self.predictions = predictions
        self.counts = np.zeros((3, len(labels)), dtype=np.int64)

    def update(self, outputs: ModelOutput, batch: Batch) -> None:
        """Count one batch."""
        made, there = self.predictions(outputs, batch)
        self.counts += np.stack([(made * there).sum(0), made.sum(0), there.sum(0)]).astype(np.int64)

    def table(self) -> ClassTable:
        """Figures of each label; what is taken for what has no meaning here."""
        rows = [figures(name, *map(int, column)) for name, column in zip(self.labels, self.counts.T, strict=True)]
        micro = figures("micro mean", *map(int, self.counts.sum(axis=1)))
        return ClassTable("label", rows, [micro, *means_of(rows)], self.labels, None)


class EntityBreakdown(Breakdown):
    """Whole entities by type; right where type and both borders are.

    Args:
        labels: Names by number, of the IOB2 scheme.
    """

    def __init__(self, labels: Sequence[str]) -> None:
        self.labels = list(labels)
        types = sorted({label[2:] for label in labels if label != "O"})
        self.counts = {name: [0, 0, 0] for name in types}

    def update(self, outputs: ModelOutput, batch: Batch) -> None:
        """Count one batch."""
        targets = batch["labels"].cpu().numpy()
        made = outputs.logits.argmax(-1).cpu().numpy()
        for found, right in zip(made, targets, strict=True):
            known = right != IGNORED
            predicted, there = (set(entities.entities([self.labels[k] for k in row[known]])) for row in (found, right))
            for place, group in enumerate((predicted & there, predicted, there)):
                for entity in group:
                    self.counts[entity[0]][place] += 1

    def table(self) -> ClassTable:
        """Figures of each type; what is taken for what has no meaning for spans."""
        rows = [figures(name, *counts) for name, counts in self.counts.items()]
        micro = figures("micro mean", *(sum(counts[place] for counts in self.counts.values()) for place in range(3)))
        return ClassTable("entity", rows, [micro, *means_of(rows)], [], None)
