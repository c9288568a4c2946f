"""`optrun report`: compare finished and unfinished runs or sweeps."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from optrun.commands.parser import VerbParser
from optrun.config.schema.objective import read_objectives
from optrun.errors import EXIT_DONE, ConfigError, refuse_url

if TYPE_CHECKING:
    from optrun.artifacts.objective import Objective

KEYS = ("baseline", "by", "metric", "objectives", "out", "target")


def parser() -> VerbParser:
    """Build the parser of the verb."""
    return VerbParser(
        "report",
        "DIR [DIR ...] [out=DIR] [baseline=NAME] [metric=NAME] [by=KEY,KEY] [target=LEVEL] [objectives=NAME,NAME]",
        """
Compares runs, sweeps, or folders of them: a ranked table here, report.html, report.md and report.csv on disk (in the
first DIR; where that is one run of several, in outputs/reports/DATE/TIME; or in out). Reads files only.

  baseline  the contender that the others are tested against; else the best
  metric    the metric to compare by, such as eval/loss; else the main metric of the runs
  by        configuration keys that tell contenders apart; else all that differ, but lr and the optimizer's own
  target    the level of the metric to which steps, tokens and time are counted; else one that all contenders reach
  objectives  numbers to weigh against each other, such as eval/loss,perf/tokens_per_second: the configurations that no
            other is better than in all; else those of the sweep
""",
        keys=KEYS,
    )


def run(argv: list[str]) -> int:
    """Compare, print the table and write the report.

    Returns:
        0.
    """
    arguments = parser().parse(argv)
    if arguments is None:
        return EXIT_DONE
    given = arguments.values("report")
    if not arguments.positional:
        raise ConfigError("optrun report takes directories: optrun report DIR [DIR ...]")
    from rich.console import Console

    from optrun.report.build import report

    refuse_url("DIR", arguments.positional)
    refuse_url("out", given.get("out"))
    folders = [Path(path).expanduser() for path in arguments.positional]
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"{folder}: no such directory.")
    report(
        folders,
        out=Path(given["out"]).expanduser() if "out" in given else None,
        baseline=given.get("baseline"),
        metric=given.get("metric"),
        by=[key for key in given.get("by", "").split(",") if key],
        target=_level(given["target"]) if "target" in given else None,
        objectives=_objectives(given.get("objectives", "")),
        console=Console(),
    )
    return EXIT_DONE


def _objectives(text: str) -> list[Objective]:
    from optrun.artifacts.objective import Objective

    named = [part for part in text.split(",") if part]
    return [Objective(name, mode) for name, mode in read_objectives(named, "optrun report objectives")]


def _level(text: str) -> float:
    """Read a level of the metric.

    Raises:
        ConfigError: It is no finite number.
    """
    try:
        level = float(text)
    except ValueError:
        level = math.nan
    if not math.isfinite(level):
        raise ConfigError(f"optrun report target={text}: expected a number, a level of the metric, as in target=4.5.")
    return level
