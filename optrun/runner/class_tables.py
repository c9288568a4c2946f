"""Tables of the figures of each class: precision, recall, f1, support, and confusions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from optrun.base.formatting import count, number
from optrun.base.plain import lookup
from optrun.report.table import NONE, Table

if TYPE_CHECKING:
    from optrun.task.class_table import ClassFigures, ClassTable

_KEYS = ("precision", "recall", "f1", "support")
_MOST_ROWS = 30
"""A longer table is left to `optrun evaluate`."""
_MOST_SHOWN = 12
"""A confusion matrix of more classes does not fit into a terminal."""


def tables_of(
    summary: Mapping[str, object], *, most: int = _MOST_ROWS
) -> Iterator[tuple[str, Table]]:
    """Yield each evaluation set's figures by class.

    If they are of the weights that the summary is of.

    Args:
        summary: Values of `summary.json`; missing ones are left out.
        most: Classes of a table at most.

    Yields:
        Name of the set, empty for a single one, and its table.
    """
    step, sets = (lookup(summary, "classes", key) for key in ("step", "sets"))
    fits = step == summary.get("global_step") and isinstance(sets, Mapping)
    for name, values in sets.items() if fits else ():
        rows = lookup(values, "classes")
        if (
            isinstance(rows, list)
            and 0 < len(rows) <= most
            and all(isinstance(row, Mapping) and row for row in rows)
        ):
            means = values.get("means")
            yield (
                str(name),
                _tabulated(
                    str(next(iter(rows[0]))), rows, means if isinstance(means, list) else []
                ),
            )


def figures_table(found: ClassTable) -> Table:
    """Tabulate a row for each class, then the means."""
    return _tabulated(found.noun, _values(found.noun, found.rows), _values(found.noun, found.means))


def _tabulated(
    noun: str, rows: Sequence[Mapping[str, object]], means: Sequence[Mapping[str, object]]
) -> Table:
    """Tabulate figures by name; `noun` is the key of the row's own name."""
    table = Table([noun, *_KEYS], [False, True, True, True, True])
    for row in [*rows, *means]:
        *figures, support = (row.get(key) for key in _KEYS)
        cells = [
            number(float(figure)) if isinstance(figure, int | float) else NONE for figure in figures
        ]
        table.rows.append(
            [str(row.get(noun, "")), *cells, count(support) if isinstance(support, int) else NONE]
        )
    table.styles = [*[""] * len(rows), *["muted"] * len(means)]
    return table


def confusion_table(found: ClassTable) -> Table | None:
    """Tabulate true classes in rows, predicted ones in columns.

    None: there is no matrix, or it is too wide.
    """
    if found.confusion is None or len(found.labels) > _MOST_SHOWN:
        return None
    table = Table(["true \\ predicted", *found.labels], [False, *([True] * len(found.labels))])
    for label, line in zip(found.labels, found.confusion.tolist(), strict=True):
        table.rows.append([label, *(f"{cell:,}" if cell else "·" for cell in line)])
        table.styles.append("")
    return table


def as_values(found: ClassTable, most: int | None = None) -> dict[str, object]:
    """Convert everything that is in a table, for JSON.

    Args:
        found: The table.
        most: Classes of a confusion matrix at most; with more it is left out. None: however many.
    """
    values: dict[str, object] = {
        "classes": _values(found.noun, found.rows),
        "means": _values(found.noun, found.means),
    }
    if found.confusion is not None and (most is None or len(found.labels) <= most):
        values["confusion"] = {"labels": found.labels, "counts": found.confusion.tolist()}
    return values


def _values(noun: str, figures: Sequence[ClassFigures]) -> list[dict[str, object]]:
    return [{noun: row.name, **{key: getattr(row, key) for key in _KEYS}} for row in figures]
