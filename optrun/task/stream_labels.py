"""The labels of a stream, which are read once, so that classes are known before the first step; its texts are not."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from optrun.base.errors import ConfigError
from optrun.base.reading import LINES_BYTES, read_json
from optrun.data.cache import cached, digest, known_by
from optrun.data.columns import label_column
from optrun.data.source import Source, Split
from optrun.data.stream import StreamRows
from optrun.task.labels import ClassNumbers, class_names, declared_names, labels_of, named_label, numbers

MOST_LABELS = 1 << 16
"""Different labels of a column; one with more holds something else."""
_BATCH = 10_000


def streamed_labels(source: Source, *, regression: bool = False) -> tuple[list[str], dict[Split, np.ndarray]]:
    """Return the classes, and the class number (or the number) of each row of every split.

    Args:
        source: Its training rows are a stream.
        regression: Whether the labels are numbers to predict.

    Returns:
        Names by number; numbers by split, shape (rows,).

    Raises:
        ConfigError: A row without a label, or with one that is none; fewer than two classes.
    """
    name = label_column(source, source.train)
    rows: Any = source.train.rows
    assert isinstance(rows, StreamRows)
    declared = declared_names(rows.features[name])
    folder = cached(
        "stream-labels",
        digest("labels-2", rows.fingerprint(), name, str(regression), *declared),
        partial(_write, rows, name, declared, regression=regression),
    )
    values = np.asarray(np.load(folder / "labels.npy", mmap_mode="r", allow_pickle=False))
    held = source.eval_sets.values()
    if regression:
        return [], {source.train: values, **{split: numbers(split, label_column(source, split)) for split in held}}
    distinct = read_json(folder / "names.json", LINES_BYTES)
    names = class_names(source, name, distinct)
    numbered = ClassNumbers(names, source)
    table = np.array([numbered.of(label, rows.key) for label in distinct], dtype=np.int32)
    found = {split: numbered.all(split, labels_of(split, label_column(source, split))) for split in held}
    return names, {source.train: table[values], **found}


def streamed_list_names(rows: StreamRows, name: str) -> tuple[list[str], int]:
    """List every label of a column of lists of labels, once; and count the rows with an empty list.

    Raises:
        ConfigError: A row without a list, or with something else than labels in it.
    """
    declared = declared_names(rows.features[name])

    def find() -> list[Any]:
        met: dict[str, None] = {}
        empty = 0
        for at, values in _column(rows, name):
            if not isinstance(values, list):
                raise ConfigError(
                    f"data.label_column={name}: {rows.where(at)} has {values!r:.60} there; task=token_classification "
                    "expects a list of labels, one for each word."
                )
            met.update((_label(rows, at, name, value, declared), None) for value in values)
            _expect_classes(rows, name, len(met))
            empty += not values
        return [list(met), empty]

    names, empty = known_by(digest("label-lists-1", rows.fingerprint(), name, *declared), find)
    return names, empty


def _column(rows: StreamRows, name: str) -> Iterator[tuple[int, Any]]:
    """Number and value of each row."""
    rows = rows.select_columns([name])
    for begin in range(0, len(rows), _BATCH):
        for at, row in enumerate(rows.read(begin, min(begin + _BATCH, len(rows))), begin):
            yield at, row.get(name)


def _expect_classes(rows: StreamRows, name: str, count: int) -> None:
    if count > MOST_LABELS:
        raise ConfigError(
            f"data.label_column={name}: {rows.key} has more than {MOST_LABELS:,} different labels there: no "
            "classes. For numbers use task.problem_type=regression."
        )


def _write(rows: StreamRows, name: str, declared: list[str], folder: Path, *, regression: bool) -> None:
    """Write the label of each row, as its number in the order in which labels are met."""
    met: dict[str, int] = {}
    found = np.empty(len(rows), dtype=np.float32 if regression else np.int32)
    for at, value in _column(rows, name):
        if regression:
            found[at] = _number(rows, at, name, value)
        else:
            found[at] = met.setdefault(_label(rows, at, name, value, declared), len(met))
            _expect_classes(rows, name, len(met))
    np.save(folder / "labels.npy", found)
    (folder / "names.json").write_text(json.dumps(list(met)), encoding="utf-8")


def _label(rows: StreamRows, at: int, name: str, value: Any, declared: list[str]) -> str:
    return value if isinstance(value, str) else named_label(value, declared, name, rows.where(at))


def _number(rows: StreamRows, at: int, name: str, value: Any) -> float:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        raise ConfigError(f"{rows.where(at)} has no value in column {name}.")
    try:
        number = float(value) if not isinstance(value, bool) else math.nan
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not abs(number) <= float(np.finfo(np.float32).max):
        raise ConfigError(
            f"{rows.where(at)} has {value!r:.60} in column {name}: task.problem_type=regression expects finite numbers."
        )
    return number
