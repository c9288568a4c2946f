"""One study of Optuna's: a space, what its trials share, and each trial as the jobs that run it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

import optuna
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState

from optrun.artifacts.objective import stand_in
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
from optrun.sweeper.rungs import build_pruner, rungs_of, untrained, value_at_rung
from optrun.sweeper.samplers import build_sampler
from optrun.sweeper.space import any_value, ends, space_of, written
from optrun.sweeper.view import JobTable


@dataclass(frozen=True)
class Trial:
    """A trial as read from the study, and its jobs, one for each seed."""

    study: ContenderStudy
    frozen: FrozenTrial
    jobs: tuple[Job, ...]

    @property
    def number(self) -> int:
        """Number of the trial in its study."""
        return int(self.frozen.number)


class ContenderStudy:
    """The Optuna study of one contender.

    Args:
        hydra: Parses the overrides.
        compose: Resolves the overrides of a trial to a configuration.
        options: Options of the sweeper.
        contender: The contender whose values are searched. Without a name, one study searches all
            optimizers together.
        share: Number of trials to run.

    Raises:
        ConfigError: There is nothing to search over, or a range is invalid.
    """

    def __init__(
        self,
        hydra: Hydra,
        compose: Composer,
        options: OptunaConfig,
        contender: Contender,
        share: int,
    ) -> None:
        self.name = contender.name
        self.share = share
        self.compose = compose
        self._composed = cache(self._compose)
        """A study is gone through again and again."""
        self.options = options
        parsed = list(zip(contender.overrides, parse(hydra, contender.overrides), strict=True))
        self.fixed = [token for token, override in parsed if not override.is_sweep_override()]
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
            raise ConfigError(f"{seed_sweeps[0].input_line}: each seed once.")
        self.jobs_of_trial = max(1, len(self.seeds))
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
            for job in map(self._job, ends(self.space)):
                try:
                    store.typed(saved.with_schemas(job.values, job.label))
                except ConfigError as error:
                    raise ConfigError(
                        f"{error} In the space of the search, at {job.label}."
                    ) from error
        except ConfigError as error:
            complaint = str(error).lstrip("+")
            if any(complaint.startswith(key) for key in contender.own_keys):
                raise ConfigError(f"search.{contender.name}.{complaint}") from error
            raise
        self.searched = {override.key_or_group for override in swept}
        """Keys and groups that are searched."""
        self.example = self._job(
            {key: any_value(distribution) for key, distribution in self.space.items()}
        )
        """A job that may never be: what is common to all can be seen in it."""
        self.max_steps = self.example.values["training"]["max_steps"]
        """Optimizer steps of a whole trial; None: its configuration counts in epochs."""
        self._pruner = build_pruner(options, self.max_steps)
        self._sweep: SweepDir
        self._storage: BaseStorage
        self._study: optuna.Study

    def _job(self, params: Mapping[str, object]) -> Job:
        return self._jobs(params)[0]

    def _jobs(self, params: Mapping[str, object]) -> tuple[Job, ...]:
        return self._composed(tuple(params.items()))

    def _compose(self, params: tuple[tuple[str, object], ...]) -> tuple[Job, ...]:
        """Build the jobs of a trial, one per seed, from its parameters."""
        proposed = [written(key, value) for key, value in params]
        optimizer_tokens = [f"optimizer={self.name}"] if self.name else []
        seeds = [[f"seed={seed}"] for seed in self.seeds] or [[]]
        jobs = build_jobs(self.compose, [[*self.fixed, *proposed, *seed] for seed in seeds])
        label_seeds = seeds if len(seeds) > 1 else [[]]
        return tuple(
            replace(job, label=label_of([*optimizer_tokens, *proposed, *seed]))
            for job, seed in zip(jobs, label_seeds, strict=True)
        )

    # What it is bound to
    # --------------------------------------------------------------------------------------------

    def shared(self) -> PlainDict:
        """Map dotted keys to the values common to all trials, and their metric.

        Values computed from a searched number, such as `model.config.n_positions` from
        `data.max_length`, are left out: the range may change while the study lasts.
        """
        high = {
            key: getattr(distribution, "high", any_value(distribution))
            for key, distribution in self.space.items()
        }
        low_values, high_values = (
            flat(result_deciding_values(values))
            for values in (self.example.values, self._job(high).values)
        )
        searched = {key.lstrip("+") for key in self.space}
        common = {
            key: value
            for key, value in low_values.items()
            if key not in searched and high_values.get(key) == value
        }
        metric = self.example.values["checkpoint"]["metric"]
        return {
            **common,
            **({"seed": ",".join(self.seeds)} if self.seeds else {}),
            "checkpoint.metric": metric if metric is None or "/" in metric else f"eval/{metric}",
            "checkpoint.mode": self.mode(),
        }

    def mode(self) -> str:
        """Return the direction of the objective, `min` or `max`.

        `checkpoint.mode` wins, then the direction of the metric, then that of the task.
        """
        saving = self.example.values["checkpoint"]
        if saving["mode"] is not None:
            return str(saving["mode"])
        if saving["metric"] is not None:
            return metric_mode(str(saving["metric"]))
        return str(TASKS[saved_kind("task", TASKS, self.example.values["task"])].MODE)

    def open(self, storage: BaseStorage, where: str, sweep: SweepDir) -> None:
        """Open the study, or create it.

        Args:
            storage: An Optuna storage.
            where: Name of the storage in messages.
            sweep: Directory of the sweep.

        Raises:
            ConfigError: The study was begun with another search space or configuration.
        """
        self._sweep = sweep
        self._storage = storage
        self._study = study_of.open_study(storage, self.mode(), self.name, self._pruner)
        study_of.refuse_other_search(self._study, where, self.space, self.shared())

    # Trials
    # ----------------------------------------------------------------------------------------------

    def trials(self) -> list[Trial]:
        """List the completely proposed trials.

        Trials that only hold a late result (`AGAIN`) are left out.
        """
        return [
            Trial(self, frozen, self._jobs(frozen.params))
            for frozen in self._study.get_trials(deepcopy=False)
            if study_of.has_all_params(frozen, self.space)
            and study_of.AGAIN not in frozen.user_attrs
        ]

    def give_up_halves(self) -> None:
        """Fail trials without all parameters.

        A process killed during a proposal leaves such a trial.
        """
        for trial in self._study.get_trials(deepcopy=False):
            if trial.state == TrialState.RUNNING and not study_of.has_all_params(trial, self.space):
                self._study.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)

    def ask(self) -> Trial:
        """Propose one more trial."""
        number = len(self._study.get_trials(deepcopy=False))
        options = self.options
        self._study.sampler = build_sampler(
            options.sampler, options.seed, number, self.share, study=self.name, space=self.space
        )
        proposal = self._study.ask(fixed_distributions=self.space)
        return Trial(
            self,
            self._study.get_trials(deepcopy=False)[proposal.number],
            self._jobs(proposal.params),
        )

    def plan_jobs(self, trial: Trial, driver: Driver) -> list[PlannedJob]:
        """Report a trial at each rung reached, and return its jobs to run next.

        Returns:
            One for each job, up to the next rung or to its end; empty if the trial has ended or is
            pruned. A trial that was not evaluated before a rung goes on.
        """
        rows = [driver.job_table.row(job) for job in trial.jobs]
        if any(row.paused for row in rows):
            return []  # an earlier start pruned it, and was killed before the study knew
        totals = [self.max_steps, *(row.state.total for row in rows)]
        total = min((steps for steps in totals if steps is not None), default=math.inf)
        for rung in rungs_of(self.options):
            if rung >= total:
                break
            if rung in trial.frozen.intermediate_values:
                continue
            planned_jobs = [PlannedJob(job, rung) for job in trial.jobs]
            if any(map(driver.is_short_of, planned_jobs)):
                return planned_jobs
            value = value_at_rung(driver, trial.jobs, rung, self._values_at(rung))
            if value is not None and self._is_pruned(trial, rung, value):
                driver.stop_at_rung(trial.jobs, rung)
                return []
        planned_jobs = [PlannedJob(job) for job in trial.jobs]
        if any(map(driver.is_short_of, planned_jobs)):
            return planned_jobs
        return []

    def _values_at(self, rung: int) -> list[float]:
        """List the values of all trials at a rung."""
        trials = self._study.get_trials(deepcopy=False)
        return [
            trial.intermediate_values[rung] for trial in trials if rung in trial.intermediate_values
        ]

    def _is_pruned(self, trial: Trial, rung: int, value: float) -> bool:
        """Report the value at a rung to the study, and ask its pruner; NaN is always pruned."""
        if math.isnan(value):
            return True
        study_id = self._storage.get_study_id_from_name(self._study.study_name)
        trial_id = self._storage.get_trial_id_from_study_id_trial_number(study_id, trial.number)
        self._storage.set_trial_intermediate_value(trial_id, rung, value)
        return bool(self._pruner.prune(self._study, self._storage.get_trial(trial_id)))

    def tell(self, trial: Trial, job_table: JobTable) -> None:
        """Report the result of a trial to the study, if it has ended."""
        value = self._value(trial, job_table)
        rows = [job_table.row(job) for job in trial.jobs]
        if value is not None:
            self._study.tell(trial.number, value, skip_if_finished=True)
        elif any(row.paused for row in rows):
            self._study.tell(trial.number, state=TrialState.PRUNED, skip_if_finished=True)
        elif all(row.state.ended for row in rows):
            self._study.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)

    def tell_late(self, trial: Trial, job_table: JobTable) -> None:
        """Add the late result of a trial to the study."""
        value = self._value(trial, job_table)
        if value is not None:
            study_of.add_late_result(self._study, trial.frozen, value)

    def _value(self, trial: Trial, job_table: JobTable) -> float | None:
        """Compute the outcome of a trial: the mean over its seeds.

        Returns:
            None if a job has not ended, failed without diverging, or has no finite metric.
        """
        outcomes = []
        for job in trial.jobs:
            outcome = self._outcome(job, job_table.row(job).state)
            if outcome is None:
                return None
            outcomes.append(outcome)
        return sum(outcomes) / len(outcomes)

    def _outcome(self, job: Job, state: JobState) -> float | None:
        """Return the objective of a job; None if it has none.

        A diverged job counts as the worst job so far, or as its untrained model if that is worse.
        Without a value, a sampler would propose the same region again.
        """
        if state.metric is not None and state.mode != self.mode():
            raise ConfigError(
                f"the study goes for the {self.mode()}imum, but {state.metric} is best at its"
                f" {state.mode}imum: say so with checkpoint.mode={state.mode}, and choose a new"
                " hydra.sweep.dir."
            )
        if state.diverged:
            ended = self._study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
            before = untrained(self._sweep, job, state.metric or "")
            values = [trial.value for trial in ended if trial.value is not None]
            return stand_in(values, [before], state.mode)
        if state.status != "finished" or state.best is None or math.isnan(state.best):
            return None
        return state.best
