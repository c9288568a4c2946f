"""`optrun confirm`: run what a sweep chose on fresh seeds, and give the verdict from these alone."""

from __future__ import annotations

from pathlib import Path

from optrun.base.errors import EXIT_DONE, ConfigError, did_you_mean, refuse_url
from optrun.cli.parser import VerbParser
from optrun.cli.placement import PLACES, is_place
from optrun.config.overrides import is_hydra

KEYS = ("seeds", "difference", "power", "baseline", "metric", "by", "out")


def parser() -> VerbParser:
    """Build the parser of the verb."""
    return VerbParser(
        "confirm",
        "DIR [seeds=FIRST-LAST] [difference=D] [power=0.8] [baseline=NAME] [metric=NAME] [by=KEY,KEY] [out=DIR] "
        "[hydra.KEY=VALUE ...]",
        """
Runs the configuration that a sweep chose for each contender on seeds that took no part in the choice, and gives the
verdict from these alone. The same line goes on where it was stopped. A confirmation is planned once.

  seeds       fresh ones, such as 5-9 or 5,6,7; else as many as find the difference, 20 at most
  difference  the smallest that matters to you, in units of the metric; else `matters` of the runs, or what another seed
              changes (one standard deviation)
  power       the chance with which it is found, 0.8 unless told
  baseline    the contender that the others are compared with; else each is asked whether it could be the best
  metric      the metric to choose and compare by; else the main metric of the runs
  by          configuration keys that tell contenders apart, as for optrun report
  out         where the runs go; else DIR/confirm, which the report of DIR shows
  hydra...    how they run, as for a sweep: hydra/launcher=joblib, hydra.sweeper.devices=auto
""",
        keys=KEYS,
    )


def run(argv: list[str]) -> int:
    """Plan, or go on with what was planned; run it as a sweep, and report.

    Returns:
        The exit code of the sweep.
    """
    placed = [token for token in argv if is_hydra(token)]
    arguments = parser().parse([token for token in argv if token not in placed])
    if arguments is None:
        return EXIT_DONE
    given = arguments.values("confirm")
    if len(arguments.positional) != 1:
        raise ConfigError("optrun confirm takes one directory: optrun confirm DIR")
    refuse_url("DIR", arguments.positional)
    refuse_url("out", given.get("out"))
    sweep = Path(arguments.positional[0]).expanduser()
    if not sweep.is_dir():
        raise ConfigError(f"{sweep}: no such directory.")
    for token in placed:
        _expect_place(token)
    from rich.console import Console

    from optrun.cli.confirm_request import read_request
    from optrun.cli.confirm_sweep import confirm
    from optrun.launch.single_run import Caller

    out = Path(given.pop("out")).expanduser() if "out" in given else None
    asked = read_request(by=[key for key in given.pop("by", "").split(",") if key], **given)
    return confirm(sweep, asked, Caller(Console()), placed, out=out).exit_code


def _expect_place(token: str) -> None:
    """Refuse what does not say how the runs of a confirmation are run.

    Raises:
        ConfigError: It would have no effect, or has a key of the verb.
    """
    key = token.lstrip("+~").partition("=")[0]
    if key == "hydra.sweep.dir":
        raise ConfigError(f"optrun confirm {token}: out=DIR says where its runs go.")
    if not is_place(token):
        raise ConfigError(f"optrun confirm {token}: has no effect here. {did_you_mean(key, PLACES)}")
