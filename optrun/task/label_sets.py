"""Any number of labels for an example: read from lists or from columns of 0 and 1, and judged."""

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
    require_values,
    row_label_lists,
)

if TYPE_CHECKING:
    from transformers.utils.generic import ModelOutput

_EXPECTED = (
    'task.problem_type=multi_label_classification expects a list of labels, such as ["a", "b"], or'
    " a column of 0 and 1 for each label: data.label_columns=[a,b]."
)
_INDICATORS = ({"0", "1"}, {"0.0", "1.0"}, {"-1", "1"}, {"false", "true"}, {"no", "yes"})
"""What lists hold that say of each label whether a row has it."""
_YES = (True, 1, 1.0, "1", "1.0", "true", "True")
_NO = (False, 0, 0.0, "0", "0.0", "false", "False")


def label_columns(source: Source, split: Split) -> list[str]:
    """List the label columns of a split: `data.label_columns`, else the single one.

    Raises:
        ConfigError: One is not there, or both keys are given.
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


def row_label_sets(source: Source) -> tuple[list[str], dict[Split, np.ndarray]]:
    """Return the labels, and 0 or 1 for each label of each row of every split.

    Returns:
        Names by number; 0 or 1 by split, shape (rows, labels), float32.

    Raises:
        ConfigError: A row that is no list of labels, or no 0 and 1; a label unseen in training;
            fewer than two labels.
    """
    if source.columns is not None and source.columns.label_columns is not None:
        return _sets_of_columns(source)
    lists = {
        split: row_label_lists(split, label_column(source, split), _EXPECTED)
        for split in source.splits
    }
    for split, row_lists in lists.items():
        note_minus_one_labels(source, split, label_column(source, split), row_lists)
    train = label_column(source, source.train)
    _refuse_indicators(source.train, train, lists[source.train])
    names = class_names(
        source, train, {split: row_lists.names for split, row_lists in lists.items()}
    )
    class_numbers = ClassNumbers(names, source)
    return names, {
        split: _indicators_of_lists(split, row_lists, class_numbers)
        for split, row_lists in lists.items()
    }


def _refuse_indicators(split: Split, column: str, lists: ColumnLabels) -> None:
    """Refuse multi-hot lists, whose 0 and 1 would be read as the names of two labels.

    Raises:
        ConfigError: All lists have the same length of two or more, and hold only 0 and 1, or only
            false and true.
    """
    assert lists.borders is not None
    lengths = set(np.diff(lists.borders).tolist())
    values = {name.strip().lower() for name in lists.names}
    is_indicator = any(values <= pair for pair in _INDICATORS)
    if is_indicator and len(lengths) == 1 and min(lengths) > 1:
        count = lengths.pop()
        raise ConfigError(
            f"data.label_column={column}: {split.where(0)} has {split.rows[0][column]!r:.60}, a 0"
            f" or 1 for each of {count} labels. Write the names of the labels that a row has, or a"
            " column of 0 and 1 for each label (data.label_columns=[a,b])."
        )


def _indicators_of_lists(
    split: Split, lists: ColumnLabels, class_numbers: ClassNumbers
) -> np.ndarray:
    """Return 1 for each label of each row, else 0; shape (rows, labels), float32."""
    assert lists.borders is not None
    indicators = np.zeros((len(lists.borders) - 1, len(class_numbers.names)), dtype=np.float32)
    rows = np.repeat(np.arange(len(indicators)), np.diff(lists.borders))
    columns = class_numbers.numbers_of_names(split, lists)[lists.indices]
    indicators[rows, columns] = 1
    return indicators


def _sets_of_columns(source: Source) -> tuple[list[str], dict[Split, np.ndarray]]:
    names = label_columns(source, source.train)
    if len(set(names)) < len(names) or len(names) < 2:
        raise ConfigError(
            f"data.label_columns={names}: expected two columns or more, each of them once."
        )
    columns = dict(zip(names, names, strict=True))
    if source.classes is not None or source.head_classes is not None:
        names = _classes_of_columns(source, names)
        numbered = LabelTable(names)
        columns = {names[numbered.class_number(column) or 0]: column for column in columns}
    if len(columns) < len(set(label_columns(source, source.train))):
        raise ConfigError(
            f"data.label_columns={list(label_columns(source, source.train))}: two of them are the"
            f" same class of the model: {', '.join(names)}. Leave one out."
        )
    indicators = {}
    for split in source.splits:
        label_columns(source, split)
        absent = np.zeros(len(split.rows), dtype=np.float32)
        indicators[split] = np.stack(
            [
                _indicator_column(split, columns[name]) if name in columns else absent
                for name in names
            ],
            axis=1,
        )
    return names, indicators


def _classes_of_columns(source: Source, names: list[str]) -> list[str]:
    """Return the classes of the checkpoint, or of the pretrained head if it has all columns.

    Raises:
        ConfigError: A column that is no class of the checkpoint.
    """
    if source.classes is None:
        return head_or_row_classes(source, "data.label_columns", names, source.head_classes or [])
    numbered = LabelTable(source.classes)
    if any(numbered.class_number(name) is None for name in names):
        raise ConfigError(
            f"data.label_columns={names}: the checkpoint has {', '.join(source.classes)}."
            " Expected these."
        )
    return source.classes


def _indicator_column(split: Split, name: str) -> np.ndarray:
    """Read a column of 0 and 1 (or false and true); shape (rows,), float32; cached.

    Raises:
        ConfigError: A row with another value, or without one.
    """

    def find() -> dict[str, np.ndarray]:
        has = np.zeros(len(split.rows), dtype=np.float32)
        for row, value in enumerate(require_values(split, name)):
            if isinstance(value, list | dict) or value not in (*_YES, *_NO):
                raise ConfigError(
                    f"data.label_columns: {split.where(row)} has {value!r} in column {name}; "
                    "expected 1 where the row has this label, and 0 where it has not."
                )
            has[row] = value in _YES
        return {"has": has}

    return cached_arrays("labels", digest_if_known("label-column-1", split.content, name), find)[
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

    def counted(self, outputs: ModelOutput, batch: Batch) -> tuple[int, np.ndarray]:
        """Count examples with all labels right, and right, predicted and true ones of each label.

        The latter have the shape (3, labels).
        """
        predicted = (outputs.logits > 0).long().cpu().numpy()
        actual = batch["labels"].long().cpu().numpy()
        return int((predicted == actual).all(axis=1).sum()), np.stack(
            [(predicted * actual).sum(0), predicted.sum(0), actual.sum(0)]
        )

    def table(self) -> ClassTable:
        """Return precision, recall and F1 by label."""
        return table_of_counts("label", self.labels, self.sums[-1])

    def compute(self) -> dict[str, float]:
        """Compute metrics over all examples; loss and exact matches are NaN if there was none."""
        loss, count, exact, _ = self.sums
        table = self.table()
        count = count or math.nan
        macro = float(np.mean([row.f1 for row in table.rows]))
        return {
            "loss": loss / count,
            "f1_micro": table.means[0].f1,
            "f1_macro": macro,
            "exact_match": exact / count,
        }
