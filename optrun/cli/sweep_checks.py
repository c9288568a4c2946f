"""What a sweep refuses before its first job starts."""

from collections.abc import Sequence

from omegaconf import OmegaConf

from optrun.base.errors import ConfigError
from optrun.base.plain import PlainMapping
from optrun.config import saved, store
from optrun.config.registry import origins
from optrun.config.safety import refuse_stored_trust
from optrun.config.schema.distributed import RanksConfig
from optrun.config.schema.optimizer import PytorchOptimizerConfig
from optrun.config.schema.sweeper import ConfirmConfig
from optrun.config.tokens import is_typed
from optrun.launch.rank_checks import refuse_composed, refuse_idle_nproc
from optrun.sweeper.command import SweepCommand
from optrun.sweeper.folder import SweepDir
from optrun.sweeper.jobs import Job
from optrun.training.trackers import require_tracker


def refuse_early(jobs: list[Job], command: SweepCommand, launcher: PlainMapping) -> None:
    """Refuse an invalid sweep before its first job starts.

    Args:
        jobs: Examples of all jobs.
        command: The command line of the sweep.
        launcher: `hydra.launcher`.

    Raises:
        ConfigError: A job needs several machines, code that its process does not have, a missing
            package or impossible ranks, or ranks are given and no job is distributed.
    """
    for key in ("nodes", "tasks_per_node"):
        if int(launcher.get(key) or 1) > 1:
            raise ConfigError(
                f"hydra.launcher.{key}={launcher[key]}: expected 1: a job of a sweep has the ranks"
                " of one machine, which training.nproc_per_node=N starts. On several machines,"
                " start each run separately, with torchrun or srun."
            )
    distributed_jobs = [job for job in jobs if job.values["distributed"]["name"] != "none"]
    for job in jobs:
        origins.refuse_code_of_program(job.values, "the processes of a sweep")
        refuse_stored_trust(OmegaConf.create(dict(job.values)), command.overrides)
    for job in distributed_jobs:
        _refuse_ranks(job)
    if is_typed("training.nproc_per_node", command.overrides) and not distributed_jobs:
        for job in jobs:
            refuse_idle_nproc(job.values["training"]["nproc_per_node"])
    _require_packages(jobs)


def _require_packages(jobs: list[Job]) -> None:
    """Require the packages of the jobs' trackers and of pytorch-optimizer.

    One job of each combination of tracker and optimizer is checked.

    Raises:
        ConfigError: A package is not installed.
    """
    job_by_choices = {str([job.values["tracking"], job.values["optimizer"]]): job for job in jobs}
    for job in job_by_choices.values():
        has_tracker = job.values["tracking"]["name"] != "none"
        has_library_class = "class_name" in job.values["optimizer"]
        if not has_tracker and not has_library_class:
            continue  # needs no package; composing it would take time
        cfg = saved.with_schemas(job.values, job.label)
        require_tracker(OmegaConf.to_object(cfg.tracking))  # type: ignore[arg-type]
        if OmegaConf.get_type(cfg.optimizer) is PytorchOptimizerConfig:
            from optrun.optimizer.build import require_optimizer  # needs torch, as the library does

            require_optimizer(OmegaConf.to_object(cfg.optimizer))  # type: ignore[arg-type]


def _refuse_ranks(job: Job) -> None:
    """Refuse a job with an impossible number of ranks; devices are checked in its process."""
    config = store.typed(saved.with_schemas(job.values, job.label))
    assert isinstance(config.distributed, RanksConfig)
    nproc = config.training.nproc_per_node
    try:
        refuse_composed(config, None if nproc == "auto" else int(nproc))
    except ConfigError as error:
        raise ConfigError(f"{error} In the job {job.label}.") from error


def refuse_other_code(directory: SweepDir) -> None:
    """Refuse to continue a sweep if plugin code changed since one of its jobs began.

    Raises:
        ConfigError: The message names the job, the plugin and both digests.
    """
    for summary in sorted(directory.path.glob("*/summary.json")):
        origins.require(
            directory.summary(summary.parent.name).get("plugins", ()), str(summary.parent)
        )


def refuse_without_evaluation(jobs: list[Job]) -> None:
    """Refuse a search without an evaluation; a plain grid needs no metric.

    Refused are `data=stdlib`, `files` and `tokens` with `data.eval_fraction=0` and no `data.eval`.
    Other sources, such as the hub's, may bring rows to evaluate on that no key names.

    Raises:
        ConfigError: The jobs have no rows to evaluate on.
    """
    for job in jobs:
        data = job.values["data"]
        is_by_keys = data.get("kind", data["name"]) in ("stdlib", "files", "tokens")
        if data["eval_fraction"] == 0 and is_by_keys and data.get("eval") is None:
            raise ConfigError(
                "data.eval_fraction=0: a search (hydra/sweeper=optuna) needs an evaluation, and"
                " this run has none. Give data.eval or a fraction above 0; after the search, train"
                " on all rows."
            )


def refuse_unfit_confirmation(
    confirm: ConfirmConfig, seeds: Sequence[int], jobs: Sequence[Job]
) -> None:
    """Refuse an impossible confirmation before the sweep starts.

    Args:
        confirm: `hydra.sweeper.confirm`.
        seeds: Seeds of the sweep.
        jobs: Examples of all jobs.

    Raises:
        ConfigError: The seeds are used by the sweep or too few, or the sweep chooses no contenders.
    """
    from optrun.cli.values import read_request
    from optrun.report.confirmation_plan import refuse_used_seeds
    from optrun.report.workloads import count_planned_workloads

    count = count_planned_workloads([job.values for job in jobs])
    if count > 1:
        raise ConfigError(
            f"hydra.sweeper.confirm: this sweep has {count} workloads (tasks, or evaluation data),"
            " and a confirmation tests one choice on one of them. Leave it out, or start one sweep"
            " for each workload."
        )
    try:
        request = read_request(**vars(confirm))
        if request.seeds is not None:
            refuse_used_seeds(request.seeds, seeds)
    except ConfigError as error:
        raise ConfigError(f"hydra.sweeper.confirm.{error}") from error
