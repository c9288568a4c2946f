"""`optrun confirm`.

Run what a sweep chose on fresh seeds, and give the verdict from these alone.
"""

from optrun.artifacts.target import locate
from optrun.base.errors import ConfigError, did_you_mean
from optrun.cli.parser import VerbArguments, VerbParser
from optrun.cli.values import PLACES, is_place, read_request
from optrun.config.tokens import key_of


def parser() -> VerbParser:
    """Build the parser of `optrun confirm DIR`, a sweep or search."""
    return VerbParser(
        "confirm",
        ["DIR"],
        """
Runs the best configuration of each optimizer of a sweep on fresh seeds, and compares them on
these seeds alone. If it is interrupted, the same command continues it. A confirmation is planned
once.

  seeds       at least 3 fresh seeds, such as 5-9 or 5,6,7; default: as many as detect the
              difference, at most 20
  difference  the smallest difference that matters to you, in units of the metric; default:
              `matters` of the runs, or one standard deviation between seeds
  power       the probability of detecting that difference; default: 0.8
  baseline    test the others against this one; without it, test whether each could be the best
  metric      choose and compare by this metric; default: the main metric of the runs
  by          compare the values of these keys, as in optrun report
  out         folder of the runs; default: DIR/confirm, which the report of DIR shows
  hydra...    how the runs are launched: hydra/launcher=joblib, hydra.sweeper.devices=auto
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
    """Plan or continue a confirmation of a sweep's best configurations, run it, and report.

    Returns:
        The exit code of its runs, which are a sweep of their own.

    Raises:
        ConfigError: An override says anything but where the runs are launched, or a value is
            invalid.
    """
    sweep = locate(arguments.positional[0]).runs_folder
    for token in arguments.overrides:
        key = key_of(token)
        if key == "hydra.sweep.dir":
            raise ConfigError(f"optrun confirm {token}: write out=DIR for the folder of its runs.")
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
