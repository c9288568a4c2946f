"""`optrun transfer`: the learning rate for a size that was not swept, from sweeps at smaller ones."""

from __future__ import annotations

from pathlib import Path

from optrun.base.errors import EXIT_DONE, ConfigError, refuse_url
from optrun.cli.parser import VerbParser

KEYS = ("metric", "out", "to")


def parser() -> VerbParser:
    """Build the parser of the verb."""
    return VerbParser(
        "transfer",
        'DIR [DIR ...] to="KEY=VALUE ..." [metric=NAME] [out=DIR]',
        """
Predicts the best learning rate for another width, depth, length or batch from sweeps over lr at two sizes or more: the
bottom of each basin, the power law through them, the lr with its interval for each optimizer, the two runs that would
test it. Writes transfer.md, transfer.json and transfer.png. Reads files only.

  to      the size that is asked for, by keys that varied between the sweeps: to="model.config.n_embd=512"
  metric  the metric to judge by, such as eval/loss; else the main metric of the runs
  out     where to write; else a new folder, outputs/transfer/DATE/TIME
""",
        keys=KEYS,
    )


def run(argv: list[str]) -> int:
    """Predict, print and write the answer.

    Returns:
        0.
    """
    arguments = parser().parse(argv)
    if arguments is None:
        return EXIT_DONE
    given = arguments.values("transfer")
    if not arguments.positional:
        raise ConfigError('optrun transfer takes sweeps: optrun transfer DIR [DIR ...] to="KEY=VALUE ..."')
    if "to" not in given:
        raise ConfigError(
            'optrun transfer: to is missing: the size that lr is for, as in to="training.max_steps=10000".'
        )
    if given.get("out") == "":
        raise ConfigError("optrun transfer out=: expected a folder to write to.")
    refuse_url("DIR", arguments.positional)
    refuse_url("out", given.get("out"))
    from rich.console import Console

    from optrun.report.transfer.answer import parse_target
    from optrun.report.transfer.build import transfer

    transfer(
        [Path(path).expanduser() for path in arguments.positional],
        parse_target(given["to"]),
        out=Path(given["out"]).expanduser() if "out" in given else None,
        metric=given.get("metric"),
        console=Console(),
    )
    return EXIT_DONE
