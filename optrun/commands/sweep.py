"""`optrun -m`: one run per combination or trial, then the comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console

from optrun.artifacts.metrics import read_summary
from optrun.commands.branch import Branching
from optrun.commands.rank_checks import refuse_composed, refuse_idle_nproc
from optrun.commands.single_run import Caller
from optrun.config import overrides, saved, store
from optrun.config.compose_errors import interpolation
from optrun.config.hydra_internals import Hydra
from optrun.config.request import CommandLine
from optrun.config.schema.distributed import RanksConfig
from optrun.config.schema.optimizer import PytorchOptimizerConfig
from optrun.config.schema.sweeper import GridConfig, OptunaConfig, SweeperConfig
from optrun.errors import EXIT_STOPPED_EARLY, ConfigError, StorageError, printable, refuse_url
from optrun.registry import origins, plugins
from optrun.sweeper import jobs as jobs_of
from optrun.sweeper.command import SweepCommand
from optrun.sweeper.devices import KEY, Device, find_devices, job_devices, refuse_misplaced
from optrun.sweeper.driver import Driver, clean
from optrun.sweeper.folder import SweepDir
from optrun.sweeper.halving import through_rungs
from optrun.sweeper.pool import DevicePool
from optrun.sweeper.stop import Stop
from optrun.sweeper.view import PlainView, make_view, short
from optrun.sweeper.workers import DeviceWorkers, OneWorker
from optrun.tracking import require_tracker

_SHOWN_LEFT_OUT = 4


@dataclass(frozen=True)
class SweepOutcome:
    """How a sweep ended."""

    folder: Path
    exit_code: int
    """0 where every job finished, 1 where one failed, 75 where it was stopped with everything saved."""
    jobs: tuple[str, ...]
    """Folders of the jobs, below `folder`."""


def sweep(
    hydra: Hydra,
    command_line: CommandLine,
    cfg: DictConfig,
    caller: Caller,
    branching: Branching,
    *,
    sweeps_by_itself: bool,
) -> SweepOutcome:
    """Run every combination or trial that is not done yet, then compare.

    Args:
        hydra: Over the user's folders.
        command_line: Its overrides are checked.
        cfg: Composed for the sweep, Hydra's node in it.
        caller: Who asked for it.
        branching: Makes the overrides of a job whole that branches from a trunk.
        sweeps_by_itself: Whether the recipe is a sweep without `-m`.

    Raises:
        ConfigError: A key, choice or combination that does not exist; nothing was started.
    """
    command = SweepCommand(
        **vars(command_line),
        plugins=list(plugins.LOADED.values()),
        plugins_may_change=origins.changes_allowed(),
        sweeps_by_itself=sweeps_by_itself,
    )
    options = sweeper_options(cfg)
    compose = jobs_of.Composer(hydra, command.config_name, whole=branching, require=branching.require_place)
    grids = [_checked(branching, command, options.params, grid) for grid in _grids(options)]
    jobs: list[jobs_of.Job] = []
    if isinstance(options, OptunaConfig):
        from optrun.sweeper.search import Search

        search = Search(hydra, compose, options, grids[0])
        judged = search.placements()
    else:
        search = None
        points = (point for grid in grids for point in jobs_of.combinations(hydra, grid))
        judged = jobs = jobs_of.build_jobs(compose, points)
    _refuse_early(judged, command)
    if search is not None or options.rungs:
        _refuse_unjudged(judged)
    devices = _devices(options, judged, str(cfg.hydra.runtime.choices["hydra/launcher"]))
    pool = DevicePool(devices) if devices else None
    folder = _folder(cfg)
    directory = SweepDir(folder)
    directory.prepare()
    _refuse_other_code(directory)
    clean(directory)
    with Stop(owns_process=caller.owns_process) as stop:
        view = make_view(caller.console, f"optrun · sweep · {folder}")
        workers = OneWorker(directory.log) if pool is None else DeviceWorkers(pool, directory.log)
        driver = Driver(directory, command, options, workers, view, stop)
        _tell_devices(devices, judged, options, view)
        _tell_left_out(jobs, view)
        try:
            if search is not None:
                search(driver)
            else:
                driver.add(jobs)
                view.note(_opening(driver, folder))
                _tell_power(jobs, command.overrides, view)
                through_rungs(driver, jobs)
        finally:
            view.stop()
            driver.close()
            if driver.board.jobs:  # a start that was refused leaves the result of the one before
                driver.write_result()
        code = _close(driver, folder, caller.console)
    return SweepOutcome(folder, code, tuple(job.name for job in driver.board.jobs))


def _devices(options: SweeperConfig, jobs: list[jobs_of.Job], launcher: str) -> list[Device]:
    """The devices of the sweep; none where it was not asked for any.

    Raises:
        ConfigError: They are not there, a job cannot have them, or a launcher is to place the jobs, too.
    """
    if options.devices is None:
        return []
    given = f"{KEY}={options.devices}"
    if launcher != "basic":
        raise ConfigError(
            f"hydra/launcher={launcher}: expected basic, the default. With {given} optrun starts a process on each "
            "device of this machine by itself; on a cluster a launcher's own keys ask for devices, such as "
            "hydra.launcher.gpus_per_node=1. Leave one of them out."
        )
    devices = find_devices(options.devices)
    for job in jobs:
        refuse_misplaced(job.values, job.label, len(devices))
    return devices


def _tell_devices(devices: list[Device], jobs: list[jobs_of.Job], options: SweeperConfig, view: PlainView) -> None:
    """Say which devices are used, and which of them a search leaves idle."""
    if not devices:
        return
    view.note(f"devices: {', '.join(f'{device.visible} ({device.uuid})' for device in devices)}")
    if isinstance(options, OptunaConfig):
        widest = max(job_devices(job.values, len(devices)) for job in jobs)
        if options.n_jobs * widest < len(devices):
            view.note(
                f"hydra.sweeper.n_jobs={options.n_jobs}: so many trials are proposed and run at a time; "
                f"hydra.sweeper.n_jobs={len(devices) // widest} would use all {len(devices)} devices."
            )


def _tell_left_out(jobs: list[jobs_of.Job], view: PlainView) -> None:
    """Say which points are not run, since another one is the same run: `distributed=ddp,fsdp`, for one."""
    doubled = [job for job in jobs if job.left_out]
    for job in doubled[:_SHOWN_LEFT_OUT]:
        view.note(
            f"{'; '.join(job.left_out)}: left out: the same run as {job.label}, since no result depends on what "
            "differs. To run it, too, give it a hydra.sweep.dir of its own."
        )
    if len(doubled) > _SHOWN_LEFT_OUT:
        view.note(f"the same of {len(doubled) - _SHOWN_LEFT_OUT} more jobs")


def _tell_power(jobs: list[jobs_of.Job], overrides: Sequence[str], view: PlainView) -> None:
    """Say what the report will be able to see, while it can still be changed."""
    if len({job.values.get("seed") for job in jobs}) < 2:
        return
    from optrun.report.forecast import forecast

    if foretold := forecast([job.values for job in jobs], overrides):
        view.note(foretold)


def sweeper_options(cfg: DictConfig) -> SweeperConfig:
    """The typed `hydra.sweeper`; Hydra's own `basic` is a grid.

    Raises:
        ConfigError: Another sweeper, or a value out of range.
    """
    node = cfg.hydra.sweeper
    try:
        values: dict[str, Any] = OmegaConf.to_container(node, resolve=True)  # type: ignore[assignment]
        target = str(values.get("_target_", ""))
        if target.endswith(".BasicSweeper"):
            return GridConfig(
                name="basic",
                params=values.get("params") or {},
                retry_failed=False,
                max_batch_size=values.get("max_batch_size"),
                devices=None,
                rungs=[],
                reduction_factor=2,
                grids=[],
            )
        made = OmegaConf.to_object(node)
    except OmegaConfBaseException as error:
        cause = error.__cause__
        if isinstance(cause, ConfigError):
            raise cause from error
        raise interpolation(cfg, error) from error
    if not isinstance(made, SweeperConfig):
        raise ConfigError(f"hydra/sweeper: {target or node} is not optrun's. Choices: grid, optuna, basic.")
    return made


def _grids(options: SweeperConfig) -> list[dict[str, Any]]:
    return (options.grids or [{}]) if isinstance(options, GridConfig) else [{}]


def _checked(branching: Branching, command: SweepCommand, params: dict[str, Any], grid: dict[str, Any]) -> list[str]:
    """The overrides of one grid: the file's under the grid's under the command line's, all known by name."""
    own = [token for token in command.overrides if not overrides.is_hydra(token)]
    subdir = [token for token in command.overrides if token.startswith("hydra.sweep.subdir=")]
    if subdir:
        raise ConfigError(
            f"{subdir[0]}: the folder of a job is named by what the job is; hydra.sweep.dir=DIR moves all."
        )
    below = jobs_of.merged(jobs_of.param_overrides(params), jobs_of.param_overrides(grid, "hydra.sweeper.grids"))
    return branching.checked(jobs_of.merged(below, own), sweep=True)


def _refuse_early(jobs: list[jobs_of.Job], command: SweepCommand) -> None:
    """Refuse what every job would refuse by itself, before the first of them starts."""
    from optrun.config.safety import refuse_stored_trust

    for job in jobs:
        refuse_stored_trust(OmegaConf.create(dict(job.values)), command.overrides)
        if job.values["distributed"]["name"] != "none":
            _refuse_unfit_ranks(job)
    typed = any(token.startswith("training.nproc_per_node=") for token in command.overrides)
    if typed and all(job.values["distributed"]["name"] == "none" for job in jobs):
        for job in jobs:
            refuse_idle_nproc(job.values["training"]["nproc_per_node"])
    for job in {str([job.values[group] for group in ("tracking", "optimizer")]): job for job in jobs}.values():
        config = saved.with_schemas(job.values, job.label)
        require_tracker(OmegaConf.to_object(config.tracking))  # type: ignore[arg-type]
        if OmegaConf.get_type(config.optimizer) is PytorchOptimizerConfig:
            from optrun.optimizer.build import require_optimizer  # needs torch, as the library does

            require_optimizer(OmegaConf.to_object(config.optimizer))  # type: ignore[arg-type]


def _refuse_unfit_ranks(job: jobs_of.Job) -> None:
    """Refuse a job whose ranks cannot be; which devices there are, its own process sees, perhaps on another machine.

    Raises:
        ConfigError: With the key and the job.
    """
    config = store.typed(saved.with_schemas(job.values, job.label))
    distributed, given = config.distributed, config.training.nproc_per_node
    assert isinstance(distributed, RanksConfig)
    try:
        refuse_composed(config, None if given == "auto" else int(given) * distributed.nnodes)
    except ConfigError as error:
        raise ConfigError(f"{error} In the job {job.label}.") from error


def _refuse_other_code(directory: SweepDir) -> None:
    """Refuse to go on with a sweep whose jobs were trained with code that changed since.

    Raises:
        ConfigError: Naming the job, what it used, and both digests.
    """
    for summary in sorted(directory.path.glob("*/summary.json")):
        try:
            recorded = read_summary(summary).get("plugins", ())
        except (OSError, ValueError):
            continue  # torn away with its process: the job begins anew
        origins.require(recorded, str(summary.parent))


def _refuse_unjudged(jobs: list[jobs_of.Job]) -> None:
    """A search, or rungs, go by a metric; a plain grid may do without.

    Raises:
        ConfigError: The jobs have no rows to evaluate on.
    """
    for job in jobs:
        data = job.values["data"]
        # Other sources, such as the hub's, may bring evaluation rows of their own.
        by_key_alone = data.get("kind", data["name"]) in ("stdlib", "files", "tokens")
        if data["eval_fraction"] == 0 and by_key_alone and data.get("eval") is None:
            raise ConfigError(
                "data.eval_fraction=0: a search (hydra/sweeper=optuna) and rungs go by an evaluation, and there is "
                "none. Give data.eval or a fraction above 0, and train on all rows when the choice is made."
            )


def _folder(cfg: DictConfig) -> Path:
    """The sweep directory; one that is named by the clock is new, even where two sweeps begin in the same second.

    Raises:
        ConfigError: There is a file of that name.
        StorageError: It cannot be made.
    """
    refuse_url("hydra.sweep.dir", str(cfg.hydra.sweep.dir))
    folder = Path(str(cfg.hydra.sweep.dir))
    clocked = "now:" in str(OmegaConf.to_container(cfg.hydra.sweep, resolve=False)["dir"])  # type: ignore[index,call-overload]
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"hydra.sweep.dir={folder}: this is a file.")
    number, free = 2, folder
    while True:
        try:
            free.mkdir(parents=True, exist_ok=not clocked)
            return free
        except FileExistsError:
            free, number = folder.with_name(f"{folder.name}-{number}"), number + 1
        except OSError as error:
            raise StorageError(f"hydra.sweep.dir={folder}: {error.strerror}. Choose another directory.") from error


def _opening(driver: Driver, folder: Path) -> str:
    states = list(driver.board.states.values())
    done = sum(state.status == "finished" for state in states)
    failed = sum(state.status == "failed" for state in states)
    cut = sum(state.status in ("running", "interrupted") for state in states)
    pieces = [f"{len(states)} jobs -> {folder}"]
    if done:
        pieces.append(f"{done} finished before")
    if cut:
        pieces.append(f"{cut} to go on with")
    if failed:
        again = "tried again" if driver.options.retry_failed else "left (hydra.sweeper.retry_failed=true tries again)"
        pieces.append(f"{failed} failed before, {again}")
    return " · ".join(pieces)


def _close(driver: Driver, folder: Path, console: Console) -> int:
    from optrun.report.build import report

    code = driver.exit_code()
    if any(state.status != "new" for state in driver.board.states.values()):
        report([folder], console=console)
    console.print(driver.board.counts(), highlight=False)
    if driver.options.rungs:
        done, whole = driver.steps()
        console.print(f"{done:,} of {whole:,} steps done; halving saved {whole - done:,}", highlight=False)
    for job in driver.failed_before:  # those of this start were told when they ended
        failure = f"failed before: {job.label}: {short(driver.board.states[job.name].message)}"
        line = printable(f"{failure}  ({driver.sweep.run(job.name).log})")
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if code == EXIT_STOPPED_EARLY:
        console.print(
            f"stopped; what ran is saved. The same command with hydra.sweep.dir={folder} goes on.",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
    return code
