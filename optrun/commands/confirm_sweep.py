"""Run what a sweep chose on fresh seeds, as a sweep of its own beneath it, and report."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hydra.types import RunMode

from optrun.commands.placement import is_place
from optrun.commands.single_run import Caller
from optrun.commands.sweep import Compare, run_points
from optrun.config import overrides, store
from optrun.config.literal import quote_path
from optrun.config.request import DEFAULT_CONFIG, CommandLine
from optrun.config.schema.sweeper import ConfirmConfig
from optrun.errors import ConfigError, StorageError
from optrun.sweeper.command import is_sweep

if TYPE_CHECKING:
    from optrun.report.confirmation import Confirmation


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What was asked of a confirmation; None: as `report.confirmation.prepare` has it."""

    seeds: Sequence[int] | None = None
    power: float | None = None
    baseline: str | None = None
    metric: str | None = None
    by: Sequence[str] = ()
    out: Path | None = None
    """Where its runs go; None: beneath the sweep."""

    @classmethod
    def of(cls, config: ConfirmConfig) -> Asked:
        """Read `hydra.sweeper.confirm`."""
        from optrun.report.confirmation import parse_power, parse_seeds

        return cls(
            seeds=None if config.seeds is None else parse_seeds(config.seeds),
            power=None if config.power is None else parse_power(str(config.power)),
            baseline=config.baseline,
        )


def confirm(
    sweep: Path, asked: Asked, caller: Caller, of_hydra: Sequence[str] = (), *, seconds: float | None = None
) -> int:
    """Plan, or go on with what was planned; run it as a sweep, and report.

    Args:
        sweep: Whose choice is confirmed.
        asked: How.
        caller: Who asked for it.
        of_hydra: Overrides that say where its jobs run, such as hydra/launcher=joblib.
        seconds: What a sweep before it has left of hydra.sweeper.timeout; None: as `of_hydra` has it.

    Returns:
        The exit code of the sweep that confirms.

    Raises:
        ConfigError: There is nothing to confirm, or something else was confirmed here.
    """
    from optrun.report import confirmation
    from optrun.report.build import report

    folder = asked.out if asked.out is not None else sweep / confirmation.FOLDER
    made, said = confirmation.prepare(
        sweep,
        folder,
        seeds=asked.seeds,
        power=asked.power,
        baseline=asked.baseline,
        metric=asked.metric,
        by=asked.by,
    )
    for line in said:
        caller.console.print(line, markup=False, highlight=False, soft_wrap=True)
    fresh = confirmation.read(folder) is None
    try:
        made.write(folder)
    except OSError as error:
        raise StorageError(f"{folder}: {error.strerror}. out=DIR names another folder.") from error

    def compare(runs: Path, _: int) -> None:
        if runs.resolve().parent == sweep.resolve():  # the report of the sweep shows what confirms it
            report([sweep], baseline=asked.baseline, metric=made.metric, by=asked.by, console=caller.console)
            return
        report([runs], console=caller.console)  # by its plan

    told = {"baseline": asked.baseline, "metric": asked.metric, "by": ",".join(asked.by) or None, "out": asked.out}
    words = [f"{key}={value}" for key, value in told.items() if value is not None]
    again = shlex.join(["optrun", "confirm", str(sweep), *words, *filter(is_place, of_hydra)])
    if seconds is not None:
        of_hydra = [token for token in of_hydra if not token.startswith("hydra.sweeper.timeout=")]
        of_hydra.append(f"hydra.sweeper.timeout={max(seconds, 1e-3)}")
    try:
        return _run(made, folder, caller, of_hydra, compare, again)
    except ConfigError:
        if fresh and [path.name for path in folder.iterdir()] == [confirmation.RECORD]:  # nothing was begun
            (folder / confirmation.RECORD).unlink()
            folder.rmdir()
        raise


def _run(
    made: Confirmation, folder: Path, caller: Caller, of_hydra: Sequence[str], compare: Compare, again: str
) -> int:
    config_dir = made.config_dir[-1] if made.config_dir else None
    hydra = store.open_hydra(config_dir)
    line = CommandLine(
        config_name=made.config_name or DEFAULT_CONFIG,
        names_config=made.config_name is not None,
        config_dir=config_dir,
        overrides=[*_placement(of_hydra), f"hydra.sweep.dir={quote_path(folder)}"],
    )
    overrides.checked(hydra, line.config_name, _placement(of_hydra), sweep=True)
    for tokens in made.contenders.values():
        overrides.checked(hydra, line.config_name, tokens, sweep=False)
    cfg = store.compose(hydra, line.config_name, list(line.overrides), RunMode.MULTIRUN)
    by_itself = is_sweep(hydra, replace(line, overrides=()))
    outcome = run_points(hydra, line, cfg, caller, made.points(), compare, again=again, sweeps_by_itself=by_itself)
    return outcome.exit_code


def _placement(of_hydra: Sequence[str]) -> list[str]:
    """Pick the overrides that are Hydra's, but for the directory of the sweep."""
    return [token for token in of_hydra if overrides.is_hydra(token) and not token.startswith("hydra.sweep.dir=")]
