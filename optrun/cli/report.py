"""`optrun report`: compare finished and unfinished runs or sweeps."""

from __future__ import annotations

from optrun.base.errors import EXIT_DONE, ConfigError
from optrun.cli.parser import VerbArguments, VerbParser

_AGAIN = "While a sweep runs, type optrun report DIR again, or look at its study: optuna-dashboard."
_INSTEAD = {
    "watch": _AGAIN,
    "port": _AGAIN,
    "target": "eval/loss of every step stands in metrics.jsonl, with its time.",
    "objectives": "report.csv has score, speed and memory of every run, to weigh them.",
}


def parser() -> VerbParser:
    """Build the parser of the verb."""
    return VerbParser(
        "report",
        ["DIR", "..."],
        """
Compares runs, sweeps, or folders of them: which could be the best, a table here, report.html,
report.md and report.csv on disk (in DIR; of several in outputs/reports/DATE/TIME; or in out).
Another metric or baseline than the sweep's own stands in the names of the files. Reads files only.

  baseline  the contender that the others are tested against; else each is asked whether it could
            be the best
  metric    the metric to compare by, such as eval/loss; else the main metric of the runs
  matters   the smallest difference of it that counts; else one standard deviation between seeds
  by        configuration keys that tell contenders apart; else all that differ, but lr and the
            optimizer's own
""",
        keys={
            "out": "DIR",
            "baseline": "NAME",
            "metric": "NAME",
            "matters": "D",
            "by": "KEY,KEY",
        },
        instead=_INSTEAD,
    )


def run(arguments: VerbArguments) -> int:
    """Compare runs, print the table and write the report.

    Returns:
        0.
    """
    typed = arguments.key_values
    from rich.console import Console

    from optrun.cli.values import read_number
    from optrun.report.build import report

    try:
        matters = read_number(
            "matters",
            typed.get("matters"),
            "a number above 0, the smallest difference that counts: matters=0.01",
            0,
        )
    except ConfigError as error:
        raise ConfigError(f"optrun report {error}") from error
    report(
        arguments.positional,
        out=arguments.out,
        baseline=typed.get("baseline"),
        metric=typed.get("metric"),
        by=arguments.listed("by"),
        matters=matters,
        console=Console(),
    )
    return EXIT_DONE
