"""Labels of any name to class numbers and back, or to numbers as they are."""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from optrun.base.errors import ConfigError, nearest
from optrun.data.cache import cached, digest, key_of
from optrun.data.cached_arrays import array_to_texts, cached_arrays, texts_to_array
from optrun.data.columns import label_column, refuse_mixed, values
from optrun.data.source import Source, Split
from optrun.data.stream import StreamRows

MAX_SHOWN = 12
MOST_LABELS = 1 << 16
"""Different labels of a stream's column; one with more holds something else."""
NUMBERS = "numbers-1"
LABEL_OF_EACH_WORD = "task=token_classification expects a list of labels, one for each word."
_MISSING = {"", "na", "n/a", "nan", "null", "none", "-", "?"}
_LARGEST = float(np.finfo(np.float32).max)


def is_missing(value: object) -> bool:
    """Tell whether a cell has no value: none, or NaN."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def present_values(split: Split, name: str) -> Iterator[Any]:
    """Yield the values of a column, none of them missing.

    Raises:
        ConfigError: The first row that has none, or another kind of value than those before it.
    """
    if not isinstance(split.rows, StreamRows):
        refuse_mixed(split, name)
    for row, value in enumerate(values(split, name)):
        if is_missing(value):
            raise ConfigError(f"{split.where(row)} has no value in column {name}.")
        yield value


def declared_names(feature: object) -> list[str]:
    """List the class names of a `ClassLabel` feature, or a list of them; empty if it has none."""
    names = getattr(getattr(feature, "feature", feature), "names", None)
    if names:
        return [str(label) for label in names]
    return []


def _label_indices(
    split: Split, name: str, index_of: dict[str, int], expected: str | None = None
) -> Iterator[list[int]]:
    """Yield the indices of each row's labels, in the order in which labels first appear.

    Args:
        split: The rows.
        name: The column.
        index_of: Label to its index; new labels are added to it.
        expected: If rows have lists of labels: what the task expects, for the message. None: each
            row has one label.

    Raises:
        ConfigError: The first row without a label, or without a list of labels; too many labels in
            a stream.
    """
    declared = declared_names(split.rows.features[name])
    streamed = isinstance(split.rows, StreamRows)
    for row, value in enumerate(present_values(split, name)):
        if expected is not None and not isinstance(value, list | tuple | np.ndarray):
            raise ConfigError(
                f"data.label_column={name}: {split.where(row)} has {value!r:.60} there; {expected}"
            )
        labels = [value] if expected is None else value
        if declared and -1 in labels:
            raise _unlabelled_error(split, name, "-1", _count_of(split, name, -1))
        yield [
            index_of.setdefault(
                (
                    label
                    if isinstance(label, str)
                    else named_label(label, declared, name, split.where(row))
                ),
                len(index_of),
            )
            for label in labels
        ]
        if streamed and len(index_of) > MOST_LABELS:
            raise ConfigError(
                f"data.label_column={name}: {split.key} has more than {MOST_LABELS:,} different"
                " labels there: no classes. For numbers use task.problem_type=regression."
            )


def _cache_labels(
    split: Split, kind: str, name: str, find: Callable[[], dict[str, np.ndarray]]
) -> dict[str, np.ndarray]:
    """Compute the labels of a column once, and map them from the cache.

    The labels of a stream are kept in labels.npy and names.json.
    """
    declared = declared_names(split.rows.features[name])
    rows = split.rows
    if not isinstance(rows, StreamRows):
        return cached_arrays(
            "labels",
            key_of(kind, split.content, name, *(declared if kind != NUMBERS else ())),
            find,
        )
    values = "numbers" if kind == NUMBERS else "places"

    def write(folder: Path) -> None:
        arrays = find()
        np.save(folder / "labels.npy", arrays[values])
        (folder / "names.json").write_bytes(arrays.get("names", texts_to_array([])).tobytes())

    key = digest("labels-2", rows.fingerprint(), name, str(kind == NUMBERS), *declared)
    folder = cached("stream-labels", key, write)
    names = np.fromfile(folder / "names.json", dtype=np.uint8)
    return {
        "names": names,
        values: np.asarray(np.load(folder / "labels.npy", mmap_mode="r", allow_pickle=False)),
    }


def row_labels(split: Split, name: str) -> tuple[list[str], np.ndarray]:
    """Find the label of each row, once for the same rows, with a few rows in memory at a time.

    Returns:
        The distinct labels in the order in which they first appear; and the index of each row's
        label among them, shape (rows,), int32.

    Raises:
        ConfigError: The first row without a label, or with a list; one that says NA among numbers.
    """

    def find() -> dict[str, np.ndarray]:
        index_of: dict[str, int] = {}
        label_indices = np.fromiter(
            chain.from_iterable(_label_indices(split, name, index_of)), np.int32, len(split.rows)
        )
        if not declared_names(split.rows.features[name]):
            _refuse_unlabelled(split, name, list(index_of), label_indices)
            if not isinstance(split.rows, StreamRows):
                _refuse_missing(split, name, list(index_of), label_indices)
        return {"names": texts_to_array(index_of), "places": label_indices}

    arrays = _cache_labels(split, "labels-2", name, find)
    return array_to_texts(arrays["names"]), arrays["places"]


def _refuse_missing(split: Split, name: str, labels: Sequence[str], places: np.ndarray) -> None:
    """Refuse a word such as NA among numeric labels."""
    missing = [label for label in labels if label.strip().lower() in _MISSING]
    labelled = [label for label in labels if label not in missing]
    if missing and labelled and all(_parse_number(label) is not None for label in labelled):
        row = int(np.argmax(places == labels.index(missing[0])))
        raise ConfigError(
            f"{split.where(row)} has {missing[0]!r} in column {name}, and all others have numbers: "
            "a row without a label? Leave such rows out, or give them a number of their own."
        )


def _refuse_unlabelled(split: Split, name: str, labels: Sequence[str], places: np.ndarray) -> None:
    """Refuse the usual marks of unlabelled rows: -100, -1 and "-".

    -100 always means "no label"; -1 only beside 0, 1, 2 and no other negative number; "-" only
    beside two or more other labels.

    Args:
        split: The rows.
        name: The column.
        labels: The distinct labels.
        places: The index in `labels` of each row's label, or of each item of its list.

    Raises:
        ConfigError: With the label and how often it appears.
    """
    numbers = {label: _parse_number(label) for label in labels}
    negative = [label for label, number in numbers.items() if number is not None and number < 0]
    unlabelled = [label for label in labels if numbers[label] == -100]
    if [numbers[label] for label in negative] == [-1.0] and {0.0, 1.0, 2.0} <= set(
        numbers.values()
    ):
        unlabelled += negative
    if "-" in labels and len(labels) > 2:
        unlabelled.append("-")
    if not unlabelled:
        return
    label = unlabelled[0]
    raise _unlabelled_error(split, name, label, int(np.sum(places == labels.index(label))))


def _unlabelled_error(split: Split, name: str, label: str, count: int) -> ConfigError:
    """Build the error for marks of unlabelled rows."""
    return ConfigError(
        f"{split.key}: {count:,} labels in column {name} are {label!r}, which says that there is no"
        " label, and would be a class of their own. Leave these out of the data; if it is a class,"
        " give it a name."
    )


def _count_of(split: Split, name: str, number: int) -> int:
    """Count how often a number stands in a column, or in its lists."""
    cells = (cell if isinstance(cell, list) else [cell] for cell in values(split, name))
    return sum(cell.count(number) for cell in cells)


def note_minus_one_labels(
    source: Source, split: Split, name: str, labels: Sequence[str], places: np.ndarray
) -> None:
    """Note how many labels are -1 if the others are 0 and 1.

    Such a -1 may be a class, such as a negative sentiment, or mean that the row has no label.
    """
    numbers = {label: _parse_number(label) for label in labels}
    if set(numbers.values()) != {-1.0, 0.0, 1.0}:
        return
    label = next(label for label, number in numbers.items() if number == -1)
    count = int(np.sum(places == labels.index(label)))
    source.notes.append(
        f"{split.key}: {count:,} labels in column {name} are {label}, a class like 0 and 1; if they"
        " say that there is no label, leave them out of the data"
    )


class LabelLists(NamedTuple):
    """Several labels of each row.

    Attributes:
        names: The distinct labels in the order in which they first appear.
        places: The index in `names` of each label of each row, rows joined; int32.
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
        ConfigError: The first row without a list, or with a list that holds something else than
            labels.
    """

    def find() -> dict[str, np.ndarray]:
        index_of: dict[str, int] = {}
        label_indices = array("i")
        borders = np.zeros(len(split.rows) + 1, dtype=np.int64)
        for row, indices in enumerate(_label_indices(split, name, index_of, expected)):
            label_indices.extend(indices)
            borders[row + 1] = len(label_indices)
        if not declared_names(split.rows.features[name]):
            _refuse_unlabelled(split, name, list(index_of), np.array(label_indices, dtype=np.int32))
        return {
            "names": texts_to_array(index_of),
            "places": np.array(label_indices, dtype=np.int32),
            "borders": borders,
        }

    arrays = _cache_labels(split, "label-lists-2", name, find)
    return LabelLists(array_to_texts(arrays["names"]), arrays["places"], arrays["borders"])


def named_label(value: object, declared: Sequence[str], name: str, where: str) -> str:
    """Name a label as text; 1.0 is `1`, a class number is its declared name.

    Args:
        value: The label.
        declared: Names of the classes of the column.
        name: The column.
        where: What has it, for the message.

    Raises:
        ConfigError: It is missing, no class of a `ClassLabel`, or a list.
    """
    if is_missing(value):
        raise ConfigError(f"{where} has no value in column {name}.")
    if declared and isinstance(value, int):
        if not 0 <= value < len(declared):
            raise ConfigError(
                f"{where} has the class number {value} in column {name}, which has classes 0 to"
                f" {len(declared) - 1}: a row without a label. Leave it out, or take another split."
            )
        return declared[value]
    if isinstance(value, list | dict | bytes):
        raise ConfigError(f"data.label_column={name}: {where} holds {value!r:.60}, not one label.")
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)


def class_names(source: Source, name: str, labels: Mapping[Split, Iterable[str]]) -> list[str]:
    """List the classes of a label column, in the order of their numbers.

    Those of a trained model are what they are. Otherwise a `ClassLabel` feature brings its own
    order; labels that are all numbers are ordered as numbers, others as text.

    Args:
        source: Whose training split says what classes there are.
        name: The label column.
        labels: By split; of rows that were cut off from the training rows, too: they alone may have
            a rare label.

    Raises:
        ConfigError: Fewer than two classes, or fractions.
    """
    if source.classes is not None:
        return source.classes
    names = _classes_of_rows(source, name, labels)
    if source.head_classes is None:
        return names
    return _classes_of_head(source, name, names, source.head_classes)


def _classes_of_head(
    source: Source, name: str, names: Sequence[str], head_classes: list[str]
) -> list[str]:
    """Return the classes of a pretrained head if it has all labels of the rows, else the rows'.

    A note says which, unless the names are the same.
    """
    table = LabelTable(head_classes)
    strangers = [label for label in names if table.find(label) is None]
    if strangers:
        source.notes.append(
            f"the model's head tells {_first_names(head_classes)} apart, and column {name} has"
            f" {_first_names(strangers)}: the head is new"
        )
        return list(names)
    spelt = [label for label in names if label not in head_classes]
    absent = {*range(len(head_classes))} - {table.find(label) for label in names}
    if spelt:
        pairs = [f"{label} is {head_classes[table.find(label) or 0]}" for label in spelt]
        source.notes.append(f"labels are those of the model's head: {_first_names(pairs)}")
    if absent:
        classes = _first_names([head_classes[number] for number in sorted(absent)])
        source.notes.append(f"classes of the model's head that no row has, and stay: {classes}")
    return head_classes


def _first_names(names: Sequence[str]) -> str:
    """List the first names."""
    return ", ".join(names[:MAX_SHOWN]) + (", ..." if len(names) > MAX_SHOWN else "")


def _classes_of_rows(source: Source, name: str, labels: Mapping[Split, Iterable[str]]) -> list[str]:
    """List the labels of the rows, as `class_names`.

    Raises:
        ConfigError: Fewer than two classes, or fractions.
    """
    split = source.train
    declared = declared_names(split.rows.features[name])
    distinct = set().union(
        *(
            labels[labelled_split]
            for labelled_split in (source.splits if source.cut_from_train else [split])
        )
    )
    names = declared
    if not declared:
        values = {label: _parse_number(label) for label in distinct}
        if all(value is not None for value in values.values()):
            if any(value is not None and not value.is_integer() for value in values.values()):
                raise ConfigError(
                    f"data.label_column={name}: {split.key} holds fractions there. "
                    "For numbers use task.problem_type=regression."
                )
            names = sorted(distinct, key=lambda label: (values[label] or 0.0, label))
        else:
            names = sorted(distinct)
    if len(names) < 2 and (source.head_classes is None or not names):
        only = f"one label only ({names[0]})" if names else "no label"
        raise ConfigError(
            f"data.label_column={name}: {split.key} has {only}. A classifier needs two or more."
        )
    return names


def _parse_number(label: str) -> float | None:
    try:
        value = float(label)
    except ValueError:
        return None
    if math.isfinite(value):
        return value
    return None


_BY_NUMBER = re.compile(r"(?:LABEL_)?(\d+)")


class LabelTable:
    """Labels as rows spell them to the numbers of classes that a model has.

    A label is the class of the same name; else the one that differs only by case and surrounding
    white space; else, if it is a number or `LABEL_number`, the class of that number.

    Args:
        names: Classes by number.

    Example:
        >>> table = LabelTable(["NEGATIVE", "POSITIVE"])
        >>> [table.find(label) for label in ("POSITIVE", "negative", "1", "LABEL_0")]
        [1, 0, 1, 0]
        >>> [table.find(label) for label in ("2", "neutral")]
        [None, None]
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._exact = {name: number for number, name in enumerate(names)}
        folded = [name.strip().casefold() for name in names]
        self._folded = {
            name: number for number, name in enumerate(folded) if folded.count(name) == 1
        }
        self._values = {_parse_number(name): number for number, name in enumerate(names)}
        self._values.pop(None, None)
        self._count = len(names)

    def find(self, label: str) -> int | None:
        """Return the number of a label; None: it is no class."""
        if label in self._exact:
            return self._exact[label]
        folded = self._folded.get(label.strip().casefold())
        if folded is not None:
            return folded
        value = _parse_number(label)
        if self._values:
            if value is None:
                return None
            return self._values.get(value)
        position = _BY_NUMBER.fullmatch(label.strip())
        if position is not None and int(position[1]) < self._count:
            return int(position[1])
        return None


class ClassNumbers:
    """Label to class number.

    Args:
        names: Classes by number.
        source: Where they come from, for the message.
    """

    def __init__(self, names: Sequence[str], source: Source) -> None:
        self.names = list(names)
        self.known_from = source.train.key if source.classes is None else "the checkpoint"
        is_of_model = source.classes is not None or self.names == source.head_classes
        self._table = LabelTable(names) if is_of_model else None
        self._number = {name: number for number, name in enumerate(names)}
        self._by_value = {_parse_number(name): number for number, name in enumerate(names)}

    def of(self, label: str, where: str) -> int:
        """Return the number of a label; `where` names its row in the message."""
        number = self._find(label)
        if number is not None:
            return number
        close = nearest(label, self.names, limit=1)
        hint = f" Did you mean {close[0]}?" if close else ""
        raise ConfigError(
            f"{where} has the label {label!r}, which {self.known_from} does not have. Labels:"
            f" {_first_names(self.names)}.{hint}"
        )

    def _find(self, label: str) -> int | None:
        if self._table is not None:
            return self._table.find(label)
        number = self._number.get(label)
        if number is None and (value := _parse_number(label)) is not None:
            number = self._by_value.get(value)
        return number

    def table(
        self,
        split: Split,
        labels: Sequence[str],
        places: np.ndarray,
        borders: np.ndarray | None = None,
    ) -> np.ndarray:
        """Look up the class number of each distinct label; shape (labels,), int64.

        Args:
            split: The rows.
            labels: The distinct labels in the order in which they first appear.
            places: The index in `labels` of each row's label, shape (rows,); the joined indices if
                rows have several labels.
            borders: Where each row begins in `places`, shape (rows + 1,); None: each has one label.

        Raises:
            ConfigError: The first row whose label is no class.
        """
        numbers = np.empty(len(labels), dtype=np.int64)
        for index, label in enumerate(labels):
            row = 0
            if self._find(label) is None:
                row = int(np.argmax(places == index))
                if borders is None:
                    row = row
                else:
                    row = int(np.searchsorted(borders, row, side="right")) - 1
            numbers[index] = self.of(label, split.where(row))
        return numbers


def row_classes(source: Source) -> tuple[list[str], dict[Split, np.ndarray]]:
    """Return the classes, and the class number of each row of every split.

    All labels of a stream are read now, so that the classes are known before the first step; its
    texts are not.

    Returns:
        The name of each class; the class number of each row by split, shape (rows,), int64 (int32
        for a stream).

    Raises:
        ConfigError: A row without a label, a label unseen in training, fewer than two classes.
    """
    labels = {split: row_labels(split, label_column(source, split)) for split in source.splits}
    names = class_names(
        source,
        label_column(source, source.train),
        {split: names_of_rows for split, (names_of_rows, _) in labels.items()},
    )
    numbered = ClassNumbers(names, source)
    class_numbers = {}
    for split, (names_of_rows, label_indices) in labels.items():
        note_minus_one_labels(
            source, split, label_column(source, split), names_of_rows, label_indices
        )
        table = numbered.table(split, names_of_rows, label_indices)
        class_numbers[split] = (
            table.astype(np.int32) if isinstance(split.rows, StreamRows) else table
        )[label_indices]
    return names, class_numbers


def numbers(split: Split, name: str) -> np.ndarray:
    """Read a column of numbers.

    Returns:
        Shape (rows,), float32.

    Raises:
        ConfigError: The first row that is no finite number.
    """

    def find() -> dict[str, np.ndarray]:
        parsed = np.empty(len(split.rows), dtype=np.float32)
        for row, value in enumerate(present_values(split, name)):
            try:
                number = float(value) if not isinstance(value, bool) else math.nan
            except (TypeError, ValueError, OverflowError):
                number = math.nan
            if not abs(number) <= _LARGEST:  # NaN too
                raise ConfigError(
                    f"{split.where(row)} has {value!r:.60} in column {name}: "
                    "a task of numbers (regression, scores) expects finite numbers."
                )
            parsed[row] = number
        return {"numbers": parsed}

    return _cache_labels(split, NUMBERS, name, find)["numbers"]


def label_config(names: Iterable[str]) -> dict[str, object]:
    """Return `id2label` and `label2id` for a transformers configuration."""
    names_by_number = list(names)
    return {
        "num_labels": len(names_by_number),
        "id2label": dict(enumerate(names_by_number)),
        "label2id": {label: number for number, label in enumerate(names_by_number)},
    }
