"""`optrun -m`: one run per combination or trial, then the comparison."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from optrun.base.errors import (
    EXIT_STOPPED_EARLY,
    EXIT_STORAGE,
    ConfigError,
    StorageError,
    refuse_url,
)
from optrun.cli.sweep_checks import (
    refuse_early,
    refuse_other_code,
    refuse_unfit_confirmation,
    refuse_without_evaluation,
)
from optrun.cli.sweep_files import refuse_changed_files
from optrun.cli.values import PLACES
from optrun.config import overrides, store
from optrun.config.compose_errors import interpolation_error
from optrun.config.groups import default_values
from optrun.config.hydra_internals import Hydra
from optrun.config.keys import raw_value
from optrun.config.registry import origins, plugins
from optrun.config.request import CommandLine
from optrun.config.schema.sweeper import ConfirmConfig, GridConfig, OptunaConfig, SweeperConfig
from optrun.launch.single_run import Caller
from optrun.runner.forks.command_line import Forks
from optrun.sweeper import jobs as jobs_of
from optrun.sweeper.command import SweepCommand, is_sweep
from optrun.sweeper.contenders import Contender, contenders_of, search_overrides
from optrun.sweeper.devices import KEY, find_devices, job_devices, refuse_misplaced
from optrun.sweeper.driver import Driver, PlannedJob
from optrun.sweeper.folder import SweepDir
from optrun.sweeper.stop import Stop
from optrun.sweeper.view import View, short
from optrun.sweeper.workers import Workers

if TYPE_CHECKING:
    from optrun.report.verdict import SweepVerdict
    from optrun.sweeper.search import Search

_SWEEPER = "hydra.sweeper."


Compare = Callable[[Path, int], "SweepVerdict"]
"""Takes the directory of a sweep that has ended, and its exit code."""


@dataclass(frozen=True)
class SweepOutcome:
    """The outcome of a sweep."""

    folder: Path
    exit_code: int
    """0: every job finished; 1: one failed; 74: the disk refused; 75: stopped with everything
    saved."""
    jobs: tuple[str, ...]
    """Folders of the jobs, below `folder`."""
    confirm: ConfirmConfig | None = None
    """The confirmation that follows; None: none."""
    seconds_left: float | None = None
    """What is left of `hydra.sweeper.timeout` for the confirmation; None: there is no limit."""
    verdict: SweepVerdict | None = None
    """The verdict of its report; None: no job began, or the disk refused."""


@dataclass(frozen=True)
class _Plan:
    """The jobs of a sweep and how to run them."""

    command: SweepCommand
    options: SweeperConfig
    jobs: list[jobs_of.Job] = field(default_factory=list)
    """All of them; empty for a search."""
    search: Search | None = None
    """Draws the values of each trial; None: a grid."""
    tuned: list[str] = field(default_factory=list)
    """Searched keys: runs that differ only in these belong to the same contender of the report."""

    @property
    def examples(self) -> list[jobs_of.Job]:
        """Jobs to check before the start, as examples of all jobs."""
        if self.search is None:
            return self.jobs
        return self.search.examples()

    @property
    def seeds(self) -> list[int]:
        """Seeds of all jobs or trials."""
        if self.search is None:
            return [job.values["seed"] for job in self.jobs]
        return self.search.seeds()


def sweep(
    hydra: Hydra, command_line: CommandLine, cfg: DictConfig, caller: Caller, forks: Forks
) -> SweepOutcome:
    """Run every unfinished combination or trial, then compare.

    Args:
        hydra: Composes configurations, also from the user's folders.
        command_line: The command line; all overrides are checked except those of one optimizer.
        cfg: The composed configuration of the sweep, with the node `hydra`.
        caller: The command line or a Python program, and where it prints.
        forks: Checks the overrides, and with `branch_from` adds those of the run to branch from.

    Raises:
        ConfigError: A key, choice or combination is invalid; nothing was started.
    """
    command = _command(hydra, command_line)
    options = sweeper_options(cfg)
    # 1. The contenders: optimizers, each with overrides and ranges of its own. Without
    # `search.OPTIMIZER.KEY` one contender for each grid, or a single one without grids.
    grids = options.grids if isinstance(options, GridConfig) else []
    contenders: list[Contender] = []
    for grid in grids or [{}]:
        contenders += _build_contenders(hydra, forks, command, options, grid)
    # 2. The trials of a search, or the jobs of a grid. Composing them refuses what does not fit.
    compose = jobs_of.Composer(
        hydra, command.config_name, complete=forks.complete, require=forks.refuse_other_position
    )
    if isinstance(options, OptunaConfig):
        from optrun.sweeper.search import Search

        search = Search(hydra, compose, options, contenders)
        plan = _Plan(command, options, search=search, tuned=search.tuned())
    else:
        points: list[list[str]] = []
        tuned: set[str] = set()
        for contender in contenders:
            points += jobs_of.combinations(hydra, contender.overrides)  # one for each job
            tuned |= contender.own_keys
        plan = _Plan(command, options, jobs_of.build_jobs(compose, points), tuned=sorted(tuned))
    # 3. The confirmation, if there is one, is checked before the sweep starts.
    confirms = options.confirm.asked
    if confirms:
        refuse_unfit_confirmation(options.confirm, plan.seeds, plan.examples)

    def write_report(folder: Path, exit_code: int) -> SweepVerdict:
        from optrun.report.build import report

        is_brief = confirms and exit_code != EXIT_STOPPED_EARLY  # a confirmation's report follows
        return report([folder], console=caller.console, brief=is_brief).verdict

    # 4. The sweep. Its confirmation is left to the caller.
    outcome = _run(plan, cfg, caller, write_report)
    return replace(outcome, confirm=options.confirm if confirms else None)


def run_points(
    hydra: Hydra,
    command_line: CommandLine,
    caller: Caller,
    points: Iterable[Sequence[str]],
    compare: Compare,
    *,
    again: str,
) -> SweepOutcome:
    """Run given points as a sweep, one job for each, then compare.

    Of the sweeper in the configuration only the options are used that say where jobs run, such as
    its devices (see `PLACES`); its grids and parameters are not.

    Args:
        hydra: Composes configurations, also from the user's folders.
        command_line: The command line, with Hydra's overrides only.
        caller: The command line or a Python program, and where it prints.
        points: The overrides of each job.
        compare: Called with the folder and the exit code when the sweep has ended.
        again: The command that continues the sweep, for messages.
    """
    command = _command(hydra, command_line)
    cfg = store.compose(hydra, command.config_name, list(command.overrides), RunMode.MULTIRUN)
    recipe_options = sweeper_options(cfg)
    option_names = [key.removeprefix(_SWEEPER) for key in PLACES if key.startswith(_SWEEPER)]
    options = _plain_grid(**{name: getattr(recipe_options, name) for name in option_names})
    compose = jobs_of.Composer(hydra, command.config_name)
    jobs = jobs_of.build_jobs(compose, points)
    return _run(_Plan(command, options, jobs), cfg, caller, compare, again)


def _command(hydra: Hydra, command_line: CommandLine) -> SweepCommand:
    """Build the command of a sweep for its workers, with the loaded plugins.

    `sweeps_by_itself` is true if the recipe is a sweep without any override: each job must then ask
    for a single run.
    """
    return SweepCommand(
        argv=command_line.argv,
        config_name=command_line.config_name,
        names_config=command_line.names_config,
        config_dir=command_line.config_dir,
        # The values of a file without a defaults list are overrides of each job.
        config_file=command_line.config_file if command_line.names_config else "",
        overrides=command_line.overrides,
        plugins=list(plugins.LOADED.values()),
        plugins_may_change=origins.changes_allowed(),
        sweeps_by_itself=is_sweep(hydra, replace(command_line, overrides=())),
    )


def _run(
    plan: _Plan, cfg: DictConfig, caller: Caller, compare: Compare, again: str = ""
) -> SweepOutcome:
    """Run the plan in the sweep directory, then compare.

    Args:
        plan: The jobs and how to run them.
        cfg: The composed configuration of the sweep.
        caller: The command line or a Python program, and where it prints.
        compare: Called when the sweep has ended, unless no job began or the disk refused.
        again: The command that continues the sweep; empty: the same command.

    Raises:
        ConfigError: The sweep cannot work; no job has started then.
    """
    options = plan.options
    examples = plan.examples
    search = plan.search
    # 1. Refuse what cannot work, before the first job starts: each `refuse_` raises ConfigError.
    # `search` runs the trials of a search; None: the sweep is a grid, whose jobs are known.
    refuse_early(examples, plan.command, cfg.hydra.launcher)
    if search is not None:
        refuse_without_evaluation(examples)
    # Empty unless the user asks for devices.
    devices = _devices(options, examples, str(cfg.hydra.runtime.choices["hydra/launcher"]))
    folder = _make_folder(cfg)  # it may exist: the sweep then continues
    directory = SweepDir(folder)
    directory.prepare()
    refuse_other_code(directory)
    # A grid without an unfinished job only compares again, and reads no data.
    if search is not None or any(
        directory.state(job.name).status != "finished" for job in plan.jobs
    ):
        refuse_changed_files(directory, examples)
    with Stop(owns_process=caller.owns_process, seconds=options.timeout) as stop:
        view = View(caller.console)
        workers = Workers(devices, directory.log)
        driver = Driver(directory, plan.command, options, workers, view, stop, tuned=plan.tuned)
        _tell_devices(devices, examples, options, view)
        _tell_left_out(plan.jobs, view)
        # 2. Run the jobs.
        try:
            if search is not None:
                search(driver)
            else:
                driver.add(plan.jobs)
                view.note(_opening(driver, folder))
                # It asks for the jobs anew whenever some have ended; those of a grid stay the same.
                driver.run_unfinished_jobs(lambda: list(map(PlannedJob, plan.jobs)))
        finally:
            view.stop()
            driver.close()
            # Without a job the result of an earlier start stays.
            if driver.job_table.rows:
                with contextlib.suppress(*([OSError] if stop.refused else [])):
                    driver.write_result()
        # 3. Compare, and say how it ended.
        exit_code = driver.exit_code()  # EXIT_STORAGE: the disk refused a write
        verdict = None
        has_begun = driver.job_table.count("new") < len(driver.job_table.rows)
        if exit_code != EXIT_STORAGE and has_begun:
            verdict = compare(folder, exit_code)
        again = again or f"The same command with hydra.sweep.dir={folder}"
        end = ""
        if stop.refused:
            end = (
                f"paused: {stop.refused} Make room. {again} continues it. Jobs start from their"
                " last checkpoints."
            )
        elif exit_code == EXIT_STOPPED_EARLY:
            end = f"stopped; what ran is saved. {again} continues it."
        _tell_end(driver, end)
    return SweepOutcome(
        folder,
        exit_code,
        tuple(driver.job_table.rows),
        seconds_left=stop.seconds_left,
        verdict=verdict,
    )


def _devices(options: SweeperConfig, jobs: list[jobs_of.Job], launcher: str) -> list[str]:
    """Find the devices of the sweep; none unless it asks for some.

    Raises:
        ConfigError: A device is missing or does not suit a job, or the launcher places jobs itself.
    """
    if options.devices is None:
        return []
    if launcher != "basic":
        raise ConfigError(
            f"hydra/launcher={launcher}: expected basic, the default. With {KEY}={options.devices}"
            " optrun starts a process on each device of this machine by itself; on a cluster a"
            " launcher's own keys ask for devices, such as hydra.launcher.gpus_per_node=1. Leave"
            " one of them out."
        )
    devices = find_devices(options.devices)
    for job in jobs:
        refuse_misplaced(job.values, job.label, len(devices))
    return devices


def _tell_devices(
    devices: list[str], examples: list[jobs_of.Job], options: SweeperConfig, view: View
) -> None:
    """Print the devices of the sweep; nothing without `hydra.sweeper.devices`.

    A search whose `n_jobs` leaves devices idle gets a note.
    """
    if not devices:
        return
    view.note(f"devices: {', '.join(devices)}")
    if isinstance(options, OptunaConfig):
        devices_of_job = max(job_devices(job.values, len(devices)) for job in examples)
        if options.n_jobs * devices_of_job < len(devices):
            view.note(
                f"hydra.sweeper.n_jobs={options.n_jobs} trials run at a time;"
                f" hydra.sweeper.n_jobs={len(devices) // devices_of_job} would use all"
                f" {len(devices)} devices."
            )


def _tell_left_out(jobs: list[jobs_of.Job], view: View) -> None:
    """Print the points left out because they equal another point.

    `distributed=ddp,fsdp` gives one, for example. One line names them all.
    """
    equal = [f"{point} (the same run as {job.label})" for job in jobs for point in job.left_out]
    if equal:
        view.note(
            f"left out, since no result depends on what differs: {', '.join(equal)}. To run one,"
            " too, give it a hydra.sweep.dir of its own."
        )


def sweeper_options(cfg: DictConfig) -> SweeperConfig:
    """Read `hydra.sweeper` into its dataclass; Hydra's own `basic` means a grid.

    Of `basic` only `max_batch_size` and `params` are read.

    Raises:
        ConfigError: The sweeper is another one, a value is out of range, or an interpolation has
            no value.
    """
    node = cfg.hydra.sweeper
    try:
        values: dict[str, object] = OmegaConf.to_container(node, resolve=True)  # type: ignore[assignment]
        target = str(values.get("_target_", ""))
        if target.endswith(".BasicSweeper"):
            return _plain_grid(
                max_batch_size=values.get("max_batch_size"), params=values.get("params") or {}
            )
        options = OmegaConf.to_object(node)
    except OmegaConfBaseException as error:
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from error
        raise interpolation_error(cfg, error) from error
    if not isinstance(options, SweeperConfig):
        raise ConfigError(
            f"hydra/sweeper: {target or node} is not optrun's. Choices: grid, optuna, basic."
        )
    return options


def _plain_grid(**changed: object) -> GridConfig:
    """Build the default options of a grid under the name `basic`, with some keys changed."""
    values = {**default_values("hydra/sweeper", "grid"), "name": "basic", **changed}
    return GridConfig(**{**values, "confirm": ConfirmConfig(**values["confirm"])})


def _build_contenders(
    hydra: Hydra,
    forks: Forks,
    command: SweepCommand,
    options: SweeperConfig,
    grid: dict[str, object],
) -> list[Contender]:
    """Build the contenders of one grid, with checked overrides.

    A contender is one optimizer with its own keys, or with no `search.OPTIMIZER.KEY` all of them.

    Args:
        hydra: Composes configurations.
        forks: Checks the overrides, also those of branches.
        command: The command of the sweep.
        options: `hydra.sweeper`.
        grid: One of `hydra.sweeper.grids`; empty if there are none.

    Raises:
        ConfigError: An override is invalid, or for an optimizer that is not listed.
    """
    # 1. The overrides of all sources. If two give the same key, the later source wins.
    in_file = [*jobs_of.param_overrides(options.params), *search_overrides(options.search)]
    in_grid = jobs_of.param_overrides(grid, "hydra.sweeper.grids")
    typed = [token for token in command.overrides if not overrides.is_hydra(token)]
    tokens = jobs_of.merged(jobs_of.merged(in_file, in_grid), typed)
    # 2. Those of one optimizer (`search.lamb.lr=1e-3,2e-3`), and those of all. The former are
    # checked with the optimizer that they are for.
    search_tokens = list(filter(overrides.is_search, tokens))
    common_tokens = [token for token in tokens if not overrides.is_search(token)]
    check = partial(forks.check, sweep=True)  # refuses, or returns the tokens for Hydra
    return contenders_of(hydra, check, check(common_tokens), search_tokens)


def _make_folder(cfg: DictConfig) -> Path:
    """Make the sweep directory.

    A folder named by the time is always new: it gets a number if another sweep began in the same
    second. Any other may exist, since the sweep then continues.

    Raises:
        ConfigError: A file has that name.
        StorageError: The folder cannot be created.
    """
    refuse_url("hydra.sweep.dir", str(cfg.hydra.sweep.dir))
    folder = Path(str(cfg.hydra.sweep.dir))
    is_named_by_time = "now:" in str(raw_value(cfg, "hydra.sweep.dir"))
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"hydra.sweep.dir={folder}: this is a file. Choose another directory.")
    number = 2
    candidate = folder
    while True:
        try:
            candidate.mkdir(parents=True, exist_ok=not is_named_by_time)
            return candidate
        except FileExistsError:
            candidate = folder.with_name(f"{folder.name}-{number}")
            number += 1
        except OSError as error:
            raise StorageError(
                f"hydra.sweep.dir={folder}: {error.strerror}. Choose another directory."
            ) from error


def _opening(driver: Driver, folder: Path) -> str:
    """Write the first line of a sweep: its jobs, its folder, and the jobs of earlier starts.

    Such as `12 jobs -> outputs/sweeps/a · 3 finished before · 1 to continue with`. For failed jobs
    it says whether `hydra.sweeper.retry_failed` tries them again.
    """
    count = driver.job_table.count
    phrases = [f"{driver.job_table.total} jobs -> {folder}"]
    finished = count("finished")
    if finished:
        phrases.append(f"{finished} finished before")
    unfinished = count("running", "interrupted")
    if unfinished:
        phrases.append(f"{unfinished} to continue with")
    failed = count("failed")
    if failed and driver.options.retry_failed:
        phrases.append(f"{failed} failed before, tried again")
    elif failed:
        phrases.append(
            f"{failed} failed before, left (hydra.sweeper.retry_failed=true tries again)"
        )
    return " · ".join(phrases)


def _tell_end(driver: Driver, end: str) -> None:
    """Print the counts of job results below the comparison, and the failures of earlier starts.

    After a search with a pruner also the steps that it saved.

    Args:
        driver: The driver of the sweep.
        end: Why the sweep was stopped, and how to continue it; empty if it was not stopped.
    """
    note = driver.view.note
    job_table = driver.job_table
    note(job_table.counts())  # such as "2 of 8 finished · 1 running · ..."
    if isinstance(driver.options, OptunaConfig) and driver.options.prunes:
        done, all_steps = job_table.steps()
        note(f"{done:,} of {all_steps:,} steps done; pruning saved {all_steps - done:,}")
    for row in driver.failed_before:  # those of this start were told when they ended
        log = driver.sweep.run_dir(row.job.name).log
        note(f"failed before: {row.job.label}: {short(row.state.message)}  ({log})")
    if end:
        note(end)
