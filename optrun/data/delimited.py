"""Read csv and tsv as they stand: each field is a text, a wrong width is an error.

Python's csv module reads them, since it is the one that refuses a quotation mark out of place:
pyarrow takes the rest of a file for one field, and pandas fills up a row that is too short.
"""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import json
import lzma
import re
import tempfile
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from optrun.base import shell
from optrun.base.errors import ConfigError
from optrun.base.reading import read_json
from optrun.data.cache import cached, versions
from optrun.data.columns import USUAL_LABELS, usual_columns
from optrun.data.content import chunks_of, open_bytes
from optrun.data.encoding import UTF8, recode_to_utf8
from optrun.data.reading import Reading
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
_BATCH = 10_000
"""Rows that are in memory at once."""
_UNPACKED_BADLY = (OSError, EOFError, lzma.LZMAError)
_REASONS = {
    "unexpected end of data": "a quotation mark is opened and not closed; inside of quotes it is"
    " written twice",
    "expected after": "text follows a closing quotation mark; inside of quotes it is written twice",
}
"""Part of a message of the csv module to its meaning."""


@dataclass(frozen=True)
class Dialect:
    r"""How a file separates its columns.

    Attributes:
        delimiter: One character.
        quoted: Whether fields may be quoted; else a field is what stands between delimiters.
        skip: Lines before the header, such as Excel's `sep=;`.
        escaped: Whether a quote inside of quotes is written `\"` (Spark, MySQL), not `""`.
    """

    delimiter: str
    quoted: bool
    skip: int = 0
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

    dialects = []
    for path, encoding in zip(reading.files, reading.encodings, strict=True):
        where = f"{reading.key}={path}"
        text = _first_lines(path, encoding)
        dialect, note = dialect_of(where, text, kind, reading.options.delimiter)
        dialects.append(dialect)
        if note:
            reading.notes.append(f"{where}: {note}")
    names = repr(list(reading.options.column_names or ()))
    address = reading.address("csv-3", versions("pyarrow"), kind, repr(dialects), names)
    folder = cached("rows", address, lambda folder: _convert(reading, dialects, folder))
    reading.notes += read_json(folder / "notes.json")
    return Dataset.from_file(str(folder / "rows.arrow"))


def _first_lines(path: Path, encoding: str) -> str:
    text = ""
    with contextlib.suppress(Exception):  # whoever reads the file says what is wrong with it
        for chunk in recode_to_utf8(chunks_of(path), encoding):
            text += chunk.decode(UTF8, "replace")
            if len(text) > _SNIFFED:
                return text[: text.rfind("\n", 0, _SNIFFED) + 1] or text
    return text


def dialect_of(where: str, text: str, kind: str, delimiter: str | None) -> tuple[Dialect, str]:
    """Find how a file separates its columns, by its first lines.

    Args:
        where: Key and path, for messages.
        text: The first lines.
        kind: `csv` or `tsv`.
        delimiter: What the user said.

    Returns:
        The dialect, and a sentence for the user; empty if the dialect is what the ending says.

    Raises:
        ConfigError: Two ways to separate them are equally good.
    """
    header = text.lstrip("\r\n").partition("\n")[0].rstrip("\r")
    excel = re.fullmatch(r"sep=(.)", header, re.IGNORECASE)
    usual = USUAL[kind]
    note = ""
    if delimiter is None and excel is not None:
        delimiter = excel[1]
        note = f"columns separated by {delimiter!r}, as its first line says"
    if delimiter is not None:
        mark = delimiter.replace("tab", "\t")
        quoted = usual.quoted or mark != usual.delimiter
        return Dialect(mark, quoted, skip=int(excel is not None)), note
    fitting = [mark for mark in DELIMITERS if _width(text, mark, usual) > 1]
    if usual.delimiter in fitting:
        fitting.remove(usual.delimiter)
        if fitting:
            note = (
                f"columns separated by {usual.delimiter!r}; every row has {fitting[0]!r}, too"
                f" ({_argument(fitting[0])} reads them so)"
            )
        return usual, note
    if not fitting:
        fitting = [mark for mark in DELIMITERS if mark in header]
    if not fitting or usual.delimiter in fitting:
        return usual, ""  # a single column, or rows of different widths, which the reader names
    if len(fitting) > 1:
        raise ConfigError(
            f"{where}: its columns may be separated in several ways: {header[:80]!r}. Say"
            f" {' or '.join(map(_argument, fitting))}."
        )
    return Dialect(fitting[0], True), f"columns separated by {fitting[0]!r} (data.delimiter)"


def _argument(delimiter: str) -> str:
    """Write the argument of a delimiter for a shell."""
    if delimiter == "\t":
        return "data.delimiter=tab"
    return shell.quote(f'data.delimiter="{delimiter}"')


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
    if len(set(complete)) == 1:
        return widths[0]
    return 0


def _convert(reading: Reading, dialects: list[Dialect], folder: Path) -> None:
    """Write the rows of all files as Arrow, and notes for the user."""
    import pyarrow as pa

    notes: list[str] = []
    names: list[str] = []
    with contextlib.ExitStack() as stack:
        sink = stack.enter_context(pa.OSFile(str(folder / "rows.arrow"), "wb"))
        plain = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder)))
        for path, text, dialect in zip(
            reading.files, reading.utf8_files(plain), dialects, strict=True
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

    def __init__(
        self, where: str, text: Path, dialect: Dialect, names: Sequence[str] | None
    ) -> None:
        self.notes: list[str] = []
        self._where = where
        self._cannot = f"{where}: cannot be read as {'csv' if dialect.quoted else 'tsv'}"
        self._text = text
        self._dialect = dialect
        self._has_header = names is None
        if dialect.quoted and self._needs_escapes():
            self._dialect = replace(dialect, escaped=True)
            self.notes.append(rf"{where}: its quotes inside of quotes are written \", and read so")
        first = next(self._rows(), None)
        if first is None:
            raise ConfigError(f"{self._cannot}: there is no header line.")
        self.names = first if names is None else list(names)
        if len(self.names) != len(first):
            raise ConfigError(
                f"data.column_names={self.names}: {where} has {len(first)} columns in its first"
                " row. Expected a name for each."
            )
        repeated = [name for name in self.names if self.names.count(name) > 1]
        if repeated:
            raise ConfigError(
                f"{where}: two columns are called {repeated[0]!r}. If there is no line of names,"
                ' "data.column_names=[NAME1,NAME2,...]" gives them.'
            )

    def _needs_escapes(self) -> bool:
        r"""Tell whether quotes are written `\"`: the file has them, and is no csv without them."""
        try:
            if any(b'\\"' in chunk for chunk in chunks_of(self._text)):
                deque(self._rows(), maxlen=0)
        except ConfigError:
            return True
        except _UNPACKED_BADLY:
            pass  # whoever reads the first row says it
        return False

    def _rows(self) -> Iterator[list[str]]:
        """Yield all rows except blank ones, the line of names included.

        Raises:
            ConfigError: A quotation mark out of place, or a file that cannot be unpacked.
        """
        dialect = self._dialect
        number = 0 if self._has_header else 1
        limit = csv.field_size_limit(_FIELD)
        try:
            with (
                open_bytes(self._text) as stream,
                io.TextIOWrapper(stream, encoding="utf-8-sig", newline="") as lines,
            ):
                for cells in csv.reader(
                    itertools.islice(lines, dialect.skip, None),
                    delimiter=dialect.delimiter,
                    quoting=csv.QUOTE_MINIMAL if dialect.quoted else csv.QUOTE_NONE,
                    escapechar="\\" if dialect.escaped else None,
                    strict=True,
                ):
                    if cells:
                        yield cells
                        number += 1
        except csv.Error as error:
            message = str(error)
            reasons = [reason for part, reason in _REASONS.items() if part in message]
            raise ConfigError(
                f"{self._cannot}: row {number:,}: {''.join(reasons) or message}."
            ) from error
        except _UNPACKED_BADLY as error:
            if getattr(error, "errno", None) is not None:  # the disk's own word
                raise
            raise ConfigError(f"{self._cannot}: {error}") from error
        finally:
            csv.field_size_limit(limit)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows as columns of texts; a header that repeats inside the file is left out."""
        import pyarrow as pa

        rows = enumerate(self._rows(), 0 if self._has_header else 1)
        if self._has_header:
            next(rows)
        repeated = 0
        while batch := list(itertools.islice(rows, _BATCH)):
            columns: list[list[str | None]] = [[] for _ in self.names]
            for number, cells in batch:
                if len(cells) != len(self.names):
                    raise self._wrong_width(number, cells)
                if self._repeats_names(number, cells):
                    repeated += 1
                    continue
                for column, cell in zip(columns, cells, strict=True):
                    column.append(cell or None)
            arrays = [pa.array(column, pa.string()) for column in columns]
            yield pa.record_batch(arrays, names=self.names)
        if repeated:
            self.notes.append(
                f"{self._where}: rows that repeat the line of names are left out: {repeated:,}"
            )

    def _repeats_names(self, number: int, cells: list[str]) -> bool:
        """Tell whether a row repeats the line of names, as in joined files.

        Raises:
            ConfigError: It may as well be a row, of a file without a line of names.
        """
        if not self._has_header or len(cells) == 1 or cells != self.names:
            return False
        if usual_columns((*USUAL_TEXTS, *USUAL_LABELS, "id"), self.names):
            return True
        names = ", ".join(f"NAME{at}" for at in range(1, 1 + len(cells)))
        raise ConfigError(
            f"{self._where}: row {number:,} repeats the first line, which has the names of the"
            f" columns: {', '.join(map(repr, cells))}. Take the repeated line out, or, if a row"
            f' stands in place of a line of names, say "data.column_names=[{names}]".'
        )

    def _wrong_width(self, number: int, cells: list[str]) -> ConfigError:
        """Build the error for a row of the wrong width."""
        comment = self.names[0].strip()
        if comment.startswith("#") and self._has_header:
            return ConfigError(
                f"{self._where}: it begins with {comment[:40]!r}, where the names of the columns"
                " belong. Take comments out of the file."
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
