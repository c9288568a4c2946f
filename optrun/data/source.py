"""Two splits of rows with named columns, wherever they come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from optrun.config.schema.data import ColumnsConfig
from optrun.data.cache import digest
from optrun.data.long_text import LongText
from optrun.data.randomness import generator
from optrun.data.shapes import is_nested
from optrun.data.text_rows import TextRows
from optrun.errors import ConfigError

if TYPE_CHECKING:
    from datasets import Dataset

FEW_DOCUMENTS = 20


@dataclass(eq=False)
class Split:
    """Rows of one purpose."""

    rows: Dataset | TextRows
    """Of a source of token ids a `TokenBlocks`, which only a task that reads them is given."""
    key: str
    """The configuration key the rows came by, for messages: `data.train`, `data.eval`, `data.eval.dev`."""
    positions: np.ndarray | None = None
    """Where each row stood in what was read, from 0; None: where it stands here. Shape (rows,), int64."""
    content: str | None = None
    """Digest of everything that decides the rows, by which what was found out of all of them is remembered; None: it is
    found out anew."""

    def take(self, indices: np.ndarray | None) -> Split:
        """The rows at these indices; None: all."""
        if indices is None:
            return self
        positions = indices if self.positions is None else self.positions[indices]
        content = None if self.content is None else digest(self.content, np.ascontiguousarray(indices).tobytes())
        return Split(self.rows.select(indices), self.key, positions, content)

    def number(self, row: int) -> int:
        """The number of a row for a person who looks for it in the file: counted from 1, without a header line."""
        return int(row if self.positions is None else self.positions[row]) + 1


@dataclass
class Source:
    """Training and evaluation rows: what the reader of a data source returns."""

    train: Split
    eval_sets: Mapping[str, Split]
    """Evaluation rows by the name of the set; that of a single one is empty. From a reader `{}` means: cut them from
    the training rows. Without a row where none are wanted: `data.eval_fraction=0`."""
    columns: ColumnsConfig | None
    """Names of the columns, as configured; None: one column, `text`."""
    prompt: str | None = None
    """A text whose continuation shows a person what a language model learnt from this source."""
    cut_from_train: bool = False
    """Whether the evaluation rows were held back from the training rows."""
    classes: list[str] | None = None
    """The classes by number, where a trained model has them already; None: those of the training rows."""
    notes: list[str] = field(default_factory=list)
    """What was decided where the configuration was silent; shown to the user."""

    @property
    def splits(self) -> list[Split]:
        """The training rows, then each evaluation set."""
        return [self.train, *self.eval_sets.values()]


def cut(split: Split, fraction: float, *, seed: int, documents: bool) -> tuple[Split, Split, str]:
    """Hold back a share of the rows for evaluation.

    Args:
        split: All rows.
        fraction: Share to hold back, in (0, 1).
        seed: Picks the rows.
        documents: True where rows are documents to be joined: with fewer than 20 of them the end of each document is
            held back instead, at a line break or a space near it.

    Returns:
        Training rows, evaluation rows, and a sentence that says what was done.

    Raises:
        ConfigError: Fewer than two rows that cannot be cut.
    """
    rows = split.rows
    if (
        documents
        and len(rows) < FEW_DOCUMENTS
        and rows.column_names == ["text"]
        and not is_nested(rows.features["text"])
    ):
        return _cut_ends(split, fraction)
    if len(rows) < 2:
        raise ConfigError(f"{split.key}: one row cannot be cut into training and evaluation rows. Give data.eval.")
    held = min(max(1, round(fraction * len(rows))), len(rows) - 1)
    order = generator(seed, "split").permutation(len(rows))
    note = f"no evaluation split given: {held:,} of {len(rows):,} rows of {split.key} held back by seed {seed}"
    train, evaluation = split.take(np.sort(order[held:])), split.take(np.sort(order[:held]))
    evaluation.key = f"{split.key} (held back)"
    return train, evaluation, note


def _cut_ends(split: Split, fraction: float) -> tuple[Split, Split, str]:
    heads, tails = [], []
    kept = None if split.content is None else digest(split.content, repr(fraction))
    for text in split.rows["text"]:
        text = text or ""
        end = _end_of_head(text, fraction)
        head, tail = text.cut(end) if isinstance(text, LongText) else (text[:end], text[end:])
        heads.append(head)
        tails.append(tail)
    note = f"no evaluation split given: the last {fraction:.0%} of each text of {split.key} held back"
    return (
        Split(TextRows(heads), split.key, content=kept and f"{kept} head"),
        Split(TextRows(tails), f"{split.key} (held back)", content=kept and f"{kept} tail"),
        note,
    )


def _end_of_head(text: str | LongText, fraction: float) -> int:
    """Where the end that is held back begins: behind a line break, else a space, else where it has just that share.

    Neither may be further away than the end is long: behind a title and one endless line nothing would be left to train
    on.
    """
    end = int(len(text) * (1 - fraction))
    near = end - min(len(text) - end, end // 2)
    for gap in ("\n", " "):
        found = text.rfind(gap, near, end)
        if found >= 0:
            return found + 1
    return end
