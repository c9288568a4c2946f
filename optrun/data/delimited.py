"""csv and tsv as they stand.

Every field is a text, a line of the wrong width is an error, what is found is told.
"""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import lzma
import re
import shlex
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from optrun.base.errors import ConfigError
from optrun.data.cache import cached, versions
from optrun.data.content import chunks_of, open_bytes
from optrun.data.encoding import recoded
from optrun.data.reading import Reading, ReadOptions

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset

_BLOCK = 32 << 20
"""Bytes read at once; a single row may not be longer."""
_SNIFFED, _ROWS = 1 << 16, 50
"""Characters and rows by which the delimiter is told."""
DELIMITERS = (",", ";", "\t", "|")


@dataclass(frozen=True)
class Dialect:
    """How a file separates its columns.

    Attributes:
        delimiter: One character.
        quoted: Whether fields may be quoted (quotes inside doubled, line breaks inside quotes);
            else a field is what stands between delimiters.
        skip: Lines before the header, such as Excel's `sep=;`.
        note: What was found, for a person; empty where it is what the ending says.
    """

    delimiter: str
    quoted: bool
    skip: int = 0
    note: str = ""


def read_delimited(asked: Reading, kind: str) -> Dataset:
    """Read rows of csv or tsv files, mapped from the cache.

    Args:
        asked: The files.
        kind: `csv`, whose columns are separated by commas, or `tsv`, by tabs, if nothing else is
            said or found.

    Returns:
        Every column as text, `007` and `NA` included; an empty unquoted field is missing.

    Raises:
        ConfigError: Files with different columns, a column named twice, a row of another width, a
            delimiter that cannot be told.
    """
    from datasets import Dataset

    dialects = [
        dialect_of(asked.key, path, kind, encoding, asked.options)
        for path, encoding in zip(asked.files, asked.encodings, strict=True)
    ]
    told = {
        dialect.note: path
        for path, dialect in zip(asked.files, dialects, strict=True)
        if dialect.note
    }
    asked.notes += [f"{asked.key}={path}: {note}" for note, path in told.items()]
    names = list(asked.options.column_names or ())
    usual = all(dialect == USUAL[kind] for dialect in dialects) and not names
    own = () if usual else (repr(dialects), repr(names))
    name = asked.address("csv-2", versions("pyarrow"), kind, *own)
    folder = cached("rows", name, lambda folder: _convert(asked, dialects, folder))
    return Dataset.from_file(str(folder / "rows.arrow"))


USUAL = {"csv": Dialect(",", True), "tsv": Dialect("\t", False)}
"""The dialect that an ending promises."""


def dialect_of(key: str, path: Path, kind: str, encoding: str, options: ReadOptions) -> Dialect:
    """Find how a file separates its columns, by its first lines.

    Raises:
        ConfigError: Two ways to separate them are equally good.
    """
    text = ""
    with contextlib.suppress(Exception):  # whoever reads the file says what is wrong with it
        for chunk in recoded(chunks_of(path), encoding):
            text += chunk.decode("utf-8", "replace")
            if len(text) > _SNIFFED:
                text = text[: text.rfind("\n", 0, _SNIFFED) + 1] or text
                break
    header = text.lstrip("\r\n").partition("\n")[0].rstrip("\r")
    said = re.fullmatch(r"sep=(.)", header, re.IGNORECASE)
    usual = USUAL[kind]
    if options.delimiter is not None:
        mark = "\t" if options.delimiter == "tab" else options.delimiter
        return Dialect(mark, usual.quoted or mark != usual.delimiter, skip=int(said is not None))
    if said is not None:
        return Dialect(
            said[1], True, 1, f"columns separated by {said[1]!r}, as its first line says"
        )
    fits = {mark: width for mark in DELIMITERS if (width := _width(text, mark, usual)) > 1}
    if usual.delimiter in fits or (usual.delimiter in header and not fits):
        others = [mark for mark in fits if mark != usual.delimiter]
        doubt = (
            f"columns separated by {usual.delimiter!r}; every row has {others[0]!r}, too"
            if others
            else ""
        )
        return replace(usual, note=f"{doubt} ({_said(others[0])} reads them so)" if others else "")
    found = list(fits) or [mark for mark in DELIMITERS if mark in header]
    if not found:
        return usual  # a single column
    if len(found) > 1:
        ways = " or ".join(map(_said, found))
        raise ConfigError(
            f"{key}={path}: its columns may be separated in several ways: {header[:80]!r}. Say"
            f" {ways}."
        )
    return Dialect(found[0], True, note=f"columns separated by {found[0]!r} (data.delimiter)")


def _said(delimiter: str) -> str:
    """Write the argument that says a delimiter, as a shell takes it."""
    return (
        "data.delimiter=tab" if delimiter == "\t" else shlex.quote(f'data.delimiter="{delimiter}"')
    )


def _width(text: str, delimiter: str, usual: Dialect) -> int:
    """Count the columns that every one of the first rows has; 0: they differ."""
    plain = not usual.quoted and delimiter == usual.delimiter
    source = io.StringIO(text, newline="")
    try:
        rows = csv.reader(
            source, delimiter=delimiter, quoting=csv.QUOTE_NONE if plain else csv.QUOTE_MINIMAL
        )
        widths = [len(row) for row in itertools.islice(rows, _ROWS) if row]
    except csv.Error:
        return 0
    whole = widths[: max(1, len(widths) - 1)]  # the last one may be cut
    return widths[0] if len(set(whole)) == 1 else 0


def _convert(asked: Reading, dialects: list[Dialect], folder: Path) -> None:
    import pyarrow as pa

    names: list[str] = []
    with pa.OSFile(str(folder / "rows.arrow"), "wb") as sink, contextlib.ExitStack() as stack:
        plain = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder)))
        for path, text, dialect in zip(asked.files, asked.in_utf8(plain), dialects, strict=True):
            with _understood(asked.key, path, text, dialect):
                here = _header(asked, path, text, dialect)
                if not names:
                    names = here
                    writer = stack.enter_context(
                        pa.ipc.new_stream(sink, pa.schema([(name, pa.string()) for name in names]))
                    )
                elif here != names:
                    raise ConfigError(
                        f"{asked.key}={path}: its columns are {', '.join(here)}; those of"
                        f" {asked.files[0]} are {', '.join(names)}. Give files with the same"
                        " columns in the same order."
                    )
                for batch in _batches(
                    text, dialect, names, named=asked.options.column_names is not None
                ):
                    writer.write_batch(batch)


@contextlib.contextmanager
def _understood(key: str, path: Path, text: Path, dialect: Dialect) -> Iterator[None]:
    """Turn what the reader says of a file's text into words that name the file."""
    import pyarrow as pa

    try:
        yield
    except (
        pa.ArrowException,
        OSError,
        EOFError,
        UnicodeDecodeError,
        lzma.LZMAError,
        zipfile.BadZipFile,
    ) as error:
        if getattr(error, "errno", None) is not None:  # the disk's own word, not the reader's
            raise
        kind = "tsv" if dialect == USUAL["tsv"] else "csv"
        why = _reason(str(error), dialect)
        if "columns, got" in why:
            with open_bytes(text) as stream:
                first = stream.read(80).split(b"\n")[0].decode(errors="replace").strip()
            if first.startswith("#"):
                why = (
                    f"it begins with {first!r}, where the names of the columns belong. Take"
                    " comments out of the file."
                )
        raise ConfigError(f"{key}={path}: cannot be read as {kind}: {why}") from error


def _options(dialect: Dialect, **reading: object) -> dict[str, object]:
    import pyarrow.csv as reader

    quotes = {"quote_char": '"', "double_quote": True, "newlines_in_values": True}
    parse = reader.ParseOptions(
        delimiter=dialect.delimiter, **(quotes if dialect.quoted else {"quote_char": False})
    )
    return {
        "read_options": reader.ReadOptions(
            block_size=_BLOCK, use_threads=False, skip_rows=dialect.skip, **reading
        ),
        "parse_options": parse,
    }


def _header(asked: Reading, path: Path, text: Path, dialect: Dialect) -> list[str]:
    """Read the names of the columns, or number them if they were said."""
    import pyarrow.csv as reader

    said = asked.options.column_names
    reading = {} if said is None else {"autogenerate_column_names": True}
    with (
        open_bytes(text) as stream,
        reader.open_csv(stream, **_options(dialect, **reading)) as rows,
    ):
        there: list[str] = rows.schema.names
    if said is not None and len(said) != len(there):
        raise ConfigError(
            f"data.column_names={list(said)}: {asked.key}={path} has {len(there)} columns in its"
            " first row. Expected a name for each."
        )
    names = there if said is None else list(said)
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        no_name = said is None and re.fullmatch(r"[-+]?[\d.]*", twice[0])
        hint = (
            ' If there is no line of names, "data.column_names=[NAME1,NAME2,...]" gives them.'
            if no_name
            else ""
        )
        raise ConfigError(f"{asked.key}={path}: two columns are called {twice[0]!r}.{hint}")
    return names


def _batches(
    path: Path, dialect: Dialect, names: list[str], *, named: bool
) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa
    import pyarrow.csv as reader

    convert = reader.ConvertOptions(
        column_types={name: pa.string() for name in names},
        null_values=[""],
        strings_can_be_null=True,
        quoted_strings_can_be_null=False,
        check_utf8=True,
    )
    options = _options(dialect, **({"column_names": names} if named else {}))
    with (
        open_bytes(path) as stream,
        reader.open_csv(stream, convert_options=convert, **options) as rows,
    ):
        yield from rows


def _reason(message: str, dialect: Dialect) -> str:
    # pyarrow counts the line of names as a row.
    line = re.sub(
        r"\bRow #(\d+)", lambda found: f"row {int(found[1]) - 1:,}", " ".join(message.split())
    )
    line = line if len(line) <= 300 else line[:300] + " ..."
    if "invalid UTF8" in line or "codec can't decode" in line:
        return "its bytes are no UTF-8."
    if "columns, got" in line and dialect.quoted and line.count('"') % 2:
        return (
            f"{line} (a quotation mark is opened and not closed; inside of quotes it is written"
            " twice)"
        )
    if "columns, got" in line and dialect.quoted:
        mark = "a comma" if dialect.delimiter == "," else repr(dialect.delimiter)
        first = "; or the first line does not name the columns" if "row 1: " in line else ""
        return f"{line} (a field with {mark} needs quotes around it{first})"
    if "Empty CSV" in line:
        return "there is no header line."
    return line
