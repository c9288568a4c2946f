"""Hold a table as text, and render it for the terminal and as Markdown."""

from __future__ import annotations

import csv
import html
import io
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from optrun.base.formatting import csv_cell, plain

CSV_MARK = "optrun_report"
"""Name of the last CSV column. A file without it is not overwritten by a report."""
_ALWAYS = 5
"""Columns that every terminal shows: of contenders the rank, name, choice, mean and verdict."""
NONE = "–"
"""The cell of an unknown value."""


@dataclass
class Table:
    """Cells of text in rows, with the layout of columns and rows."""

    columns: list[str]
    numeric: list[bool]
    """Which columns are set flush right."""
    rows: list[list[str]] = field(default_factory=list)
    styles: list[str] = field(default_factory=list)
    """One word per row: "best", "better", "worse", "muted" or nothing."""


def to_rich(table: Table, *, title: str | None = None, width: int | None = None) -> RichTable:
    """Render a table for the terminal; names are text, never markup.

    Args:
        table: The table to show.
        title: Text above the table.
        width: Width of the terminal in characters. Trailing columns are left out until every cell
            fits on one line, but not the first `_ALWAYS`, whose texts may wrap. None: all columns
            are shown.
    """
    n_columns = len(table.columns)
    # A console wider than any table, to measure the width that a table would like.
    wide_console = Console(width=10_000)
    grid = _build_grid(table, title)
    while width and n_columns > _ALWAYS and wide_console.measure(grid).maximum > width:
        n_columns -= 1
        first_columns = Table(
            table.columns[:n_columns],
            table.numeric[:n_columns],
            [row[:n_columns] for row in table.rows],
            table.styles,
        )
        grid = _build_grid(first_columns, title)
    return grid


def _build_grid(table: Table, title: str | None) -> RichTable:
    """Build a rich table; text may wrap between words, but numbers stay on one line.

    A word of more than 30 characters may be broken.
    """
    grid = RichTable(
        title=title,
        box=box.SIMPLE_HEAD,
        show_header=any(table.columns),
        title_justify="left",
        pad_edge=False,
    )
    for index, (column, numeric) in enumerate(zip(table.columns, table.numeric, strict=True)):
        cells = [row[index] for row in table.rows]
        unbreakable = column.split()
        unbreakable += cells if numeric else " ".join(cells).split()
        grid.add_column(
            Text(column),
            justify="right" if numeric else "left",
            overflow="fold",
            min_width=min(30, max(map(len, unbreakable), default=0)),
        )
    colours = {"best": "bold", "better": "green", "worse": "red", "muted": "dim"}
    for row, style in zip(table.rows, table.styles, strict=True):
        grid.add_row(*map(Text, row), style=colours.get(style, ""))
    return grid


def to_markdown(table: Table) -> str:
    """Render a GitHub table; nothing in a name can end its cell or become markup."""
    rules = ["---:" if numeric else "---" for numeric in table.numeric]
    lines = [_markdown_row(table.columns), f"| {' | '.join(rules)} |"]
    return "\n".join([*lines, *(_markdown_row(row) for row in table.rows)])


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(escape_markdown(cell) for cell in cells)} |"


def to_csv(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Write rows as CSV; the last column marks the file as a report's."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow([*map(csv_cell, columns), CSV_MARK])
    writer.writerows([*map(csv_cell, row), 1] for row in rows)
    return buffer.getvalue()


def escape_markdown(text: str) -> str:
    r"""Escape text for Markdown.

    Example:
        >>> escape_markdown("a|b <c>")
        'a\\|b &lt;c&gt;'
    """
    return re.sub(r"[\\`*_\[\]|]", r"\\\g<0>", html.escape(plain(text), quote=False))


def format_metric(number: float | None) -> str:
    """Format a metric with four decimals; below 0.01 and from 1000 with four significant digits.

    None is `NONE`.
    """
    if number is None:
        return NONE
    if math.isnan(number):
        return "NaN"
    if 0.01 <= abs(number) < 1000:
        return f"{number:.4f}"
    return f"{number:.4g}"
