"""`optrun report`: compare finished and unfinished runs or sweeps."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from optrun.base.errors import EXIT_DONE, ConfigError, refuse_url
from optrun.cli.parser import VerbParser
from optrun.config.schema.objective import read_objectives

if TYPE_CHECKING:
    from optrun.artifacts.objective import Objective

KEYS = ("baseline", "by", "matters", "metric", "objectives", "out", "port", "target", "watch")


def parser() -> VerbParser:
    """Build the parser of the verb."""
    made = VerbParser(
        "report",
        "DIR [DIR ...] [out=DIR] [baseline=NAME] [metric=NAME] [matters=D] [by=KEY,KEY] [target=LEVEL]"
        " [objectives=NAME,NAME]",
        """
Compares runs, sweeps, or folders of them: which could be the best, a table here, report.html, report.md and report.csv
on disk (in the first DIR; where that is one run of several, in outputs/reports/DATE/TIME; or in out). Reads files only.

  baseline  the contender that the others are tested against; else each is asked whether it could be the best
  metric    the metric to compare by, such as eval/loss; else the main metric of the runs
  matters   the smallest difference of it that counts; else one standard deviation between seeds
  by        configuration keys that tell contenders apart; else all that differ, but lr and the optimizer's own
  target    the level of the metric to which steps and time are counted, as in target=4.5
  objectives  numbers to weigh against each other, such as eval/loss,perf/tokens_per_second: the configurations that no
            other is better than in all; else those of the sweep
  port      of the page that --watch serves on this machine alone; else a free one
""",
        keys=KEYS,
    )
    made.add_argument("--watch", action="store_true", help="the page anew while jobs run (or watch=true)")
    return made


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
    from functools import partial

    from rich.console import Console

    from optrun.report.build import report

    refuse_url("DIR", arguments.positional)
    refuse_url("out", given.get("out"))
    folders = [Path(path).expanduser() for path in arguments.positional]
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"{folder}: no such directory.")
    asked = partial(
        report,
        out=Path(given["out"]).expanduser() if "out" in given else None,
        baseline=given.get("baseline"),
        metric=given.get("metric"),
        by=[key for key in given.get("by", "").split(",") if key],
        target=_number("target", given, "a level of the metric, as in target=4.5"),
        matters=_matters(given),
        objectives=_objectives(given.get("objectives", "")),
    )
    if given.get("watch", "false") not in ("true", "false"):
        raise ConfigError(f"optrun report watch={given['watch']}: expected true or false.")
    if arguments.options.watch or given.get("watch") == "true":
        from optrun.report.watch import watch

        watch(folders, Console(), port=_port(given), make=asked)
    elif "port" in given:
        raise ConfigError(f"optrun report port={given['port']}: has no effect without --watch.")
    else:
        asked(folders, console=Console())
    return EXIT_DONE


def _port(given: dict[str, str]) -> int:
    if not given.get("port", "0").isdecimal() or int(given.get("port", "0")) > 65535:
        raise ConfigError(f"optrun report port={given['port']}: expected a port, 1 to 65535.")
    return int(given.get("port", "0"))


def _objectives(text: str) -> list[Objective]:
    from optrun.artifacts.objective import Objective

    named = [part for part in text.split(",") if part]
    return [Objective(name, mode) for name, mode in read_objectives(named, "optrun report objectives")]


def _number(key: str, given: dict[str, str], expected: str) -> float | None:
    """Read a finite number; None where it was not given.

    Raises:
        ConfigError: It is none.
    """
    if key not in given:
        return None
    try:
        number = float(given[key])
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ConfigError(f"optrun report {key}={given[key]}: expected a number, {expected}.")
    return number


def _matters(given: dict[str, str]) -> float | None:
    number = _number("matters", given, "the smallest difference that counts, as in matters=0.01")
    if number is not None and number <= 0:
        raise ConfigError(f"optrun report matters={given['matters']}: expected a number above 0.")
    return number
