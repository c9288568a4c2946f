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
_MOST_SHOWN = 12
"""More classes do not fit into the end of a training or into a confusion matrix on a terminal;
`optrun evaluate` shows the figures of all of them."""

F1_MEANING = (
    "eval/f1: the f1 of the second class of two, the macro mean of more, the micro mean of spans"
)
"""Which figure of a table the metric f1 is."""


def tables_of(summary: Mapping[str, object]) -> Iterator[tuple[str, Table]]:
    """Yield the table of metrics by class of each evaluation set with at most 12 classes.

    Yields nothing if they were computed for other weights than the summary's metrics.

    Args:
        summary: Values of `summary.json`; missing ones are left out.

    Yields:
        Name of the evaluation set (empty if there is only one), and its table.
    """
    sets = lookup(summary, "classes", "sets")
    if not isinstance(sets, Mapping) or lookup(summary, "classes", "step") != summary.get(
        "global_step"
    ):
        return
    for name, values in sets.items():
        rows = values["classes"]
        if 0 < len(rows) <= _MOST_SHOWN:
            yield str(name), _tabulated(str(next(iter(rows[0]))), rows, values["means"])


def figures_table(found: ClassTable) -> Table:
    """Build a table with a row for each class, then the means."""
    return _tabulated(found.noun, _values(found.noun, found.rows), _values(found.noun, found.means))


def _tabulated(
    noun: str, rows: Sequence[Mapping[str, object]], means: Sequence[Mapping[str, object]]
) -> Table:
    """Build a table of metrics, means last and muted.

    Args:
        noun: Key of each row's name, and heading of the first column.
        rows: Figures of each class; a missing one is shown as a dash.
        means: Rows of means.
    """
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

    None if there is no confusion matrix, or too many classes for a table.
    """
    if found.confusion is None or len(found.labels) > _MOST_SHOWN:
        return None
    table = Table(["true \\ predicted", *found.labels], [False, *([True] * len(found.labels))])
    for label, line in zip(found.labels, found.confusion.tolist(), strict=True):
        table.rows.append([label, *(f"{cell:,}" if cell else "·" for cell in line)])
        table.styles.append("")
    return table


def as_values(found: ClassTable, most: int | None = None) -> dict[str, object]:
    """Convert metrics by class to plain values for JSON.

    Args:
        found: The metrics by class.
        most: With more classes than this the confusion matrix is left out. None: no limit.
    """
    values: dict[str, object] = {
        "classes": _values(found.noun, found.rows),
        "means": _values(found.noun, found.means),
    }
    if found.confusion is not None and (most is None or len(found.labels) <= most):
        values["confusion"] = {"labels": found.labels, "counts": found.confusion.tolist()}
    return values


def _values(noun: str, figures: Sequence[ClassFigures]) -> list[dict[str, object]]:
    """List the figures of each class as plain values; `noun` is the key of its name."""
    return [{noun: row.name, **{key: getattr(row, key) for key in _KEYS}} for row in figures]
