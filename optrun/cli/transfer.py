"""`optrun transfer`.

The learning rate for a size that was not swept, from sweeps at smaller ones.
"""

from __future__ import annotations

from optrun.base.errors import EXIT_DONE, ConfigError
from optrun.cli.parser import VerbArguments, VerbParser


def parser() -> VerbParser:
    """Build the parser of the verb."""
    return VerbParser(
        "transfer",
        ["DIR", "..."],
        """
Predicts the best learning rate for another width, depth, length or batch from sweeps over lr at
two sizes or more: the bottom of each basin, the power law through them, the lr with its interval
for each optimizer, the two runs that would test it. Writes transfer.md, transfer.json and
transfer.png. Reads files only.

  to      the size that is asked for, by keys that varied between the sweeps:
          to="model.config.n_embd=512"
  metric  the metric to judge by, such as eval/loss; else the main metric of the runs
  out     where to write; else a new folder, outputs/transfer/DATE/TIME
""",
        keys={"to": '"KEY=VALUE ..."', "metric": "NAME", "out": "DIR"},
    )


def run(arguments: VerbArguments) -> int:
    """Predict, print and write the answer.

    Returns:
        0.
    """
    if "to" not in arguments.own:
        raise ConfigError(
            "optrun transfer: to is missing: the size that lr is for, as in"
            ' to="training.max_steps=10000".'
        )
    from rich.console import Console

    from optrun.report.transfer.answer import parse_target
    from optrun.report.transfer.build import transfer

    transfer(
        arguments.folders(),
        parse_target(arguments.own["to"]),
        out=arguments.out,
        metric=arguments.own.get("metric"),
        console=Console(),
    )
    return EXIT_DONE
