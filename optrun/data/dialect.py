"""How a csv or tsv file separates its columns, found by its first rows."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

from optrun.base import shell
from optrun.base.errors import ConfigError

_USUAL_DELIMITERS = {"csv": ",", "tsv": "\t"}
_DELIMITERS = (",", ";", "\t", "|")
_SAMPLE_ROWS = 50
"""Rows at most by which a delimiter is found."""


@dataclass(frozen=True)
class Dialect:
    r"""How a file separates its columns.

    Attributes:
        delimiter: One character.
        quoted: Whether fields may be quoted; if not, quotation marks are characters like others.
        skipped_lines: Lines before the header, such as Excel's `sep=;`.
        escaped: Whether a quotation mark inside of quotes is written `\"` (Spark, MySQL), not `""`.
    """

    delimiter: str
    quoted: bool
    skipped_lines: int = 0
    escaped: bool = False

    def read(self, lines: Iterable[str], *, strict: bool) -> Any:
        """Return a reader of the csv module; strict: it refuses quotation marks out of place."""
        return csv.reader(
            islice(lines, self.skipped_lines, None),
            delimiter=self.delimiter,
            quoting=csv.QUOTE_MINIMAL if self.quoted else csv.QUOTE_NONE,
            escapechar="\\" if self.escaped else None,
            strict=strict,
        )


def find_dialect(
    where: str, sample: str, kind: str, delimiter: str | None
) -> tuple[Dialect, str | None]:
    r"""Find how a file separates its columns.

    Args:
        where: Key and path, for messages.
        sample: The first lines; the last one may be cut.
        kind: `csv` or `tsv`.
        delimiter: `data.delimiter`, one character or `tab`; None: Excel's first line `sep=;` names
            it, else the first rows decide.

    Returns:
        The dialect, and a note for the user; None if the user named it, or if it is the usual one.

    Raises:
        ConfigError: Several delimiters fit the first rows, and the usual one does not.

    Example:
        >>> find_dialect("a.csv", "text;label\na, b;0\n", "csv", None)[1]
        "columns separated by ';' (data.delimiter)"
    """
    first_line = sample.lstrip("\r\n").partition("\n")[0].rstrip("\r")
    excel = re.fullmatch(r"sep=(.)", first_line, re.IGNORECASE)  # None: no such line
    note = None
    if delimiter is None and excel is not None:
        delimiter = excel[1]
        note = f"columns separated by {delimiter!r}, as its first line says"
    if delimiter is None:
        delimiter, note = _guess_delimiter(where, sample, first_line, kind)
    delimiter = delimiter.replace("tab", "\t")
    skipped_lines = 0 if excel is None else 1
    return Dialect(delimiter, _is_quoted(kind, delimiter), skipped_lines), note


def _guess_delimiter(where: str, sample: str, header: str, kind: str) -> tuple[str, str | None]:
    r"""Guess a delimiter by the first rows.

    One fits if it splits each of the first 50 rows into the same number of columns, at least two.
    If none does, those that are in the header fit. The usual one of the kind is a comma for csv, a
    tab for tsv. In this order:

    1. The usual one and others split the rows: the usual one, with a note on another one.
    2. The usual one fits in another way (alone, or by the header), or none fits: the usual one,
       without a note.
    3. Only others fit: the one that does, with a note; several are an error.

    Returns:
        The delimiter, and a note for the user; None in case 2.

    Raises:
        ConfigError: Several fit, and the usual one does not.

    Example:
        >>> _guess_delimiter("a.csv", "a;b\n1,5;2\n3;4\n", "a;b", "csv")
        (';', "columns separated by ';' (data.delimiter)")
        >>> _guess_delimiter("a.csv", "a,b\n1,2\n3,4\n", "a,b", "csv")
        (',', None)
    """
    usual = _USUAL_DELIMITERS[kind]
    fitting = []
    for delimiter in _DELIMITERS:
        dialect = Dialect(delimiter, _is_quoted(kind, delimiter))
        if _count_columns(sample, dialect) > 1:  # 0 if the rows differ in it
            fitting.append(delimiter)
    # 1. The usual one fits, among others.
    if usual in fitting and len(fitting) > 1:
        alternative = next(delimiter for delimiter in fitting if delimiter != usual)
        return usual, (
            f"columns separated by {usual!r}; every row has {alternative!r}, too"
            f" ({_option(alternative)} separates columns there)"
        )
    # 2. It alone fits; or none does, and the header has the usual one, or none. The file then has a
    #    single column, or rows of different widths, which `_Table.rows` refuses.
    fitting = fitting or [delimiter for delimiter in _DELIMITERS if delimiter in header]
    if not fitting or usual in fitting:
        return usual, None
    # 3. Only others fit.
    if len(fitting) > 1:
        raise ConfigError(
            f"{where}: its columns may be separated in several ways: {header[:80]!r}. Say"
            f" {' or '.join(map(_option, fitting))}."
        )
    return fitting[0], f"columns separated by {fitting[0]!r} (data.delimiter)"


def _is_quoted(kind: str, delimiter: str) -> bool:
    """Tell whether fields may be quoted: in all files but those called tsv with tabs in them."""
    return kind == "csv" or delimiter != "\t"


def _option(delimiter: str) -> str:
    """Write `data.delimiter=...` for a shell."""
    if delimiter == "\t":
        return "data.delimiter=tab"
    return shell.quote(f'data.delimiter="{delimiter}"')


def _count_columns(sample: str, dialect: Dialect) -> int:
    """Count the columns of the first 50 rows; 0 if the rows differ.

    The last row is ignored, unless it is the only one, since it may be cut.
    """
    try:
        rows = dialect.read(io.StringIO(sample, newline=""), strict=False)
        widths = [len(row) for row in islice(rows, _SAMPLE_ROWS) if row]
    except csv.Error:
        return 0
    complete = widths[:-1] or widths
    if len(set(complete)) == 1:
        return complete[0]
    return 0
