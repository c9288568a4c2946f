"""Say what a picture of a report is: how it is drawn, what stands below it, which numbers it shows."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from optrun.formatting import csv_cell
from optrun.report.findings import Row
from optrun.report.tables import CSV_MARK
from optrun.report.theme import Theme

SHOWN = 8
"""More contenders than this cannot be told apart in one picture; the best are drawn, the table has all."""
WIDTH = 4.3
"""Inches: as wide as a phone, where the page shows it at about its own size; two stand side by side on a desk."""
_NAME_LENGTH = 34


@dataclass(frozen=True)
class Data:
    """The numbers of a picture."""

    columns: Sequence[str]
    rows: Sequence[Sequence[object]]

    def to_csv(self) -> str:
        """Write them as CSV; the last column marks the file as a report's."""
        buffer = io.StringIO()
        writer = csv.writer(buffer, lineterminator="\n")
        writer.writerow([*map(csv_cell, self.columns), CSV_MARK])
        writer.writerows([*(_short(csv_cell(cell)) for cell in row), 1] for row in self.rows)
        return buffer.getvalue()


def _short(cell: object) -> object:
    """Write a number with the digits that mean something."""
    return f"{cell:.8g}" if isinstance(cell, float) else cell


@dataclass(frozen=True)
class Picture:
    """One figure, to be drawn under any theme."""

    name: str
    """For file names and anchors."""
    title: str
    caption: str
    draw: Callable[[Theme], Figure]
    """Makes a `chart.Chart` where its points should tell their values on the page."""
    data: Callable[[], Data] | None = None
    """What is written beside it as `report-NAME.csv`; None: nothing."""


def drawn_rows(rows: Sequence[Row]) -> list[Row]:
    """Pick the contenders that are drawn; their place in this list is their colour, marker and switch everywhere."""
    return [row for row in rows if row.arm.runs][:SHOWN]


def short_name(text: str) -> str:
    """Shorten a contender's name for a legend."""
    return text if len(text) <= _NAME_LENGTH else text[: _NAME_LENGTH - 1] + "…"


def series_colour(theme: Theme, series: int) -> str:
    """The colour of a contender."""
    return theme.series[series % len(theme.series)]
