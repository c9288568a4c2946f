"""Figures of each class as a person sees them: tables, and the folder that `optrun evaluate ...

out=DIR` writes.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from optrun.artifacts.atomic import storing
from optrun.artifacts.metrics import to_json
from optrun.base.formatting import count, csv_cell, number
from optrun.base.plain import lookup
from optrun.report.table import NONE, Table
from optrun.runner.folders import written_aside

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
        summary: As in `summary.json`; what is missing, or no figures, is left out.
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
        shown = [
            number(float(figure)) if isinstance(figure, int | float) else NONE for figure in figures
        ]
        table.rows.append(
            [str(row.get(noun, "")), *shown, count(support) if isinstance(support, int) else NONE]
        )
    table.styles = [*[""] * len(rows), *["muted"] * len(means)]
    return table


def confusion_table(found: ClassTable) -> Table | None:
    """Tabulate true classes in rows, predicted ones in columns; None.

    There is no matrix, or it is too wide.
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


def write_folder(
    folder: Path, values: Mapping[str, object], tables: Mapping[str, ClassTable], subtitle: str
) -> list[Path]:
    """Write what an evaluation found, aside first.

    Args:
        folder: New or empty.
        values: Step, metrics and all else, for `evaluation.json`.
        tables: By evaluation set; the name of a single one is empty.
        subtitle: What stands below the title of the pictures.

    Returns:
        The files.

    Raises:
        StorageError: The disk refused.
    """
    with storing(folder), written_aside(folder) as aside:
        whole = {**values, "tables": {name: as_values(found) for name, found in tables.items()}}
        (aside / "evaluation.json").write_text(
            json.dumps(to_json(whole), indent=1) + "\n", encoding="utf-8"
        )
        for name, found in tables.items():
            end = f"-{name}" if name else ""
            noun = {"class": "classes", "entity": "entities"}.get(found.noun, f"{found.noun}s")
            figures = [
                [row.name, *(getattr(row, key) for key in _KEYS)]
                for row in [*found.rows, *found.means]
            ]
            _write_csv(aside / f"{noun}{end}.csv", [found.noun, *_KEYS], figures)
            if found.confusion is not None:
                counts = zip(found.labels, found.confusion.tolist(), strict=True)
                rows = [[label, *line] for label, line in counts]
                _write_csv(aside / f"confusion{end}.csv", ["true", *found.labels], rows)
                _draw(aside, end, found, f"{subtitle} · {name}" if name else subtitle)
    return sorted(folder.iterdir())


def _draw(folder: Path, end: str, found: ClassTable, subtitle: str) -> None:
    from optrun.report.theme import DARK, LIGHT, PAGE, save_png, standalone_svg
    from optrun.runner.confusion import draw_confusion

    assert found.confusion is not None
    counts = found.confusion.tolist()
    for theme, kind in ((LIGHT, ""), (DARK, "-dark")):
        save_png(
            draw_confusion(found.labels, counts, theme, subtitle=subtitle),
            folder / f"confusion{end}{kind}.png",
        )
    svg = standalone_svg(
        draw_confusion(found.labels, counts, PAGE, subtitle=subtitle),
        name=f"confusion{end}",
        label=f"Which class was taken for which: {subtitle}",
    )
    (folder / f"confusion{end}.svg").write_text(svg, encoding="utf-8")


def _write_csv(path: Path, head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(map(csv_cell, row) for row in (head, *rows))
