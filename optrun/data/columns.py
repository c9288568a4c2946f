"""Which column is which: as named, or as there is only one possibility."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from optrun.config.data import ColumnsConfig
from optrun.errors import ConfigError, nearest

if TYPE_CHECKING:
    from datasets import Dataset

    from optrun.data.source import Source, Split

ALL_KEYS = ("text_column", "eval_text_column", "text_pair_column", "label_column", "target_column", "image_column")
USUAL_LABELS = ("label", "labels")
USUAL_TEXTS = ("text", "sentence", "content")


def refuse_unused(columns: ColumnsConfig | None, used: Iterable[str], task: str) -> None:
    """A column that the task would not read is an error, not a shrug.

    Raises:
        ConfigError: With the key and what the task does read.
    """
    if columns is None:
        return
    used = list(used)
    for key in ALL_KEYS:
        if getattr(columns, key) is not None and key not in used:
            names = ", ".join(f"data.{name}" for name in used) or "none"
            raise ConfigError(f"data.{key}={getattr(columns, key)}: task={task} reads no such column. It reads: {names}.")


def missing_column(key: str, name: str, split: Split) -> ConfigError:
    """The refusal of a column that is not there."""
    there = split.rows.column_names
    close = nearest(name, there)
    hint = f" Did you mean {' or '.join(close)}?" if close else ""
    return ConfigError(f"{key}={name}: {split.key} has no such column. Columns: {', '.join(there)}.{hint}")


def named(columns: ColumnsConfig | None, key: str, split: Split) -> str | None:
    """The column that a key names; None where it names none.

    Raises:
        ConfigError: The split has no column of that name.
    """
    name: str | None = getattr(columns, key) if columns is not None else None
    if name is not None and name not in split.rows.column_names:
        raise missing_column(f"data.{key}", name, split)
    return name


def label_column(source: Source, split: Split) -> str:
    """The label column: as named, else `label` or `labels`.

    Raises:
        ConfigError: There is none, or both.
    """
    name = named(source.columns, "label_column", split)
    if name is not None:
        return name
    there = split.rows.column_names
    usual = [column for column in USUAL_LABELS if column in there]
    if len(usual) == 1:
        return usual[0]
    raise ConfigError(
        f"data.label_column is needed: {split.key} has no single column called label or labels. "
        f"Columns: {', '.join(there)}."
    )


def text_column(source: Source, split: Split, taken: Iterable[str | None] = ()) -> str:
    """The text column: as named, else the only column of texts, else the one with a usual name.

    For the evaluation split `data.eval_text_column` comes first; where only `data.text_column` is given, the split does
    not have it, and there is exactly one other column of texts, that one is taken and a note says so.

    Args:
        source: Carries the names and collects notes.
        split: Where the column must be.
        taken: Columns with another meaning.

    Raises:
        ConfigError: No such column, no column of texts, or several.
    """
    columns = source.columns
    evaluation = split is source.eval
    if evaluation:
        name = named(columns, "eval_text_column", split)
        if name is not None:
            return name
    candidates = [name for name in _texts(split.rows) if name not in taken]
    wanted = columns.text_column if columns is not None else None
    if wanted is not None:
        if wanted in split.rows.column_names:
            return wanted
        if evaluation and len(candidates) == 1:
            source.notes.append(
                f"{split.key} has no column {wanted!r}: its only text column, {candidates[0]!r}, is read instead "
                f"(say data.eval_text_column={candidates[0]} to confirm)"
            )
            return candidates[0]
        key = "data.text_column"
        error = missing_column(key, wanted, split)
        raise ConfigError(f"{error} data.eval_text_column names it where only evaluation differs.") if evaluation else error
    if len(candidates) == 1:
        return candidates[0]
    usual = [name for name in USUAL_TEXTS if name in candidates]
    if len(usual) == 1:
        return usual[0]
    said = f"several columns of texts ({', '.join(candidates)})" if candidates else "no column of texts"
    key = "data.eval_text_column" if evaluation and not candidates else "data.text_column"
    raise ConfigError(f"{key} is needed: {split.key} has {said}. Columns: {', '.join(split.rows.column_names)}.")


def _texts(rows: Dataset) -> list[str]:
    return [name for name, feature in rows.features.items() if getattr(feature, "dtype", None) in ("string", "large_string")]


def texts(split: Split, column: str) -> Iterable[str]:
    """Each row's text; a missing one is empty, a number is its digits."""
    for batch in split.rows.select_columns([column]).iter(batch_size=1000):
        for value in batch[column]:
            yield "" if value is None else str(value)
