"""`optrun transfer`.

The learning rate for a size that was not swept, from sweeps at smaller ones.
"""

from __future__ import annotations

from pathlib import Path

from optrun.base.errors import EXIT_DONE, ConfigError
from optrun.cli.parser import VerbArguments, VerbParser


def parser() -> VerbParser:
    """Build the parser of the verb."""
    return VerbParser(
        "transfer",
        ["DIR", "..."],
        """
Predicts the best learning rate for another width, depth, length or batch from sweeps over lr at
two sizes or more: the optimum of each size, the power law through them, the lr with its interval
for each optimizer, the two runs that would test it. Writes transfer.md and transfer.png. Reads
files only.

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
    if "to" not in arguments.key_values:
        raise ConfigError(
            "optrun transfer: to is missing: the size that lr is for, as in"
            ' to="training.max_steps=10000".'
        )
    from rich.console import Console

    from optrun.report.lr_scaling.page import transfer

    transfer(
        [Path(path) for path in arguments.positional],
        _parse_target(arguments.key_values["to"]),
        out=arguments.out,
        metric=arguments.key_values.get("metric"),
        console=Console(),
    )
    return EXIT_DONE


def _parse_target(text: str) -> dict[str, object]:
    """Split a size such as `model.config.n_embd=512 training.max_steps=10000` into its keys."""
    target: dict[str, object] = {}
    for token in text.split():
        key, equals, value = token.partition("=")
        if not equals or not key:
            raise ConfigError(
                f'to: {token!r}: expected KEY=VALUE, as in to="training.max_steps=10000".'
            )
        if key in target:
            raise ConfigError(f"to: {key} is given twice: which one is meant?")
        target[key] = value
    if not target:
        raise ConfigError(
            'to: expected the size that lr is for, as in to="model.config.n_embd=512".'
        )
    return target
