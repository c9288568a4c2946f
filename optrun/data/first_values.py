"""Look at the names and the first values of columns, and guess which one holds the labels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datasets import Dataset

LABEL_NAMES = ("label", "labels", "class", "category", "sentiment", "rating", "score", "target")
"""Usual names of a column of labels."""
_MOST_CLASSES = 100

Columns = Mapping[str, Sequence[Any]]
"""The first 1,000 values of each column, without the missing ones."""


def same_column(name: str, column_names: Sequence[str]) -> str | None:
    """Find a column by its name, else by its name in another case or with blanks around it.

    None: no column fits, or several do.

    Example:
        >>> same_column("label", ["Text", " Label"]), same_column("text", ["Text", "TEXT"])
        (' Label', None)
    """
    if name in column_names:
        return name
    folded = name.strip().casefold()
    alike = [column for column in column_names if column.strip().casefold() == folded]
    if len(alike) == 1:
        return alike[0]
    return None


def usual_columns(names: Iterable[str], column_names: Sequence[str]) -> list[str]:
    """List the columns with one of some usual names, as `same_column` finds them."""
    columns = [same_column(name, column_names) for name in names]
    return [column for column in columns if column is not None]


def first_values(rows: Dataset) -> Columns:
    """Read the first 1,000 values of each column, without the missing ones."""
    head = without_image_decoding(rows)[:1000]
    return {name: [value for value in values if value is not None] for name, values in head.items()}


def without_image_decoding(rows: Dataset) -> Dataset:
    """Return rows with images as bytes: a broken image raises no error."""
    for name, feature in rows.features.items():
        if type(feature).__name__ == "Image":
            rows = rows.cast_column(name, type(feature)(decode=False))
    return rows


def guess_label_column(rows: Dataset) -> str | None:
    """Guess the column of labels: by its type, else by a usual name, else the only one of classes.

    A column with the type `ClassLabel` or a usual name, such as `label` or `stars`, must hold
    classes or numbers. None: there is no column of labels, or several of classes without usual
    names.
    """
    columns = first_values(rows)
    declared: list[str] = [
        name for name, feature in rows.features.items() if type(feature).__name__ == "ClassLabel"
    ]
    for name in (*declared, *usual_columns(LABEL_NAMES, list(columns))):
        if are_classes(columns[name]) or are_numbers(columns[name]):
            return name
    classes = [name for name, values in columns.items() if are_classes(values)]
    if len(classes) == 1:
        return classes[0]
    return None


def is_number(value: str | None) -> bool:
    """Tell whether `float` can read a text; True for None and for an empty text, too."""
    try:
        float(value or "0")
    except (TypeError, ValueError):
        return False
    return True


def are_numbers(values: Sequence[object]) -> bool:
    """Tell whether all values are numbers or texts that `is_number`; False for no values."""
    return bool(values) and all(
        isinstance(value, int | float) or (isinstance(value, str) and is_number(value))
        for value in values
    )


def are_classes(values: Sequence[object]) -> bool:
    """Tell whether values are classes: texts or integers, from 2 to 100 different ones.

    There may be at most half as many different values as values, but always two.

    Example:
        >>> are_classes(["a", "b"]), are_classes(["a", "b", "c"]), are_classes([0.5, 1.5])
        (True, False, False)
    """
    if not all(isinstance(value, str | int) for value in values):
        return False
    return 2 <= len(set(values)) <= min(_MOST_CLASSES, max(2, len(values) // 2))
