"""Runs and sweeps from Python, by the same arguments as on the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from optrun.api.calls import Location, caller, command_line_of, load_plugins
from optrun.api.one_call import one_call
from optrun.api.saved_run import Result, Run, load_run, result_of
from optrun.base.errors import ConfigError
from optrun.config.schema.run import RunConfig

if TYPE_CHECKING:
    from optrun.report.lr_scaling.predict import Prediction
    from optrun.report.verdict import SweepVerdict


@dataclass(frozen=True)
class SweepResult:
    """How a sweep ended."""

    sweep_dir: Path
    """Absolute."""
    exit_code: int
    """0 if every job finished, 1 if one failed, 75 if the sweep was stopped and all is saved."""
    runs: tuple[Run, ...]
    """The runs that have begun."""
    verdict: SweepVerdict | None
    """Which contenders could be the best, and how sure that is: the first line of the report.

    None: no job began.
    """


def run(
    overrides: Sequence[str] = (),
    *,
    config_name: str | None = None,
    config_dir: Location | None = None,
    plugins: Sequence[Location] = (),
    quiet: bool = False,
) -> Result:
    """Train a model, or resume a run, as `optrun` does with the same arguments.

    Args:
        overrides: `key=value` as on the command line, `resume=...` among them.
        config_name: A recipe, as `-cn`.
        config_dir: A folder of choices and recipes of your own, as `--config-dir`.
        plugins: Files or modules that register choices, as `--plugin`.
        quiet: Whether nothing is printed; the run directory has it all.

    Returns:
        Metrics, summary, model and run directory.

    Raises:
        ConfigError: A key or value is unknown or does not fit; nothing was started.
        StoppedEarly: A signal, such as Ctrl-C, or the time budget ended the run with everything
            saved; a second Ctrl-C raises KeyboardInterrupt at once.
        OptrunError: Any other failure; `exit_code` is that of the command line.
    """
    command_line = command_line_of(overrides, config_name, config_dir)
    with one_call():
        from optrun.cli.train import is_sweep, train
        from optrun.config import store

        load_plugins(plugins)
        hydra = store.open_hydra(command_line.config_dir)
        if is_sweep(hydra, command_line):
            raise ConfigError(
                "this recipe is a sweep. Start it with optrun.sweep(...), or add hydra.mode=RUN for"
                " a single run of it."
            )
        return result_of(train(hydra, command_line, caller(quiet=quiet)))


def sweep(
    overrides: Sequence[str] = (),
    *,
    config_name: str | None = None,
    config_dir: Location | None = None,
    plugins: Sequence[Location] = (),
    quiet: bool = False,
) -> SweepResult:
    """Run every combination, or a search, as `optrun -m` does with the same arguments.

    A repeated call with the same `hydra.sweep.dir` continues the sweep.

    Args:
        overrides: `key=value` as on the command line; several values, `lr=1e-3,2e-3`, are an axis.
        config_name: A recipe, as `-cn`.
        config_dir: A folder of choices and recipes of your own, as `--config-dir`.
        plugins: Files or modules that register choices, as `--plugin`.
        quiet: Whether nothing is printed.

    Returns:
        The runs, and whether all are done; a failed job does not stop the others.

    Raises:
        ConfigError: A key or value is unknown or does not fit; nothing was started.
        OptrunError: The launcher fails.
    """
    command_line = command_line_of(overrides, config_name, config_dir)
    with one_call():
        from optrun.cli.train import start_sweep
        from optrun.config import store

        load_plugins(plugins)
        outcome = start_sweep(
            store.open_hydra(command_line.config_dir), command_line, caller(quiet=quiet)
        )
    folder = outcome.folder.resolve()
    runs = tuple(
        load_run(folder / job) for job in outcome.jobs if (folder / job / "config.yaml").is_file()
    )
    return SweepResult(folder, outcome.exit_code, runs, outcome.verdict)


def compose(
    overrides: Sequence[str] = (),
    *,
    config_name: str | None = None,
    config_dir: Location | None = None,
    plugins: Sequence[Location] = (),
) -> RunConfig:
    """Compose and check a configuration without running it.

    Args:
        overrides: `key=value` as on the command line.
        config_name: A recipe, as `-cn`.
        config_dir: A folder of choices and recipes of your own, as `--config-dir`.
        plugins: Files or modules that register choices, as `--plugin`.

    Returns:
        Typed values, such as `.optimizer.weight_decay`.

    Raises:
        ConfigError: A key or value is unknown or does not fit.
    """
    command_line = command_line_of(overrides, config_name, config_dir)
    with one_call():
        from optrun.config import store
        from optrun.config.compose import compose_request
        from optrun.runner.forks.command_line import add_trunk_config

        load_plugins(plugins)
        hydra = store.open_hydra(command_line.config_dir)
        return compose_request(hydra, add_trunk_config(hydra, command_line)).config


def transfer(
    sweeps: Sequence[Location], to: Mapping[str, float], *, metric: str | None = None
) -> Prediction:
    """Predict the learning rate for another size from sweeps over lr, as `optrun transfer` does.

    Args:
        sweeps: Directories of sweeps at two sizes or more.
        to: The target size: keys that varied in the sweeps -> values, such as
            `{"model.config.n_embd": 512}`.
        metric: Metric that defines the best lr; None: the main metric of the runs.

    Returns:
        For each contender (runs that differ only in lr, size and seed) the lr with its interval,
        the exponents, and runs to test it.

    Raises:
        TypeError: `sweeps` is a single directory, not a list; or `to` is empty or no mapping.
        ConfigError: The sweeps do not suffice; the message says which runs are missing.
    """
    if isinstance(sweeps, str | PathLike):
        raise TypeError(
            f'sweeps={sweeps!r}: expected a list of directories, such as ["outputs/sweeps/small"].'
        )
    if not isinstance(to, Mapping) or not to:
        raise TypeError(
            f'to={to!r}: expected keys and numbers, such as {{"model.config.n_embd": 512}}.'
        )
    from optrun.report.lr_scaling.predict import predict

    return predict([Path(sweep) for sweep in sweeps], to, metric)
