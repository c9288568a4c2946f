"""Find the columns of the rows, as keys name them, or by names and types."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optrun.base import shell
from optrun.base.errors import ConfigError, did_you_mean
from optrun.config.schema.data import ColumnsConfig
from optrun.data.first_values import (
    guess_label_column,
    is_number,
    same_column,
    usual_columns,
)
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
USUAL_IN_HEADERS = (*USUAL_TEXTS, *USUAL_LABELS, "id")
"""Names of columns by which the first line of a file is surely a header."""
_TEXT_TYPES = ("string", "large_string")


def refuse_unused(columns: ColumnsConfig | None, used: Collection[str], task: str) -> None:
    """Refuse column keys without use for a task, and two keys for one column.

    Args:
        columns: The keys; None: the data have no such keys.
        used: Keys that the task reads.
        task: Its name, for the message.

    Raises:
        ConfigError: With the key, and the keys that the task reads.
    """
    if columns is None:
        return
    key_of_column: dict[str, str] = {}
    for key in ALL_KEYS:
        value = getattr(columns, key)
        if value is None:
            continue
        for column in value if isinstance(value, list | tuple) else [value]:
            other_key = key_of_column.setdefault(column, key)  # the first key with this column
            if other_key != key:
                raise ConfigError(
                    f"data.{key}={value}: data.{other_key} names the same column. Give each key a"
                    " column of its own."
                )
        if key not in used:
            keys = ", ".join(f"data.{name}" for name in used) or "none"
            raise ConfigError(
                f"data.{key}={value}: task={task} does not use this key. It uses: {keys}."
            )


def missing_column(key: str, name: str, split: Split) -> ConfigError:
    """Build the error for a missing column; its message has all columns and the nearest names.

    Args:
        key: What names the column, such as `data.text_column`.
        name: The missing column.
        split: Where it is missing.
    """
    column_names = split.rows.column_names
    problem = f"{split.key} has no column {name}. Columns: {', '.join(column_names)}."
    if split.key.startswith("data.eval"):
        problem += f" It needs the column names of data.train; optrun predict takes {key}=NAME."
    return ConfigError(f"{key}={name}: {problem} {did_you_mean(name, column_names, '')}".rstrip())


def named_column(columns: ColumnsConfig | None, key: str, split: Split) -> str | None:
    """Find the column that a key names, and mark it as read; None: the key is not set.

    Its name may differ in case and in blanks around it.

    Raises:
        ConfigError: The split has no column of that name.
    """
    name: str | None = getattr(columns, key) if columns is not None else None
    if name is None:
        return None
    column = same_column(name, split.rows.column_names)
    if column is None:
        raise missing_column(f"data.{key}", name, split)
    return split.mark_read(column)


def unread_columns(source: Source, task: str) -> list[str]:
    """Write a sentence for each split with columns unread by its task, for the user.

    A column that was named for the training rows is not named again for evaluation rows. A split
    is skipped if it has no rows, or if its task finds columns in another way than by their names,
    so that none is marked as read.

    Returns:
        Such as `data.train: not read by task=causal_lm: id, source`.
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


def _named_or_usual(source: Source, split: Split, key: str, usual: Sequence[str]) -> str:
    """Find the column that a key names, else the only one with a usual name; mark it as read.

    The message of an error guesses a column of labels.

    Args:
        source: Has the keys.
        split: Where the column must be.
        key: The key without `data.`.
        usual: Usual names of such a column.

    Raises:
        ConfigError: There is none, or several.
    """
    # 1. The column of the key.
    name = named_column(source.columns, key, split)
    if name is not None:
        return name
    if source.columns is None:
        noun = key.removesuffix("_column")  # label, target
        raise ConfigError(
            f"{split.key} has only texts, and this task needs {noun}s. Take data=files or data=hub."
        )
    # 2. The only column with a usual name.
    columns = usual_columns(usual, split.rows.column_names)
    if len(columns) == 1:
        return split.mark_read(columns[0])
    # 3. Neither: say what might help.
    advice = "optrun start FILE guesses it."
    # A stream has no `num_rows`, and its rows are not read for a guess.
    if usual == USUAL_LABELS and getattr(split.rows, "num_rows", False):
        guess = guess_label_column(split.rows)
        if guess is not None:
            advice = f"{guess} looks like it: {shell.quote(f'data.{key}={guess}')}"
    raise ConfigError(
        f"data.{key} is needed: {split.key} has no single column called {' or '.join(usual)}. "
        f"{columns_in_words(split.rows)}{advise_on_header(split)} {advice}"
    )


def label_column(source: Source, split: Split, usual_names: Iterable[str] = USUAL_LABELS) -> str:
    """Find the label column: the one of `data.label_column`, else one with a usual name.

    Raises:
        ConfigError: There is none, or several have usual names.
    """
    return _named_or_usual(source, split, "label_column", tuple(usual_names))


def advise_on_header(split: Split) -> str:
    """Advise to name the columns if the first line seems to be a row, not a header.

    Returns:
        Two sentences, with a space before them; empty if the first line seems to be a header.
    """
    if not _is_header_a_row(split):
        return ""
    columns = split.rows.column_names
    numbered = ", ".join(f"NAME{number}" for number, _ in enumerate(columns, 1))
    return (
        f" The first line seems to be a row, not a header: {', '.join(map(repr, columns))}."
        f' "data.column_names=[{numbered}]" gives the columns their names, such as text and label.'
    )


def _is_header_a_row(split: Split) -> bool:
    """Tell whether the names of the columns look like a row of a file without a header.

    They do if a name is a fraction and another is no number, or if a column of texts has its own
    name among its first 1,000 cells. Usual names, such as `text`, are always a header. Example:
    `0.5` and `good`, or a column `good` with the cells `bad, good, bad`.
    """
    columns = split.rows.column_names
    if usual_columns(USUAL_IN_HEADERS, columns):
        return False
    has_fraction = any(re.fullmatch(r"-?\d+\.\d+", name) for name in columns)
    if has_fraction and not all(map(is_number, columns)):
        return True
    return any(
        name and name in split.rows.select_columns([name])[:1000][name]
        for name in _list_text_columns(split.rows)
    )


def text_column(source: Source, split: Split, taken: Iterable[str | None] = ()) -> str:
    """Find the text column, and mark it as read.

    It is the one of `data.text_column`, else the only one of texts, else the one with a usual name:
    `text`, `sentence` or `content`. If evaluation rows lack the column that the key names, their
    only column of texts is read, and a note says so. For a split without rows the column of the
    training rows is returned.

    Args:
        source: Has the keys, and takes notes.
        split: Where the column must be.
        taken: Columns that have another meaning, such as labels, and so cannot be the one.

    Raises:
        ConfigError: The named column is missing or has another meaning, or there is no column of
            texts, or several.
    """
    if not len(split.rows):
        split = source.train
    # Columns of texts that may be the one, without a key.
    candidates = [column for column in _list_text_columns(split.rows) if column not in taken]
    # 1. Evaluation rows without the column of the key.
    name = source.columns.text_column if source.columns is not None else None
    is_missing = name is not None and same_column(name, split.rows.column_names) is None
    if is_missing and split is not source.train and len(candidates) == 1:
        source.notes.append(
            f"{split.key} has no column {name!r}, so its only text column {candidates[0]!r} is read"
        )
        return split.mark_read(candidates[0])
    # 2. Rows without a key. `named_column` refuses a missing column; None: no key is set.
    column = named_column(source.columns, "text_column", split)
    if column is None:
        return split.mark_read(_usual_text(split, taken, candidates))
    # 3. The column of the key, which is marked as read already.
    if column in taken:
        raise ConfigError(
            f"data.text_column={column}: {split.key} has its labels or targets there, not its"
            " texts."
        )
    return column


def _usual_text(split: Split, taken: Iterable[str | None], candidates: Sequence[str]) -> str:
    """Return the only column of texts, else the one with a usual name.

    A column with a usual name that holds objects or lists makes the only column of texts doubtful:
    of rows such as `{"text": {"en": "a"}, "id": "x1"}` the texts are hardly those of `id`.

    Args:
        split: The rows.
        taken: Columns with another meaning.
        candidates: The other columns of texts.

    Raises:
        ConfigError: There is no column of texts, or it is not clear which.
    """
    features = split.rows.features
    nested = [name for name in USUAL_TEXTS if name not in taken and is_nested(features.get(name))]
    # 1. The only column, or the only one with a usual name.
    if len(candidates) == 1 and not nested:
        return candidates[0]
    usual = usual_columns(USUAL_TEXTS, candidates)
    if len(usual) == 1:
        return usual[0]
    # 2. It is not clear: say why. A column of texts and numbers has no type, so it is no candidate;
    #    `refuse_mixed` names it.
    if not candidates:
        problem = "no column of texts"
        for name in USUAL_TEXTS:
            if name in split.rows.column_names:
                refuse_mixed(split, name)
    elif len(candidates) == 1:
        problem = f"no texts in column {nested[0]}, and {candidates[0]} may be something else"
    else:
        problem = f"several columns of texts ({', '.join(candidates)})"
    raise ConfigError(
        f"data.text_column is needed: {split.key} has {problem}. {columns_in_words(split.rows)}"
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
        ConfigError: The named column is missing or holds no lists of texts; or no key names one,
            and there is no column of such lists, or several.
    """
    candidates = []
    for column, feature in split.rows.features.items():
        item_type = getattr(getattr(feature, "feature", None), "dtype", None)
        if column != labels and item_type in _TEXT_TYPES:
            candidates.append(column)
    name = named_column(source.columns, "text_column", split)
    # 1. The column of the key. If it holds no lists of texts, mixed lists may be the reason.
    if name is not None:
        if name in candidates:
            return name
        refuse_mixed(split, name)
        message = (
            f"data.text_column={name}: task=token_classification expects lists of words there."
        )
    # 2. The only column of lists of texts, else the only one with a usual name.
    else:
        if len(candidates) != 1:
            candidates = usual_columns(USUAL_WORDS, candidates)
        if len(candidates) == 1:
            return split.mark_read(candidates[0])
        for column in usual_columns(USUAL_WORDS, split.rows.column_names):
            refuse_mixed(split, column)
        message = (
            f"data.text_column is needed: {split.key} has no single column of word lists. "
            f"{columns_in_words(split.rows)}"
        )
    # 3. Neither: advise on the format if the rows have no lists at all.
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

    It is the one of `data.image_column`, else the only one of type `Image`, else the only one whose
    first cell is the path of an image; in the last case a note says so.

    Raises:
        ConfigError: There is none, or several.
    """
    # 1. The column of the key.
    name = named_column(source.columns, "image_column", split)
    if name is not None:
        return name
    # 2. The only one of type `Image`.
    columns: list[str] = [
        column
        for column, feature in split.rows.features.items()
        if type(feature).__name__ == "Image"
    ]
    if len(columns) == 1:
        return split.mark_read(columns[0])
    # 3. The only one whose first cell is a path; the rows of a stream are not read for that.
    paths: list[str] = []
    if getattr(split.rows, "num_rows", False):
        paths = [column for column, cell in split.rows[0].items() if is_image_path(cell)]
    if len(paths) == 1 and not columns:
        source.notes.append(
            f"{split.key}: column {paths[0]} holds paths of images (data.image_column)"
        )
        return split.mark_read(paths[0])
    number = "several columns" if columns else "no column"
    raise ConfigError(
        f"data.image_column is needed: {split.key} has {number} of images."
        f" {columns_in_words(split.rows)}"
    )


def is_image_path(cell: object) -> bool:
    """Tell whether a cell is a text with the ending of an image file."""
    return isinstance(cell, str) and Path(cell).suffix.lower() in IMAGES


def _list_text_columns(rows: Dataset) -> list[str]:
    """List the columns of type text.

    Columns whose first 100 texts are all numbers or empty are listed only if there are no others:
    csv has texts alone, and a column `id` of 1, 2, 3 is no text to learn.
    """
    with_words = []
    with_numbers = []
    for name, feature in rows.features.items():
        if getattr(feature, "dtype", None) not in _TEXT_TYPES:
            continue
        if all(map(is_number, rows.select_columns([name])[:100][name])):
            with_numbers.append(name)
        else:
            with_words.append(name)
    return with_words or with_numbers


_KIND_OF_TYPE = {
    str: "a text",
    int: "a number",
    float: "a number",
    bool: "true or false",
    dict: "an object",
    list: "a list",
}


def refuse_mixed(split: Split, column: str) -> None:
    """Refuse a column with cells of several kinds, or with items of lists of several kinds.

    Kinds are text, number, boolean, object and list; a missing value has none. Items are compared
    over all lists of the column together. Cells are only read if the type of the column allows
    several kinds. Refused are the cells `1` and `"a"`, and the lists `[1]` and `["a"]`.

    Raises:
        ConfigError: The message has the first value, and the first value of another kind.
    """
    feature = split.rows.features[column]
    if not is_mixed(feature) and not is_mixed(getattr(feature, "feature", None)):
        return
    first_cell = _FirstValue()
    first_item = _FirstValue()
    for row, cell in enumerate(split.rows[column]):
        _refuse_other_kind(split, column, row, cell, first_cell)  # which it sets at the first one
        if isinstance(cell, list):
            for item in cell:
                _refuse_other_kind(split, column, row, item, first_item)


@dataclass
class _FirstValue:
    """The first value of a kind that a column has; `kind` is empty before there is one."""

    kind: str = ""
    row: int = 0
    value: object = None


def _refuse_other_kind(
    split: Split, column: str, row: int, value: object, first: _FirstValue
) -> None:
    """Refuse a value of another kind than the first one.

    first: The first value of the column; set here if there is none yet.
    """
    kind = _KIND_OF_TYPE.get(type(value))
    if kind is None or kind == first.kind:
        return
    if not first.kind:
        first.kind = kind
        first.row = row
        first.value = value
        return
    raise ConfigError(
        f"{split.key}: column {column} mixes kinds of values: row {split.number(first.row)} has"
        f" {cell_repr(first.value)}, row {split.number(row)} has {cell_repr(value)}. Write values"
        " of one kind."
    )


def values(split: Split, name: str) -> Iterator[Any]:
    """Yield the values of a column, and mark it as read; 1,000 rows are in memory at a time."""
    return (value for (value,) in split.cells([name]))


def texts(split: Split, column: str) -> Iterator[str]:
    """Yield the cells of a column as texts, and mark it as read.

    Numbers are written as Python writes them; a missing cell is an empty text.

    Raises:
        ConfigError: A value is no text, such as a list, bytes or a date; or the column mixes texts
            and numbers.
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
    """Return the text of a cell: a number as Python writes it, None as an empty text.

    NaN is a number and becomes "nan"; True becomes "True". None: the cell is something else, such
    as a list.
    """
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    if isinstance(value, int | float):
        return str(value)
    return None


def cell_text(row: Mapping[str, object], column: str) -> str:
    """Return a cell of a row as `text_of` does.

    Raises:
        ConfigError: It is no text and no number; the caller adds key and row to the message.
    """
    text = text_of(row.get(column))
    if text is None:
        raise ConfigError(
            f"it has {cell_repr(row[column])} in column {column}, where a text is expected."
        )
    return text
