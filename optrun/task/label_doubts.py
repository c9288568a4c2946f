"""Labels that are probably not what a person meant.

Spellings of one, or texts in place of labels.
"""

from __future__ import annotations

import contextlib
import unicodedata
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from optrun.base.errors import ConfigError
from optrun.data.columns import label_column, text_column
from optrun.data.loader import ExampleSource
from optrun.data.source import Source
from optrun.task.base import Task

_SHOWN = 3
"""Values that a message shows."""
_LETTERS = 40
"""Of a value in a message."""
_FEWEST = 10
"""Labels from which one in every second row is odd."""


def label_doubts(
    task: Task, source: Source, examples: ExampleSource, counts: Mapping[str, int]
) -> list[str]:
    """Name labels that differ by spelling alone, and columns that seem to have changed places.

    Args:
        task: After it has read its source.
        source: The rows; one of a mixture.
        examples: What was made of its training rows.
        counts: Label to how often it stands in them.

    Returns:
        A sentence for each doubt, with the values and the keys.
    """
    if source.classes is not None or not task.labels:  # those of a trained model are what they are
        return []
    columns, name = source.columns, None
    several = None if columns is None else columns.label_columns
    if not several:
        with contextlib.suppress(ConfigError):  # a task with usual names of its own
            name = label_column(source, source.train)
    key = (
        f"data.label_columns={list(several)}"
        if several
        else f"data.label_column={name}"
        if name
        else "the labels"
    )
    doubts = [
        f"{key}: {' and '.join(map(repr, alike[:_SHOWN]))} are different labels, and differ only by"
        " case, white space or the way a number is written. If they mean the same, write them"
        " alike."
        for alike in _alike(task.labels)
    ]
    if name is not None and task.unit == "examples" and not task.config.of_sets:
        doubts += _looks_like_text(
            source, examples, name, [label for label, count in counts.items() if count]
        )
    return doubts


def _alike(labels: Iterable[str]) -> list[list[str]]:
    """Group labels that a person would read as one."""
    groups: dict[object, list[str]] = {}
    for label in labels:
        read: object = " ".join(unicodedata.normalize("NFKC", label).split()).casefold()
        with contextlib.suppress(ValueError):
            read = float(label)
        groups.setdefault(read, []).append(label)
    return [group for group in groups.values() if len(group) > 1]


def _looks_like_text(
    source: Source, examples: ExampleSource, name: str, met: Sequence[str]
) -> list[str]:
    """Warn of a label column with more different values than texts, or with another one in every second row."""
    rows, hashes = len(source.train.rows), getattr(examples, "hashes", None)
    texts = len(met) if hashes is None else len(np.unique(hashes[: max(1000, 10 * len(met))]))
    if texts >= len(met) and (2 * len(met) <= rows or len(met) < _FEWEST):
        return []
    doubt = (
        f"data.label_column={name}: {len(met):,} labels in {rows:,} training rows, such as"
        f" {_shown(met)}"
    )
    if texts >= len(met):
        return [
            f"{doubt}: nearly every row has one of its own. If they are no labels, name another"
            " column."
        ]
    text = text_column(source, source.train, taken=(name,))
    values = dict.fromkeys(map(str, source.train.rows[:1000][text]))
    return [
        f"{doubt}; and data.text_column={text} has only {texts:,} texts, such as"
        f" {_shown(list(values))}. If the two have changed places: data.text_column={name}"
        f" data.label_column={text}."
    ]


def _shown(values: Sequence[str]) -> str:
    return ", ".join(
        repr(value if len(value) <= _LETTERS else f"{value[:_LETTERS]}...")
        for value in values[:_SHOWN]
    )
