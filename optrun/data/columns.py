"""Find the columns of the rows, as keys name them, or by names and types."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optrun.base.errors import ConfigError, nearest
from optrun.config.schema.data import ColumnsConfig
from optrun.data.folders import IMAGES
from optrun.data.row_advice import USUAL_TEXTS, cell_repr, columns_in_words, is_mixed, is_nested

if TYPE_CHECKING:
    from datasets import Dataset

    from optrun.data.source import Source, Split

ALL_KEYS = (
    "text_column",
    "text_pair_column",
    "messages_column",
    "label_column",
    "target_column",
    "image_column",
    "label_columns",
    "negative_columns",
)
USUAL_LABELS = ("label", "labels")
USUAL_WORDS = ("tokens", "words")
_TEXT_TYPES = ("string", "large_string")


def refuse_unused(columns: ColumnsConfig | None, used: Iterable[str], task: str) -> None:
    """Refuse keys of columns that a task does not read, and a column under two keys.

    Args:
        columns: The keys; None: the data have no such keys.
        used: Keys that the task reads.
        task: Its name, for the message.

    Raises:
        ConfigError: With the key, and the keys that the task reads.
    """
    if columns is None:
        return
    used = list(used)
    meanings: dict[str, str] = {}
    for key in ALL_KEYS:
        name = getattr(columns, key)
        if name is None:
            continue
        several = name if isinstance(name, list | tuple) else [name]
        for column in several:
            other_key = meanings.setdefault(column, key)
            if other_key != key:
                raise ConfigError(
                    f"data.{key}={name}: data.{other_key} is that column already. Give each its"
                    " own."
                )
        if key not in used:
            names = ", ".join(f"data.{name}" for name in used) or "none"
            raise ConfigError(
                f"data.{key}={name}: task={task} reads no such column. It reads: {names}."
            )


def missing_column(key: str, name: str, split: Split) -> ConfigError:
    """Build the refusal of a missing column, with the columns and the nearest name."""
    column_names = split.rows.column_names
    close = nearest(name, column_names)
    hint = f" Did you mean {' or '.join(close)}?" if close else ""
    if split.key.startswith("data.eval"):
        hint += " It needs the column names of data.train."
    return ConfigError(
        f"{key}={name}: {split.key} has no such column. Columns: {', '.join(column_names)}.{hint}"
    )


def named_column(columns: ColumnsConfig | None, key: str, split: Split) -> str | None:
    """Find the column that a key names, and mark it as read; None: the key is not set.

    Raises:
        ConfigError: The split has no column of that name.
    """
    name: str | None = getattr(columns, key) if columns is not None else None
    if name is None:
        return None
    column = same_column(name, split.rows.column_names)
    if column is None:
        raise missing_column(f"data.{key}", name, split)
    return split.reading(column)


def unread_columns(source: Source, task: str) -> list[str]:
    """Name the columns of each split without a use for its task.

    A column that the training rows have is not named again for those to evaluate on. A split of
    which the task has read no column by its name says nothing.
    """
    sentences = []
    named_before: set[str] = set()
    for split in source.splits:
        columns: Sequence[str] = getattr(split.rows, "column_names", ())
        unread = [name for name in columns if name not in split.columns_read | named_before]
        named_before.update(unread)
        if unread and split.columns_read and len(split.rows):
            names = ", ".join(name if name.strip() else repr(name) for name in unread)
            sentences.append(f"{split.key}: not read by task={task}: {names}")
    return sentences


def same_column(name: str, column_names: Sequence[str]) -> str | None:
    """Find a column by its name, whatever its case and the blanks around it.

    Example:
        >>> same_column("label", ["Text", " Label"]), same_column("text", ["Text", "TEXT"])
        (' Label', None)
    """
    if name in column_names:
        return name
    folded = name.strip().casefold()
    close = [candidate for candidate in column_names if candidate.strip().casefold() == folded]
    return close[0] if len(close) == 1 else None


def usual_columns(names: Iterable[str], column_names: Sequence[str]) -> list[str]:
    """List the columns with one of some usual names, as `same_column` finds them."""
    columns = [same_column(name, column_names) for name in names]
    return [column for column in columns if column is not None]


def _named_or_usual(source: Source, split: Split, key: str, usual: Sequence[str]) -> str:
    """Find the column that a key names, else the only one with a usual name; mark it as read.

    Args:
        source: Has the keys.
        split: Where the column must be.
        key: The key without `data.`.
        usual: Usual names of such a column.

    Raises:
        ConfigError: There is none, or several.
    """
    name = named_column(source.columns, key, split)
    if name is not None:
        return name
    if source.columns is None:
        kind_of_column = f"{key.removesuffix('_column').removesuffix('s')}s"
        raise ConfigError(
            f"{split.key} has texts alone, and this task needs {kind_of_column}. Take data=files or"
            " data=hub."
        )
    columns = usual_columns(usual, split.rows.column_names)
    if len(columns) == 1:
        return split.reading(columns[0])
    raise ConfigError(
        f"data.{key} is needed: {split.key} has no single column called {' or '.join(usual)}. "
        f"{columns_in_words(split.rows)}{missing_names(split)}"
    )


def label_column(source: Source, split: Split, usual_names: Iterable[str] = USUAL_LABELS) -> str:
    """Find the label column: the one of `data.label_column`, else one with a usual name.

    Raises:
        ConfigError: There is none, or several have usual names.
    """
    return _named_or_usual(source, split, "label_column", tuple(usual_names))


def missing_names(split: Split) -> str:
    """Say how to name the columns if a row stands in place of their names.

    It does if a name is a fraction, or a text that its own column has among the first 1,000 rows.

    Returns:
        Two sentences that begin with a space; empty if the names are names.
    """
    columns = split.rows.column_names
    if usual_columns((*USUAL_TEXTS, *USUAL_LABELS, "id"), columns):
        return ""  # a text may well be the word text
    has_fraction = any(re.fullmatch(r"-?\d+\.\d+", name) for name in columns)
    is_row = has_fraction and not all(map(is_number, columns))
    for name in _list_text_columns(split.rows):
        if name and name in split.rows.select_columns([name])[:1000][name]:
            is_row = True
    if not is_row:
        return ""
    numbered = ", ".join(f"NAME{number}" for number, _ in enumerate(columns, 1))
    return (
        f" A row stands in place of a line of names: {', '.join(map(repr, columns))}."
        f' "data.column_names=[{numbered}]" gives the columns their names, such as text and label.'
    )


def text_column(source: Source, split: Split, taken: Iterable[str | None] = ()) -> str:
    """Find the text column, and mark it as read.

    It is the one of `data.text_column`, else the only one of texts, else the one with a usual name.
    Evaluation rows may have their only column of texts under another name than the training rows; a
    note says so. For a split without rows the column of the training rows is returned.

    Args:
        source: Has the keys, and takes notes.
        split: Where the column must be.
        taken: Columns with another meaning.

    Raises:
        ConfigError: No such column, no column of texts, or several.
    """
    if not len(split.rows):  # nothing to evaluate on has the columns of the training rows
        split = source.train
    name = source.columns.text_column if source.columns is not None else None
    others = [other for other in _list_text_columns(split.rows) if other not in taken]
    is_elsewhere = name is not None and same_column(name, split.rows.column_names) is None
    if is_elsewhere and split is not source.train and len(others) == 1:
        source.notes.append(
            f"{split.key} has no column {name!r}, so its only text column {others[0]!r} is read"
        )
        return split.reading(others[0])
    column = named_column(source.columns, "text_column", split)
    if column is None:
        column = _usual_text(split, taken, others)
    elif column in taken:
        raise ConfigError(
            f"data.text_column={column}: {split.key} has its labels or targets there, not its"
            " texts."
        )
    return split.reading(column)


def _usual_text(split: Split, taken: Iterable[str | None], candidates: Sequence[str]) -> str:
    """Return the only column of texts, else the one with a usual name.

    Raises:
        ConfigError: No column of texts, or several.
    """
    features = split.rows.features
    nested = [name for name in USUAL_TEXTS if name not in taken and is_nested(features.get(name))]
    if len(candidates) == 1 and not nested:
        return candidates[0]
    usual = usual_columns(USUAL_TEXTS, candidates)
    if len(usual) == 1:
        return usual[0]
    for name in USUAL_TEXTS:
        if not candidates and name in split.rows.column_names:
            refuse_mixed(split, name)
    columns = "no column of texts"
    if candidates:
        columns = f"several columns of texts ({', '.join(candidates)})"
    if len(candidates) == 1:
        columns = f"no texts in column {nested[0]}, and {candidates[0]} may be something else"
    raise ConfigError(
        f"data.text_column is needed: {split.key} has {columns}. {columns_in_words(split.rows)}"
    )


def words_column(source: Source, split: Split, labels: str) -> str:
    """Find the column of word lists, and mark it as read.

    It is the one of `data.text_column`, else the only one of lists of texts, else the only one of
    these with a usual name.

    Args:
        source: Has the keys.
        split: Where the column must be.
        labels: The column of label lists; empty: there is none.

    Raises:
        ConfigError: No such column, or it holds no lists of texts.
    """
    name = named_column(source.columns, "text_column", split)
    candidates = [
        column
        for column, feature in split.rows.features.items()
        if column != labels
        and getattr(getattr(feature, "feature", None), "dtype", None) in _TEXT_TYPES
    ]
    if name is None and len(candidates) != 1:
        candidates = usual_columns(USUAL_WORDS, candidates)
    if name is None and len(candidates) == 1:
        return split.reading(candidates[0])
    if name is not None and name in candidates:
        return name
    for column in set(split.rows.column_names) & ({name} if name else set(USUAL_WORDS)):
        refuse_mixed(split, column)
    message = f"data.text_column={name}: task=token_classification expects lists of words there."
    if name is None:
        message = (
            f"data.text_column is needed: {split.key} has no single column of word lists. "
            f"{columns_in_words(split.rows)}"
        )
    if not any(hasattr(feature, "feature") for feature in split.rows.features.values()):
        message += " Lists are read from json, jsonl and parquet, and from data=hub."
    raise ConfigError(message)


def target_column(source: Source, split: Split) -> str:
    """Find the column of texts to produce: the one of `data.target_column`, else `target`.

    Raises:
        ConfigError: There is none.
    """
    return _named_or_usual(source, split, "target_column", ("target",))


def image_column(source: Source, split: Split) -> str:
    """Find the column of images, and mark it as read.

    It is the one of `data.image_column`, else the only one of images, else the only one whose first
    cell is the path of an image; a note says so then.

    Raises:
        ConfigError: There is none, or several.
    """
    name = named_column(source.columns, "image_column", split)
    if name is not None:
        return name
    columns: list[str] = [
        name for name, feature in split.rows.features.items() if type(feature).__name__ == "Image"
    ]
    if len(columns) == 1:
        return split.reading(columns[0])
    paths: list[str] = []
    if getattr(split.rows, "num_rows", 0):  # which a stream does not have
        paths = [name for name, cell in split.rows[0].items() if is_image_path(cell)]
    if len(paths) == 1 and not columns:
        source.notes.append(
            f"{split.key}: column {paths[0]} holds paths of images (data.image_column)"
        )
        return split.reading(paths[0])
    number = "several columns" if columns else "no column"
    raise ConfigError(
        f"data.image_column is needed: {split.key} has {number} of images."
        f" {columns_in_words(split.rows)}"
    )


def is_image_path(cell: object) -> bool:
    """Tell whether a cell is a text with the ending of an image file."""
    return isinstance(cell, str) and Path(cell).suffix.lower() in IMAGES


def _list_text_columns(rows: Dataset) -> list[str]:
    """List the columns of texts.

    Columns whose first 100 texts are all numbers, or empty, count only if there are no others.
    """
    columns = []
    columns_of_numbers = []
    for name, feature in rows.features.items():
        if getattr(feature, "dtype", None) not in _TEXT_TYPES:
            continue
        if all(map(is_number, rows.select_columns([name])[:100][name])):
            columns_of_numbers.append(name)
        else:
            columns.append(name)
    return columns or columns_of_numbers


def is_number(value: str | None) -> bool:
    """Tell whether a text is a number, as `float` reads it; so are None and an empty text."""
    try:
        float(value or "0")
    except (TypeError, ValueError):
        return False
    return True


_KINDS = {
    str: "a text",
    int: "a number",
    float: "a number",
    bool: "true or false",
    dict: "an object",
    list: "a list",
}


def refuse_mixed(split: Split, column: str) -> None:
    """Refuse a column whose cells, or the items of whose lists, are of several types.

    Nothing is read of a column whose type says that it is not mixed. Missing cells may stand beside
    any type.

    Raises:
        ConfigError: With the first row that differs from those before it.
    """
    feature = split.rows.features[column]
    if not is_mixed(feature) and not is_mixed(getattr(feature, "feature", None)):
        return
    first_cell: _First = {}
    first_item: _First = {}
    for row, cell in enumerate(split.rows[column]):
        _refuse_other_type(split, column, row, cell, first_cell)
        for item in cell if isinstance(cell, list) else []:
            _refuse_other_type(split, column, row, item, first_item)


_First = dict[str, tuple[int, object]]
"""The type of the first value in words, with its row and the value; empty before it."""


def _refuse_other_type(split: Split, column: str, row: int, value: object, first: _First) -> None:
    """Refuse a value of another type than the first one; `first` gets the first."""
    kind = _KINDS.get(type(value))
    if kind is None or kind in first:
        return
    if not first:
        first[kind] = (row, value)
        return
    [(first_row, first_value)] = first.values()
    raise ConfigError(
        f"{split.key}: column {column} mixes kinds of values: row {split.number(first_row)} has"
        f" {cell_repr(first_value)}, row {split.number(row)} has {cell_repr(value)}. Write all of"
        " them alike."
    )


def values(split: Split, name: str) -> Iterator[Any]:
    """Yield the values of a column, of 1,000 rows in memory at a time, and mark it as read."""
    return (value for (value,) in split.cells([name]))


def texts(split: Split, column: str) -> Iterator[str]:
    """Yield the text of each row, as `text_of` makes it of a cell.

    Raises:
        ConfigError: A value that is no text: a list, bytes, a date; a column that mixes texts and
            numbers.
    """
    refuse_mixed(split, column)
    for row, value in enumerate(values(split, column)):
        text = text_of(value)
        if text is None:
            raise ConfigError(
                f"{split.key}: row {split.number(row)} has {cell_repr(value)} in column {column},"
                f" where a text is expected. {columns_in_words(split.rows)}"
            )
        yield text


def text_of(value: object) -> str | None:
    """Return the text of a cell: a number as Python writes it, a missing cell as an empty text.

    None: it is something else.
    """
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    if isinstance(value, int | float):
        return str(value)
    return None


def cell_text(row: Mapping[str, object], column: str) -> str:
    """Return the text of a row's cell, as `text_of`.

    Raises:
        ConfigError: It is something else; the message has no key and no number of the row.
    """
    text = text_of(row.get(column))
    if text is None:
        raise ConfigError(
            f"it has {cell_repr(row[column])} in column {column}, where a text is expected."
        )
    return text
