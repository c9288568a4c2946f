"""Files of a stream, here or on the hub: jsonl by the offsets of rows, parquet by row groups."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from optrun.base.errors import ConfigError, message_in_one_line
from optrun.data.cache import checksum, digest
from optrun.data.cached_arrays import cached_arrays
from optrun.data.content import parse_row
from optrun.data.first_rows import FIRST_ROWS
from optrun.data.hub_file import HubFile
from optrun.data.local_file import LocalFile
from optrun.data.spans import RecentlyRead, spans

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset

Row = dict[str, Any]
File = LocalFile | HubFile
_IS_SPACE = np.isin(np.arange(256), list(b" \t\r\n"))
"""Whether each byte is white space of JSON; shape (256,), bool."""
_FEWEST_GROUPS = 4
"""Row groups of the parquet files of a stream that stay in memory, besides those with the rows
of six windows.
"""
_WINDOWS_IN_MEMORY = 6


@dataclass
class Opening:
    """State that the files of a stream share.

    Attributes:
        window: Rows of a window; the rows of four windows are read near each other.
        groups: The row groups in memory, by file, number and columns.
        read: Bytes that were read so far to find where rows begin.
    """

    window: int
    groups: RecentlyRead[tuple[File, int, tuple[str, ...] | None], pa.Table] = field(
        default_factory=lambda: RecentlyRead(_FEWEST_GROUPS)
    )
    read: int = 0


@dataclass(frozen=True)
class Shard(ABC):
    """One file of a stream.

    Attributes:
        key: The configuration key of the file, for messages.
        file: A file on this disk or on the hub.
        rows: The number of rows; blank lines are none.
        content: Digest of the bytes of the file.
    """

    key: str
    file: File
    rows: int
    content: str

    @abstractmethod
    def names(self) -> Sequence[str]:
        """List the columns: of parquet all of them, else those of the first 100 rows."""

    @abstractmethod
    def read(
        self,
        begin: int,
        end: int,
        columns: Sequence[str] | None,
        unexpected: frozenset[str] = frozenset(),
    ) -> list[Row]:
        """Read rows `begin` to `end`.

        Args:
            begin: The first row.
            end: One past the last row.
            columns: Columns to return, with None in a row that lacks one; None: each row as it is.
            unexpected: Columns that rows must not have: no first row has them, so that nothing
                would read them.

        Raises:
            ConfigError: A row is no JSON object, or has a value in one of `unexpected`.
            OptrunError: The file has changed since it was opened.
        """

    @abstractmethod
    def parts(self, rows: np.ndarray) -> np.ndarray:
        """Number the part of the file that each row is in; a part is read as a whole.

        Args:
            rows: Numbers of rows, ascending.

        Returns:
            Numbers that are equal for rows of one part; shape (rows,), int64.
        """

    @abstractmethod
    def sizes(self, borders: np.ndarray, columns: Sequence[str]) -> np.ndarray:
        """Estimate the bytes of some columns between row borders, without reading rows.

        Args:
            borders: Numbers of rows, ascending.
            columns: The columns; a jsonl file counts all columns.

        Returns:
            Bytes from each border to the next one; shape (borders - 1,), int64.
        """

    @abstractmethod
    def head(self, count: int, columns: Sequence[str] | None) -> Dataset:
        """Read at most `count` first rows as a table with types; columns=None: all columns."""


@dataclass(frozen=True)
class Lines(Shard):
    """A jsonl file."""

    begins: np.ndarray = field(compare=False, repr=False)
    """Byte offset of each row, and of the end of the last one; shape (rows + 1,), int64."""

    @staticmethod
    def open(key: str, file: File, opening: Opening) -> Lines:
        """Find where the rows of a file begin, and its digest; both are cached.

        If the file must be read, it is read once for both, and `opening.read` grows by its size.
        """
        read_begins: np.ndarray | None = None  # where rows begin, once the file was read

        def read_for_digest() -> str:
            nonlocal read_begins
            opening.read += file.size
            read_begins, content = find_row_starts(file.chunks())
            return content

        def read_for_begins() -> dict[str, np.ndarray]:
            if read_begins is None:  # `read_for_digest` was not called
                read_for_digest()
            assert read_begins is not None
            return {"begins": read_begins}

        # Each function is called only if the cache does not have its result: both, the second one
        # alone, or none. A file of the hub has a digest without being read.
        content = file.identified(read_for_digest)
        arrays = cached_arrays("stream", digest("lines-1", content), read_for_begins)
        begins = arrays["begins"]
        return Lines(key, file, len(begins) - 1, content, begins)

    def names(self) -> Sequence[str]:
        """List the keys of the first 100 rows, in their order; the result is cached."""

        def find() -> list[str]:
            names: dict[str, None] = {}
            for row in self.read(0, min(FIRST_ROWS, self.rows), None):
                names.update(dict.fromkeys(row))
            return list(names)

        return self.file.cached_result(f"columns-1 {FIRST_ROWS}", find)

    def read(
        self,
        begin: int,
        end: int,
        columns: Sequence[str] | None,
        unexpected: frozenset[str] = frozenset(),
    ) -> list[Row]:
        """Read rows by their byte offsets, in one read; see `Shard.read`."""
        # 1. The bytes of all rows.
        borders = self.begins[begin : end + 1]
        first_byte = int(borders[0])
        raw = self.file.read(first_byte, int(borders[-1]) - first_byte)
        spans_in_raw = pairwise((borders - first_byte).tolist())
        # 2. Parse each; messages count rows from 1.
        rows = []
        for number, (row_begin, row_end) in enumerate(spans_in_raw, begin + 1):
            row = self._parse(raw[row_begin:row_end], number)
            for name in unexpected:
                if row.get(name):  # an empty value is as good as none
                    raise ConfigError(
                        f"{self.key}={self.file}: row {number:,} has a column {name}, which none of"
                        f" the first {FIRST_ROWS} rows of any file has, so it would not be read."
                        f" Put a row with it among the first {FIRST_ROWS} of a file, or give it in"
                        f' each row, if only as "{name}": null.'
                    )
            if columns is not None:
                row = {name: row.get(name) for name in columns}
            rows.append(row)
        return rows

    def _parse(self, raw: bytes, number: int) -> Row:
        """Parse the line of a row; `number` counts rows from 1, for messages.

        Raises:
            ConfigError: It is no JSON object.
        """
        try:
            row = parse_row(raw)
        except ValueError as error:
            raise ConfigError(
                f"{self.key}={self.file}: row {number:,} is not JSON: {error}."
            ) from error
        if not isinstance(row, dict):
            raise ConfigError(
                f"{self.key}={self.file}: row {number:,} is not an object, such as"
                f' {{"text": ...}}, but {raw[:40]!r}.'
            )
        return row

    def parts(self, rows: np.ndarray) -> np.ndarray:
        """Number the block of the hub that each row is in; of a local file each row is a part."""
        return self.file.part_of(self.begins[rows])

    def sizes(self, borders: np.ndarray, columns: Sequence[str]) -> np.ndarray:  # noqa: ARG002
        """Count the bytes of the rows, all columns included."""
        return np.diff(self.begins[borders])

    def head(self, count: int, columns: Sequence[str] | None) -> Dataset:
        """Read the first rows as a table."""
        from optrun.data.json_rows import table_of  # imports datasets, which takes a second

        return table_of(self.read(0, min(count, self.rows), columns))


@dataclass(frozen=True)
class Groups(Shard):
    """A parquet file."""

    ends: tuple[int, ...]
    """The number of rows up to the end of each row group."""
    columns: tuple[str, ...]
    """All columns."""
    window: int
    """As that of `Opening`."""
    recent: RecentlyRead[tuple[File, int, tuple[str, ...] | None], pa.Table] = field(
        compare=False, repr=False
    )

    @staticmethod
    def open(key: str, file: File, opening: Opening) -> Groups:
        """Find the row groups of a file by its footer.

        Raises:
            ConfigError: It is no parquet file.
        """
        import pyarrow as pa
        import pyarrow.parquet as reader

        def read() -> str:
            opening.read += file.size
            return checksum(file.chunks())

        def footer() -> tuple[list[int], list[str]]:
            with reader.ParquetFile(file.opened()) as opened:
                counts = [
                    opened.metadata.row_group(at).num_rows
                    for at in range(opened.metadata.num_row_groups)
                ]
                return counts, opened.schema_arrow.names

        try:
            content = file.identified(read)
            counts, names = file.cached_result("groups-2", footer)
        except (pa.ArrowException, OSError) as error:
            raise ConfigError(
                f"{key}={file}: cannot be read as parquet: {message_in_one_line(error)}"
            ) from error
        ends = tuple(np.cumsum(counts, dtype=np.int64).tolist())
        return Groups(
            key, file, sum(counts), content, ends, tuple(names), opening.window, opening.groups
        )

    def names(self) -> Sequence[str]:
        """List the columns as its footer has them."""
        return self.columns

    def _group(self, number: int, columns: Sequence[str] | None) -> pa.Table:
        """Read a row group, or take it from memory.

        Memory holds four groups, and as many more as make six windows, if each group had as many
        rows as the largest one in memory: with windows of 1,000 rows and groups of 500 rows these
        are 4 + 6 * 1,000 // 500 = 16 groups.

        Args:
            number: The number of the row group.
            columns: Columns to read; None: all.

        Raises:
            OptrunError: The file has changed since it was opened.
        """
        import pyarrow.parquet as reader

        def read_group() -> pa.Table:
            self.file.refuse_changed()  # before Arrow calls the new bytes damaged
            with reader.ParquetFile(self.file.opened()) as file:
                group = file.read_row_group(number, columns=columns, use_threads=False)
            self.file.refuse_changed()
            # Make room by the largest group: a small one must not make room for many large ones.
            rows = max(group.num_rows, *(table.num_rows for table in self.recent.values()), 1)
            self.recent.capacity = _FEWEST_GROUPS + _WINDOWS_IN_MEMORY * self.window // rows
            return group

        names = None if columns is None else tuple(columns)
        # Calls `read_group` only if the group is not in memory, and drops old ones if it is full.
        return self.recent.read((self.file, number, names), read_group)

    def read(
        self,
        begin: int,
        end: int,
        columns: Sequence[str] | None,
        unexpected: frozenset[str] = frozenset(),  # noqa: ARG002
    ) -> list[Row]:
        """Read rows out of whole row groups; see `Shard.read`.

        `unexpected` is ignored, since the footer names all columns.
        """
        # Columns that the file does not have, as cells of each row.
        lacking = dict.fromkeys(name for name in columns or () if name not in self.columns)
        rows: list[Row] = []
        for number, first, last in spans(self.ends, begin, end):
            rows += self._group(number, columns).slice(first, last - first).to_pylist()
        if not lacking:
            return rows
        return [{**row, **lacking} for row in rows]

    def parts(self, rows: np.ndarray) -> np.ndarray:
        """Number the row groups."""
        return np.searchsorted(self.ends, rows, side="right")

    def sizes(self, borders: np.ndarray, columns: Sequence[str]) -> np.ndarray:
        """Estimate the bytes of columns between row borders, before compression.

        The bytes of a row group, which its footer has, are spread evenly over its rows: half of a
        group's rows are expected to have half of its bytes.
        """
        totals = self.file.cached_result(
            digest("totals-1", *columns), partial(self._totals, columns)
        )
        bytes_at_ends = np.cumsum([0, *totals])
        bytes_at_borders = np.interp(borders, np.array([0, *self.ends]), bytes_at_ends)
        sizes: np.ndarray = np.diff(bytes_at_borders).astype(np.int64)
        return sizes

    def _totals(self, columns: Sequence[str]) -> list[int]:
        """Count the bytes of the columns in each row group, before compression."""
        import pyarrow.parquet as reader

        with reader.ParquetFile(self.file.opened()) as file:
            groups = [file.metadata.row_group(number) for number in range(len(self.ends))]
        totals = []
        for group in groups:
            total = 0
            for chunk in map(group.column, range(group.num_columns)):
                if chunk.path_in_schema.split(".")[0] in columns:  # a nested column has dots
                    total += chunk.total_uncompressed_size
            totals.append(total)
        return totals

    def head(self, count: int, columns: Sequence[str] | None) -> Dataset:
        """Read the first rows of the first row group."""
        from datasets import Dataset

        return Dataset(self._group(0, columns).slice(0, count))


def find_row_starts(chunks: Iterable[bytes]) -> tuple[np.ndarray, str]:
    r"""Find the byte offset of each line except blank ones, and digest the bytes, in one pass.

    Returns:
        The offsets of these lines, and then the size of the file, shape (rows + 1,), int64; and the
        text that `checksum` computes from the bytes.

    Example:
        >>> starts, _ = find_row_starts([b"one\ntw", b"o\n\nthree"])
        >>> starts.tolist()
        [0, 4, 9, 14]
    """
    total = xxhash.xxh3_128()
    starts = [np.zeros(0, dtype=np.int64)]
    unfinished = b""  # the line that the next chunk continues
    offset = 0  # the byte at which it begins
    for chunk in chunks:
        total.update(chunk)
        lines, line_end, unfinished = (unfinished + chunk).rpartition(b"\n")
        if line_end:
            starts.append(offset + _find_line_starts(lines + line_end))
            offset += len(lines) + 1
    # The last line may have no line end.
    if unfinished.strip():
        starts.append(np.array([offset], dtype=np.int64))
    size = offset + len(unfinished)
    return np.concatenate([*starts, np.array([size])]), f"{size} {total.hexdigest()}"


def _find_line_starts(lines: bytes) -> np.ndarray:
    r"""Find the byte offset of each line except blank ones; `lines` ends with a line break.

    Example:
        >>> _find_line_starts(b"one\n \ntwo\n").tolist()
        [0, 6]
    """
    raw = np.frombuffer(lines, dtype=np.uint8)
    ends = np.flatnonzero(raw == ord("\n"))
    starts = np.concatenate([[0], ends[:-1] + 1])
    # Only lines that begin with white space may be blank: few, so that a loop is fast enough.
    begins_with_space = _IS_SPACE[raw[starts]]
    blank = []
    for number in np.flatnonzero(begins_with_space).tolist():
        if not lines[starts[number] : ends[number]].strip():
            blank.append(number)
    return np.delete(starts, blank).astype(np.int64)
