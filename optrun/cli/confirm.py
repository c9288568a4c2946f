"""`optrun confirm`.

Run what a sweep chose on fresh seeds, and give the verdict from these alone.
"""

from __future__ import annotations

from optrun.artifacts.target import locate
from optrun.base.errors import ConfigError, did_you_mean
from optrun.cli.parser import VerbArguments, VerbParser
from optrun.cli.values import PLACES, is_place, read_request
from optrun.config.tokens import key_of


def parser() -> VerbParser:
    """Build the parser of the verb."""
    return VerbParser(
        "confirm",
        ["DIR"],
        """
Runs the configuration that a sweep chose for each contender on seeds that took no part in the
choice, and gives the verdict from these alone. The same line goes on where it was stopped. A
confirmation is planned once.

  seeds       at least 3 fresh ones, such as 5-9 or 5,6,7; else as many as find the difference,
              20 at most
  difference  the smallest that matters to you, in units of the metric; else `matters` of the runs,
              or what another seed changes (one standard deviation)
  power       the chance with which it is found, 0.8 unless told
  baseline    the contender that the others are compared with; else each is asked whether it could
              be the best
  metric      the metric to choose and compare by; else the main metric of the runs
  by          configuration keys that tell contenders apart, as for optrun report
  out         where the runs go; else DIR/confirm, which the report of DIR shows
  hydra...    how they run, as for a sweep: hydra/launcher=joblib, hydra.sweeper.devices=auto
""",
        keys={
            "seeds": "FIRST-LAST",
            "difference": "D",
            "power": "0.8",
            "baseline": "NAME",
            "metric": "NAME",
            "by": "KEY,KEY",
            "out": "DIR",
        },
        overrides="hydra.KEY",
    )


def run(arguments: VerbArguments) -> int:
    """Plan or continue a confirmation, run it as a sweep, and report.

    Returns:
        The exit code of the sweep.
    """
    sweep = locate(arguments.positional[0]).runs_folder
    for token in arguments.overrides:
        key = key_of(token)
        if key == "hydra.sweep.dir":
            raise ConfigError(f"optrun confirm {token}: out=DIR says where its runs go.")
        if not is_place(token):
            raise ConfigError(
                f"optrun confirm {token}: has no effect here. {did_you_mean(key, PLACES)}"
            )
    from rich.console import Console

    from optrun.cli.confirm_sweep import confirm
    from optrun.launch.single_run import Caller

    values = {key: value for key, value in arguments.key_values.items() if key not in ("by", "out")}
    request = read_request(by=arguments.listed("by"), **values)
    return confirm(
        sweep, request, Caller(Console()), arguments.overrides, out=arguments.out
    ).exit_code
