"""`optrun report`: compare finished and unfinished runs or sweeps."""

from __future__ import annotations

from functools import partial

from optrun.base.errors import EXIT_DONE, ConfigError
from optrun.cli.parser import VerbArguments, VerbParser
from optrun.config.schema.objective import read_objectives


def parser() -> VerbParser:
    """Build the parser of the verb."""
    made = VerbParser(
        "report",
        ["DIR", "..."],
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
        keys={
            "out": "DIR",
            "baseline": "NAME",
            "metric": "NAME",
            "matters": "D",
            "by": "KEY,KEY",
            "target": "LEVEL",
            "objectives": "NAME,NAME",
            "port": "N",
            "watch": "true",
        },
    )
    made.add_argument(
        "--watch", action="store_true", help="the page anew while jobs run (or watch=true)"
    )
    return made


def run(arguments: VerbArguments) -> int:
    """Compare, print the table and write the report.

    Returns:
        0.
    """
    given, folders = arguments.own, arguments.folders()
    from rich.console import Console

    from optrun.artifacts.objective import Objective
    from optrun.cli.values import read_number
    from optrun.report.build import report

    try:
        target = read_number(
            "target", given.get("target"), "a number, a level of the metric, as in target=4.5"
        )
        matters = read_number(
            "matters",
            given.get("matters"),
            "a number above 0, the smallest difference that counts: matters=0.01",
            0,
        )
    except ConfigError as error:
        raise ConfigError(f"optrun report {error}") from error
    port = given.get("port", "0")
    if not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"optrun report port={port}: expected a port, 1 to 65535.")
    objectives = read_objectives(arguments.listed("objectives"), "optrun report objectives")
    asked = partial(
        report,
        out=arguments.out,
        baseline=given.get("baseline"),
        metric=given.get("metric"),
        by=arguments.listed("by"),
        target=target,
        matters=matters,
        objectives=[Objective(name, mode) for name, mode in objectives],
    )
    watched = arguments.flag("watch")
    if arguments.options.watch or watched:
        from optrun.report.watch import watch

        watch(folders, Console(), port=int(port), make=asked)
    elif "port" in given:
        raise ConfigError(f"optrun report port={port}: has no effect without --watch.")
    else:
        asked(folders, console=Console())
    return EXIT_DONE
