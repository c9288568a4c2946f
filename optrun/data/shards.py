"""Files whose rows are read where they lie, here or on the hub: jsonl by where each row begins, parquet by groups."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from optrun.base.errors import ConfigError, OptrunError
from optrun.base.reading import open_file, parse_json
from optrun.data.cache import cached, digest, known_by
from optrun.data.content import COMPRESSED
from optrun.data.formats import ENDINGS, STREAMED, refuse_other_content
from optrun.data.heads import HEAD, NO_TABLE, table
from optrun.data.hub_file import BLOCK, HubFile
from optrun.data.known_files import remembered

if TYPE_CHECKING:
    from datasets import Dataset

Row = dict[str, Any]
File = Path | HubFile

_CHUNK = 8 << 20
_SPACE = np.isin(np.arange(256), list(b" \t\r\n"))
_GROUPS = 4
"""Row groups of the parquet files of a stream that stay in memory, besides those with the rows of six windows."""
_WINDOWS = 6


@dataclass(frozen=True)
class Shard(ABC):
    """One file of a stream.

    Attributes:
        key: The configuration key it came by.
        path: The file, or one of the hub, which never changes.
        rows: How many it has, empty lines left out.
        content: Digest of its bytes.
        state: Size and time of change, as they were when it was indexed.
    """

    key: str
    path: File
    rows: int
    content: str
    state: tuple[int, int]

    def __reduce__(self) -> Any:
        """Without what is open in this process."""
        return type(self), tuple(getattr(self, each.name) for each in fields(self))

    @abstractmethod
    def names(self) -> Sequence[str]:
        """List its columns, as far as they are known without reading all of it."""

    @abstractmethod
    def read(
        self, begin: int, end: int, columns: Sequence[str] | None, unread: frozenset[str] = frozenset()
    ) -> list[Row]:
        """Read rows `begin` to `end`.

        Args:
            begin: The first one.
            end: One past the last.
            columns: Those that are wanted, None where a row has none; None: all, as they are.
            unread: Columns that would be wanted and are not, since no file is known to have them.

        Raises:
            ConfigError: A row that is none, or has something in one of `unread`.
            OptrunError: The file is not the one that was indexed.
        """

    @abstractmethod
    def parts(self, rows: np.ndarray) -> np.ndarray:
        """Number the part of the file in which each row begins; a part is read as a whole. Shape (rows,), int64."""

    @abstractmethod
    def sizes(self, borders: np.ndarray, columns: Sequence[str]) -> np.ndarray:
        """Estimate bytes between row borders without reading; shape (borders - 1,), int64."""

    def head(self, count: int, columns: Sequence[str] | None) -> Dataset:
        """Read the first rows, with the types of their columns.

        Raises:
            ConfigError: They are no table.
        """
        rows = self.read(0, min(count, self.rows), columns)
        try:
            return table(rows)
        except NO_TABLE as error:
            why = " ".join(str(error).split())
            raise ConfigError(f"{self.key}={self.path}: its first rows are no table: {why}.") from error

    def refuse_changed(self) -> None:
        """Refuse a file that is not the one that was indexed.

        Raises:
            OptrunError: It was written to, replaced or removed.
        """
        if _state(self.path) != self.state:
            raise OptrunError(
                f"{self.key}={self.path}: this file changed while it was read as a stream, so its rows are no longer "
                "where they were. Leave the files of a stream as they are; start again with the file as it is now."
            )


def _state(path: File) -> tuple[int, int]:
    if isinstance(path, HubFile):
        return path.size, 0
    try:
        entry = path.stat()
    except OSError:
        return (-1, -1)
    return entry.st_size, entry.st_mtime_ns


@dataclass(frozen=True)
class Lines(Shard):
    """A jsonl file; `index` holds where each row begins, and where the last one ends."""

    index: Path

    @cached_property
    def _begins(self) -> np.ndarray:
        return np.asarray(np.load(self.index / "begins.npy", mmap_mode="r", allow_pickle=False))

    @cached_property
    def _file(self) -> int:
        self.refuse_changed()
        assert isinstance(self.path, Path)
        return os.open(self.path, os.O_RDONLY)  # read by place alone: processes that share it do not disturb each other

    def names(self) -> Sequence[str]:
        """List the keys of its first rows: to parse them all would take much longer than to find where they are."""

        def find() -> list[str]:
            return list(dict.fromkeys(name for row in self.read(0, min(HEAD, self.rows), None) for name in row))

        found: list[str] = known_by(digest("columns-1", self.content, str(HEAD)), find)
        return found

    def read(
        self, begin: int, end: int, columns: Sequence[str] | None, unread: frozenset[str] = frozenset()
    ) -> list[Row]:
        """Read rows by the place of their bytes."""
        borders = self._begins[begin : end + 1]
        first, size = int(borders[0]), int(borders[-1] - borders[0])
        raw = self.path.read(first, size) if isinstance(self.path, HubFile) else self._bytes(first, size)
        cuts = (borders - first).tolist()
        rows = []
        for number, (left, right) in enumerate(pairwise(cuts), begin):
            row = self._parsed(raw[left:right], number)
            for name in unread:
                if row.get(name):  # an empty one says as much as none
                    self._refuse_unread(number, name)
            rows.append(row if columns is None else {name: row.get(name) for name in columns})
        return rows

    def _bytes(self, first: int, size: int) -> bytes:
        raw = b""
        while len(raw) < size and (piece := os.pread(self._file, size - len(raw), first + len(raw))):
            raw += piece
        self.refuse_changed()  # at each read, and behind it: rows written over in place parse as well as before
        return raw

    def _refuse_unread(self, number: int, name: str) -> None:
        raise ConfigError(
            f"{self.key}={self.path}: row {number + 1:,} has a column {name}, which none of the first {HEAD} rows of "
            f"any file has, so it would not be read. Put a row with it among the first {HEAD} of a file, or give it in "
            f'each row, if only as "{name}": null.'
        )

    def _parsed(self, raw: bytes, number: int) -> Row:
        try:
            row = parse_json(raw, f"row {number + 1:,}")
        except ValueError as error:
            raise ConfigError(
                f"{self.key}={self.path}: row {number + 1:,} is no JSON: {error.__cause__ or error}."
            ) from error
        if not isinstance(row, dict):
            raise ConfigError(
                f'{self.key}={self.path}: row {number + 1:,} is no object, such as {{"text": ...}}, but {raw[:40]!r}.'
            )
        return row

    def parts(self, rows: np.ndarray) -> np.ndarray:
        """Number the blocks of the hub; a row that lies here is a part of its own."""
        return self._begins[rows] // BLOCK if isinstance(self.path, HubFile) else rows

    def sizes(self, borders: np.ndarray, columns: Sequence[str]) -> np.ndarray:  # noqa: ARG002
        """Count the bytes of the rows, with all that stands in them."""
        return np.diff(self._begins[borders])


class GroupCache(OrderedDict[tuple[Any, ...], Any]):
    """Row groups of all files of a stream, by process, file, number and columns.

    Args:
        window: Rows of a window. Four windows are read together, and each may begin and end in the middle of a group.
    """

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = window

    def __reduce__(self) -> Any:
        """Empty in another process."""
        return type(self), (self.window,)

    def keep(self, place: tuple[Any, ...], group: Any) -> None:
        """Add a row group, and drop those that were not used for longest."""
        self[place] = group
        rows = sum(kept.num_rows for kept in self.values()) / len(self)
        while len(self) > _GROUPS + _WINDOWS * self.window / max(rows, 1):
            self.popitem(last=False)


@dataclass(frozen=True)
class Groups(Shard):
    """A parquet file; `ends` holds the number of rows up to the end of each row group, `columns` all its columns."""

    ends: tuple[int, ...]
    columns: tuple[str, ...]
    kept: GroupCache = field(compare=False, repr=False)

    def names(self) -> Sequence[str]:
        """List the columns as its footer has them."""
        return self.columns

    def _group(self, number: int, columns: Sequence[str] | None) -> Any:
        import pyarrow.parquet as reader

        place = (os.getpid(), self.path, number, None if columns is None else tuple(columns))
        if place not in self.kept:
            self.refuse_changed()  # Arrow says of other bytes only that they are broken
            with reader.ParquetFile(_opened(self.path)) as file:
                group = file.read_row_group(number, columns=columns, use_threads=False)
            self.refuse_changed()
            self.kept.keep(place, group)
        self.kept.move_to_end(place)
        return self.kept[place]

    def head(self, count: int, columns: Sequence[str] | None) -> Dataset:
        """Read the first rows, with types as `datasets` wrote them down: classes with names, images."""
        from datasets import Dataset

        try:
            return Dataset(self._group(0, columns).slice(0, count))
        except NO_TABLE as error:  # of types that `datasets` has none for
            why = " ".join(str(error).split())
            raise ConfigError(f"{self.key}={self.path}: its first rows are no table: {why}.") from error

    def read(
        self,
        begin: int,
        end: int,
        columns: Sequence[str] | None,
        unread: frozenset[str] = frozenset(),  # noqa: ARG002
    ) -> list[Row]:
        """Read rows out of their row groups, which are read as wholes."""
        lacking = dict.fromkeys(name for name in columns or () if name not in self.columns)
        rows: list[Row] = []
        at = begin
        while at < end:
            number = int(np.searchsorted(self.ends, at, side="right"))
            before = self.ends[number - 1] if number else 0
            last = min(end, self.ends[number])
            rows += self._group(number, columns).slice(at - before, last - at).to_pylist()
            at = last
        return [{**row, **lacking} for row in rows] if lacking else rows

    def parts(self, rows: np.ndarray) -> np.ndarray:
        """Number the row groups."""
        return np.searchsorted(self.ends, rows, side="right")

    def sizes(self, borders: np.ndarray, columns: Sequence[str]) -> np.ndarray:
        """Count the columns' bytes before compression, spread evenly over the rows of each row group."""
        if isinstance(self.path, HubFile):
            totals = known_by(digest("totals-1", self.content, *columns), lambda: self._totals(columns))
        else:
            totals = self._totals(columns)
        places, sums = np.array([0, *self.ends]), np.cumsum([0, *totals])
        spread: np.ndarray = np.diff(np.interp(borders, places, sums)).astype(np.int64)
        return spread

    def _totals(self, columns: Sequence[str]) -> list[int]:
        """Count the bytes of the columns in each row group."""
        import pyarrow.parquet as reader

        with reader.ParquetFile(_opened(self.path)) as file:
            groups = [file.metadata.row_group(number) for number in range(len(self.ends))]
        return [
            sum(
                column.total_uncompressed_size
                for column in map(group.column, range(group.num_columns))
                if column.path_in_schema.split(".")[0] in columns
            )
            for group in groups
        ]


def _opened(path: File) -> Any:
    return path.opened() if isinstance(path, HubFile) else path


def open_shards(key: str, files: Sequence[File], notes: list[str], window: int = 1) -> list[Shard]:
    """Find the rows of each file; what was found once of a file is known as long as it is the same file.

    Args:
        key: The configuration key, for messages.
        files: All of one format.
        notes: Takes what it cost.
        window: Rows that are read near each other.

    Raises:
        ConfigError: A format that cannot be read in the middle; files of several formats; one without rows.
    """
    kinds = {kind_of_stream(key, path) for path in files}
    if len(kinds) > 1:
        raise ConfigError(f"{key}: files of several formats ({', '.join(sorted(kinds))}). Give files of one format.")
    kind = kinds.pop()
    begun, read = time.monotonic(), 0
    shards: list[Shard] = []
    kept = GroupCache(window)
    for path in files:
        if _state(path)[0] == 0:
            raise ConfigError(f"{key}={path}: the file is empty.")
        new: list[int] = []
        shards.append(_lines(key, path, new) if kind == "json" else _groups(key, path, new, kept))
        read += sum(new)
        if not shards[-1].rows:
            raise ConfigError(f"{key}={path}: no rows in it.")
    if read:
        rows = sum(shard.rows for shard in shards)
        notes.append(
            f"{key}: {rows:,} rows of {len(files):,} files found by reading {read / 1e6:,.0f} MB once "
            f"({time.monotonic() - begun:.0f} s); where they are is remembered"
        )
    return shards


def kind_of_stream(key: str, path: File) -> str:
    """Name the format of a file that can be read in the middle.

    Raises:
        ConfigError: It cannot.
    """
    suffixes = [suffix.lower() for suffix in Path(str(path)).suffixes]
    if suffixes and suffixes[-1] in COMPRESSED:
        raise ConfigError(
            f"{key}={path}: data.streaming=true cannot begin in the middle of a compressed file. Unpack it, or write "
            "it as parquet, which is compressed inside."
        )
    if not suffixes or suffixes[-1] not in STREAMED:
        raise ConfigError(
            f"{key}={path}: data.streaming=true reads {', '.join(STREAMED)}. Write its rows as one of these, or take "
            "data.streaming=false."
        )
    return ENDINGS[suffixes[-1]].name


def _lines(key: str, path: File, new: list[int]) -> Lines:
    if isinstance(path, HubFile):
        return _lines_of_hub(key, path, new)

    def find() -> dict[str, Any]:
        refuse_other_content(key, path, "json")
        new.append(path.stat().st_size)
        begins, content = _begins_of(path)
        name = digest("lines-1", content)
        cached("stream", name, lambda folder: np.save(folder / "begins.npy", begins))
        return {"content": content, "rows": len(begins) - 1, "index": name}

    found = remembered(path, "lines-1", find)

    def again(folder: Path) -> None:
        np.save(folder / "begins.npy", _begins_of(path)[0])

    index = cached("stream", found["index"], again)
    return Lines(key, path, found["rows"], found["content"], _state(path), index)


def _lines_of_hub(key: str, path: HubFile, new: list[int]) -> Lines:
    """Find lines as `_lines`; the hub's digest of the bytes is known, and what was found by it is remembered."""

    def make(folder: Path) -> None:
        new.append(path.size)
        np.save(folder / "begins.npy", _begins_of(path)[0])

    index = cached("stream", digest("hub-lines-1", path.content), make)
    rows = len(np.load(index / "begins.npy", mmap_mode="r", allow_pickle=False)) - 1
    return Lines(key, path, rows, path.content, _state(path), index)


def _chunks(path: File) -> Iterator[bytes]:
    if isinstance(path, HubFile):
        yield from path.chunks()
        return
    with open_file(path, follow=True) as file:
        while chunk := file.read(_CHUNK):
            yield chunk


def _begins_of(path: File) -> tuple[np.ndarray, str]:
    """Find where each line that is not blank begins, and where the last one ends; digest the bytes.

    Returns:
        Shape (rows + 1,), int64; size and xxh3-128.
    """
    total, found, at, rest = xxhash.xxh3_128(), [np.zeros(0, dtype=np.int64)], 0, b""
    for chunk in _chunks(path):
        total.update(chunk)
        whole, line_end, tail = (rest + chunk).rpartition(b"\n")
        if line_end:
            found.append(at + _starts(whole + line_end))
            at += len(whole) + 1
        rest = tail
    if rest.strip():
        found.append(np.array([at], dtype=np.int64))
    begins = np.concatenate([*found, np.array([at + len(rest)])])
    return begins, f"{at + len(rest)} {total.hexdigest()}"


def _starts(lines: bytes) -> np.ndarray:
    """Find where lines that are not blank begin, in bytes that end with a line."""
    raw = np.frombuffer(lines, dtype=np.uint8)
    ends = np.flatnonzero(raw == ord("\n"))
    starts = np.concatenate([[0], ends[:-1] + 1])
    doubtful = np.flatnonzero(_SPACE[raw[starts]])
    blank = [number for number in doubtful.tolist() if not lines[starts[number] : ends[number]].strip()]
    return np.delete(starts, blank).astype(np.int64)


def _groups(key: str, path: File, new: list[int], kept: GroupCache) -> Groups:
    import pyarrow as pa
    import pyarrow.parquet as reader

    def look() -> str:
        assert isinstance(path, Path)
        refuse_other_content(key, path, "parquet")
        new.append(path.stat().st_size)
        total = xxhash.xxh3_128()
        for chunk in _chunks(path):
            total.update(chunk)
        return f"{path.stat().st_size} {total.hexdigest()}"

    def footer() -> list[Any]:
        """Rows of each row group, and the names of the columns."""
        with reader.ParquetFile(_opened(path)) as file:
            counts = [file.metadata.row_group(number).num_rows for number in range(file.metadata.num_row_groups)]
            return [counts, file.schema_arrow.names]

    try:
        if isinstance(path, HubFile):
            content, (counts, names) = path.content, known_by(digest("groups-2", path.content), footer)
        else:
            content, (counts, names) = remembered(path, "bytes-1", look), footer()
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(f"{key}={path}: cannot be read as parquet: {' '.join(str(error).split())}") from error
    ends = tuple(np.cumsum(counts, dtype=np.int64).tolist())
    return Groups(key, path, ends[-1] if ends else 0, content, _state(path), ends, tuple(names), kept)
