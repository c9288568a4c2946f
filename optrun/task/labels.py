"""Labels of any name to class numbers and back, or to numbers as they are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from optrun.data.source import Split
from optrun.errors import ConfigError, nearest

MAX_SHOWN = 12


def column(split: Split, name: str) -> list[Any]:
    """Values of a column, none of them missing.

    Raises:
        ConfigError: With the first row that has none.
    """
    values: list[Any] = list(split.rows[name])
    for row, value in enumerate(values):
        if value is None:
            raise ConfigError(f"{split.key}: row {row + 1} has no value in column {name}.")
    return values


def class_names(split: Split, name: str) -> list[str]:
    """The classes of a label column, in the order of their numbers.

    A `ClassLabel` feature brings its own order; whole numbers are ordered as numbers, everything else as text.

    Raises:
        ConfigError: Fewer than two classes, or fractions.
    """
    feature = split.rows.features[name]
    declared = getattr(feature, "names", None)
    if declared:
        return [str(label) for label in declared]
    values = column(split, name)
    if any(isinstance(value, float) and not value.is_integer() for value in values):
        raise ConfigError(
            f"data.label_column={name}: {split.key} holds fractions there. For numbers use task.problem_type=regression."
        )
    if any(isinstance(value, list | dict) for value in values):
        raise ConfigError(f"data.label_column={name}: {split.key} holds lists there, not one label a row.")
    distinct = set(values)
    numeric = all(isinstance(value, int | float) and not isinstance(value, bool) for value in distinct)
    names = [label_name(value) for value in (sorted(distinct) if numeric else sorted(distinct, key=str))]
    if len(names) < 2:
        raise ConfigError(
            f"data.label_column={name}: {split.key} has one label only ({names[0]}). A classifier needs two or more."
        )
    return names


def label_name(value: Any) -> str:
    """The name of a label as text; 1.0 is `1`."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)


def class_numbers(split: Split, name: str, names: list[str], *, known_from: str) -> np.ndarray:
    """Class numbers of a label column.

    Args:
        split: The rows.
        name: The label column.
        names: Classes by number.
        known_from: Which split the classes come from, for the message.

    Returns:
        Shape (rows,), int64.

    Raises:
        ConfigError: A label that is no class; the first such row, the labels known.
    """
    values = column(split, name)
    feature = split.rows.features[name]
    declared = getattr(feature, "names", None)
    if declared:
        values = [declared[value] if isinstance(value, int) and 0 <= value < len(declared) else value for value in values]
    number = {label: index for index, label in enumerate(names)}
    labels = [label_name(value) for value in values]
    for row, label in enumerate(labels):
        if label not in number:
            raise unseen_label(split, row, label, names, known_from)
    return np.fromiter((number[label] for label in labels), dtype=np.int64, count=len(labels))


def unseen_label(split: Split, row: int, label: str, names: list[str], known_from: str) -> ConfigError:
    """The refusal of a label that training does not have."""
    close = nearest(label, names, limit=1)
    hint = f" Did you mean {close[0]}?" if close else ""
    shown = ", ".join(names[:MAX_SHOWN]) + (", ..." if len(names) > MAX_SHOWN else "")
    return ConfigError(
        f"{split.key}: row {row + 1} has the label {label!r}, which {known_from} does not have. Labels: {shown}.{hint}"
    )


def numbers(split: Split, name: str) -> np.ndarray:
    """A column of numbers.

    Returns:
        Shape (rows,), float32.

    Raises:
        ConfigError: The first row that is no finite number.
    """
    found: list[float] = []
    for row, value in enumerate(column(split, name)):
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = float("nan")
        if not np.isfinite(number):
            raise ConfigError(
                f"{split.key}: row {row + 1} has {value!r} in column {name}: "
                "task.problem_type=regression expects finite numbers."
            )
        found.append(number)
    return np.array(found, dtype=np.float32)


def label_config(names: Iterable[str]) -> dict[str, Any]:
    """`id2label` and `label2id` for a transformers configuration."""
    listed = list(names)
    return {
        "num_labels": len(listed),
        "id2label": dict(enumerate(listed)),
        "label2id": {label: number for number, label in enumerate(listed)},
    }
