"""`hydra/sweeper=optuna`: a thin sweeper on Optuna's ask-and-tell interface.

Optuna proposes trials and stores them. A trial is one job, or one job for each seed, like any other
job of a sweep. A killed search continues: running trials are finished first, from their
checkpoints, and no trial is proposed twice. If optimizers have their own search spaces, each has
its own study, and they take turns: their numbers of trials differ by one at most.
"""

from __future__ import annotations

import contextlib
import itertools
import time
import warnings
from collections.abc import Iterator, Sequence

from optrun.artifacts.lock import RunLock
from optrun.base.errors import ConfigError, LockedError, StorageError, first_line
from optrun.config.hydra_internals import Hydra
from optrun.config.schema.sweeper import OptunaConfig
from optrun.sweeper.contenders import Contender
from optrun.sweeper.driver import Driver, PlannedJob
from optrun.sweeper.folder import SweepDir
from optrun.sweeper.jobs import Composer, Job

try:
    import optuna
    from optuna.trial import TrialState
    from sqlalchemy.exc import SQLAlchemyError

    from optrun.sweeper.contender_study import ContenderStudy, Trial
    from optrun.sweeper.study import refuse_mixed
except ImportError as error:
    raise ConfigError("hydra/sweeper=optuna needs Optuna: install optrun[sweep].") from error

_ASK_SECONDS = 60.0


class Search:
    """Runs a search: one study, or one per optimizer, over all swept values.

    Args:
        hydra: Parses the overrides.
        compose: Resolves the overrides of a trial to a configuration.
        options: Options of the sweeper.
        contenders: The contenders, one study each.

    Raises:
        ConfigError: There is nothing to search over, a range is invalid, or there are fewer trials
            than optimizers.
    """

    def __init__(
        self,
        hydra: Hydra,
        compose: Composer,
        options: OptunaConfig,
        contenders: Sequence[Contender],
    ) -> None:
        self.options = options
        self.trials_per_study = options.n_trials // len(contenders)
        self.studies = [
            ContenderStudy(hydra, compose, options, contender, self.trials_per_study)
            for contender in contenders
        ]
        names = ", ".join(study.name for study in self.studies)
        if not self.trials_per_study:
            raise ConfigError(
                f"hydra.sweeper.n_trials={options.n_trials}: {names} need at least one trial each."
                f" Expected {len(self.studies)} or more."
            )

    @property
    def has_study_per_optimizer(self) -> bool:
        """Whether each optimizer has its own study."""
        return bool(self.studies[0].name)

    def examples(self) -> list[Job]:
        """List one example job of each study; it may never run."""
        return [study.example for study in self.studies]

    def tuned(self) -> list[str]:
        """List the searched keys and groups, without the optimizer."""
        return sorted({key for study in self.studies for key in study.searched} - {"optimizer"})

    def seeds(self) -> list[int]:
        """List the seeds of all trials."""
        seeds: list[int] = []
        for study in self.studies:
            seeds += map(int, study.seeds or [study.example.values["seed"]])
        return seeds

    def __call__(self, driver: Driver) -> None:
        """Run trials up to `n_trials`; trials of earlier starts count."""
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        with warnings.catch_warnings(
            action="ignore", category=optuna.exceptions.ExperimentalWarning
        ):
            self._open(driver.sweep)
            driver.job_table.expected = self.trials_per_study * sum(
                study.jobs_of_trial for study in self.studies
            )
            self._rerun_lost_jobs(driver, self._load_ended_trials(driver))
            driver.run_unfinished_jobs(lambda: self._plan_next_jobs(driver))

    # The studies
    # ----------------------------------------------------------------------------------------------

    def _open(self, sweep: SweepDir) -> None:
        """Open all studies, or create them, while no other process proposes trials.

        Raises:
            ConfigError: A study began with another search; or `n_trials` is lower than before, so
                that one optimizer has more trials than it may have now, and another fewer than it.
            StorageError: The file of the study cannot be opened.
        """
        where = str(sweep.study)
        # 1. Open the studies.
        with _proposal_lock(sweep):
            try:
                storage = optuna.storages.get_storage(f"sqlite:///{sweep.study.resolve()}")
                refuse_mixed(storage, where, self.has_study_per_optimizer)
                for study in self.studies:
                    study.open(storage, where, sweep)
            except (SQLAlchemyError, optuna.exceptions.OptunaError) as error:
                raise StorageError(f"{where}: {first_line(error)}") from error
        # 2. Refuse a limit under which their numbers of trials would stay unequal: with 4 and 2
        # trials and a limit of 3 each, the second could never have as many as the first.
        counts = {study.name: len(study.trials()) for study in self.studies}
        largest = max(counts, key=lambda name: counts[name])
        most = counts[largest]
        if most > self.trials_per_study and min(counts.values()) < most:
            raise ConfigError(
                f"hydra.sweeper.n_trials={self.options.n_trials}: {self.trials_per_study} for each"
                f" of {len(counts)} optimizers, but {largest} has {most} already. Expected"
                f" {most * len(counts)}, so that all have the same number."
            )

    def _load_ended_trials(self, driver: Driver) -> list[Trial]:
        """Return the ended trials of earlier starts; add their jobs to the job table.

        Also prints how many trials are done, running and to be proposed.
        """
        trials: list[Trial] = []
        for study in self.studies:
            trials += study.trials()
        ended = [trial for trial in trials if trial.frozen.state.is_finished()]
        for trial in ended:
            driver.add(trial.jobs)
        n_running = sum(trial.frozen.state == TrialState.RUNNING for trial in trials)
        n_trials = self.trials_per_study * len(self.studies)
        remaining = max(0, n_trials - len(ended) - n_running)
        shares = ""
        if self.has_study_per_optimizer:
            names = ", ".join(study.name for study in self.studies)
            shares = f" · {self.trials_per_study} for each of {names}"
        driver.view.note(
            f"study of {n_trials} trials -> {driver.sweep.path}{shares} · {len(ended)} done before"
            f" · {n_running} under way · {remaining} to propose"
        )
        return ended

    def _rerun_lost_jobs(self, driver: Driver, ended: Sequence[Trial]) -> None:
        """Run jobs of ended trials again if they have no result, and add their late results.

        These are jobs whose folder is gone, and failed jobs if `retry_failed` is set. Pruned trials
        stay pruned.
        """
        unpruned = [trial for trial in ended if trial.frozen.state != TrialState.PRUNED]
        # All jobs are planned; the driver runs those that have no result.
        planned_jobs: list[PlannedJob] = []
        for trial in unpruned:
            planned_jobs += map(PlannedJob, trial.jobs)
        driver.run_unfinished_jobs(lambda: planned_jobs)
        with _proposal_lock(driver.sweep):
            for trial in unpruned:
                trial.study.tell_late(trial, driver.job_table)

    # The trials
    # ----------------------------------------------------------------------------------------------

    def _plan_next_jobs(self, driver: Driver) -> list[PlannedJob]:
        """Return the jobs to run next, of at most `n_jobs` trials; propose new trials for this.

        Ended trials are reported to their studies. If a job has run out of `training.max_seconds`,
        no more trials are proposed. The result is empty when the search is done.
        """
        with _proposal_lock(driver.sweep):
            # 1. Continue the running trials.
            for study in self.studies:
                study.fail_incomplete_trials()
            trials = {study.name: study.trials() for study in self.studies}
            all_trials = itertools.chain.from_iterable(trials.values())
            running = [trial for trial in all_trials if trial.frozen.state == TrialState.RUNNING]
            open_trials, planned_jobs = self._plan_jobs_or_end_trials(
                running[: self.options.n_jobs], driver
            )
            if any(row.out_of_time for row in driver.job_table.rows.values()):
                return planned_jobs
            # 2. Propose new ones. Again and again, because a new trial may have the values, and so
            # the jobs, of an earlier one: it ends at once.
            counts = {name: len(study_trials) for name, study_trials in trials.items()}
            while proposed := self._propose(len(open_trials), counts):
                new_open_trials, new_jobs = self._plan_jobs_or_end_trials(proposed, driver)
                open_trials += new_open_trials
                planned_jobs += new_jobs
            if not open_trials:
                driver.job_table.expected = 0  # fewer jobs than trials: some trials share a job
            return planned_jobs

    def _propose(self, n_open: int, counts: dict[str, int]) -> list[Trial]:
        """Propose trials until `n_jobs` are open, or each study has all of its trials.

        The study with the fewest trials proposes next, the first of them if several have as few.

        Args:
            n_open: Number of trials with unfinished jobs.
            counts: Number of trials of each study so far, by name; changed in place.
        """
        proposed: list[Trial] = []
        while n_open + len(proposed) < self.options.n_jobs:
            study = min(self.studies, key=lambda study: counts[study.name])
            if counts[study.name] >= self.trials_per_study:
                break
            proposed.append(study.ask())
            counts[study.name] += 1
        return proposed

    def _plan_jobs_or_end_trials(
        self, trials: Sequence[Trial], driver: Driver
    ) -> tuple[list[Trial], list[PlannedJob]]:
        """Plan the next jobs of trials, and report trials without further jobs to their studies.

        Returns:
            The trials with further jobs, and these jobs.
        """
        # The driver has to know all jobs before one of them is planned.
        for trial in trials:
            driver.add(trial.jobs)
        open_trials: list[Trial] = []
        planned_jobs: list[PlannedJob] = []
        for trial in trials:
            jobs_of_trial = trial.study.plan_jobs(trial, driver)
            if jobs_of_trial:
                open_trials.append(trial)
                planned_jobs += jobs_of_trial
            else:
                trial.study.tell(trial, driver.job_table)
        return open_trials, planned_jobs


@contextlib.contextmanager
def _proposal_lock(sweep: SweepDir) -> Iterator[None]:
    """Hold the lock for proposing trials: several processes propose `n_trials` in all.

    Waits at most 60 s for another process that holds it.

    Raises:
        LockedError: The other process holds it for longer.
    """
    deadline = time.monotonic() + _ASK_SECONDS
    while True:
        try:
            with RunLock(sweep.asking):
                yield
                return
        except LockedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
