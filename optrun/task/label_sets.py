"""Any number of labels for an example: lists, or columns of 0 and 1; and their metrics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from optrun.base.errors import ConfigError
from optrun.data.cache import digest_if_known
from optrun.data.cached_arrays import cached_arrays
from optrun.data.columns import label_column, missing_column
from optrun.data.loader import Batch
from optrun.data.source import Source, Split
from optrun.task.class_table import ClassTable, table_of_counts
from optrun.task.evaluation import SummedMetrics
from optrun.task.labels import (
    ClassNumbers,
    ColumnLabels,
    LabelTable,
    class_names,
    head_or_row_classes,
    note_minus_one_labels,
    read_label_lists,
    require_values,
)

if TYPE_CHECKING:
    from transformers.utils.generic import ModelOutput

_EXPECTED = (
    'task.problem_type=multi_label_classification expects a list of labels, such as ["a", "b"], or'
    " a column of 0 and 1 for each label: data.label_columns=[a,b]."
)
_INDICATORS = ({"0", "1"}, {"0.0", "1.0"}, {"-1", "1"}, {"false", "true"}, {"no", "yes"})
"""Values of multi-hot lists, which say for each label whether a row has it."""
_YES = (1, "1", "1.0", "true", "True")
"""Cells of a row that has the label; True and 1.0 are among them, since they equal 1."""
_NO = (0, "0", "0.0", "false", "False")


def label_columns(source: Source, split: Split) -> list[str]:
    """List the label columns of a split: `data.label_columns`, else the single label column.

    The split remembers that they are read.

    Raises:
        ConfigError: A column is missing, or both keys are given.
    """
    columns = source.columns
    names = None if columns is None else columns.label_columns
    if names is None:
        return [label_column(source, split)]
    if columns is not None and columns.label_column is not None:
        raise ConfigError(
            f"data.label_column={columns.label_column}: data.label_columns names a column for each"
            " label. Give one of the two keys."
        )
    for name in names:
        if name not in split.rows.column_names:
            raise missing_column("data.label_columns", name, split)
    split.columns_read.update(names)
    return list(names)


def read_label_sets(source: Source) -> tuple[list[str], dict[Split, np.ndarray]]:
    """Read the labels of each row of every split, any number of them.

    Returns:
        The labels; and by split 1 where a row has the label, else 0, shape (rows, labels), float32.

    Raises:
        ConfigError: A row that is no list of labels, or no 0 and 1; a label unseen in training;
            fewer than two labels.
    """
    # 1. A column of 0 and 1 for each label.
    if source.columns is not None and source.columns.label_columns is not None:
        return _sets_of_columns(source)

    # 2. A column with lists of labels: read them, find the classes, mark these with 1. The classes
    # may be those of a checkpoint, of a pretrained head, or of the rows.
    lists: dict[Split, ColumnLabels] = {}
    for split in source.splits:
        column = label_column(source, split)
        lists[split] = read_label_lists(split, column, _EXPECTED)
        note_minus_one_labels(source, split, column, lists[split])
    train_column = label_column(source, source.train)
    _refuse_indicators(source.train, train_column, lists[source.train])
    names = class_names(source, train_column, lists)
    class_numbers = ClassNumbers(names, source)
    indicators = {}
    for split, row_lists in lists.items():
        indicators[split] = _indicators_of_lists(split, row_lists, class_numbers)
    return names, indicators


def _refuse_indicators(split: Split, column: str, lists: ColumnLabels) -> None:
    """Refuse multi-hot lists, such as [0, 1, 1], instead of lists of label names.

    Their 0 and 1 would be read as the names of two labels.

    Raises:
        ConfigError: All lists have the same length of two or more, and hold only 0 and 1, only
            false and true, or another of `_INDICATORS`.
    """
    assert lists.offsets is not None
    lengths = set(np.diff(lists.offsets).tolist())  # of the lists
    values = {name.strip().lower() for name in lists.names}
    are_indicators = any(values <= pair for pair in _INDICATORS)
    if are_indicators and len(lengths) == 1 and min(lengths) > 1:
        count = lengths.pop()
        raise ConfigError(
            f"data.label_column={column}: {split.where(0)} has {split.rows[0][column]!r:.60}, a 0"
            f" or 1 for each of {count} labels. Write the names of the labels that a row has, or a"
            " column of 0 and 1 for each label (data.label_columns=[a,b])."
        )


def _indicators_of_lists(
    split: Split, lists: ColumnLabels, class_numbers: ClassNumbers
) -> np.ndarray:
    """Return 1 for each label of each row, else 0; shape (rows, labels), float32.

    Example: the lists ["a"], [] and ["b", "a"] with the classes a and b give
    [[1, 0], [0, 0], [1, 1]].

    Raises:
        ConfigError: A label is no class.
    """
    offsets = lists.offsets
    assert offsets is not None
    indicators = np.zeros((len(offsets) - 1, len(class_numbers.names)), dtype=np.float32)
    # Row and class number of each label, over all rows one after another: in the example the rows
    # 0, 2, 2 and the class numbers 0, 1, 0.
    rows = np.repeat(np.arange(len(indicators)), np.diff(offsets))
    # The class number of each distinct label, in the order in which `lists.indices` counts them.
    number_of_name = class_numbers.numbers_of_names(split, lists)
    columns = number_of_name[lists.indices]
    indicators[rows, columns] = 1
    return indicators


def _sets_of_columns(source: Source) -> tuple[list[str], dict[Split, np.ndarray]]:
    """Read label sets from the columns of `data.label_columns`, see `read_label_sets`.

    The labels are the names of the columns. With the classes of a checkpoint or of a pretrained
    head, a column is the class of its name; a class without a column is 0 in every row.

    Raises:
        ConfigError: Fewer than two columns, a column that is named twice, or that is no class of
            the checkpoint; two columns of one class; a cell that is not 0 or 1.
    """
    # 1. The classes are the columns.
    names = label_columns(source, source.train)
    if len(set(names)) < len(names) or len(names) < 2:
        raise ConfigError(
            f"data.label_columns={names}: expected two columns or more, each of them once."
        )
    column_of_class = {name: name for name in names}

    # 2. Or the classes are those of a model, and each column is one of them.
    if source.classes is not None or source.head_classes is not None:
        # All columns are among these classes, perhaps by other names: no number is None.
        classes = _classes_of_columns(source, names)
        table = LabelTable(classes)
        column_of_class = {classes[table.class_number(name) or 0]: name for name in names}
        if len(column_of_class) < len(names):
            raise ConfigError(
                f"data.label_columns={names}: two of them are the same class of the model:"
                f" {', '.join(classes)}. Leave one out."
            )
        names = classes

    # 3. Read the column of each class; zeros for a class without a column.
    indicators = {}
    for split in source.splits:
        label_columns(source, split)  # marks them as read, refuses a missing one
        columns = []
        for name in names:
            if name in column_of_class:
                columns.append(_indicator_column(split, column_of_class[name]))
            else:
                columns.append(np.zeros(len(split.rows), dtype=np.float32))
        indicators[split] = np.stack(columns, axis=1)
    return names, indicators


def _classes_of_columns(source: Source, names: list[str]) -> list[str]:
    """Return the classes of the checkpoint, else of the pretrained head, for label columns.

    Each of the columns is one of them: if the head lacks one, the names of the columns are
    returned.

    Args:
        source: Has the classes of checkpoint and head; its `notes` are changed if the head decides.
        names: The label columns.

    Raises:
        ConfigError: A column is no class of the checkpoint.
    """
    # 1. A pretrained head.
    if source.classes is None:
        # Falls back to `names` if the head lacks one, and adds a note on what differs.
        return head_or_row_classes(source, "data.label_columns", names, source.head_classes or [])

    # 2. A checkpoint.
    table = LabelTable(source.classes)
    if any(table.class_number(name) is None for name in names):
        raise ConfigError(
            f"data.label_columns={names}: the checkpoint has {', '.join(source.classes)}. Name"
            " columns of these classes."
        )
    return source.classes


def _indicator_column(split: Split, name: str) -> np.ndarray:
    """Read a column of 0 and 1 (or false and true); shape (rows,), float32; cached.

    Raises:
        ConfigError: A row with another value, or without one.
    """

    def read() -> dict[str, np.ndarray]:
        has_label = np.zeros(len(split.rows), dtype=np.float32)
        for row, value in enumerate(require_values(split, name)):
            if isinstance(value, list | dict) or value not in (*_YES, *_NO):
                raise ConfigError(
                    f"data.label_columns: {split.where(row)} has {value!r} in column {name};"
                    " expected 1 if the row has this label, else 0."
                )
            has_label[row] = value in _YES
        return {"has": has_label}

    return cached_arrays("labels", digest_if_known("label-column-1", split.content, name), read)[
        "has"
    ]


class LabelSetMetrics(SummedMetrics):
    """Mean loss, micro and macro F1, and the share of examples with all labels right.

    A label is predicted if its probability is above one half. A label that neither occurs nor is
    predicted has an F1 of 0, as in scikit-learn.

    Args:
        labels: Names by number.
    """

    def __init__(self, labels: Sequence[str]) -> None:
        names = ["loss", "f1_micro", "f1_macro", "exact_match"]
        super().__init__(
            lambda batch: len(batch["labels"]), names, 0, np.zeros((3, len(labels)), dtype=np.int64)
        )
        self.labels = labels

    def sum_batch(self, outputs: ModelOutput, batch: Batch) -> tuple[int, np.ndarray]:
        """Count examples with all labels right, and count by label, shape (3, labels).

        The three counts of a label are right, predicted and true ones.
        """
        predicted = (outputs.logits > 0).long().cpu().numpy()  # a probability above one half
        actual = batch["labels"].long().cpu().numpy()
        exact = int((predicted == actual).all(axis=1).sum())
        right = predicted * actual
        return exact, np.stack([right.sum(0), predicted.sum(0), actual.sum(0)])

    def table(self) -> ClassTable:
        """Return precision, recall and F1 by label."""
        return table_of_counts("label", self.labels, self.sums[-1])

    def compute(self) -> dict[str, float]:
        """Compute metrics over all examples; loss and exact matches are NaN if there was none."""
        loss_sum, count, exact, _ = self.sums
        count = count or math.nan
        table = self.table()
        return {
            "loss": loss_sum / count,
            "f1_micro": table.means[0].f1,
            "f1_macro": float(np.mean([row.f1 for row in table.rows])),
            "exact_match": exact / count,
        }
