"""Figures of each class as a person sees them: tables, and the folder that `optrun evaluate ... out=DIR` writes."""

from __future__ import annotations

import csv
import io
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optrun.artifacts.atomic import storing
from optrun.artifacts.metrics import to_json
from optrun.base.formatting import csv_cell
from optrun.report.table import Table
from optrun.runner.class_figures import KEYS, figures_of

if TYPE_CHECKING:
    from optrun.task.class_table import ClassTable

MOST_SHOWN = 12
"""A confusion matrix of more classes does not fit into a terminal."""


def figures_table(found: ClassTable) -> Table:
    """Tabulate a row for each class, then the means."""
    return figures_of(as_values(found))


def confusion_table(found: ClassTable) -> Table | None:
    """Tabulate true classes in rows, predicted ones in columns; None: there is no matrix, or it is too wide."""
    if found.confusion is None or len(found.labels) > MOST_SHOWN:
        return None
    table = Table(["true \\ predicted", *found.labels], [False, *([True] * len(found.labels))])
    for label, line in zip(found.labels, found.confusion.tolist(), strict=True):
        table.rows.append([label, *(f"{cell:,}" if cell else "·" for cell in line)])
        table.styles.append("")
    return table


def as_values(found: ClassTable, most: int | None = None) -> dict[str, Any]:
    """Convert everything that is in a table, for JSON.

    Args:
        found: The table.
        most: Classes of a confusion matrix at most; with more it is left out. None: however many.
    """

    def rows(figures: Any) -> list[dict[str, Any]]:
        return [{found.noun: row.name, **{key: getattr(row, key) for key in KEYS}} for row in figures]

    values: dict[str, Any] = {"classes": rows(found.rows), "means": rows(found.means)}
    if found.confusion is not None and (most is None or len(found.labels) <= most):
        values["confusion"] = {"labels": found.labels, "counts": found.confusion.tolist()}
    return values


def write_folder(
    folder: Path, values: Mapping[str, Any], tables: Mapping[str, ClassTable], subtitle: str
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
    aside = folder.with_name(f".{folder.name}.new")
    try:
        with storing(folder):
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
            whole = {**values, "tables": {name: as_values(found) for name, found in tables.items()}}
            (aside / "evaluation.json").write_text(json.dumps(to_json(whole), indent=1) + "\n", encoding="utf-8")
            for name, found in tables.items():
                end = f"-{name}" if name else ""
                noun = {"class": "classes", "entity": "entities"}.get(found.noun, f"{found.noun}s")
                (aside / f"{noun}{end}.csv").write_text(_figures_csv(found), encoding="utf-8")
                if found.confusion is not None:
                    (aside / f"confusion{end}.csv").write_text(_confusion_csv(found), encoding="utf-8")
                    _draw(aside, end, found, f"{subtitle} · {name}" if name else subtitle)
            if folder.exists():
                folder.rmdir()
            aside.rename(folder)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return sorted(folder.iterdir())


def _draw(folder: Path, end: str, found: ClassTable, subtitle: str) -> None:
    from optrun.report.svg import standalone_svg
    from optrun.report.theme import DARK, LIGHT, PAGE, save_png
    from optrun.runner.confusion import draw_confusion

    assert found.confusion is not None
    counts = found.confusion.tolist()
    for theme, kind in ((LIGHT, ""), (DARK, "-dark")):
        save_png(draw_confusion(found.labels, counts, theme, subtitle=subtitle), folder / f"confusion{end}{kind}.png")
    svg = standalone_svg(
        draw_confusion(found.labels, counts, PAGE, subtitle=subtitle),
        name=f"confusion{end}",
        label=f"Which class was taken for which: {subtitle}",
    )
    (folder / f"confusion{end}.svg").write_text(svg, encoding="utf-8")


def _figures_csv(found: ClassTable) -> str:
    lines = [[found.noun, *KEYS]]
    lines += [[row.name, *(getattr(row, key) for key in KEYS)] for row in [*found.rows, *found.means]]
    return _csv(lines)


def _confusion_csv(found: ClassTable) -> str:
    assert found.confusion is not None
    rows = zip(found.labels, found.confusion.tolist(), strict=True)
    return _csv([["true", *found.labels], *([label, *line] for label, line in rows)])


def _csv(lines: list[list[Any]]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows(map(csv_cell, line) for line in lines)
    return buffer.getvalue()
