"""A stream.

The rows of any number of files, read where they lie, a few windows that are far apart at a time.

What an example is, and where it stands in an epoch, are functions of its number: a run goes on at
any step at once, with any number of workers and ranks. A task with `READS_STREAMS` in its schema
finds a `StreamRows` as the rows of the training split, and returns one of two things from `read`:
`StreamedRows`, an example for each row, or
`StreamedBlocks`, the rows of each window joined and cut.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from optrun.base.errors import ConfigError
from optrun.data.cache import digest, known_by, versions
from optrun.data.encoded import MAKERS
from optrun.data.examples import Example, scalar_pieces
from optrun.data.first_rows import FIRST_ROWS, related_columns, with_empty_columns
from optrun.data.formats import one_format, refuse_other_content, streamed_format
from optrun.data.hub_file import HubFile
from optrun.data.local_file import LocalFile
from optrun.data.randomness import generator
from optrun.data.shards import Groups, Opening, Row, Shard
from optrun.data.spans import RecentlyRead, spans

if TYPE_CHECKING:
    from datasets import Dataset

_BATCH = 1000
_SAMPLED = 8
"""Windows that are tokenised before the first step, to plan how many blocks each of the others has.
"""
_MARGIN = 1.02
"""More tokens for a byte than in the densest of these are planned for."""
_TOGETHER = 4
"""Windows whose examples are shuffled together, and whose tokens stay in the memory of a process.
"""
_PARTS = 2
"""Parts of files, each read as a whole, whose windows are shuffled together."""


@dataclass(eq=False)
class StreamRows:
    """Rows with named columns, as a task asks for them; only what is looked at is in memory."""

    key: str
    """The configuration key the files came by."""
    shards: Sequence[Shard]
    """The files, in order."""
    window: int
    """Rows of a window, which ends with its file at the latest."""
    columns: Sequence[str] | None = None
    """Those that are read; None: all."""
    whole: StreamRows | None = None
    """The same rows with all columns; None: these are."""

    def __len__(self) -> int:
        return self._ends[-1]

    @cached_property
    def _ends(self) -> list[int]:
        """Where the rows of each file end."""
        return list(accumulate(shard.rows for shard in self.shards))

    @cached_property
    def head(self) -> Dataset:
        """The first rows of the first file, with the columns of the first rows of any file."""
        first = self.shards[0].head(FIRST_ROWS, self.columns)
        types = {
            name: self.shards[number].head(FIRST_ROWS, [name]).features[name]
            for name, number in self._first_with.items()
            if number and (self.columns is None or name in self.columns)
        }
        count = len(first) or min(
            FIRST_ROWS, self.shards[0].rows
        )  # without columns it has no length either
        return with_empty_columns(first, count, types) if types else first

    @cached_property
    def _first_with(self) -> dict[str, int]:
        """Each column to the number of the first file that is known to have it."""
        if self.whole is not None:
            return self.whole._first_with
        found: dict[str, int] = {}
        for number, shard in enumerate(self.shards):
            for name in shard.names():
                found.setdefault(name, number)
        return found

    @cached_property
    def _unread(self) -> frozenset[str]:
        """Columns that belong to those that are read, and that no file is known to have."""
        if self.columns is None or isinstance(
            self.shards[0], Groups
        ):  # a footer names every column there is
            return frozenset()
        return related_columns(
            self.columns, self.shards[0].read(0, 1, self.columns)[0], self._first_with
        )

    @property
    def column_names(self) -> list[str]:
        """Columns of the first rows of the files."""
        return list(self.head.column_names)

    @property
    def features(self) -> Any:
        """Their types."""
        return self.head.features

    def select_columns(self, names: Sequence[str]) -> StreamRows:
        """Return the same rows, of which only these columns are read."""
        return replace(self, columns=list(names), whole=self.whole or self)

    def select(self, indices: Iterable[int]) -> Dataset:
        """Return some rows, in memory."""
        from datasets import Dataset

        from optrun.data.json_rows import table_of  # imports datasets, which takes a second

        rows = [self.row(int(index)) for index in indices]
        if not rows:
            return self.head.select([])
        if isinstance(self.shards[0], Groups):  # its footers say the types
            cells = {name: [row.get(name) for row in rows] for name in self.column_names}
            return Dataset.from_dict(cells, features=self.features)
        found = table_of(rows)
        lacking = {
            name: self.features[name]
            for name in self.column_names
            if name not in found.column_names
        }
        return with_empty_columns(found, len(rows), lacking) if lacking else found

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return (row[key] for row in self.select_columns([key]))
        if isinstance(key, slice):  # the first ones: what a message shows
            return self.head[key]
        return self.row(int(key))

    def __iter__(self) -> Iterator[Row]:
        for rows in self._batches(_BATCH):
            yield from rows

    def iter(self, batch_size: int) -> Iterator[dict[str, list[Any]]]:
        """Yield rows in batches."""
        for rows in self._batches(batch_size):
            yield {
                name: [row.get(name) for row in rows] for name in self.columns or self.column_names
            }

    def _batches(self, size: int) -> Iterator[list[Row]]:
        return (
            self.read(begin, min(begin + size, len(self))) for begin in range(0, len(self), size)
        )

    def row(self, index: int) -> Row:
        """Return one row."""
        return self.read(index, index + 1)[0]

    def read(self, begin: int, end: int) -> list[Row]:
        """Read rows `begin` to `end`.

        Raises:
            OptrunError: A row that is none; a file that changed meanwhile.
        """
        rows: list[Row] = []
        for number, first, last in spans(self._ends, begin, end):
            rows += self.shards[number].read(first, last, self.columns, self._unread)
        return rows

    def where(self, index: int) -> str:
        """Name a row for a person who looks for it: its file, and its number there from 1."""
        number, _, row = next(spans(self._ends, index, index + 1))
        return f"{self.key}={self.shards[number].file}: row {row:,}"

    @cached_property
    def borders(self) -> np.ndarray:
        """Where each window begins, and where the last one ends; shape (windows + 1,), int64."""
        begins = pairwise([0, *self._ends])
        return np.concatenate(
            [*(np.arange(begin, end, self.window) for begin, end in begins), self._ends[-1:]]
        )

    def _windows(self) -> Iterator[tuple[Shard, int, int, np.ndarray]]:
        """Yield each file with its windows.

        The first one, one past the last, and their borders inside of it.
        """
        begins = [0, *self._ends]
        for shard, begin, (first, last) in zip(
            self.shards,
            begins[:-1],
            pairwise(np.searchsorted(self.borders, begins).tolist()),
            strict=True,
        ):
            yield shard, first, last, self.borders[first : last + 1] - begin

    @cached_property
    def parts_of_windows(self) -> np.ndarray:
        """The first window of each part that is read as a whole, and how many there are.

        Shape (parts + 1,), int64.
        """
        begins = np.ones(len(self.borders), dtype=bool)
        for shard, first, last, borders in self._windows():
            parts = shard.parts(borders[:-1])
            begins[first + 1 : last] = parts[1:] != parts[:-1]
        return np.flatnonzero(begins)

    def window_bytes(self, columns: Sequence[str]) -> np.ndarray:
        """Estimate the bytes of each window without reading; shape (windows,), int64."""
        return np.concatenate(
            [shard.sizes(borders, columns) for shard, _, _, borders in self._windows()]
        )

    def fingerprint(self) -> str:
        """Digest of every byte of the files, by the digest of each, and of the windows."""
        return digest("stream", str(self.window), *(shard.content for shard in self.shards))

    def parts(self) -> dict[str, str]:
        """Map each file to the digest of its bytes.

        What a checkpoint keeps, so that a changed one is named.
        """
        return {str(shard.file): shard.content for shard in self.shards}


def open_stream(
    key: str, files: Sequence[Path | HubFile], window: int, notes: list[str]
) -> StreamRows:
    """Open files as a stream.

    What was found once of a file is known as long as it is the same file.

    Args:
        key: The configuration key, for messages.
        files: All of one format.
        window: Rows of a window.
        notes: Takes what it cost.

    Raises:
        ConfigError: A format that cannot be read in the middle; files of several formats; one
            without rows.
    """
    kind = one_format(key, (streamed_format(key, path) for path in files))
    assert kind.stream is not None
    begun, opening = time.monotonic(), Opening(window)
    shards: list[Shard] = []
    for path in files:
        file = LocalFile.of(key, path) if isinstance(path, Path) else path
        if file.size == 0:
            raise ConfigError(f"{key}={path}: the file is empty.")
        if isinstance(path, Path):
            refuse_other_content(key, path, kind)
        shards.append(kind.stream(key, file, opening))
        if not shards[-1].rows:
            raise ConfigError(f"{key}={path}: no rows in it.")
    rows = StreamRows(key, shards, window)
    if opening.read:
        notes.append(
            f"{key}: {len(rows):,} rows of {len(files):,} files found by reading"
            f" {opening.read / 1e6:,.0f} MB once ({time.monotonic() - begun:.0f} s); where they are"
            " is remembered"
        )
    return rows


class WindowOrder:
    """The order of one epoch.

    Windows permuted, and the examples of every four that follow one another shuffled.

    The windows of a part of a file that is read as a whole stay near each other: parts are
    permuted, and the windows of every two that follow one another. A window that is a part of its
    own has its place by chance alone.

    Args:
        borders: Where each window begins, and where the last one ends; shape (windows + 1,), int64.
        parts: First window of each part, and how many there are; shape (parts + 1,), int64.
        seed: The run's seed.
        epoch: Which epoch.

    Example:
        >>> order = WindowOrder(np.arange(0, 22, 2), np.arange(11), seed=0, epoch=0)
        >>> sorted(order[0:8].tolist()), len(order)
        ([4, 5, 8, 9, 10, 11, 12, 13], 20)
    """

    def __init__(self, borders: np.ndarray, parts: np.ndarray, *, seed: int, epoch: int) -> None:
        randomness = generator(seed, "parts", epoch)
        order = randomness.permutation(len(parts) - 1)
        sizes = np.diff(parts)[order]
        before = np.cumsum(sizes) - sizes
        windows = np.arange(parts[-1]) + np.repeat(parts[order] - before, sizes)
        turns = np.repeat(np.arange(len(order)) // _PARTS, sizes)
        self._windows = windows[np.lexsort((randomness.permutation(len(windows)), turns))]
        ends = np.cumsum(np.diff(borders)[self._windows])
        self._ends = np.append(ends[_TOGETHER - 1 : -1 : _TOGETHER], ends[-1])
        self._borders = borders
        self._seed = seed
        self._epoch = epoch
        self._last: RecentlyRead[int, np.ndarray] = RecentlyRead(1)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, places: slice) -> np.ndarray:
        """Which example stands at each place; shape (places,), int64."""
        at, end, _ = places.indices(len(self))
        found = [np.zeros(0, dtype=np.int64)]
        for number, first, last in spans(self._ends, at, end):
            found.append(self._last.read(number, partial(self._inside, number))[first:last])
        return np.concatenate(found)

    def _inside(self, number: int) -> np.ndarray:
        """Return the examples of some windows that follow one another."""
        windows = self._windows[number * _TOGETHER : (number + 1) * _TOGETHER].tolist()
        found = np.concatenate(
            [np.arange(*self._borders[window : window + 2]) for window in windows]
        )
        return generator(self._seed, "window", self._epoch, number).permutation(found)


@dataclass(eq=False)
class Windows:
    """How the examples of a stream are ordered, for an `EpochPlan`."""

    rows: StreamRows
    borders: np.ndarray
    """Where the examples of each window begin, and where the last ones end; shape (windows + 1,),
    int64."""

    @property
    def name(self) -> str:
        """In words."""
        return f"{_TOGETHER} far windows of {self.rows.window}"

    def __call__(self, seed: int, epoch: int) -> WindowOrder:
        """Make the order of an epoch."""
        return WindowOrder(self.borders, self.rows.parts_of_windows, seed=seed, epoch=epoch)


@dataclass(eq=False)
class StreamedRows:
    """An example for each row of a stream, made when it is asked for."""

    rows: StreamRows
    make: Callable[[Row], Example]
    """A row to its example; a pure function. What it refuses is told with the row's place."""
    key: str
    """Digest of everything `make` depends on, besides the row."""
    scalars: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Name to one value a row, such as `labels`; shape (rows,)."""

    def __post_init__(self) -> None:
        """Take the order and the digests of the stream."""
        self.arrangement = Windows(self.rows, self.rows.borders)
        self.parts = self.rows.parts
        self.labels = self.scalars.get("labels")

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Example:
        row = self.rows.row(index)
        try:
            example = self.make(row)
        except ConfigError as error:
            raise ConfigError(f"{self.rows.where(index)}: {error}") from error
        return {**example, **{name: values[index] for name, values in self.scalars.items()}}

    def fingerprint(self) -> str:
        """Digest of the files and of how rows become examples."""
        return digest(
            "streamed rows", self.rows.fingerprint(), self.key, *scalar_pieces(self.scalars)
        )


Encode = Callable[[list[Row]], Mapping[str, Sequence[np.ndarray]]]
"""Rows to the ids of each by name, such as `input_ids`; every name has as many of a row."""


class StreamedBlocks:
    """The rows of each window joined and cut into blocks.

    How many blocks a window has is planned by its bytes: the tokens of some windows are counted,
    and of the others as many are expected for a byte as in the densest of them, and a few more. The
    tokens of a window are spread evenly over its blocks, so that blocks are a little shorter than
    they may be; should a window hold more than was planned for, the rest of it is left out. Where
    there are few windows all are counted, and nothing is left out.

    Args:
        rows: The stream.
        encode: Rows to ids; a pure function.
        length: Tokens of a block, at most.
        key: Digest of everything `encode` depends on, besides the rows.
        empty: Name to the id that stands in a block of which no token is left.

    Attributes:
        notes: How blocks were planned.
    """

    def __init__(
        self, rows: StreamRows, encode: Encode, length: int, key: str, empty: Mapping[str, int]
    ) -> None:
        self.rows = rows
        self.encode = encode
        self.length = length
        self.key = digest("blocks-1", rows.fingerprint(), str(rows.columns), str(length), key)
        self.empty = empty
        self.notes: list[str] = []
        self.parts = rows.parts
        self._recent: RecentlyRead[int, dict[str, np.ndarray]] = RecentlyRead(_TOGETHER)
        self._borders = np.concatenate([[0], np.cumsum(self._planned())])
        self.arrangement = Windows(rows, self._borders)

    def _planned(self) -> np.ndarray:
        """Count the blocks of each window; shape (windows,), int64."""
        sizes = self.rows.window_bytes(self.rows.columns or self.rows.column_names)
        count = len(sizes)
        if count == 0:
            return np.zeros(0, dtype=np.int64)
        sampled = np.unique(
            np.linspace(0, count - 1, min(count, _SAMPLED)).round().astype(np.int64)
        )
        key = digest("sample-2", self.key, versions(*MAKERS))
        tokens = np.array(known_by(key, lambda: [self._tokens(int(at)) for at in sampled]))
        dense = tokens / np.maximum(sizes[sampled], 1)
        blocks = np.ceil(sizes * (dense.max() * _MARGIN) / self.length).astype(np.int64)
        if len(sampled) < count:
            full = tokens.sum() / max(1, blocks[sampled].sum() * self.length)
            self.notes.append(
                f"{self.rows.key}: blocks are planned by {len(sampled)} of {count:,} windows, and"
                f" are {full:.1%} full there; a window with more tokens for a byte than {_MARGIN}"
                " times the most of these loses the rest"
            )
        blocks[sampled] = -(-tokens // self.length)
        planned: np.ndarray = np.maximum(blocks, 1)
        return planned

    def _tokens(self, window: int) -> int:
        return len(next(iter(self._window(window).values())))

    def __len__(self) -> int:
        return int(self._borders[-1])

    def __getitem__(self, index: int) -> Example:
        window, number, _ = next(spans(self._borders[1:], index, index + 1))
        blocks = int(self._borders[window + 1] - self._borders[window])
        example = {}
        for name, flat in self._window(window).items():
            total = min(len(flat), blocks * self.length)
            piece = flat[total * number // blocks : total * (number + 1) // blocks]
            example[name] = np.asarray(piece if len(piece) else [self.empty[name]], dtype=np.int64)
        return example

    def _window(self, window: int) -> dict[str, np.ndarray]:
        """Return the ids of a window by name."""

        def encoded() -> dict[str, np.ndarray]:
            begin, end = self.rows.borders[window : window + 2].tolist()
            rows = self.rows.read(begin, end)
            try:
                found = self.encode(rows)
            except ConfigError as error:
                raise ConfigError(
                    f"{self.rows.where(begin)} to {end - begin - 1:,} after it: {error}"
                ) from error
            none = np.zeros(0, dtype=np.int32)
            return {
                name: np.concatenate(
                    [none, *(np.asarray(ids, dtype=np.int32) for ids in found.get(name, ()))]
                )
                for name in self.empty
            }

        return self._recent.read(window, encoded)

    def fingerprint(self) -> str:
        """Digest of the files and of how rows become blocks."""
        return self.key
