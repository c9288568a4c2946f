"""Read csv and tsv exactly: each field is a text, a row of another width is an error.

Python's csv module reads them, since it is the one that refuses a quotation mark out of place:
pyarrow takes the rest of a file for one field, and pandas fills up a row that is too short.
"""

from __future__ import annotations

import csv
import io
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING

from optrun.base.errors import ConfigError
from optrun.base.reading import read_json
from optrun.data.cache import cached, versions
from optrun.data.columns import USUAL_IN_HEADERS
from optrun.data.content import chunks_of, open_bytes
from optrun.data.dialect import find_dialect
from optrun.data.first_values import usual_columns
from optrun.data.reading import Reading

if TYPE_CHECKING:
    from datasets import Dataset

_MEANINGS_OF_ERRORS = {
    "unexpected end of data": "a quotation mark is opened and not closed; inside of quotes it is"
    " written twice",
    "expected after": "text follows a closing quotation mark; inside of quotes it is written twice",
}
"""Part of a message of the csv module to its meaning."""
_LONGEST_FIELD = 32 << 20
"""Characters of one field."""
_SAMPLE_BYTES = 1 << 16
"""Bytes from the beginning of a file, by which its delimiter is found."""
_ROWS_AT_ONCE = 10_000
"""Rows in memory at once."""


def read_delimited(reading: Reading, kind: str) -> Dataset:
    """Read rows of csv or tsv files, mapped from the cache.

    Args:
        reading: The files. Its `notes` get what no option says: a delimiter that was found, escaped
            quotation marks, repeated headers.
        kind: `csv` or `tsv`: separated by commas or tabs, unless an option or the first rows say
            otherwise.

    Returns:
        Every column as text, `007` and `NA` included; an empty field is None.

    Raises:
        ConfigError: The files have different columns, a column name is repeated, a row has another
            width, a quotation mark is out of place, or the delimiter is not clear.
    """
    from datasets import Dataset

    options = repr((reading.options.delimiter, list(reading.options.column_names or ())))
    address = reading.address("csv-4", versions("pyarrow"), kind, options)
    folder = cached("rows", address, lambda folder: _convert(reading, kind, folder))
    for number, note in read_json(folder / "notes.json"):
        reading.notes.append(f"{reading.key}={reading.files[number]}: {note}")
    return Dataset.from_file(str(folder / "rows.arrow"))


def _convert(reading: Reading, kind: str, folder: Path) -> None:
    """Write the rows of all files to `rows.arrow`, and the notes about them to `notes.json`.

    A note is a pair of the number of its file and a text.
    """
    limit_before = csv.field_size_limit(_LONGEST_FIELD)  # a setting of the whole process
    try:
        with tempfile.TemporaryDirectory(dir=folder) as plain:
            tables = [
                _Table(f"{reading.key}={path}", text, kind, reading)
                for path, text in zip(reading.files, reading.utf8_files(Path(plain)), strict=True)
            ]
            _refuse_other_columns(reading, tables)
            _write_rows(tables, folder / "rows.arrow")
    finally:
        csv.field_size_limit(limit_before)
    # A table notes what it found while its rows were read.
    notes = []
    for number, table in enumerate(tables):
        notes += [(number, note) for note in table.notes]
    (folder / "notes.json").write_text(json.dumps(notes), encoding="utf-8")


def _refuse_other_columns(reading: Reading, tables: Sequence[_Table]) -> None:
    """Refuse a file whose columns are not those of the first file, in the same order."""
    names = tables[0].names
    for path, table in zip(reading.files, tables, strict=True):
        if table.names != names:
            raise ConfigError(
                f"{reading.key}={path}: its columns are {', '.join(table.names)}; those of"
                f" {reading.files[0]} are {', '.join(names)}. Give files with the same columns in"
                " the same order."
            )


def _write_rows(tables: Sequence[_Table], path: Path) -> None:
    """Write the rows of all tables to an Arrow file, as texts; an empty field is null."""
    import pyarrow as pa

    schema = pa.schema([(name, pa.string()) for name in tables[0].names])
    rows = chain.from_iterable(table.rows() for table in tables)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        while batch := list(islice(rows, _ROWS_AT_ONCE)):
            arrays = []
            for column in zip(*batch, strict=True):  # the cells of one column
                cells = [cell or None for cell in column]
                arrays.append(pa.array(cells, pa.string()))
            writer.write_batch(pa.record_batch(arrays, schema=schema))


def _plain_name(cell: str) -> str:
    """Return a column name in lower case, without a byte order mark and blanks around it."""
    return cell.removeprefix("\ufeff").strip().casefold()


class _Table:
    """One file, with its columns.

    Args:
        where: Key and path, for messages.
        text: The file as UTF-8; it may be packed.
        kind: `csv` or `tsv`.
        reading: Delimiter and names of columns, if options give them.

    Raises:
        ConfigError: It has no header, or one that does not fit; several delimiters fit.
    """

    def __init__(self, where: str, text: Path, kind: str, reading: Reading) -> None:
        self.notes: list[str] = []
        self._where = where
        self._text = text
        options = reading.options
        with open_bytes(text) as stream:
            sample = stream.read(_SAMPLE_BYTES).decode("utf-8-sig", "replace")
        self._dialect, note = find_dialect(where, sample, kind, options.delimiter)
        if note is not None:
            self.notes.append(note)
        self._cannot = f"{where}: cannot be read as {'csv' if self._dialect.quoted else 'tsv'}"
        self._has_header = options.column_names is None
        if self._dialect.quoted and self._needs_escapes():
            self._dialect = replace(self._dialect, escaped=True)
            self.notes.append(r"its quotes inside of quotes are written \", and read so")
        self.names = self._column_names(options.column_names)

    def _column_names(self, names: Sequence[str] | None) -> list[str]:
        """Return the names of the columns: `data.column_names`, else the first row.

        Raises:
            ConfigError: There is no row, the number of names is wrong, or a name is repeated.
        """
        first = next(self._records(), None)
        if first is None:
            raise ConfigError(f"{self._cannot}: there is no header line.")
        if names is not None and len(names) != len(first):
            raise ConfigError(
                f"data.column_names={list(names)}: {self._where} has {len(first)} columns in its"
                " first row. Expected a name for each."
            )
        columns = list(names or first)
        repeated = [name for name in columns if columns.count(name) > 1]
        if repeated:
            raise ConfigError(
                f"{self._where}: two columns are called {repeated[0]!r}. If the file has no"
                ' header, "data.column_names=[NAME1,NAME2,...]" names the columns.'
            )
        return columns

    def _needs_escapes(self) -> bool:
        r"""Tell whether quotes inside of quotes are written `\"`, by reading the whole file.

        They are if the file has `\"` and is no correct csv with the usual `""`.
        """
        if not any(b'\\"' in chunk for chunk in chunks_of(self._text)):
            return False
        # It may be text of the usual kind, such as a path that ends with a backslash.
        try:
            for _ in self._records():
                pass
        except ConfigError:
            return True
        return False

    def _records(self) -> Iterator[list[str]]:
        """Yield the cells of all rows except blank ones, the header included.

        Raises:
            ConfigError: A quotation mark is out of place; the message says where and why.
        """
        number = 0 if self._has_header else 1  # of the row, for messages; the header is 0
        with (
            open_bytes(self._text) as stream,
            io.TextIOWrapper(stream, encoding="utf-8-sig", newline="") as lines,
        ):
            try:
                for cells in self._dialect.read(lines, strict=True):
                    if cells:
                        yield cells
                        number += 1
            except csv.Error as error:
                reason = str(error)
                for part, meaning in _MEANINGS_OF_ERRORS.items():
                    if part in reason:
                        reason = meaning
                        break
                raise ConfigError(f"{self._cannot}: row {number:,}: {reason}.") from error

    def rows(self) -> Iterator[list[str]]:
        """Yield the rows without the header and without rows that repeat it.

        `notes` gets the number of repeated headers.

        Raises:
            ConfigError: A row has another width, a quotation mark is out of place, or a row is
                equal to the first line, which may be no header.
        """
        repeats = 0
        first_number = 0 if self._has_header else 1  # rows are counted from 1 behind the header
        for number, cells in enumerate(self._records(), first_number):
            if len(cells) != len(self.names):
                raise self._wrong_width(number, cells)
            if number == 0:
                continue
            if self._repeats_header(number, cells):
                repeats += 1
            else:
                yield cells
        if repeats:
            self.notes.append(f"rows that repeat the header are left out: {repeats:,}")

    def _repeats_header(self, number: int, cells: list[str]) -> bool:
        """Tell whether a row repeats the header, as in joined files.

        It does if the names are equal but for case, blanks and a byte order mark. A file with one
        column is never searched for repeated headers.

        Raises:
            ConfigError: They are equal, but no name is a usual one, so that the first line may be a
                row of a file without a header.
        """
        if not self._has_header or len(cells) == 1:
            return False
        if [*map(_plain_name, cells)] != [*map(_plain_name, self.names)]:
            return False
        if usual_columns(USUAL_IN_HEADERS, self.names):
            return True
        names = ", ".join(f"NAME{position}" for position in range(1, len(cells) + 1))
        raise ConfigError(
            f"{self._where}: row {number:,} repeats the first line, which has the names of the"
            f" columns: {', '.join(map(repr, cells))}. Remove the repeated line, or, if the file"
            f' has no header, add "data.column_names=[{names}]".'
        )

    def _wrong_width(self, number: int, cells: list[str]) -> ConfigError:
        """Build the error for a row of the wrong width, or for a comment as header."""
        first_name = self.names[0].strip()
        if first_name.startswith("#") and self._has_header:
            return ConfigError(
                f"{self._where}: it begins with {first_name[:40]!r}, where the names of the columns"
                " belong. Remove comments from the file."
            )
        mark = self._dialect.delimiter
        hint = ""
        if self._dialect.quoted:
            first = "; or the first line does not name the columns" if number == 1 else ""
            hint = f" (a field with {mark!r} needs quotes around it{first})"
        return ConfigError(
            f"{self._cannot}: row {number:,}: Expected {len(self.names)} columns, got"
            f" {len(cells)}: {mark.join(cells)[:80]!r}{hint}."
        )
