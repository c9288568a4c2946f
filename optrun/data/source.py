"""Two splits of rows with named columns, wherever they come from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from optrun.base.errors import ConfigError
from optrun.config.schema.data import ColumnsConfig
from optrun.data.cache import digest_if_known
from optrun.data.heartbeat import send_heartbeat
from optrun.data.randomness import generator
from optrun.data.row_advice import is_nested
from optrun.data.text_rows import TextRows

if TYPE_CHECKING:
    from pathlib import Path

    from datasets import Dataset

FEW_DOCUMENTS = 20
NO_SPLIT = "no evaluation split given"


@dataclass(eq=False)
class Split:
    """Rows of one purpose."""

    rows: Dataset | TextRows
    """Of a source of token ids a `TokenBlocks`, which only a task that reads them is given."""
    key: str
    """The configuration key of the rows, for messages: `data.train`, `data.eval.dev`."""
    positions: np.ndarray | None = None
    """The number of each row in the data as they were read, from 0; None: the same as here.

    Shape (rows,), int64.
    """
    content: str | None = None
    """Digest of everything that decides the rows, under which results over all of them are cached;
    None: it is not known, and they are computed anew.
    """

    folder: Path | None = None
    """Folder of the file of the rows, where relative paths in them may begin."""
    columns_read: set[str] = field(default_factory=set)
    """Columns that the task has found a use for; those of parts of the same rows are the same."""

    def take(self, indices: np.ndarray | None) -> Split:
        """Select the rows at these indices as a new split; None: all rows, this split itself."""
        if indices is None:
            return self
        positions = indices if self.positions is None else self.positions[indices]
        content = digest_if_known(self.content, indices.tobytes())
        rows = self.rows.select(indices)
        return Split(rows, self.key, positions, content, self.folder, self.columns_read)

    def mark_read(self, name: str) -> str:
        """Mark a column as read, and return its name."""
        self.columns_read.add(name)
        return name

    def cells(self, names: Sequence[str]) -> Iterator[tuple[object, ...]]:
        """Yield the values of each row in some columns, a few rows in memory at a time."""
        self.columns_read.update(names)
        for batch in self.rows.select_columns(list(names)).iter(batch_size=1000):
            send_heartbeat()
            yield from zip(*(batch[name] for name in names), strict=True)

    def number(self, row: int) -> int:
        """Number a row from 1, without a header line, as a person counts in the file."""
        if self.positions is not None:
            row = self.positions[row]
        return int(row) + 1

    def where(self, row: int) -> str:
        """Name a row in a message, for a stream with its file."""
        where_in_stream = getattr(self.rows, "where", None)
        if where_in_stream is not None:
            return str(where_in_stream(row))
        return f"{self.key}: row {self.number(row)}"


@dataclass
class Source:
    """Training and evaluation rows of a data source."""

    train: Split
    eval_sets: Mapping[str, Split]
    """Evaluation rows by the name of the set; that of a single one is empty.

    From a reader `{}` means: cut them from
    the training rows. Without a row where none are wanted: `data.eval_fraction=0`."""
    columns: ColumnsConfig | None
    """Names of the columns, as configured; None: one column, `text`."""
    prompt: str | None = None
    """A text whose continuation shows a person what a language model learnt from this source."""
    cut_from_train: bool = False
    """Whether the evaluation rows were held out from the training rows."""
    classes: list[str] | None = None
    """The classes by number, where a trained model has them already; None: those of the training
    rows."""
    notes: list[str] = field(default_factory=list)
    """What was decided where the configuration was silent; shown to the user."""
    head_classes: list[str] | None = None
    """The classes by number that the head of a pretrained model tells apart; None: it has none."""

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
        documents: Whether the task joins rows. Then the end of each text is held back instead, from
            a line break or a space on, if there are fewer than 20 and `text` is the only column.

    Returns:
        Training and evaluation rows, at least one each, and a sentence that says what was done.

    Raises:
        ConfigError: There are fewer than two rows.
    """
    rows = split.rows
    # 1. Few long texts: the end of each.
    are_texts = rows.column_names == ["text"] and not is_nested(rows.features["text"])
    if documents and are_texts and len(rows) < FEW_DOCUMENTS:
        return _cut_ends(split, fraction)
    if len(rows) < 2:
        raise ConfigError(
            f"{split.key}: fewer than two rows cannot be cut into training and evaluation rows."
            " Give data.eval."
        )
    # 2. Rows at random, at least one of each kind; both parts keep the order of the rows.
    held_count = min(max(1, round(fraction * len(rows))), len(rows) - 1)
    order = generator(seed, "split").permutation(len(rows))
    train = split.take(np.sort(order[held_count:]))
    evaluation = split.take(np.sort(order[:held_count]))
    evaluation.key = f"{split.key} (held out)"
    which = f"{len(evaluation.rows):,} of {len(rows):,} rows of {split.key}"
    return train, evaluation, f"{NO_SPLIT}: {which} held out at random by seed {seed}"


def _cut_ends(split: Split, fraction: float) -> tuple[Split, Split, str]:
    """Hold back the end of each text, a share of its characters.

    Returns:
        Beginnings as training rows, ends as evaluation rows, and a sentence that says so.
    """
    heads: list[str] = []
    tails: list[str] = []
    for text in split.rows["text"]:
        text = text or ""
        end = _end_of_head(text, fraction)
        heads.append(text[:end])
        tails.append(text[end:])
    note = f"{NO_SPLIT}: the last {fraction:.0%} of each text of {split.key} held out"
    head_content = digest_if_known(split.content, repr(fraction), "head")
    tail_content = digest_if_known(split.content, repr(fraction), "tail")
    return (
        Split(TextRows(heads), split.key, content=head_content),
        Split(TextRows(tails), f"{split.key} (held out)", content=tail_content),
        note,
    )


def _end_of_head(text: str, fraction: float) -> int:
    """Find the position to cut a text, with about `fraction` of its characters behind it.

    The cut moves back behind the last line break, else the last space, but not so far that the text
    behind the cut becomes twice as long, or the text before it half as long.

    Example:
        >>> text = "one two three four"
        >>> text[_end_of_head(text, 0.3) :]
        'three four'
    """
    exact = int(len(text) * (1 - fraction))
    characters_behind = len(text) - exact
    # How far back: as many characters as stand behind, or half of those before, if that is less.
    earliest = exact - min(characters_behind, exact // 2)
    for separator in ("\n", " "):
        at = text.rfind(separator, earliest, exact)
        if at >= 0:
            return at + 1
    return exact
