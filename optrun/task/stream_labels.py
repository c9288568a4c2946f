"""The labels of a stream, which are read once: four bytes a row, so that classes are known before the first step."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from optrun.data.cache import cached, digest
from optrun.data.columns import label_column
from optrun.data.source import Source, Split
from optrun.data.stream import StreamRows
from optrun.errors import ConfigError
from optrun.task.labels import ClassNumbers, class_names, labels_of, numbers

MOST_LABELS = 1 << 16
"""Different labels of a column; one with more holds something else."""
_BATCH = 10_000


def streamed_labels(source: Source, *, regression: bool) -> tuple[list[str], dict[Split, np.ndarray]]:
    """Classes, and the class number (or the number) of each row of every split.

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
    folder = cached(
        "stream-labels",
        digest("labels-1", rows.fingerprint(), name, str(regression)),
        lambda folder: _read(rows.select_columns([name]), name, folder, regression=regression),
    )
    values = np.asarray(np.load(folder / "labels.npy", mmap_mode="r", allow_pickle=False))
    held = source.eval_sets.values()
    if regression:
        return [], {source.train: values, **{split: numbers(split, label_column(source, split)) for split in held}}
    distinct = json.loads((folder / "names.json").read_bytes())
    names = class_names(source, name, distinct)
    numbered = ClassNumbers(names, source)
    table = np.array([numbered(source.train, 0, label) for label in distinct], dtype=np.int32)
    found = {split: numbered.all(split, labels_of(split, label_column(source, split))) for split in held}
    return names, {source.train: table[values], **found}


def _read(rows: StreamRows, name: str, folder: Path, *, regression: bool) -> None:
    """Write the label of each row, as its number in the order in which labels are met."""
    met: dict[str, int] = {}
    found = np.empty(len(rows), dtype=np.float32 if regression else np.int32)
    for begin in range(0, len(rows), _BATCH):
        for at, row in enumerate(rows.read(begin, min(begin + _BATCH, len(rows))), begin):
            value = row.get(name)
            if value is None or (isinstance(value, float) and math.isnan(value)):
                raise ConfigError(f"{rows.where(at)} has no value in column {name}.")
            found[at] = (
                _number(rows, at, name, value) if regression else met.setdefault(_name(rows, at, value), len(met))
            )
        if len(met) > MOST_LABELS:
            raise ConfigError(
                f"data.label_column={name}: {rows.key} has more than {MOST_LABELS:,} different labels there: no "
                "classes. For numbers use task.problem_type=regression."
            )
    np.save(folder / "labels.npy", found)
    (folder / "names.json").write_text(json.dumps(list(met)), encoding="utf-8")


def _name(rows: StreamRows, at: int, value: Any) -> str:
    if isinstance(value, list | dict | bytes):
        raise ConfigError(f"{rows.where(at)} holds {value!r:.60}, not one label.")
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)


def _number(rows: StreamRows, at: int, name: str, value: Any) -> float:
    try:
        number = float(value) if not isinstance(value, bool) else math.nan
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not abs(number) <= float(np.finfo(np.float32).max):
        raise ConfigError(
            f"{rows.where(at)} has {value!r:.60} in column {name}: task.problem_type=regression expects finite numbers."
        )
    return number
