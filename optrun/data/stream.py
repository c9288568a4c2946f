"""Streams: rows of any number of files, read in place, a few windows at a time.

A window is a number of consecutive rows of one file. Content and position of an example are
functions of its number, so that a run continues at any step at once, with any number of workers and
ranks. A task with `READS_STREAMS` in its schema gets a `StreamRows` as the rows of the training
split. Its `read` returns `StreamedRows`, an example for each row, or `StreamedBlocks`, the rows of
each window joined and cut.
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
from optrun.data.cache import cached_result, digest, versions
from optrun.data.encoded import MAKERS
from optrun.data.examples import Example, scalar_pieces
from optrun.data.first_rows import FIRST_ROWS, missing_optional_columns, with_empty_columns
from optrun.data.formats import one_format, refuse_other_content, streamed_format
from optrun.data.hub_file import HubFile
from optrun.data.local_file import LocalFile
from optrun.data.randomness import generator
from optrun.data.shards import Groups, Opening, Row, Shard
from optrun.data.spans import RecentlyRead, spans

if TYPE_CHECKING:
    from datasets import Dataset

_ROWS_AT_ONCE = 1000
_SAMPLED_WINDOWS = 8
"""Windows that are tokenised before the first step, to plan the blocks of the others."""
_MARGIN = 1.02
"""Planned tokens per byte, relative to the densest of these windows."""
_WINDOWS_TOGETHER = 4
"""Windows whose examples are shuffled together, and whose tokens a process keeps in memory."""
_PARTS_TOGETHER = 2
"""Parts of files, each read as a whole, whose windows are shuffled together."""


@dataclass(eq=False)
class StreamRows:
    """Rows with named columns, read when they are needed; it reads like a `datasets.Dataset`."""

    key: str
    """The configuration key of the files, for messages."""
    shards: Sequence[Shard]
    """The files, in order."""
    window: int
    """Rows of a window; the last window of a file may have fewer."""
    columns: Sequence[str] | None = None
    """Columns that are read; None: all."""
    unselected: StreamRows | None = None
    """The rows with all columns of which these are a selection; None: these have all columns."""

    def __len__(self) -> int:
        return self._ends[-1]

    @cached_property
    def _ends(self) -> list[int]:
        """The number of rows up to the end of each file."""
        return list(accumulate(shard.rows for shard in self.shards))

    @cached_property
    def head(self) -> Dataset:
        """The first 100 rows of the first file, with the columns of all files.

        A column that only later files have is empty, with the type that it has there.
        """
        first = self.shards[0].head(FIRST_ROWS, self.columns)
        # The types of the columns that the first file lacks.
        missing_types = {}
        for name, number in self._first_file_with.items():
            is_selected = self.columns is None or name in self.columns
            if number > 0 and is_selected:  # `number` is that of the first file with the column
                missing_types[name] = self.shards[number].head(FIRST_ROWS, [name]).features[name]
        if not missing_types:
            return first
        # A table without columns has no length: no selected one is in the first file.
        count = len(first) or min(FIRST_ROWS, self.shards[0].rows)
        return with_empty_columns(first, count, missing_types)

    @cached_property
    def _first_file_with(self) -> dict[str, int]:
        """Map each column, also an unselected one, to the number of the first file with it.

        Example: files with the columns `text` and `text, tools` give `{"text": 0, "tools": 1}`.
        """
        if self.unselected is not None:
            return self.unselected._first_file_with
        first_file_with: dict[str, int] = {}
        for number, shard in enumerate(self.shards):
            for name in shard.names():
                first_file_with.setdefault(name, number)
        return first_file_with

    @cached_property
    def _unexpected(self) -> frozenset[str]:
        """Optional columns of chats that no file has in its first 100 rows, such as `tools`.

        A later row with one of them is refused, since nothing would read it. Empty for rows that
        are no chats, for all columns together, which are read whatever they are, and for parquet,
        whose footer names every column.
        """
        if self.columns is None or isinstance(self.shards[0], Groups):
            return frozenset()
        first_row = self.shards[0].read(0, 1, self.columns)[0]
        return missing_optional_columns(self.columns, first_row, self._first_file_with)

    @property
    def column_names(self) -> list[str]:
        """The columns of the first rows of all files."""
        return list(self.head.column_names)

    @property
    def features(self) -> Any:
        """The types of these columns, as `datasets.Features`."""
        return self.head.features

    def select_columns(self, names: Sequence[str]) -> StreamRows:
        """Return the same rows with these columns alone."""
        return replace(self, columns=list(names), unselected=self.unselected or self)

    def select(self, indices: Iterable[int]) -> Dataset:
        """Return some rows as a table in memory, with all columns of the stream.

        A parquet column has the type that `features` has. A jsonl column has the type of its values
        in these rows; if none of the rows has the column, that of `features`.

        Args:
            indices: Numbers of rows, in any order; none: a table without rows.
        """
        from datasets import Dataset

        from optrun.data.json_rows import table_of  # imports datasets, which takes a second

        rows = [self.row(int(index)) for index in indices]
        if not rows:
            return self.head.select([])
        if isinstance(self.shards[0], Groups):
            cells = {name: [row.get(name) for row in rows] for name in self.column_names}
            return Dataset.from_dict(cells, features=self.features)
        table = table_of(rows)
        missing_types = {
            name: self.features[name]
            for name in self.column_names
            if name not in table.column_names
        }
        if not missing_types:
            return table
        return with_empty_columns(table, len(rows), missing_types)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return (row[key] for row in self.select_columns([key]))
        if isinstance(key, slice):  # the first rows, for a message
            return self.head[key]
        return self.row(int(key))

    def __iter__(self) -> Iterator[Row]:
        for rows in self._batches(_ROWS_AT_ONCE):
            yield from rows

    def iter(self, batch_size: int) -> Iterator[dict[str, list[Any]]]:
        """Yield the cells of each column, for `batch_size` rows at a time."""
        names = self.columns or self.column_names
        for rows in self._batches(batch_size):
            columns = {}
            for name in names:
                columns[name] = [row.get(name) for row in rows]
            yield columns

    def _batches(self, size: int) -> Iterator[list[Row]]:
        for begin in range(0, len(self), size):
            yield self.read(begin, min(begin + size, len(self)))

    def row(self, index: int) -> Row:
        """Return one row."""
        return self.read(index, index + 1)[0]

    def read(self, begin: int, end: int) -> list[Row]:
        """Read rows `begin` to `end`, over the borders of files.

        Raises:
            OptrunError: As `Shard.read`.
        """
        rows: list[Row] = []
        for number, first, last in spans(self._ends, begin, end):
            rows += self.shards[number].read(first, last, self.columns, self._unexpected)
        return rows

    def where(self, index: int) -> str:
        """Name a row for a message: its file, and its number there from 1."""
        number, _, row = next(spans(self._ends, index, index + 1))
        return f"{self.key}={self.shards[number].file}: row {row:,}"

    @cached_property
    def borders(self) -> np.ndarray:
        """The first row of each window, and the number of rows; shape (windows + 1,), int64.

        A window is `window` consecutive rows, fewer at the end of a file. Example: files of 5 and 3
        rows in windows of 2 rows give `[0, 2, 4, 5, 7, 8]`.
        """
        windows = []
        for begin, end in pairwise([0, *self._ends]):
            windows.append(np.arange(begin, end, self.window))
        return np.concatenate([*windows, self._ends[-1:]])

    def _windows_of_files(self) -> Iterator[tuple[Shard, int, int, np.ndarray]]:
        """Yield each file with its windows: stretches of consecutive rows.

        Yields:
            The file, the number of its first window, the number of the next file's first window,
            and the borders of the windows as rows of the file. Example: of files of 5 and 3 rows in
            windows of 2 rows the second one comes with the windows 3 up to 5, and `[0, 2, 3]`.
        """
        first_row = 0
        first_window = 0
        for shard, end_row in zip(self.shards, self._ends, strict=True):
            end_window = int(np.searchsorted(self.borders, end_row))
            borders_in_file = self.borders[first_window : end_window + 1] - first_row
            yield shard, first_window, end_window, borders_in_file
            first_row = end_row
            first_window = end_window

    @cached_property
    def parts_of_windows(self) -> np.ndarray:
        """The first window of each part of a file, and the number of windows at the end.

        A part is what a file is read in at once, such as a row group; a window, some consecutive
        rows of a file, belongs to the part of its first row. Shape (parts + 1,), int64.

        Example: a file with windows 0 to 3, whose row groups begin in window 0 and in window 2, and
        another file with windows 4 to 6 in one row group give `[0, 2, 4, 7]`.
        """
        # One entry a window, and a last one that ends the last part: at first all begin a part.
        begins_part = np.ones(len(self.borders), dtype=bool)
        for shard, first_window, end_window, borders in self._windows_of_files():
            part_of_window = shard.parts(borders[:-1])  # by the first row of each window
            # A window behind the first one of its file begins a part if it is in another one than
            # the window before it.
            is_other_part = part_of_window[1:] != part_of_window[:-1]
            begins_part[first_window + 1 : end_window] = is_other_part
        return np.flatnonzero(begins_part)

    def window_bytes(self, columns: Sequence[str]) -> np.ndarray:
        """Estimate the bytes of some columns in each window of rows; shape (windows,), int64."""
        sizes = [shard.sizes(borders, columns) for shard, _, _, borders in self._windows_of_files()]
        return np.concatenate(sizes)

    def fingerprint(self) -> str:
        """Digest the digests of all files and the size of the windows."""
        return digest("stream", str(self.window), *(shard.content for shard in self.shards))

    def source_digests(self) -> dict[str, str]:
        """Map the name of each file to the digest of its bytes, for checkpoints."""
        return {str(shard.file): shard.content for shard in self.shards}


def open_stream(
    key: str, files: Sequence[Path | HubFile], window: int, notes: list[str]
) -> StreamRows:
    """Open files as a stream; the positions of their rows are cached.

    Args:
        key: The configuration key, for messages.
        files: Files of one format, at least one.
        window: Rows of a window.
        notes: Gets a sentence about bytes and seconds, if a file had to be read.

    Raises:
        ConfigError: A format cannot be read in the middle, files have several formats, or a file
            has no rows.
    """
    kind = one_format(key, (streamed_format(key, path) for path in files))
    assert kind.stream is not None
    start_time = time.monotonic()
    opening = Opening(window)  # counts the bytes that are read to open the files
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
        seconds = time.monotonic() - start_time
        notes.append(
            f"{key}: {len(rows):,} rows of {len(files):,} files found by reading"
            f" {opening.read / 1e6:,.0f} MB once ({seconds:.0f} s); their positions are cached"
        )
    return rows


class WindowOrder:
    """The order of the examples of one epoch.

    1. The parts of files that are read as a whole are permuted.
    2. The windows of every two consecutive parts are permuted together.
    3. The examples of every four consecutive windows are permuted together.

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
        # The windows of the parts in this order.
        sizes = np.diff(parts)[order]
        before = np.cumsum(sizes) - sizes
        windows = np.arange(parts[-1]) + np.repeat(parts[order] - before, sizes)
        # Sorted by pairs of parts, and by chance within a pair.
        pairs = np.repeat(np.arange(len(order)) // _PARTS_TOGETHER, sizes)
        self._windows = windows[np.lexsort((randomness.permutation(len(windows)), pairs))]
        # The number of examples up to the end of every fourth window, and of the last one.
        ends = np.cumsum(np.diff(borders)[self._windows])
        self._ends = np.append(ends[_WINDOWS_TOGETHER - 1 : -1 : _WINDOWS_TOGETHER], ends[-1])
        self._borders = borders
        self._seed = seed
        self._epoch = epoch
        self._last: RecentlyRead[int, np.ndarray] = RecentlyRead(1)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, positions: slice, /) -> np.ndarray:
        """Return the example of each position; shape (positions,), int64."""
        begin, end, _ = positions.indices(len(self))
        examples = [np.zeros(0, dtype=np.int64)]
        for number, first, last in spans(self._ends, begin, end):
            group = self._last.read(number, partial(self._shuffle_group, number))
            examples.append(group[first:last])
        return np.concatenate(examples)

    def _shuffle_group(self, number: int) -> np.ndarray:
        """Return the examples of the group of four windows with this number, shuffled.

        Windows are in the order of the epoch; the last group may have fewer.

        Returns:
            Numbers of the examples; int64.
        """
        windows = self._windows[number * _WINDOWS_TOGETHER : (number + 1) * _WINDOWS_TOGETHER]
        examples = [
            np.arange(self._borders[window], self._borders[window + 1]) for window in windows
        ]
        randomness = generator(self._seed, "window", self._epoch, number)
        return randomness.permutation(np.concatenate(examples))


@dataclass(eq=False)
class Windows:
    """The arrangement of the examples of a stream, for an `EpochPlan`."""

    rows: StreamRows
    borders: np.ndarray
    """Where the examples of each window begin, and where the last ones end; shape (windows + 1,),
    int64."""

    @property
    def name(self) -> str:
        """The arrangement in words, by which a resumed run recognises it."""
        return f"{_WINDOWS_TOGETHER} far windows of {self.rows.window}"

    def __call__(self, seed: int, epoch: int) -> WindowOrder:
        """Make the order of an epoch."""
        return WindowOrder(self.borders, self.rows.parts_of_windows, seed=seed, epoch=epoch)


@dataclass(eq=False)
class StreamedRows:
    """An example for each row of a stream, made when it is asked for."""

    rows: StreamRows
    make: Callable[[Row], Example]
    """Makes the example of a row; a pure function. File and number of the row are added to the
    ConfigError that it raises."""
    key: str
    """Digest of everything `make` depends on, besides the row."""
    scalars: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Name to one value a row, such as `labels`; shape (rows,)."""

    def __post_init__(self) -> None:
        """Make the attributes that a loader looks for."""
        self.arrangement = Windows(self.rows, self.rows.borders)
        self.source_digests = self.rows.source_digests
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
        """Digest the files and how rows become examples."""
        return digest(
            "streamed rows", self.rows.fingerprint(), self.key, *scalar_pieces(self.scalars)
        )


def _sample_windows(count: int) -> np.ndarray:
    """Pick up to eight of `count` windows, spread evenly from the first to the last one; int64.

    Example:
        >>> _sample_windows(3).tolist(), _sample_windows(100).tolist()
        ([0, 1, 2], [0, 14, 28, 42, 57, 71, 85, 99])
    """
    evenly = np.linspace(0, count - 1, min(count, _SAMPLED_WINDOWS))
    return np.unique(evenly.round().astype(np.int64))


Encode = Callable[[list[Row]], Mapping[str, Sequence[np.ndarray]]]
"""Makes the ids of each row by name, such as `input_ids`, all names with equal lengths."""


class StreamedBlocks:
    """The rows of each window joined and cut into blocks.

    The number of blocks of a window is planned by its bytes. The tokens of eight windows are
    counted; the others are expected to have 2 % more tokens per byte than the densest of these. The
    tokens of a window are spread evenly over its blocks, so that blocks are a little shorter than
    `length`. If a window has more tokens than planned, the rest is lost. Up to eight windows are
    all counted, and nothing is lost.

    Args:
        rows: The stream.
        encode: Makes ids of rows; a pure function.
        length: Largest number of tokens of a block.
        key: Digest of everything `encode` depends on, besides the rows.
        empty: For each name of ids, the id of the one token of a block without tokens.

    Attributes:
        notes: Sentences for the user about the plan; empty if all windows were counted.
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
        self.source_digests = rows.source_digests
        self._recent: RecentlyRead[int, dict[str, np.ndarray]] = RecentlyRead(_WINDOWS_TOGETHER)
        self._borders = np.concatenate([[0], np.cumsum(self._plan_blocks_per_window())])
        self.arrangement = Windows(rows, self._borders)

    def _plan_blocks_per_window(self) -> np.ndarray:
        """Plan how many blocks each window gets, at least one; shape (windows,), int64.

        The tokens of a window, some consecutive rows of a file, are cut into blocks for training.
        The windows of `_sample_windows` get the blocks that they need. The others are planned by
        their bytes, with 2 % more tokens per byte than the densest of these has. A window that
        needs more blocks loses the rest; a note says so.

        Example: with blocks of 100 tokens and a densest window of 250 tokens in 1,000 bytes, which
        gets 3 blocks, a window of 2,000 bytes is expected to have 2,000 * 0.25 * 1.02 = 510 tokens
        and gets 6 blocks.
        """
        window_bytes = self.rows.window_bytes(self.rows.columns or self.rows.column_names)
        count = len(window_bytes)
        if count == 0:
            return np.zeros(0, dtype=np.int64)
        # 1. Count the tokens of a few windows; the counts are cached.
        sampled = _sample_windows(count)
        key = digest("sample-2", self.key, versions(*MAKERS))
        tokens = np.array(cached_result(key, lambda: list(map(self._count_tokens, sampled))))
        # 2. Plan every window by its bytes.
        tokens_per_byte = tokens / np.maximum(window_bytes[sampled], 1)
        expected_tokens = window_bytes * (tokens_per_byte.max() * _MARGIN)
        blocks = np.ceil(expected_tokens / self.length).astype(np.int64)
        # 3. How full the planned blocks of the counted windows would be shows how good the plan is.
        if len(sampled) < count:
            full = tokens.sum() / max(1, blocks[sampled].sum() * self.length)
            self.notes.append(
                f"{self.rows.key}: blocks are planned by {len(sampled)} of {count:,} windows, and"
                f" are {full:.1%} full there; a window with more tokens for a byte than {_MARGIN}"
                " times the most of these loses the rest"
            )
        # 4. Give the counted windows what they need: tokens / length, rounded up.
        blocks[sampled] = -(-tokens // self.length)
        planned: np.ndarray = np.maximum(blocks, 1)
        return planned

    def _count_tokens(self, window: int) -> int:
        """Tokenise a window, and count its tokens: all names of ids have equally many."""
        return len(next(iter(self._ids_of_window(window).values())))

    def __len__(self) -> int:
        return int(self._borders[-1])

    def __getitem__(self, index: int) -> Example:
        # Block `number` of the `blocks` blocks of a window; the spans of one block are one span.
        window, number, _ = next(spans(self._borders[1:], index, index + 1))
        blocks = int(self._borders[window + 1] - self._borders[window])
        example = {}
        for name, flat in self._ids_of_window(window).items():
            total = min(len(flat), blocks * self.length)
            ids: Any = flat[total * number // blocks : total * (number + 1) // blocks]
            if not len(ids):
                ids = [self.empty[name]]
            example[name] = np.asarray(ids, dtype=np.int64)
        return example

    def _ids_of_window(self, window: int) -> dict[str, np.ndarray]:
        """Return the ids of all rows of a window by name, joined; four windows stay in memory.

        window: Its number; a window is some consecutive rows of a file.

        Returns:
            For each name of ids, such as `input_ids`, an array of shape (tokens,), int32; empty for
            a window whose rows have no tokens.

        Raises:
            ConfigError: A row cannot be encoded.
        """

        def encode_rows() -> dict[str, np.ndarray]:
            begin, end = self.rows.borders[window : window + 2].tolist()
            rows = self.rows.read(begin, end)
            try:
                ids_by_name = self.encode(rows)
            except ConfigError as error:
                raise ConfigError(
                    f"{self.rows.where(begin)} to {end - begin - 1:,} after it: {error}"
                ) from error
            joined = {}
            for name in self.empty:
                parts = [np.zeros(0, dtype=np.int32)]  # for rows without any tokens
                for ids in ids_by_name.get(name, ()):
                    parts.append(np.asarray(ids, dtype=np.int32))
                joined[name] = np.concatenate(parts)
            return joined

        return self._recent.read(window, encode_rows)

    def fingerprint(self) -> str:
        """Digest the files and how rows become blocks."""
        return self.key
