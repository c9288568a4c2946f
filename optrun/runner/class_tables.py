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


def tables_of(summary: Mapping[str, object]) -> Iterator[tuple[str, Table]]:
    """Yield the table of metrics by class of each evaluation set with at most 12 classes.

    Yields nothing if they were computed at another step than the summary's metrics.

    Args:
        summary: Values of `summary.json`; missing ones are left out.

    Yields:
        Name of the evaluation set (empty if there is only one), and its table.
    """
    sets = lookup(summary, "classes", "sets")
    if not isinstance(sets, Mapping):
        return
    if lookup(summary, "classes", "step") != summary.get("global_step"):
        return
    for name, values in sets.items():
        rows = values["classes"]
        if 0 < len(rows) <= _MOST_SHOWN:
            # The first key of a row is that of its name: `class`, `label` or `entity`.
            yield str(name), _build_table(str(next(iter(rows[0]))), rows, values["means"])


def figures_table(metrics: ClassTable) -> Table:
    """Build a table with a row for each class, then the means."""
    return _build_table(
        metrics.noun, _values(metrics.noun, metrics.rows), _values(metrics.noun, metrics.means)
    )


def _build_table(
    noun: str, rows: Sequence[Mapping[str, object]], means: Sequence[Mapping[str, object]]
) -> Table:
    """Build a table of metrics with a row for each class; the means come last, muted.

    Args:
        noun: Key of each row's name, such as `class`, and heading of the first column.
        rows: Figures of each class: precision, recall, f1, support; a missing one is shown as a
            dash.
        means: Rows of means, of the same form.
    """
    table = Table([noun, *_KEYS], [False, True, True, True, True])
    for row in [*rows, *means]:
        cells = [str(row.get(noun, ""))]
        for key in _KEYS[:-1]:
            figure = row.get(key)
            cells.append(number(float(figure)) if isinstance(figure, int | float) else NONE)
        support = row.get("support")
        cells.append(count(support) if isinstance(support, int) else NONE)
        table.rows.append(cells)
    table.styles = [*[""] * len(rows), *["muted"] * len(means)]
    return table


def explain_f1(table: Table) -> str:
    """Say which figure of a table by class the metric eval/f1 is.

    Of two classes it is the f1 of the second, of more their macro mean, of entities the micro mean.
    """
    if table.columns[0] == "entity":
        return "eval/f1 is the micro mean: all entities are counted together"
    if table.styles.count("") == 2:
        return f"eval/f1 is the f1 of {table.rows[1][0]}, the second class"
    return "eval/f1 is the macro mean: every class counts the same"


def confusion_table(metrics: ClassTable) -> Table | None:
    """Tabulate how often each true class (row) was predicted as each class (column).

    Zeros are shown as dots. None without a confusion matrix, or with more than 12 classes.
    """
    if metrics.confusion is None or len(metrics.labels) > _MOST_SHOWN:
        return None
    table = Table(["true \\ predicted", *metrics.labels], [False, *([True] * len(metrics.labels))])
    for label, line in zip(metrics.labels, metrics.confusion.tolist(), strict=True):
        table.rows.append([label, *(f"{cell:,}" if cell else "·" for cell in line)])
        table.styles.append("")
    return table


def as_values(metrics: ClassTable, most: int | None = None) -> dict[str, object]:
    """Convert metrics by class to plain values for JSON.

    Args:
        metrics: The metrics by class.
        most: With more classes than this the confusion matrix is left out. None: no limit.
    """
    values: dict[str, object] = {
        "classes": _values(metrics.noun, metrics.rows),
        "means": _values(metrics.noun, metrics.means),
    }
    if metrics.confusion is not None and (most is None or len(metrics.labels) <= most):
        values["confusion"] = {"labels": metrics.labels, "counts": metrics.confusion.tolist()}
    return values


def _values(noun: str, figures: Sequence[ClassFigures]) -> list[dict[str, object]]:
    """List the figures of each class as plain values; `noun` is the key of its name."""
    return [{noun: row.name, **{key: getattr(row, key) for key in _KEYS}} for row in figures]
