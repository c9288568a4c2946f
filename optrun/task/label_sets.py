"""Any number of labels for an example: read from lists or from columns of 0 and 1, and judged."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from optrun.base.errors import ConfigError
from optrun.data.cache import digest
from optrun.data.columns import label_column, missing_column, values
from optrun.data.kept import kept
from optrun.data.loader import Batch
from optrun.data.source import Source, Split
from optrun.task.class_table import ClassTable, table_of_labels
from optrun.task.evaluation import MetricAccumulator
from optrun.task.labels import ClassNumbers, LabelLists, class_names, expect_values, row_label_lists

if TYPE_CHECKING:
    from transformers.utils.generic import ModelOutput

_EXPECTED = (
    'task.problem_type=multi_label_classification expects a list of labels, such as ["a", "b"], or a column of 0 and 1 '
    "for each label: data.label_columns=[a,b]."
)
_YES, _NO = (True, 1, 1.0, "1", "1.0", "true", "True"), (False, 0, 0.0, "0", "0.0", "false", "False")


def label_columns(source: Source, split: Split) -> list[str]:
    """List the columns of labels of a split: those of `data.label_columns`, else the single one.

    Raises:
        ConfigError: One is not there, or both keys are given.
    """
    columns = source.columns
    names = None if columns is None else columns.label_columns
    if names is None:
        return [label_column(source, split)]
    if columns is not None and columns.label_column is not None:
        raise ConfigError(
            f"data.label_column={columns.label_column}: data.label_columns names a column for each label. Give one of "
            "the two keys."
        )
    for name in names:
        if name not in split.rows.column_names:
            raise missing_column("data.label_columns", name, split)
    return list(names)


def row_sets(source: Source) -> tuple[list[str], dict[Split, np.ndarray]]:
    """Return the labels, and which of them each row of every split has.

    Returns:
        Names by number; 0 or 1 by split, shape (rows, labels), float32.

    Raises:
        ConfigError: A row that is no list of labels, or no 0 and 1; a label unseen in training; fewer than two labels.
    """
    if source.columns is not None and source.columns.label_columns is not None:
        return _of_columns(source)
    lists = {split: row_label_lists(split, label_column(source, split), _EXPECTED) for split in source.splits}
    held = chain.from_iterable(lists[split].names for split in source.eval_sets.values())
    train = label_column(source, source.train)
    names = class_names(source, train, lists[source.train].names, held if source.cut_from_train else ())
    numbered = ClassNumbers(names, source)
    return names, {split: _indicators(split, found, numbered) for split, found in lists.items()}


def _indicators(split: Split, lists: LabelLists, numbered: ClassNumbers) -> np.ndarray:
    found = np.zeros((len(lists.borders) - 1, len(numbered.names)), dtype=np.float32)
    rows = np.repeat(np.arange(len(found)), np.diff(lists.borders))
    found[rows, numbered.table(split, *lists)[lists.places]] = 1
    return found


def _of_columns(source: Source) -> tuple[list[str], dict[Split, np.ndarray]]:
    names = label_columns(source, source.train)
    if len(set(names)) < len(names) or len(names) < 2:
        raise ConfigError(f"data.label_columns={names}: expected two columns or more, each of them once.")
    if source.classes is not None:
        if sorted(source.classes) != sorted(names):
            raise ConfigError(
                f"data.label_columns={names}: the checkpoint has {', '.join(source.classes)}. Expected these."
            )
        names = source.classes
    found = {}
    for split in source.splits:
        label_columns(source, split)
        found[split] = np.stack([_indicator(split, name) for name in names], axis=1)
    return names, found


def _indicator(split: Split, name: str) -> np.ndarray:
    """Return 1 for each row that has the label of a column, else 0; shape (rows,), float32."""

    def find() -> dict[str, np.ndarray]:
        expect_values(split, name)
        has = np.zeros(len(split.rows), dtype=np.float32)
        for row, value in enumerate(values(split, name)):
            if isinstance(value, list | dict) or value not in (*_YES, *_NO):
                raise ConfigError(
                    f"data.label_columns: {split.key}: row {split.number(row)} has {value!r} in column {name}; "
                    "expected 1 where the row has this label, and 0 where it has not."
                )
            has[row] = value in _YES
        return {"has": has}

    key = None if split.content is None else digest("label-column-1", split.content, name)
    return kept("labels", key, find)["has"]


class LabelSetMetrics(MetricAccumulator):
    """Loss; f1 over all labels of all examples, and its mean over labels; the share of examples with all labels right.

    A label is predicted where its probability is above one half. A label that neither occurs nor is predicted has an
    f1 of 0, as in scikit-learn.

    Args:
        labels: Names by number.
    """

    reads_loss = True

    def __init__(self, labels: Sequence[str]) -> None:
        self.names = ["loss", "f1_micro", "f1_macro", "exact_match"]
        self.loss = 0.0
        self.examples = 0
        self.exact = 0
        self.labels = labels
        self.counts = np.zeros((3, len(labels)), dtype=np.int64)

    def update(self, outputs: ModelOutput, batch: Batch) -> None:
        """Count one batch."""
        made, there = label_sets(outputs, batch)
        self.loss += float(outputs.loss) * len(made)
        self.examples += len(made)
        self.exact += int((made == there).all(axis=1).sum())
        self.counts += np.stack([(made * there).sum(0), made.sum(0), there.sum(0)])

    def partial(self) -> tuple[float, int, int, np.ndarray]:
        """Return the sums."""
        return self.loss, self.examples, self.exact, self.counts

    def merge(self, partials: Sequence[tuple[float, int, int, np.ndarray]]) -> None:
        """Add those of all ranks."""
        losses, examples, exact, counts = zip(*partials, strict=True)
        self.loss, self.examples, self.exact = sum(losses), sum(examples), sum(exact)
        self.counts = sum(counts, np.zeros_like(self.counts))

    def table(self) -> ClassTable:
        """Return figures by label."""
        return table_of_labels(self.labels, self.counts)

    def compute(self) -> dict[str, float]:
        """Compute metrics over all examples."""
        examples = max(self.examples, 1)
        return {
            "loss": self.loss / examples,
            "f1_micro": float(_f1(self.counts.sum(axis=1, keepdims=True))[0]),
            "f1_macro": float(_f1(self.counts).mean()),
            "exact_match": self.exact / examples,
        }


def _f1(counts: np.ndarray) -> np.ndarray:
    """Compute F1 of each column of right, predicted and true counts; 0/0 is 0."""
    right, total = 2 * counts[0].astype(np.float64), (counts[1] + counts[2]).astype(np.float64)
    found: np.ndarray = np.divide(right, total, out=np.zeros_like(right), where=total > 0)
    return found


def label_sets(outputs: Any, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Return predicted and true labels of a batch, 0 or 1; shape (examples, labels) each."""
    return (outputs.logits > 0).long().cpu().numpy(), batch["labels"].long().cpu().numpy()
