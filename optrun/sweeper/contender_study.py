"""One Optuna study: its space, the values that all trials share, and the jobs of each trial."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

import optuna
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState

from optrun.artifacts.objective import score_of_diverged
from optrun.artifacts.provenance import result_deciding_values
from optrun.base.errors import ConfigError
from optrun.base.plain import PlainDict, flat
from optrun.config import saved, store
from optrun.config.hydra_internals import Hydra
from optrun.config.kind import saved_kind
from optrun.config.schema.metric import metric_mode
from optrun.config.schema.sweeper import OptunaConfig
from optrun.config.schema.task import SCHEMAS as TASKS
from optrun.sweeper import study as study_of
from optrun.sweeper.contenders import Contender
from optrun.sweeper.driver import Driver, PlannedJob
from optrun.sweeper.folder import JobState, SweepDir
from optrun.sweeper.jobs import Composer, Job, build_jobs, label_of, parse
from optrun.sweeper.rungs import (
    build_pruner,
    job_value_at_rung,
    mean_if_complete,
    rungs_of,
    value_before_training,
)
from optrun.sweeper.samplers import build_sampler
from optrun.sweeper.space import corner_points, low_or_first, space_of
from optrun.sweeper.view import JobTable


@dataclass(frozen=True)
class Trial:
    """A trial of a study, and its jobs: one for each seed."""

    study: ContenderStudy
    frozen: FrozenTrial
    jobs: tuple[Job, ...]


class ContenderStudy:
    """The Optuna study of one contender: an optimizer with its own search space.

    Args:
        hydra: Parses the overrides.
        compose: Resolves the overrides of a trial to a configuration.
        options: Options of the sweeper.
        contender: The contender whose values are searched. Without a name, one study searches all
            optimizers together.
        n_trials: Number of trials to run.

    Raises:
        ConfigError: There is nothing to search over, or a range is invalid.
    """

    def __init__(
        self,
        hydra: Hydra,
        compose: Composer,
        options: OptunaConfig,
        contender: Contender,
        n_trials: int,
    ) -> None:
        self.name = contender.name
        self.n_trials = n_trials
        self.compose = compose
        self._jobs_by_params = cache(self._build_jobs)
        """Cached, because every look at the trials asks for their jobs again."""
        self.options = options
        parsed = list(zip(contender.overrides, parse(hydra, contender.overrides), strict=True))
        self.fixed = [token for token, override in parsed if not override.is_sweep_override()]
        """Overrides with one value, which all trials have."""
        swept = [override for _, override in parsed if override.is_sweep_override()]
        seed_sweeps = [
            override
            for override in swept
            if override.key_or_group == "seed" and override.is_discrete_sweep()
        ]
        self.seeds: list[str] = []
        """Seeds of every trial, whose value is their mean; empty: the seed of the configuration."""
        for override in seed_sweeps:
            self.seeds += map(str, override.sweep_string_iterator())
        if len(set(self.seeds)) < len(self.seeds):
            raise ConfigError(f"{seed_sweeps[0].input_line}: give each seed once.")
        self.jobs_of_trial = max(1, len(self.seeds))
        """Number of jobs of each trial."""
        swept = [override for override in swept if override not in seed_sweeps]
        if not swept:
            of = f"optimizer={self.name}: " if self.name else ""
            key = f"search.{self.name}.lr" if self.name else "lr"
            alternative = "" if self.name else " or optimizer=lamb,adamw"
            raise ConfigError(
                f"hydra/sweeper=optuna: {of}nothing to search over. Give a range or a list, such as"
                f" {key}='tag(log, interval(1e-4, 1e-1))'{alternative}."
            )
        try:
            self.space = space_of(swept, lambda params: flat(self._job(params).values))
            for job in map(self._job, corner_points(self.space)):
                try:
                    store.typed(saved.with_schemas(job.values, job.label))
                except ConfigError as error:
                    raise ConfigError(f"{error} In the search space, at {job.label}.") from error
        except ConfigError as error:
            complaint = str(error).lstrip("+")
            if any(complaint.startswith(key) for key in contender.own_keys):
                raise ConfigError(f"search.{contender.name}.{complaint}") from error
            raise
        self.searched = {override.key_or_group for override in swept}
        """Keys and groups that are searched."""
        self.example = self._job(
            {key: low_or_first(distribution) for key, distribution in self.space.items()}
        )
        """A job that may never run, to read the values that all jobs share."""
        self.max_steps = self.example.values["training"]["max_steps"]
        """Optimizer steps of a full trial; None: its configuration counts in epochs."""
        self._pruner = build_pruner(options, self.max_steps)
        self._sweep: SweepDir
        self._storage: BaseStorage
        self._study: optuna.Study

    def _job(self, params: Mapping[str, object]) -> Job:
        return self._jobs(params)[0]

    def _jobs(self, params: Mapping[str, object]) -> tuple[Job, ...]:
        return self._jobs_by_params(tuple(params.items()))

    def _build_jobs(self, params: tuple[tuple[str, object], ...]) -> tuple[Job, ...]:
        """Build the jobs of a trial, one per seed, from its parameters, as pairs of key and value.

        The label of a job has the optimizer of the study, the parameters, and the seed if there are
        several, such as `optimizer=lamb lr=0.01 seed=1`.
        """
        # 1. One job for each seed; without seeds the list has one entry that adds nothing. Python
        # writes a float with all of its digits.
        proposed = [f"{key}={value}" for key, value in params]
        optimizer_tokens = [f"optimizer={self.name}"] if self.name else []
        seed_tokens = [[f"seed={seed}"] for seed in self.seeds] or [[]]
        jobs = build_jobs(self.compose, [[*self.fixed, *proposed, *seed] for seed in seed_tokens])
        # 2. Label them anew; a single seed is in no label.
        if len(seed_tokens) == 1:
            seed_tokens = [[]]
        return tuple(
            replace(job, label=label_of([*optimizer_tokens, *proposed, *seed]))
            for job, seed in zip(jobs, seed_tokens, strict=True)
        )

    # The study in the storage
    # --------------------------------------------------------------------------------------------

    def shared_values(self) -> PlainDict:
        """Map dotted keys to the values shared by all trials; add the metric and its mode.

        A value counts as shared if it is equal at both ends of all ranges. So values computed from
        a searched number, such as `model.config.n_positions` from `data.max_length`, are left out:
        the range may change while the study lasts. Seeds are one value, such as `0,1,2`; a metric
        has its full name, such as `eval/accuracy`.
        """
        # 1. Compare the configuration at the low ends of all ranges (`example`) with that at the
        # high ends. Choices have no ends: the first choice stands on both sides.
        high_params = {
            key: getattr(distribution, "high", low_or_first(distribution))
            for key, distribution in self.space.items()
        }
        at_low = flat(result_deciding_values(self.example.values))
        at_high = flat(result_deciding_values(self._job(high_params).values))
        searched = {key.lstrip("+") for key in self.space}
        shared: PlainDict = {}
        for key, value in at_low.items():
            if key not in searched and at_high.get(key) == value:
                shared[key] = value
        # 2. Add the seeds, which differ between jobs, and the objective, which may be null.
        if self.seeds:
            shared["seed"] = ",".join(self.seeds)
        metric = self.example.values["checkpoint"]["metric"]
        if metric is not None and "/" not in metric:
            metric = f"eval/{metric}"
        shared["checkpoint.metric"] = metric
        shared["checkpoint.mode"] = self.mode()
        return shared

    def mode(self) -> str:
        """Return the direction of the objective, `min` or `max`.

        `checkpoint.mode` wins, then the direction of the metric, then that of the task.
        """
        checkpoint = self.example.values["checkpoint"]
        if checkpoint["mode"] is not None:
            return str(checkpoint["mode"])
        if checkpoint["metric"] is not None:
            return metric_mode(str(checkpoint["metric"]))
        task = saved_kind("task", TASKS, self.example.values["task"])
        return str(TASKS[task].MODE)

    def open(self, storage: BaseStorage, where: str, sweep: SweepDir) -> None:
        """Open the study, or create it.

        Args:
            storage: An Optuna storage.
            where: Name of the storage in messages.
            sweep: Directory of the sweep.

        Raises:
            ConfigError: The stored study has another search space or configuration.
        """
        self._sweep = sweep
        self._storage = storage
        self._study = study_of.open_study(storage, self.mode(), self.name, self._pruner)
        study_of.refuse_other_search(self._study, where, self.space, self.shared_values())

    # Trials
    # ----------------------------------------------------------------------------------------------

    def trials(self) -> list[Trial]:
        """List the trials of the study with their jobs.

        Left out are trials without all parameters, and those that `tell_late` has added.
        """
        return [
            Trial(self, frozen, self._jobs(frozen.params))
            for frozen in self._study.get_trials(deepcopy=False)
            if study_of.has_all_params(frozen, self.space)
            and study_of.LATE_RESULT_OF not in frozen.user_attrs
        ]

    def fail_incomplete_trials(self) -> None:
        """Mark running trials without all parameters as failed.

        A process killed during a proposal leaves such a trial.
        """
        for trial in self._study.get_trials(deepcopy=False):
            if trial.state == TrialState.RUNNING and not study_of.has_all_params(trial, self.space):
                self._study.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)

    def ask(self) -> Trial:
        """Let Optuna propose one more trial; the study stores it as running.

        The sampler is seeded by the number of the trial, so that a continued search proposes the
        same as an undisturbed one.
        """
        number = len(self._study.get_trials(deepcopy=False))
        options = self.options
        self._study.sampler = build_sampler(
            options.sampler, options.seed, number, self.n_trials, study=self.name, space=self.space
        )
        proposal = self._study.ask(fixed_distributions=self.space)
        return Trial(
            self,
            self._study.get_trials(deepcopy=False)[proposal.number],
            self._jobs(proposal.params),
        )

    def plan_jobs(self, trial: Trial, driver: Driver) -> list[PlannedJob]:
        """Return the jobs of a trial to run next, up to its next rung or to their end.

        A rung is a step at which all jobs of a trial stop. If they are there, their mean value is
        reported to the study first, and the pruner decides whether the trial goes on. A trial
        without an evaluation up to a rung goes on.

        Returns:
            One for each job; empty if the trial has ended or is pruned.
        """
        rows = [driver.job_table.row(job) for job in trial.jobs]
        if any(row.is_pruned for row in rows):
            return []  # an earlier start pruned it, and was killed before it told the study
        # 1. The steps of a full trial, as its configuration or a begun job knows them.
        totals = [self.max_steps, *(row.state.total for row in rows)]
        total = min((steps for steps in totals if steps is not None), default=math.inf)
        # 2. Go up the rungs: stop at the first one that a job has yet to reach, or at which the
        # trial is pruned. `rungs_of` yields them without end.
        for rung in itertools.takewhile(lambda rung: rung < total, rungs_of(self.options)):
            if rung in trial.frozen.intermediate_values:
                continue  # reported in an earlier call, and not pruned
            planned_jobs = _unfinished_jobs(trial, driver, rung)
            if planned_jobs:
                return planned_jobs
            # All jobs are there. None: one was not evaluated, so there is nothing to prune by.
            other_values = self._list_reported_values(rung)
            value = mean_if_complete(
                job_value_at_rung(driver, job, rung, other_values) for job in trial.jobs
            )
            if value is not None and self._should_prune(trial, rung, value):
                driver.prune(trial.jobs, rung)
                return []
        # 3. All rungs are passed. None: the jobs run to their end.
        return _unfinished_jobs(trial, driver, None)

    def _list_reported_values(self, rung: int) -> list[float]:
        """List the values reported by trials at a rung."""
        trials = self._study.get_trials(deepcopy=False)
        return [
            trial.intermediate_values[rung] for trial in trials if rung in trial.intermediate_values
        ]

    def _should_prune(self, trial: Trial, rung: int, value: float) -> bool:
        """Report the value of a trial at a rung to the study, and ask the pruner.

        The same as Optuna's `trial.report(value, rung)` and `trial.should_prune()`, which a trial
        read from the storage lacks. NaN is pruned without a report: Optuna cannot compare it.
        """
        if math.isnan(value):
            return True
        study_id = self._storage.get_study_id_from_name(self._study.study_name)
        trial_id = self._storage.get_trial_id_from_study_id_trial_number(
            study_id, trial.frozen.number
        )
        self._storage.set_trial_intermediate_value(trial_id, rung, value)
        return bool(self._pruner.prune(self._study, self._storage.get_trial(trial_id)))

    def tell(self, trial: Trial, job_table: JobTable) -> None:
        """End a trial in the study, by its value or by the state of its jobs.

        With a value, see `_trial_value`, the trial is complete. Without, it is pruned if one of its
        jobs is, else failed if all have ended, else left running. A trial that the study knows as
        ended does not change.
        """
        value = self._trial_value(trial, job_table)
        rows = [job_table.row(job) for job in trial.jobs]
        state = None  # with a value `Study.tell` then takes the trial for complete
        if value is None:
            if any(row.is_pruned for row in rows):
                state = TrialState.PRUNED
            elif all(row.state.ended for row in rows):
                state = TrialState.FAIL
            else:
                return
        self._study.tell(trial.frozen.number, value, state=state, skip_if_finished=True)

    def tell_late(self, trial: Trial, job_table: JobTable) -> None:
        """Add the value of an ended trial to the study, if it has one now."""
        value = self._trial_value(trial, job_table)
        if value is not None:
            study_of.add_late_result(self._study, trial.frozen, value)

    def _trial_value(self, trial: Trial, job_table: JobTable) -> float | None:
        """Compute the value of a trial: the mean of its jobs, one for each seed.

        None if a job has no value, see `_job_value`.
        """
        return mean_if_complete(
            self._job_value(job, job_table.row(job).state) for job in trial.jobs
        )

    def _job_value(self, job: Job, state: JobState) -> float | None:
        """Return the best metric of a finished job, or a bad value for a diverged one.

        A diverged job gets the worst value of all complete trials, or that of its own model before
        training if that is worse. Without a value the sampler would propose the same region again.

        Returns:
            None if the job has not ended, failed without diverging, or has no metric but NaN.

        Raises:
            ConfigError: The metric of the job is best at the other end than the study searches.
        """
        if state.metric is not None and state.mode != self.mode():
            raise ConfigError(
                f"the study searches the {self.mode()}imum, but {state.metric} is best at its"
                f" {state.mode}imum. Set checkpoint.mode={state.mode}, and choose a new"
                " hydra.sweep.dir."
            )
        if state.diverged:
            complete = self._study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
            values = [trial.value for trial in complete if trial.value is not None]
            before_training = value_before_training(self._sweep, job, state.metric or "")
            return score_of_diverged(values, [before_training], state.mode)
        if state.status != "finished" or state.best is None or math.isnan(state.best):
            return None
        return state.best


def _unfinished_jobs(trial: Trial, driver: Driver, stop_at: int | None) -> list[PlannedJob]:
    """Plan all jobs of a trial up to a step (None: to their end); none if all are there."""
    planned_jobs = [PlannedJob(job, stop_at) for job in trial.jobs]
    if any(map(driver.is_unfinished, planned_jobs)):
        return planned_jobs
    return []
