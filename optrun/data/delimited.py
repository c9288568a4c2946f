"""Read csv and tsv as they stand: each field is a text, a wrong width is an error."""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import json
import lzma
import re
import shlex
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from optrun.base.errors import ConfigError
from optrun.base.reading import read_json
from optrun.data.cache import cached, versions
from optrun.data.columns import USUAL_LABELS, usual_columns
from optrun.data.content import chunks_of, open_bytes
from optrun.data.encoding import UTF8, recoded
from optrun.data.reading import Reading, ReadOptions
from optrun.data.row_advice import USUAL_TEXTS

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset

DELIMITERS = (",", ";", "\t", "|")
_FIELD = 32 << 20
"""Characters of the longest field."""
_SNIFFED = 1 << 16
"""Characters by which the delimiter is found."""
_SNIFFED_ROWS = 50
_CHUNK = 1 << 20
_BATCH = 10_000
"""Rows that are in memory at once."""


@dataclass(frozen=True)
class Dialect:
    r"""How a file separates its columns.

    Attributes:
        delimiter: One character.
        quoted: Whether fields may be quoted; else a field is what stands between delimiters.
        skip: Lines before the header, such as Excel's `sep=;`.
        note: A sentence for the user; empty if the dialect is what the ending says.
        escaped: Whether a quote inside of quotes is written `\"` (Spark, MySQL), not `""`.
    """

    delimiter: str
    quoted: bool
    skip: int = 0
    note: str = ""
    escaped: bool = False


USUAL = {"csv": Dialect(",", True), "tsv": Dialect("\t", False)}
"""The dialect that an ending promises."""


def read_delimited(reading: Reading, kind: str) -> Dataset:
    """Read rows of csv or tsv files, mapped from the cache.

    Args:
        reading: The files.
        kind: `csv` or `tsv`: separated by commas or tabs, unless an option or the first rows say
            otherwise.

    Returns:
        Every column as text, `007` and `NA` included; an empty field is missing.

    Raises:
        ConfigError: Files with different columns, a column named twice, a row of another width, a
            delimiter that cannot be found.
    """
    from datasets import Dataset

    dialects = [
        dialect_of(reading.key, path, kind, encoding, reading.options)
        for path, encoding in zip(reading.files, reading.encodings, strict=True)
    ]
    for path, dialect in zip(reading.files, dialects, strict=True):
        if dialect.note:
            reading.notes.append(f"{reading.key}={path}: {dialect.note}")
    names = repr(list(reading.options.column_names or ()))
    address = reading.address("csv-3", versions("pyarrow"), kind, repr(dialects), names)
    folder = cached("rows", address, lambda folder: _convert(reading, dialects, folder))
    reading.notes += read_json(folder / "notes.json")
    return Dataset.from_file(str(folder / "rows.arrow"))


def dialect_of(key: str, path: Path, kind: str, encoding: str, options: ReadOptions) -> Dialect:
    """Find how a file separates its columns, by its first lines.

    Raises:
        ConfigError: Two ways to separate them are equally good.
    """
    text = _first_lines(path, encoding)
    header = text.lstrip("\r\n").partition("\n")[0].rstrip("\r")
    excel = re.fullmatch(r"sep=(.)", header, re.IGNORECASE)
    usual = USUAL[kind]
    if options.delimiter is not None:
        mark = options.delimiter.replace("tab", "\t")
        quoted = usual.quoted or mark != usual.delimiter
        return Dialect(mark, quoted, skip=int(excel is not None))
    if excel is not None:
        note = f"columns separated by {excel[1]!r}, as its first line says"
        return Dialect(excel[1], True, 1, note)
    fitting = [mark for mark in DELIMITERS if _width(text, mark, usual) > 1]
    if usual.delimiter in fitting:
        other_marks = [mark for mark in fitting if mark != usual.delimiter]
        if not other_marks:
            return usual
        note = f"columns separated by {usual.delimiter!r}; every row has {other_marks[0]!r}, too"
        return replace(usual, note=f"{note} ({_argument(other_marks[0])} reads them so)")
    if not fitting:
        fitting = [mark for mark in DELIMITERS if mark in header]
    if not fitting or usual.delimiter in fitting:
        return usual  # a single column, or rows of different widths, which the reader names
    if len(fitting) > 1:
        ways = " or ".join(map(_argument, fitting))
        raise ConfigError(
            f"{key}={path}: its columns may be separated in several ways: {header[:80]!r}. Say"
            f" {ways}."
        )
    return Dialect(fitting[0], True, note=f"columns separated by {fitting[0]!r} (data.delimiter)")


def _first_lines(path: Path, encoding: str) -> str:
    text = ""
    with contextlib.suppress(Exception):  # whoever reads the file says what is wrong with it
        for chunk in recoded(chunks_of(path), encoding):
            text += chunk.decode(UTF8, "replace")
            if len(text) > _SNIFFED:
                break
    if len(text) <= _SNIFFED:
        return text
    return text[: text.rfind("\n", 0, _SNIFFED) + 1] or text


def _argument(delimiter: str) -> str:
    """Write the argument of a delimiter for a shell."""
    if delimiter == "\t":
        return "data.delimiter=tab"
    return shlex.quote(f'data.delimiter="{delimiter}"')


def _width(text: str, delimiter: str, usual: Dialect) -> int:
    """Count the columns of the first rows; 0 if the rows differ."""
    plain = not usual.quoted and delimiter == usual.delimiter
    rows = csv.reader(
        io.StringIO(text, newline=""),
        delimiter=delimiter,
        quoting=csv.QUOTE_NONE if plain else csv.QUOTE_MINIMAL,
    )
    try:
        widths = [len(row) for row in itertools.islice(rows, _SNIFFED_ROWS) if row]
    except csv.Error:
        return 0
    complete = widths[: max(1, len(widths) - 1)]  # the last one may be cut
    if len(set(complete)) != 1:
        return 0
    return widths[0]


def _convert(reading: Reading, dialects: list[Dialect], folder: Path) -> None:
    """Write the rows of all files as Arrow, and notes for the user."""
    import pyarrow as pa

    notes: list[str] = []
    names: list[str] = []
    with contextlib.ExitStack() as stack:
        sink = stack.enter_context(pa.OSFile(str(folder / "rows.arrow"), "wb"))
        plain = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder)))
        for path, text, dialect in zip(
            reading.files, reading.in_utf8(plain), dialects, strict=True
        ):
            table = _Table(f"{reading.key}={path}", text, dialect, reading.options.column_names)
            if not names:
                names = table.names
                schema = pa.schema([(name, pa.string()) for name in names])
                writer = stack.enter_context(pa.ipc.new_stream(sink, schema))
            elif table.names != names:
                raise ConfigError(
                    f"{reading.key}={path}: its columns are {', '.join(table.names)}; those of"
                    f" {reading.files[0]} are {', '.join(names)}. Give files with the same columns"
                    " in the same order."
                )
            for batch in table.batches():
                writer.write_batch(batch)
            notes += table.notes
    (folder / "notes.json").write_text(json.dumps(notes), encoding="utf-8")


class _Table:
    """One file, with its columns.

    Args:
        where: Key and path, for messages.
        text: The file as UTF-8.
        dialect: How its columns are separated.
        names: Names of the columns; None: the first row has them.
    """

    def __init__(self, where: str, text: Path, dialect: Dialect, names: object) -> None:
        self.notes: list[str] = []
        self._where = where
        self._text = text
        self._kind = "tsv" if dialect == USUAL["tsv"] else "csv"
        self._dialect = dialect
        self._named = names is not None
        if dialect.quoted and self._needs_escapes():
            self._dialect = replace(dialect, escaped=True)
            self.notes.append(rf"{where}: its quotes inside of quotes are written \", and read so")
        first = next(self._rows(), None)
        if first is None:
            raise ConfigError(f"{where}: cannot be read as {self._kind}: there is no header line.")
        self.names = list(names) if isinstance(names, list | tuple) else first
        if len(self.names) != len(first):
            raise ConfigError(
                f"data.column_names={self.names}: {where} has {len(first)} columns in its first"
                " row. Expected a name for each."
            )
        self._refuse_repeated_names()

    def _refuse_repeated_names(self) -> None:
        repeated = sorted({name for name in self.names if self.names.count(name) > 1})
        if not repeated:
            return
        hint = ""
        if not self._named and re.fullmatch(r"[-+]?[\d.]*", repeated[0]):
            hint = (
                ' If there is no line of names, "data.column_names=[NAME1,NAME2,...]" gives them.'
            )
        raise ConfigError(f"{self._where}: two columns are called {repeated[0]!r}.{hint}")

    def _needs_escapes(self) -> bool:
        r"""Tell whether quotes are written `\"`: the file has them, and is no csv without them."""
        if not self._has_escapes():
            return False
        try:
            for _ in self._rows():
                pass
        except ConfigError:
            return True
        return False

    def _has_escapes(self) -> bool:
        end = b""
        with self._name_file_in_errors(0), open_bytes(self._text) as stream:
            while chunk := stream.read(_CHUNK):
                if b'\\"' in end + chunk:
                    return True
                end = chunk[-1:]
        return False

    @contextlib.contextmanager
    def _name_file_in_errors(self, row: int) -> Iterator[None]:
        """Raise a ConfigError with the file in place of an error of its reader."""
        cannot = f"{self._where}: cannot be read as {self._kind}"
        try:
            yield
        except csv.Error as error:
            raise ConfigError(f"{cannot}: row {row:,}: {_reason(str(error))}.") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"{self._where}: its bytes are no UTF-8.") from error
        except (OSError, EOFError, lzma.LZMAError) as error:
            if getattr(error, "errno", None) is not None:  # the disk's own word
                raise
            raise ConfigError(f"{cannot}: {error}") from error

    def _rows(self) -> Iterator[list[str]]:
        """Yield all rows except blank ones, the line of names included."""
        dialect = self._dialect
        number = int(self._named)
        limit = csv.field_size_limit(_FIELD)
        try:
            with (
                self._name_file_in_errors(number),
                open_bytes(self._text) as stream,
                io.TextIOWrapper(stream, encoding="utf-8-sig", newline="") as lines,
            ):
                reader = csv.reader(
                    itertools.islice(lines, dialect.skip, None),
                    delimiter=dialect.delimiter,
                    quoting=csv.QUOTE_MINIMAL if dialect.quoted else csv.QUOTE_NONE,
                    escapechar="\\" if dialect.escaped else None,
                    strict=True,
                )
                while True:
                    with self._name_file_in_errors(number):
                        cells = next(reader, None)
                    if cells is None:
                        return
                    if cells:
                        yield cells
                        number += 1
        finally:
            csv.field_size_limit(limit)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows as columns of texts, without repeated lines of names."""
        import pyarrow as pa

        rows = self._rows()
        if not self._named:
            next(rows)
        number = 0
        repeated = 0
        while batch := list(itertools.islice(rows, _BATCH)):
            rows_of_batch = []
            for cells in batch:
                number += 1
                if len(cells) != len(self.names):
                    raise ConfigError(
                        f"{self._where}: cannot be read as {self._kind}:"
                        f" {self._width(number, cells)}"
                    )
                if self._repeats_names(number, cells):
                    repeated += 1
                else:
                    rows_of_batch.append([cell or None for cell in cells])
            columns = (
                zip(*rows_of_batch, strict=True) if rows_of_batch else ([] for _ in self.names)
            )
            yield pa.record_batch(
                [pa.array(cells, pa.string()) for cells in columns], names=self.names
            )
        if repeated:
            self.notes.append(
                f"{self._where}: rows that repeat the line of names are left out: {repeated:,}"
            )

    def _repeats_names(self, number: int, cells: list[str]) -> bool:
        """Tell whether a row repeats the line of names, as in joined files.

        Raises:
            ConfigError: It may as well be a row, of a file without a line of names.
        """
        if self._named or len(cells) == 1 or cells != self.names:
            return False
        if usual_columns((*USUAL_TEXTS, *USUAL_LABELS, "id"), self.names):
            return True
        names = ", ".join(f"NAME{at}" for at in range(1, 1 + len(cells)))
        raise ConfigError(
            f"{self._where}: row {number:,} repeats the first line, which has the names of the"
            f" columns: {', '.join(map(repr, cells))}. Take the repeated line out, or, if a row"
            f' stands in place of a line of names, say "data.column_names=[{names}]".'
        )

    def _width(self, number: int, cells: list[str]) -> str:
        """Explain a row of the wrong width."""
        expected = len(self.names)
        message = f"row {number:,}: Expected {expected} columns, got {len(cells)}"
        comment = self.names[0].strip()
        if comment.startswith("#") and not self._named:
            return (
                f"it begins with {comment[:40]!r}, where the names of the columns belong. Take"
                " comments out of the file."
            )
        if not self._dialect.quoted:
            return f"{message}: {self._dialect.delimiter.join(cells)[:80]!r}."
        mark = repr(self._dialect.delimiter)
        if self._dialect.delimiter == ",":
            mark = "a comma"
        first = ""
        if number == 1:
            first = "; or the first line does not name the columns"
        row_text = self._dialect.delimiter.join(cells)[:80]
        return f"{message}: {row_text!r} (a field with {mark} needs quotes around it{first})."


def _reason(message: str) -> str:
    """Explain an error of the csv module about quotes."""
    if message == "unexpected end of data":
        return "a quotation mark is opened and not closed; inside of quotes it is written twice"
    if "expected after" in message:
        return "text follows a closing quotation mark; inside of quotes it is written twice"
    return message
