"""Labels of any name to class numbers and back, or to numbers as they are."""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from optrun.base.errors import ConfigError, nearest
from optrun.base.formatting import list_names
from optrun.data.cache import digest_if_known
from optrun.data.cached_arrays import array_to_texts, cached_arrays, texts_to_array
from optrun.data.columns import label_column, refuse_mixed, values
from optrun.data.source import Source, Split
from optrun.data.stream import StreamRows

MAX_SHOWN = 12
MOST_LABELS = 1 << 16
"""Different labels of a stream's column; one with more holds something else."""
LABEL_OF_EACH_WORD = "task=token_classification expects a list of labels, one for each word."
_MISSING = {"", "na", "n/a", "nan", "null", "none", "-", "?"}
_LARGEST = float(np.finfo(np.float32).max)


def is_missing(value: object) -> bool:
    """Tell whether a cell has no value: None or NaN."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def require_values(split: Split, name: str) -> Iterator[Any]:
    """Yield the values of a column; a missing one is an error.

    Raises:
        ConfigError: A row without a value; values of different kinds (not checked for a stream).
    """
    if not isinstance(split.rows, StreamRows):
        refuse_mixed(split, name)
    for row, value in enumerate(values(split, name)):
        if is_missing(value):
            raise ConfigError(
                f"{split.where(row)} has no value in column {name}; give it one, or leave the row"
                " out."
            )
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
    """Yield the indices of each row's labels.

    The index of a label counts the labels that appear before it for the first time.

    Example: the rows "b", "a", "b" give [0], [1], [0]; the rows ["b", "a"], [], ["c", "b"] give
    [0, 1], [], [2, 0]. `index_of` is {"b": 0, "a": 1} and {"b": 0, "a": 1, "c": 2} then.

    Args:
        split: The rows.
        name: The column.
        index_of: Label to its index; changed in place: new labels are added.
        expected: If a row has a list of labels: what the task expects, for the message. None: a row
            has one label.

    Raises:
        ConfigError: A row without a label, or without a list of labels; -1 for a `ClassLabel`; more
            than `MOST_LABELS` labels in a stream.
    """
    declared = declared_names(split.rows.features[name])  # of a `ClassLabel`
    for row, value in enumerate(require_values(split, name)):
        # 1. The labels of the row, as the column has them.
        labels = value
        if expected is None:
            labels = [value]
        elif not isinstance(value, list | tuple | np.ndarray):
            raise ConfigError(
                f"data.label_column={name}: {split.where(row)} has {value!r:.60} there; {expected}"
            )

        # 2. Refuse values that are no label.
        if any(isinstance(label, str) and not label.strip() for label in labels):
            raise ConfigError(
                f"{split.where(row)} has an empty label in column {name}. Leave it out of the data;"
                " if it is a class, give it a name."
            )
        if declared and -1 in labels:
            raise _unlabelled_error(split, name, "-1", _count_of(split, name, -1))

        # 3. Their names, and the indices of these; a new name gets the next index, which is the
        # number of names so far.
        indices = []
        for label in labels:
            if not isinstance(label, str):  # a text is its own name
                label = label_text(label, declared, name, split.where(row))
            indices.append(index_of.setdefault(label, len(index_of)))
        yield indices

        # 4. Refuse a column of a stream that holds something else than labels.
        if isinstance(split.rows, StreamRows) and len(index_of) > MOST_LABELS:
            raise ConfigError(
                f"data.label_column={name}: {split.key} has more than {MOST_LABELS:,} different"
                " labels there: no classes. For numbers use task.problem_type=regression."
            )


def _cache_labels(
    split: Split, kind: str, name: str, read: Callable[[], dict[str, np.ndarray]]
) -> dict[str, np.ndarray]:
    """Compute the arrays of a label column once, and map them from the cache later.

    Args:
        split: The rows; nothing is cached if their content is not known.
        kind: What the arrays are, for the cache key.
        name: The column; the class names that it declares are part of the cache key.
        read: Computes the arrays. If it raises, nothing is cached.
    """
    rows = split.rows
    content = rows.fingerprint() if isinstance(rows, StreamRows) else split.content
    declared = declared_names(rows.features[name])
    return cached_arrays("labels", digest_if_known(kind, content, name, *declared), read)


class ColumnLabels(NamedTuple):
    """The labels of a column."""

    names: list[str]
    """The distinct labels in the order in which they first appear."""
    indices: np.ndarray
    """The index in `names` of each label, the rows joined; int32."""
    offsets: np.ndarray | None = None
    """Where each row begins in `indices`, shape (rows + 1,), int64; None: a row has one label."""

    def count_of(self, label: str) -> int:
        """Count how often one of the labels appears."""
        return int(np.sum(self.indices == self.names.index(label)))

    def first_row_of(self, index: int) -> int:
        """Return the first row with the label of an index."""
        position = int(np.argmax(self.indices == index))
        if self.offsets is None:
            return position
        return int(np.searchsorted(self.offsets, position, side="right")) - 1


def read_labels(split: Split, name: str) -> ColumnLabels:
    """Read the label of each row; cached. Rows are read one after another.

    Raises:
        ConfigError: A row without a label, or with a list; a value that means "no label", such as
            -100; NA among numbers.
    """

    def read() -> dict[str, np.ndarray]:
        index_of: dict[str, int] = {}
        # A row has one label here, so that the lists of its indices have one element each. Reading
        # them fills `index_of`, whose keys are then the distinct labels in their order.
        one_index_each = chain.from_iterable(_label_indices(split, name, index_of))
        indices = np.fromiter(one_index_each, np.int32, len(split.rows))
        # Refuse values that mean "no label", and NA among numbers; in a stream NA passes. The names
        # of a `ClassLabel` are classes, and its only such value, -1, was refused above.
        if not declared_names(split.rows.features[name]):
            labels = ColumnLabels(list(index_of), indices)
            _refuse_unlabelled(split, name, labels)
            if not isinstance(split.rows, StreamRows):
                _refuse_missing(split, name, labels)
        return {"names": texts_to_array(index_of), "indices": indices}

    arrays = _cache_labels(split, "labels-3", name, read)
    return ColumnLabels(array_to_texts(arrays["names"]), arrays["indices"])


def read_label_lists(split: Split, name: str, expected: str) -> ColumnLabels:
    """Read the labels of rows with lists of labels; cached.

    Args:
        split: The rows.
        name: The column.
        expected: What the task expects there, for the message.

    Raises:
        ConfigError: A row without a list; a list with something other than labels, or with a value
            that stands for no label, such as -100.
    """

    def read() -> dict[str, np.ndarray]:
        index_of: dict[str, int] = {}  # label -> its index; `_label_indices` fills it
        joined = array("i")  # the indices of all rows, one row after another
        offsets = np.zeros(len(split.rows) + 1, dtype=np.int64)
        for row, row_indices in enumerate(_label_indices(split, name, index_of, expected)):
            joined.extend(row_indices)
            offsets[row + 1] = len(joined)
        indices = np.array(joined, dtype=np.int32)
        # With declared names `_label_indices` has refused every number that is no class.
        if not declared_names(split.rows.features[name]):
            _refuse_unlabelled(split, name, ColumnLabels(list(index_of), indices))
        return {"names": texts_to_array(index_of), "indices": indices, "borders": offsets}

    arrays = _cache_labels(split, "label-lists-3", name, read)
    return ColumnLabels(array_to_texts(arrays["names"]), arrays["indices"], arrays["borders"])


def _refuse_missing(split: Split, name: str, labels: ColumnLabels) -> None:
    """Refuse a word for "missing", such as NA, if all other labels are numbers.

    Raises:
        ConfigError: With the first row that has it.
    """
    missing = [label for label in labels.names if label.strip().lower() in _MISSING]
    others = [label for label in labels.names if label not in missing]
    others_are_numbers = all(_parse_number(label) is not None for label in others)
    if missing and others and others_are_numbers:
        # The names are in the order of their first rows.
        row = labels.first_row_of(labels.names.index(missing[0]))
        raise ConfigError(
            f"{split.where(row)} has {missing[0]!r} in column {name}, and all others have numbers:"
            " a row without a label? Leave such rows out, or give them a number of their own."
        )


def _refuse_unlabelled(split: Split, name: str, labels: ColumnLabels) -> None:
    """Refuse the usual values that mean "no label": -100, -1 and "-".

    -100 always means "no label". -1 does if it is the only negative number beside 0, 1 and 2; "-"
    does beside two or more other labels.

    Example: the labels 0, 1, 2 and -1 are refused, since classes count from 0. -1, 0 and 1 pass, as
    negative, neutral and positive; -2, -1, 0, 1 and 2 pass as grades.

    Raises:
        ConfigError: With the value and how often it appears.
    """
    numbers = {label: _parse_number(label) for label in labels.names}
    # 1. -100
    placeholders = [label for label in labels.names if numbers[label] == -100]

    # 2. -1
    negative = [label for label, number in numbers.items() if number is not None and number < 0]
    is_minus_one_alone = [numbers[label] for label in negative] == [-1.0]
    if is_minus_one_alone and {0.0, 1.0, 2.0} <= set(numbers.values()):
        placeholders += negative

    # 3. "-"
    if "-" in labels.names and len(labels.names) > 2:
        placeholders.append("-")
    if placeholders:
        raise _unlabelled_error(split, name, placeholders[0], labels.count_of(placeholders[0]))


def _unlabelled_error(split: Split, name: str, label: str, count: int) -> ConfigError:
    """Build the error for a value that means "no label", such as -100, among the labels."""
    return ConfigError(
        f"{split.key}: {count:,} labels in column {name} are {label!r}, which usually means that"
        " there is no label, and would be a class of their own. Leave these rows out of the data;"
        " if it is a class, give it a name."
    )


def _count_of(split: Split, name: str, number: int) -> int:
    """Count how often a number appears in a column, or in its lists."""
    cells = (cell if isinstance(cell, list) else [cell] for cell in values(split, name))
    return sum(cell.count(number) for cell in cells)


def note_minus_one_labels(source: Source, split: Split, name: str, labels: ColumnLabels) -> None:
    """Note how many labels are -1 if the others are 0 and 1; else do nothing.

    Such a -1 may be a class, such as a negative sentiment, or mean that the row has no label.

    Args:
        source: Its `notes` get the note.
        split: The rows.
        name: The column.
        labels: The labels of the column.
    """
    label_of = {_parse_number(label): label for label in labels.names}
    if set(label_of) != {-1.0, 0.0, 1.0}:
        return
    label = label_of[-1.0]  # such as "-1" or "-1.0"
    source.notes.append(
        f"{split.key}: {labels.count_of(label):,} labels in column {name} are {label}, a class like"
        " 0 and 1; if that marks rows without a label, leave these rows out of the data"
    )


def label_text(value: object, declared: Sequence[str], name: str, where: str) -> str:
    """Convert a label to text.

    1.0 becomes `1`; a class number of a `ClassLabel` becomes the name that it declares.

    Args:
        value: The label.
        declared: Names of the classes of the column; empty: it declares none.
        name: The column.
        where: What has it, for the message, such as `row 3 of data.train`.

    Raises:
        ConfigError: It is missing, is no class of a `ClassLabel`, or is a list, mapping or bytes.

    Example:
        >>> label_text(1.0, [], "y", "row 1"), label_text(1, ["cat", "dog"], "y", "row 1")
        ('1', 'dog')
    """
    if is_missing(value):
        raise ConfigError(
            f"{where} has no value in column {name}; give it one, or leave the row out."
        )
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


def class_names(source: Source, name: str, labels: Mapping[Split, ColumnLabels]) -> list[str]:
    """List the classes of a label column, in the order of their numbers.

    The first of these that exists:

    1. the classes of the checkpoint that is evaluated or resumed;
    2. those of the pretrained head, if it has all labels of the rows;
    3. those of a `ClassLabel` feature, in its order;
    4. the labels of the rows, in numeric order if all are numbers, else in alphabetical order.

    Args:
        source: Its training split has the classes; its `notes` are changed.
        name: The label column.
        labels: The labels by split. Those of evaluation rows that were cut off from the training
            rows count, too: only they may have a rare label.

    Raises:
        ConfigError: Fewer than two classes, or fractions.
    """
    if source.classes is not None:
        return source.classes
    names = _classes_of_rows(source, name, labels)
    if source.head_classes is None:
        return names
    return head_or_row_classes(source, f"column {name}", names, source.head_classes)


def head_or_row_classes(
    source: Source, name: str, names: Sequence[str], head_classes: list[str]
) -> list[str]:
    """Return the classes of a pretrained head if it has all labels of the rows, else the rows'.

    Labels are matched as `LabelTable` does. A note says what differs from the head, if anything.

    Args:
        source: Its `notes` are changed.
        name: What has the labels, for the note, such as `column label`.
        names: The labels of the rows.
        head_classes: Classes of the head by number.
    """
    table = LabelTable(head_classes)
    # The class number of each label in the head; None: the head lacks it.
    numbers = {label: table.class_number(label) for label in names}

    # 1. The head lacks a label: it is redrawn for the classes of the rows.
    new_labels = [label for label, number in numbers.items() if number is None]
    if new_labels:
        source.notes.append(
            f"the model's head has the classes {list_names(head_classes, MAX_SHOWN)}, and {name}"
            f" has {list_names(new_labels, MAX_SHOWN)}: the head is new"
        )
        return list(names)

    # 2. The head has them all, perhaps by other names, and perhaps more.
    renamed = [
        f"{label} is {head_classes[number]}"
        for label, number in numbers.items()
        if number is not None and label not in head_classes
    ]
    if renamed:
        source.notes.append(
            f"labels are those of the model's head: {list_names(renamed, MAX_SHOWN)}"
        )
    used = set(numbers.values())
    unused = [label for number, label in enumerate(head_classes) if number not in used]
    if unused:
        classes = list_names(unused, MAX_SHOWN)
        source.notes.append(f"classes of the model's head that no row has, and stay: {classes}")
    return head_classes


def _classes_of_rows(source: Source, name: str, labels: Mapping[Split, ColumnLabels]) -> list[str]:
    """List the classes of a `ClassLabel`, else the labels of the rows, sorted.

    Raises:
        ConfigError: No label, fractions, or a single label without a pretrained head.
    """
    # 1. Those of a `ClassLabel`, else those of the rows.
    names = declared_names(source.train.rows.features[name])
    if not names:
        splits = source.splits if source.cut_from_train else [source.train]
        distinct = set[str]().union(*(labels[split].names for split in splits))
        names = _sort_labels(distinct, name, source.train.key)

    # 2. Enough of them: the head of a pretrained model may have more than the one in the rows.
    if len(names) >= 2 or (names and source.head_classes is not None):
        return names
    only = f"one label only ({names[0]})" if names else "no label"
    raise ConfigError(
        f"data.label_column={name}: {source.train.key} has {only}. A classifier needs two or more."
        " data.label_column=NAME names another column."
    )


def _sort_labels(labels: Iterable[str], name: str, key: str) -> list[str]:
    """Sort labels in numeric order if all of them are numbers, else in alphabetical order.

    Raises:
        ConfigError: All are numbers, and some are fractions.

    Example:
        >>> _sort_labels(["10", "2"], "y", "train"), _sort_labels(["b", "10", "2"], "y", "train")
        (['2', '10'], ['10', '2', 'b'])
    """
    numbers = {label: _parse_number(label) for label in labels}
    values = [value for value in numbers.values() if value is not None]
    if len(values) < len(numbers):
        return sorted(numbers)
    if not all(value.is_integer() for value in values):
        raise ConfigError(
            f"data.label_column={name}: {key} holds fractions there. "
            "For numbers use task.problem_type=regression."
        )
    return sorted(numbers, key=lambda label: (numbers[label] or 0.0, label))


def _parse_number(label: str) -> float | None:
    """Read a label as a finite number; None if it is none.

    Example:
        >>> _parse_number("-1"), _parse_number("1e3"), _parse_number("nan"), _parse_number("spam")
        (-1.0, 1000.0, None, None)
    """
    try:
        value = float(label)
    except ValueError:
        return None
    if math.isfinite(value):
        return value
    return None


_BY_NUMBER = re.compile(r"(?:LABEL_)?(\d+)")


def _class_number_by_value(names: Sequence[str]) -> dict[float, int]:
    """Map the numbers in the names of classes to the numbers of the classes.

    For names that are numbers; or for names that each contain one number, if these count from 0
    or 1, as "1 star", "2 stars" do. Otherwise empty.

    Example:
        >>> _class_number_by_value(["10", "2"])
        {10.0: 0, 2.0: 1}
        >>> _class_number_by_value(["1 star", "2 stars"]), _class_number_by_value(["no", "yes"])
        ({1.0: 0, 2.0: 1}, {})
    """
    # 1. Names that are numbers.
    number_of_value = {}
    for number, name in enumerate(names):
        value = _parse_number(name)
        if value is not None:
            number_of_value[value] = number
    if number_of_value:
        return number_of_value

    # 2. Names that contain one number each, which count from 0 or 1.
    for number, name in enumerate(names):
        digits = re.findall(r"\d+", name)
        if len(digits) != 1:
            return {}
        number_of_value[float(digits[0])] = number
    count = len(names)
    if sorted(number_of_value) in (list(range(count)), list(range(1, count + 1))):
        return number_of_value
    return {}


class LabelTable:
    """Labels as rows spell them to the numbers of classes that a model has.

    A label is the class of the same name; else the one that differs only by case and surrounding
    white space; else, if it is a number, the class with that number in its name; else, if no name
    says another number than its own, or for `LABEL_number`, the class of that number.

    Args:
        names: Classes by number.

    Example:
        >>> table = LabelTable(["NEGATIVE", "POSITIVE"])
        >>> [table.class_number(label) for label in ("POSITIVE", "negative", "1", "LABEL_0")]
        [1, 0, 1, 0]
        >>> [table.class_number(label) for label in ("2", "neutral")]
        [None, None]
        >>> stars = LabelTable(["1 star", "2 stars", "3 stars"])
        >>> [stars.class_number(label) for label in ("1", "3", "0", "LABEL_0")]
        [0, 2, None, 0]
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._exact = {name: number for number, name in enumerate(names)}
        folded = [name.strip().casefold() for name in names]
        self._folded = {
            name: number for number, name in enumerate(folded) if folded.count(name) == 1
        }
        self._by_value = _class_number_by_value(names)
        self._count = len(names)

    def class_number(self, label: str) -> int | None:
        """Return the number of a label, see `LabelTable`; None: it is no class."""
        # 1. By name.
        if label in self._exact:
            return self._exact[label]
        folded = label.strip().casefold()
        if folded in self._folded:
            return self._folded[folded]

        # 2. By the number in the name of a class: "3" is "3 stars". If names have numbers, a number
        # that none has is no class: 0 is not the first of stars 1 to 5.
        value = _parse_number(label)
        if self._by_value and value is not None:
            return self._by_value.get(value)

        # 3. By the number of the class, from 0: "1" and "LABEL_1".
        position = _BY_NUMBER.fullmatch(label.strip())
        if position is not None and int(position[1]) < self._count:
            return int(position[1])
        return None


class ClassNumbers:
    """Looks up the class number of a label.

    Labels of a trained model's classes are matched as `LabelTable` does, others by their name, or
    as numbers: `1.0` is the class `1`.

    Args:
        names: Classes by number.
        source: Where the classes come from, for the message.
    """

    def __init__(self, names: Sequence[str], source: Source) -> None:
        self.names = list(names)
        self._origin = source.train.key if source.classes is None else "the checkpoint"
        is_of_model = source.classes is not None or self.names == source.head_classes
        self._table = LabelTable(names) if is_of_model else None
        self._number = {name: number for number, name in enumerate(names)}
        self._by_value = {_parse_number(name): number for number, name in enumerate(names)}
        self._by_value.pop(None, None)

    def _class_number(self, label: str) -> int | None:
        """Return the class number of a label; None: it is no class.

        By `LabelTable` if the classes are those of a trained model; else by name, then as a number.
        """
        if self._table is not None:
            return self._table.class_number(label)
        if label in self._number:
            return self._number[label]
        return self._by_value.get(_parse_number(label))

    def numbers_of_names(self, split: Split, labels: ColumnLabels) -> np.ndarray:
        """Look up the class number of each distinct label of a column.

        Args:
            split: The rows, for the message.
            labels: The labels of the column.

        Returns:
            Shape (distinct labels,), int64, in the order of `labels.names`.

        Raises:
            ConfigError: A label is no class; with the first row that has it.
        """
        numbers = []
        for index, label in enumerate(labels.names):
            number = self._class_number(label)
            if number is None:
                where = split.where(labels.first_row_of(index))
                close = nearest(label, self.names, limit=1)
                hint = f" Did you mean {close[0]}?" if close else ""
                raise ConfigError(
                    f"{where} has the label {label!r}, which {self._origin} does not have. Labels:"
                    f" {list_names(self.names, MAX_SHOWN)}.{hint}"
                )
            numbers.append(number)
        return np.array(numbers, dtype=np.int64)


def read_classes(source: Source) -> tuple[list[str], dict[Split, np.ndarray]]:
    """Return the classes, and the class number of each row of every split.

    All labels of a stream are read now, so that the classes are known before the first step; its
    texts are not. Adds notes to `source.notes`.

    Returns:
        The name of each class; the class number of each row by split, shape (rows,), int64 (int32
        for a stream).

    Raises:
        ConfigError: A row without a label, a label unseen in training, fewer than two classes.
    """
    # 1. The labels of all splits, and the classes.
    labels = {split: read_labels(split, label_column(source, split)) for split in source.splits}
    names = class_names(source, label_column(source, source.train), labels)
    class_numbers = ClassNumbers(names, source)

    # 2. The class number of each distinct label, then of each row.
    numbers = {}
    for split, column_labels in labels.items():
        note_minus_one_labels(source, split, label_column(source, split), column_labels)
        # Shape (distinct labels,); indexed with the index of each row's label, shape (rows,).
        number_of_name = class_numbers.numbers_of_names(split, column_labels)
        if isinstance(split.rows, StreamRows):  # half of the memory, for very many rows
            number_of_name = number_of_name.astype(np.int32)
        numbers[split] = number_of_name[column_labels.indices]
    return names, numbers


def read_finite_numbers(split: Split, name: str) -> np.ndarray:
    """Read a column of finite numbers; cached.

    Returns:
        Shape (rows,), float32.

    Raises:
        ConfigError: The first row without a value, or whose value is no finite number in the range
            of float32. True and false are no numbers here.
    """

    def read() -> dict[str, np.ndarray]:
        parsed = np.empty(len(split.rows), dtype=np.float32)
        for row, value in enumerate(require_values(split, name)):
            try:
                number = math.nan if isinstance(value, bool) else float(value)
            except (TypeError, ValueError, OverflowError):
                number = math.nan
            if not abs(number) <= _LARGEST:  # also true of NaN
                raise ConfigError(
                    f"{split.where(row)} has {value!r:.60} in column {name}:"
                    " a task of numbers (regression, scores) expects finite numbers."
                )
            parsed[row] = number
        return {"numbers": parsed}

    return _cache_labels(split, "numbers-1", name, read)["numbers"]


def note_minus_100(source: Source, split: Split, numbers: np.ndarray) -> None:
    """Note how many numbers to learn are -100, the usual value of rows without a label."""
    count = int(np.sum(numbers == -100))
    if count:
        source.notes.append(
            f"{split.key}: {count:,} of the numbers to learn are -100; if that marks rows without a"
            " label, leave these rows out of the data"
        )


def label_config(names: Sequence[str]) -> dict[str, object]:
    """Return `num_labels`, `id2label` and `label2id` for a transformers configuration.

    names: Classes by number.
    """
    return {
        "num_labels": len(names),
        "id2label": dict(enumerate(names)),
        "label2id": {label: number for number, label in enumerate(names)},
    }
