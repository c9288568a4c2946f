"""Tabulate what a summary says of each class."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from optrun.base.formatting import count, number
from optrun.report.table import NONE, Table

KEYS = ("precision", "recall", "f1", "support")
MOST_ROWS = 30
"""A longer table is left to `optrun evaluate`."""


def tables_of(summary: Mapping[str, Any], *, most: int = MOST_ROWS) -> Iterator[tuple[str, Table]]:
    """Yield each evaluation set's figures by class, if they are of the weights that the summary is of.

    Args:
        summary: As in `summary.json`; what is missing, or no figures, is left out.
        most: Classes of a table at most.

    Yields:
        Name of the set, empty for a single one, and its table.
    """
    held = summary.get("classes")
    sets = held.get("sets") if isinstance(held, Mapping) and held.get("step") == summary.get("global_step") else None
    for name, values in sets.items() if isinstance(sets, Mapping) else ():
        rows = values.get("classes") if isinstance(values, Mapping) else None
        if isinstance(rows, list) and 0 < len(rows) <= most and all(isinstance(row, Mapping) and row for row in rows):
            yield str(name), figures_of(values)


def figures_of(values: Mapping[str, Any]) -> Table:
    """Tabulate a row for each class, then the means.

    Args:
        values: `classes` and `means`, lists of figures by name, of which the first is the class.
    """
    rows, means = list(values["classes"]), values.get("means")
    noun = str(next(iter(rows[0]))) if rows else "class"
    table = Table([noun, *KEYS], [False, True, True, True, True])
    for row in [*rows, *(means if isinstance(means, list) else [])]:
        figures = [_shown(row.get(key)) for key in KEYS[:-1]]
        support = row.get("support")
        table.rows.append([str(row.get(noun, "")), *figures, count(support) if isinstance(support, int) else NONE])
        table.styles.append("" if row in rows else "muted")
    return table


def _shown(value: object) -> str:
    return number(float(value)) if isinstance(value, int | float) else NONE
