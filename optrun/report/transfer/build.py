"""Answer in the terminal and on disk.

From sweeps and a size to a line, tables, a page and a picture.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from optrun.artifacts.atomic import replace_text
from optrun.base.errors import ConfigError, StorageError
from optrun.base.formatting import rate
from optrun.base.reading import read_json
from optrun.report.sweep_folder import dated_folder
from optrun.report.table import Table, filled, to_rich, value
from optrun.report.templating import fill_markdown
from optrun.report.theme import LIGHT, save_png
from optrun.report.transfer.answer import Answer, Transfer, answer, sentence
from optrun.report.transfer.figure import draw_basins
from optrun.report.transfer.sizes import label

_FOLDER = Path("outputs", "transfer")
_MARK = "optrun transfer"
"""What `transfer.json` says of itself: a folder with such a file is an earlier answer, which may be
replaced."""


def transfer(
    dirs: Sequence[Path],
    target: Mapping[str, object],
    *,
    out: Path | None = None,
    metric: str | None = None,
    console: Console | None = None,
) -> Transfer:
    """Predict the learning rate for another size from sweeps over lr at two sizes or more.

    Args:
        dirs: The sweeps, or folders of them.
        target: Keys of the configuration that varied between sizes, and their values at the size
            that is asked for.
        out: Where to write; default: a new folder, `outputs/transfer/` and date and time.
        metric: What to judge by; default: the main metric of the runs.
        console: Where the answer is printed; None prints nothing.

    Raises:
        ConfigError: The sweeps do not tell, and the message says which runs are missing; `out` has
            other files.
        StorageError: A file cannot be written.
    """
    found = answer(dirs, target, metric)
    files = _write(out or dated_folder(_FOLDER), found)
    if console is not None:
        for each in found.answers:
            console.print(Text(f"\n{sentence(each, found.target)}", style="bold"), soft_wrap=True)
            for table in (exponents_table(each), sizes_table(each, found.metric)):
                console.print(to_rich(table, width=console.width))
            for line in lines(each):
                console.print(f"{line}.", markup=False, highlight=False)
            console.print("The two runs that would test it:", highlight=False)
            for command in each.tests:
                console.print(f"  {command}", markup=False, highlight=False, soft_wrap=True)
        for contender, reason in found.refused.items():
            console.print(f"\n{contender}: no answer. {reason}.", markup=False, highlight=False)
        console.print()
        for path in files:
            console.print(Text.assemble(("wrote ", "dim"), str(path)), soft_wrap=True)
    return replace(found, files=files)


def lines(found: Answer) -> Iterator[str]:
    """Say what carries an answer, and what speaks against it."""
    yield f"Carried by: {found.assumption}"
    yield from found.notes


def exponents_table(found: Answer) -> Table:
    """Tabulate the exponents."""
    rows = [
        [
            key,
            f"{one.value:+.3f}",
            f"{one.low:+.3f} to {one.high:+.3f}" if one.is_bounded else "none",
        ]
        for key, one in found.exponents.items()
    ]
    return Table(
        ["lr* ~ key^exponent", "exponent", "90 % interval"],
        [False, True, True],
        rows,
        [""] * len(rows),
    )


def sizes_table(found: Answer, metric: str) -> Table:
    """Tabulate the optimum of each size."""
    rows = [
        [
            label(each.size),
            rate(each.lr.value),
            each.lr.interval,
            value(each.cost),
            str(each.seeds),
        ]
        for each in found.optima
    ]
    columns = ["size", "best lr", "90 % interval", metric, "seeds"]
    return filled(Table(columns, [False, *[True] * 4], rows, [""] * len(rows)))


def _write(folder: Path, found: Transfer) -> list[Path]:
    """Write page, numbers and picture, none of them over a person's own."""
    page, numbers, picture = (folder / f"transfer.{ending}" for ending in ("md", "json", "png"))
    facts = {
        "made_by": _MARK,
        "target": found.target,
        "metric": found.metric,
        "mode": found.mode,
    } | {"answers": [_finite(asdict(each)) for each in found.answers], "refused": found.refused}
    told: list[dict[str, object]] = [
        {
            "line": sentence(each, found.target),
            "said": [*lines(each)],
            "tests": "\n".join(each.tests),
            "tables": [exponents_table(each), sizes_table(each, found.metric)],
        }
        for each in found.answers
    ]
    text = fill_markdown(
        "transfer.md",
        target=label(found.target),
        answers=told,
        refused=found.refused,
        picture=picture.name,
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not _is_own(numbers):
            for path in (page, numbers, picture):
                if path.exists():
                    raise ConfigError(
                        f"{path} exists and was not written by {_MARK}: write elsewhere with"
                        " out=DIR."
                    )
        replace_text(numbers, json.dumps(facts, indent=2) + "\n")
        replace_text(page, text)
        save_png(draw_basins(found, LIGHT), picture)
    except OSError as error:
        raise StorageError(
            f"transfer: cannot write to {folder} ({error.strerror}); choose another out=DIR."
        ) from error
    return [page, numbers, picture]


def _finite(values: object) -> object:
    """Write what is infinite, the end of no interval, as null."""
    if isinstance(values, dict):
        return {key: _finite(value) for key, value in values.items()}
    if isinstance(values, (list, tuple)):
        return [_finite(value) for value in values]
    return None if isinstance(values, float) and not math.isfinite(values) else values


def _is_own(path: Path) -> bool:
    try:
        held = read_json(path)
    except (OSError, ValueError):
        return False
    return isinstance(held, dict) and held.get("made_by") == _MARK
