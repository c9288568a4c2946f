"""`optrun report`: compare finished and unfinished runs or sweeps."""

from optrun.base.errors import EXIT_DONE
from optrun.cli.parser import VerbArguments, VerbParser

_AGAIN = "While a sweep runs, type optrun report DIR again, or look at its study: optuna-dashboard."
_INSTEAD = {
    "watch": _AGAIN,
    "port": _AGAIN,
    "target": "eval/loss of every step stands in metrics.jsonl, with its time.",
    "objectives": "report.csv has score, speed and memory of every run, to weigh them.",
}


def parser() -> VerbParser:
    """Build the parser of `optrun report DIR ...`; its keys choose folder, baseline and metric."""
    return VerbParser(
        "report",
        ["DIR", "..."],
        """
Compares runs, sweeps, or folders of them. Prints which could be the best and a table, and writes
report.html, report.md and report.csv to DIR (to outputs/reports/DATE/TIME for several, or to out).
A metric or baseline other than the sweep's own becomes part of the file names. Trains nothing.

  baseline  test the others against this one; without it, test whether each could be the best
  metric    compare by this metric, such as eval/loss; default: the main metric of the runs
  matters   the smallest difference that counts; default: one standard deviation between seeds
  by        compare the values of these keys; default: all that differ, except lr and the keys of
            the optimizer
""",
        keys={"out": "DIR", "baseline": "NAME", "metric": "NAME", "matters": "D", "by": "KEY,KEY"},
        instead=_INSTEAD,
    )


def run(arguments: VerbArguments) -> int:
    """Compare runs, print the table and write the report.

    Returns:
        0.

    Raises:
        ConfigError: A folder holds no runs, or a value is invalid.
    """
    typed = arguments.key_values
    from rich.console import Console

    from optrun.cli.values import read_number
    from optrun.report.build import report

    matters = read_number(
        "optrun report matters",
        typed.get("matters"),
        "a number above 0, the smallest difference that counts: matters=0.01",
    )
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
