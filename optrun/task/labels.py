"""Labels of any name to class numbers and back, or to numbers as they are."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np

from optrun.base.errors import ConfigError, nearest
from optrun.data.cache import digest
from optrun.data.columns import label_column, refuse_mixed, values
from optrun.data.kept import as_array, as_texts, kept
from optrun.data.source import Source, Split

MAX_SHOWN = 12
LABEL_OF_EACH_WORD = "task=token_classification expects a list of labels, one for each word."
_MISSING = {"", "na", "n/a", "nan", "null", "none", "-", "?"}
_LARGEST = float(np.finfo(np.float32).max)


def column(split: Split, name: str) -> list[Any]:
    """Return the values of a column, none of them missing.

    Raises:
        ConfigError: As `expect_values`.
    """
    expect_values(split, name)
    return list(values(split, name))


def expect_values(split: Split, name: str) -> None:
    """Refuse a column in which values are missing.

    Raises:
        ConfigError: With the first row that has none, or another kind of value than those before it.
    """
    refuse_mixed(split, name)
    for row, value in enumerate(values(split, name)):
        if value is None or (isinstance(value, float) and math.isnan(value)):
            raise ConfigError(f"{split.key}: row {split.number(row)} has no value in column {name}.")


def declared_names(feature: Any) -> list[str]:
    """List the class names of a `ClassLabel` feature, or a list of them; empty if it has none."""
    names = getattr(getattr(feature, "feature", feature), "names", None)
    return [str(label) for label in names] if names else []


def labels_of(split: Split, name: str) -> list[str]:
    """List the label of each row, by name.

    Raises:
        ConfigError: As `row_labels`.
    """
    names, places = row_labels(split, name)
    return [names[place] for place in places.tolist()]


def row_labels(split: Split, name: str) -> tuple[list[str], np.ndarray]:
    """Find the label of each row, once for the same rows, with a few rows in memory at a time.

    Returns:
        The labels by name, each once, in the order in which rows first have them; and for each row which of them it
        has, shape (rows,), int32.

    Raises:
        ConfigError: The first row without a label, or with a list; one that says NA among numbers.
    """
    declared = declared_names(split.rows.features[name])

    def find() -> dict[str, np.ndarray]:
        expect_values(split, name)
        met: dict[str, int] = {}
        places = np.empty(len(split.rows), dtype=np.int32)
        for row, value in enumerate(values(split, name)):
            places[row] = met.setdefault(label_name(value, declared, split, name, row), len(met))
        if not declared:
            _refuse_missing(split, name, list(met), places)
        return {"names": as_array(met), "places": places}

    found = kept("labels", None if split.content is None else digest("labels-1", split.content, name, *declared), find)
    return as_texts(found["names"]), found["places"]


def _refuse_missing(split: Split, name: str, labels: Sequence[str], places: np.ndarray) -> None:
    """Refuse a missing label: a csv file may say NA, which among numbers is no class of its own."""
    missing = [label for label in labels if label.strip().lower() in _MISSING]
    others = [label for label in labels if label not in missing]
    if missing and others and all(_number(label) is not None for label in others):
        row = int(np.argmax(places == labels.index(missing[0])))
        raise ConfigError(
            f"{split.key}: row {split.number(row)} has {missing[0]!r} in column {name}, and all others have numbers: "
            "a row without a label? Leave such rows out, or give them a number of their own."
        )


def label_lists_of(split: Split, name: str) -> list[list[str]]:
    """List the labels of each row's words, by name.

    Raises:
        ConfigError: As `row_label_lists`.
    """
    found = row_label_lists(split, name, LABEL_OF_EACH_WORD)
    labels = [found.names[place] for place in found.places.tolist()]
    return [labels[begin:end] for begin, end in pairwise(found.borders.tolist())]


class LabelLists(NamedTuple):
    """Several labels of each row.

    Attributes:
        names: The labels, each once, in the order in which rows first have them.
        places: Which of these the rows have, one row behind the other; int32.
        borders: Where each row begins in `places`; shape (rows + 1,), int64.
    """

    names: list[str]
    places: np.ndarray
    borders: np.ndarray


def row_label_lists(split: Split, name: str, expected: str) -> LabelLists:
    """Find the labels of each row, once for the same rows.

    Args:
        split: The rows.
        name: The column.
        expected: What a task expects there, for the message.

    Raises:
        ConfigError: The first row without a list, or with a list that holds something else than labels.
    """
    declared = declared_names(split.rows.features[name])

    def find() -> dict[str, np.ndarray]:
        expect_values(split, name)
        met: dict[str, int] = {}
        places = array("i")
        borders = np.zeros(len(split.rows) + 1, dtype=np.int64)
        for row, listed in enumerate(values(split, name)):
            if not isinstance(listed, list | tuple | np.ndarray):
                raise ConfigError(
                    f"data.label_column={name}: {split.key}: row {split.number(row)} has {listed!r} there; {expected}"
                )
            named = (label_name(value, declared, split, name, row) for value in listed)
            places.extend(met.setdefault(label, len(met)) for label in named)
            borders[row + 1] = len(places)
        return {"names": as_array(met), "places": np.array(places, dtype=np.int32), "borders": borders}

    key = None if split.content is None else digest("label-lists-1", split.content, name, *declared)
    found = kept("labels", key, find)
    return LabelLists(as_texts(found["names"]), found["places"], found["borders"])


def label_name(value: Any, declared: Sequence[str], split: Split, name: str, row: int) -> str:
    """Name a label as text; 1.0 is `1`, a class number is its declared name.

    Raises:
        ConfigError: It is missing, no class of a `ClassLabel`, or a list.
    """
    return named_label(value, declared, name, f"{split.key}: row {split.number(row)}")


def named_label(value: Any, declared: Sequence[str], name: str, where: str) -> str:
    """Name a label as `label_name` does; `where` says what has it, for the message."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        raise ConfigError(f"{where} has no value in column {name}.")
    if declared and isinstance(value, int):
        if not 0 <= value < len(declared):
            raise ConfigError(
                f"{where} has the class number {value} in column {name}, which has "
                f"classes 0 to {len(declared) - 1}: a row without a label. Leave it out, or take another split."
            )
        return declared[value]
    if isinstance(value, list | dict | bytes):
        raise ConfigError(f"data.label_column={name}: {where} holds {value!r:.60}, not one label.")
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)


def class_names(source: Source, name: str, labels: Iterable[str], held: Iterable[str] = ()) -> list[str]:
    """List the classes of a label column, in the order of their numbers.

    Those of a trained model are what they are. Otherwise a `ClassLabel` feature brings its own order; labels that are
    all numbers are ordered as numbers, others as text.

    Args:
        source: Whose training split says what classes there are.
        name: The label column.
        labels: Of the training split.
        held: Of rows that were cut off from the training split: one file may have a rare label in them alone.

    Raises:
        ConfigError: Fewer than two classes, or fractions.
    """
    if source.classes is not None:
        return source.classes
    split = source.train
    declared = declared_names(split.rows.features[name])
    distinct = set(labels) | set(held)
    names = declared
    if not declared:
        values = {label: _number(label) for label in distinct}
        if all(value is not None for value in values.values()):
            if any(value is not None and not value.is_integer() for value in values.values()):
                raise ConfigError(
                    f"data.label_column={name}: {split.key} holds fractions there. "
                    "For numbers use task.problem_type=regression."
                )
            names = sorted(distinct, key=lambda label: (values[label] or 0.0, label))
        else:
            names = sorted(distinct)
    if len(names) < 2:
        only = f"one label only ({names[0]})" if names else "no label"
        raise ConfigError(f"data.label_column={name}: {split.key} has {only}. A classifier needs two or more.")
    return names


def _number(label: str) -> float | None:
    try:
        value = float(label)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


class ClassNumbers:
    """Label to class number.

    Args:
        names: Classes by number.
        source: Where they come from, for the message.
    """

    def __init__(self, names: Sequence[str], source: Source) -> None:
        self.names = list(names)
        self.known_from = source.train.key if source.classes is None else "the checkpoint"
        self._number = {name: number for number, name in enumerate(names)}
        self._by_value = {_number(name): number for number, name in enumerate(names)}

    def __call__(self, split: Split, row: int, label: str) -> int:
        """The number of one label; 1.0 and 1 are the same.

        Raises:
            ConfigError: A label that is no class; with the labels there are.
        """
        return self.of(label, f"{split.key}: row {split.number(row)}")

    def of(self, label: str, where: str) -> int:
        """Return the number of a label; `where` says what has it, for the message."""
        number = self._find(label)
        if number is not None:
            return number
        close = nearest(label, self.names, limit=1)
        hint = f" Did you mean {close[0]}?" if close else ""
        shown = ", ".join(self.names[:MAX_SHOWN]) + (", ..." if len(self.names) > MAX_SHOWN else "")
        raise ConfigError(
            f"{where} has the label {label!r}, which {self.known_from} does not have. Labels: {shown}.{hint}"
        )

    def _find(self, label: str) -> int | None:
        number = self._number.get(label)
        if number is None and (value := _number(label)) is not None:
            number = self._by_value.get(value)
        return number

    def table(
        self, split: Split, labels: Sequence[str], places: np.ndarray, borders: np.ndarray | None = None
    ) -> np.ndarray:
        """Number the labels, of which every row has some; shape (labels,), int64.

        Args:
            split: The rows.
            labels: Each once, in the order in which rows first have them.
            places: For each row which of these it has, shape (rows,); where rows have several, one behind the other.
            borders: Where each row begins in `places`, shape (rows + 1,); None: each has one.

        Raises:
            ConfigError: The first row whose label is no class.
        """
        found = np.empty(len(labels), dtype=np.int64)
        for place, label in enumerate(labels):
            number = self._find(label)
            if number is None:
                first = int(np.argmax(places == place))
                self(split, first if borders is None else int(np.searchsorted(borders, first, side="right")) - 1, label)
            else:
                found[place] = number
        return found

    def all(self, split: Split, labels: Sequence[str]) -> np.ndarray:
        """Return the number of each row's label; shape (rows,), int64."""
        return np.array([self(split, row, label) for row, label in enumerate(labels)], dtype=np.int64)


def row_classes(source: Source) -> tuple[list[str], dict[Split, np.ndarray]]:
    """Return the classes, and the class number of each row of every split.

    Returns:
        Names by number; numbers by split, shape (rows,), int64.

    Raises:
        ConfigError: A row without a label, a label unseen in training, fewer than two classes.
    """
    labels = {split: row_labels(split, label_column(source, split)) for split in source.splits}
    held = chain.from_iterable(labels[split][0] for split in source.eval_sets.values()) if source.cut_from_train else ()
    names = class_names(source, label_column(source, source.train), labels[source.train][0], held)
    numbered = ClassNumbers(names, source)
    return names, {split: numbered.table(split, *found)[found[1]] for split, found in labels.items()}


def numbers(split: Split, name: str) -> np.ndarray:
    """Read a column of numbers.

    Returns:
        Shape (rows,), float32.

    Raises:
        ConfigError: The first row that is no finite number.
    """

    def find() -> dict[str, np.ndarray]:
        expect_values(split, name)
        found = np.empty(len(split.rows), dtype=np.float32)
        for row, value in enumerate(values(split, name)):
            try:
                number = float(value) if not isinstance(value, bool) else math.nan
            except (TypeError, ValueError, OverflowError):
                number = math.nan
            if not abs(number) <= _LARGEST:  # NaN too
                raise ConfigError(
                    f"{split.key}: row {split.number(row)} has {value!r} in column {name}: "
                    "a task of numbers (regression, scores) expects finite numbers."
                )
            found[row] = number
        return {"numbers": found}

    key = None if split.content is None else digest("numbers-1", split.content, name)
    return kept("labels", key, find)["numbers"]


def label_config(names: Iterable[str]) -> dict[str, Any]:
    """Return `id2label` and `label2id` for a transformers configuration."""
    listed = list(names)
    return {
        "num_labels": len(listed),
        "id2label": dict(enumerate(listed)),
        "label2id": {label: number for number, label in enumerate(listed)},
    }
