"""The first sheet of Excel workbooks, each cell as the text that csv would hold."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from optrun.base.errors import ConfigError, UnreadableFileError
from optrun.base.reading import open_file
from optrun.data.content import begin_of, refuse_bomb
from optrun.data.encoding import UTF8
from optrun.data.reader import understood
from optrun.data.reading import Reading

if TYPE_CHECKING:
    from datasets import Dataset


def check_workbook(path: Path, kind: str, encoding: str | None) -> tuple[str, str]:  # noqa: ARG001
    """Refuse a file that begins as no workbook does.

    Raises:
        UnreadableFileError: With what is there instead.
    """
    with open_file(path, follow=True) as file:
        raw = file.read(64)
    if not raw.startswith(b"PK\x03\x04"):
        raise UnreadableFileError(
            f"cannot be read as xlsx: it begins with {begin_of(raw)}, and is no workbook."
        )
    return UTF8, ""


def read_spreadsheet(asked: Reading) -> Dataset:
    """Read the first sheet of each workbook.

    Its first row has the names, unless `data.column_names` has.

    Returns:
        Every column as text; an empty cell is missing.

    Raises:
        ConfigError: openpyxl is missing; no workbook; no names; a formula without a value; other
            columns than before.
    """
    from datasets import Dataset, Features, Value

    names: list[str] = []
    rows: list[list[str | None]] = []
    for path in asked.files:
        table = _sheet(asked, path)
        said = asked.options.column_names
        here = list(said or ()) or [name or "" for name in next(table, [])]
        while here and not here[-1]:
            here.pop()
        twice = [name for name in here if here.count(name) > 1]
        if not here or "" in here or twice:
            raise ConfigError(
                f"{asked.key}={path}: expected the names of the columns in the first row, each"
                f" once; found {here}. data.column_names=[NAME, ...] says them where no row does."
            )
        if names and here != names:
            raise ConfigError(
                f"{asked.key}={path}: its columns are {', '.join(here)}; before,"
                f" {', '.join(names)}."
            )
        names = here
        for number, row in enumerate(table, 1):
            if any(cell is not None for cell in row[len(names) :]):
                raise ConfigError(
                    f"{asked.key}={path}: {_too_wide(names, number, named=said is None)}"
                )
            rows.append([*row, *[None] * len(names)][: len(names)])
    columns = {name: [row[at] for row in rows] for at, name in enumerate(names)}
    return Dataset.from_dict(columns, features=Features({name: Value("string") for name in names}))


def _too_wide(names: list[str], number: int, *, named: bool) -> str:
    """Explain a row with more cells than there are names: a first row of one cell is a title."""
    if named and len(names) == 1:
        told = f"row {number:,} has more cells than the first one, which is {names[0]!r} alone"
        return f"{told}. If that is a title, delete it: the first row has the names of the columns."
    return f"row {number:,} has more cells than the {len(names)} columns."


def _sheet(asked: Reading, path: Path) -> Iterator[list[str | None]]:
    """Yield the rows of the first sheet that are not empty."""
    try:
        import openpyxl
    except ImportError as error:
        raise ConfigError(
            f"{asked.key}={path}: Excel files need the package openpyxl, which is not installed."
            " pip install 'optrun[excel]', or save it as CSV (UTF-8)."
        ) from error
    refuse_bomb(f"{asked.key}={path}", path)
    sheets: list[list[tuple[object, ...]]] = []
    with understood(f"{asked.key}={path}: cannot be read as xlsx"):
        for values in (True, False):
            with contextlib.closing(
                openpyxl.load_workbook(path, read_only=True, data_only=values)
            ) as book:
                sheets.append(list(book.worksheets[0].iter_rows(values_only=True)))
                titles = [sheet.title for sheet in book.worksheets]
    if len(titles) > 1:
        rest = ", ".join(map(repr, titles[1:]))
        asked.notes.append(
            f"{asked.key}={path}: its first sheet, {titles[0]!r}, is read; {rest} are not"
        )
    for number, (row, written) in enumerate(zip(*sheets, strict=True), 1):
        for cell, source in zip(row, written, strict=True):
            if cell is None and source is not None:
                raise ConfigError(
                    f"{asked.key}={path}: row {number:,} of the sheet has a formula without a value"
                    f" ({source}). Open it in a spreadsheet program and save it, or write the"
                    " values."
                )
        if any(cell is not None for cell in row):
            yield [_as_text(cell) for cell in row]


def _as_text(cell: object) -> str | None:
    """Write a cell as csv would hold it; a whole number without a point, a date as ISO 8601."""
    if isinstance(cell, float) and cell.is_integer():
        return str(int(cell))
    if isinstance(cell, datetime.datetime | datetime.date | datetime.time):
        return cell.isoformat()
    return None if cell is None else str(cell)
