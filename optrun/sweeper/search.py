"""`hydra/sweeper=optuna`: a thin sweeper on Optuna's ask-and-tell interface.

Optuna proposes and remembers; a trial is a job like any other, or one for each seed, found by its
identity. A study
that was killed goes on: trials that were under way are finished first, from their checkpoints, and
no trial is proposed twice for one number. Optimizers with spaces of their own have a study each,
and take turns, so that at every moment their budgets differ by one trial at most.
"""

from __future__ import annotations

import contextlib
import itertools
import time
import warnings
from collections.abc import Iterator, Sequence

from optrun.artifacts.lock import RunLock
from optrun.base.errors import ConfigError, LockedError, StorageError
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
        self.share = options.n_trials // len(contenders)
        """Trials of each study."""
        self.studies = [
            ContenderStudy(hydra, compose, options, contender, self.share)
            for contender in contenders
        ]
        names = ", ".join(study.name for study in self.studies)
        if not self.share:
            raise ConfigError(
                f"hydra.sweeper.n_trials={options.n_trials}: {names} share them equally, and there"
                f" is not one for each. Expected {len(self.studies)} or more."
            )

    @property
    def apart(self) -> bool:
        """Whether each optimizer has a study of its own."""
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
            driver.job_table.expected = self.share * sum(
                study.jobs_of_trial for study in self.studies
            )
            self._go_back_to(driver, self._know_before(driver))
            driver.pursue(lambda: self._next_jobs(driver))

    # The studies
    # ----------------------------------------------------------------------------------------------

    def _open(self, sweep: SweepDir) -> None:
        """Open all studies, and create missing ones; hold the lock for proposals meanwhile.

        Raises:
            ConfigError: A study began with another search, or one optimizer has had more trials
                than its share now, and another fewer.
            StorageError: The file of the study cannot be opened.
        """
        where = str(sweep.study)
        with _asking(sweep):
            try:
                storage = optuna.storages.get_storage(f"sqlite:///{sweep.study.resolve()}")
                refuse_mixed(storage, where, self.apart)
                for study in self.studies:
                    study.open(storage, where, sweep)
            except (SQLAlchemyError, optuna.exceptions.OptunaError) as error:
                raise StorageError(f"{where}: {str(error).strip().splitlines()[0]}") from error
        had = {study.name: len(study.trials()) for study in self.studies}
        most = max(had, key=lambda name: had[name])
        if had[most] > self.share and min(had.values()) < had[most]:
            raise ConfigError(
                f"hydra.sweeper.n_trials={self.options.n_trials}: {self.share} for each of"
                f" {len(had)} optimizers, and {most} has had {had[most]}."
                f" n_trials={had[most] * len(had)} makes them equal."
            )

    def _know_before(self, driver: Driver) -> list[Trial]:
        """Return the ended trials of earlier starts; add their jobs and print the counts."""
        trials = [trial for study in self.studies for trial in study.trials()]
        ended = [trial for trial in trials if trial.frozen.state.is_finished()]
        driver.add(job for trial in ended for job in trial.jobs)
        under_way = sum(trial.frozen.state == TrialState.RUNNING for trial in trials)
        remaining = max(0, self.share * len(self.studies) - len(ended) - under_way)
        names = [study.name for study in self.studies]
        shares = f" · {self.share} for each of {', '.join(names)}" if self.apart else ""
        driver.view.note(
            f"study of {self.share * len(names)} trials -> {driver.sweep.path}{shares} ·"
            f" {len(ended)} done before · {under_way} under way · {remaining} to propose"
        )
        return ended

    def _go_back_to(self, driver: Driver, ended: Sequence[Trial]) -> None:
        """Finish the trials of earlier starts, and add their results to the studies.

        Runs jobs again if their folder is gone, or if they failed and are to be retried. Pruned
        trials stay pruned.
        """
        unpruned = [trial for trial in ended if trial.frozen.state != TrialState.PRUNED]
        jobs = [job for trial in unpruned for job in trial.jobs]
        driver.pursue(lambda: list(map(PlannedJob, jobs)))
        with _asking(driver.sweep):
            for trial in unpruned:
                trial.study.tell_late(trial, driver.job_table)

    # The trials
    # ----------------------------------------------------------------------------------------------

    def _next_jobs(self, driver: Driver) -> list[PlannedJob]:
        """Judge the trials at work, propose others, and return the jobs to run next.

        After `training.max_seconds` of a job nothing is proposed. Without an open trial the
        result is empty, and the search is done.
        """
        with _asking(driver.sweep):
            for study in self.studies:
                study.give_up_halves()
            trials = {study.name: study.trials() for study in self.studies}
            all_trials = itertools.chain.from_iterable(trials.values())
            at_work = [trial for trial in all_trials if trial.frozen.state == TrialState.RUNNING]
            open_trials, planned_jobs = self._judged(at_work[: self.options.n_jobs], driver)
            if any(row.out_of_time for row in driver.job_table.rows.values()):
                return planned_jobs
            counts = {name: len(study_trials) for name, study_trials in trials.items()}
            # A trial with the values of an earlier one is over at once: its job has ended.
            while proposed := self._propose(len(open_trials), counts):
                new_trials, further = self._judged(proposed, driver)
                open_trials += new_trials
                planned_jobs += further
            if not open_trials:
                driver.job_table.expected = 0  # trials with the same values are one job
            return planned_jobs

    def _propose(self, at_work: int, counts: dict[str, int]) -> list[Trial]:
        """Propose trials until `n_jobs` are at work, or the budgets are spent.

        Args:
            at_work: Number of unfinished trials.
            counts: Trials of each study so far; changed in place.
        """
        proposed: list[Trial] = []
        while at_work + len(proposed) < self.options.n_jobs:
            able = [study for study in self.studies if counts[study.name] < self.share]
            if not able:
                break
            study = min(able, key=lambda candidate: counts[candidate.name])
            proposed.append(study.ask())
            counts[study.name] += 1
        return proposed

    def _judged(
        self, trials: Sequence[Trial], driver: Driver
    ) -> tuple[list[Trial], list[PlannedJob]]:
        """Judge trials at their rungs, and report ended trials to their studies.

        Returns:
            The unfinished trials, and their jobs to run next.
        """
        driver.add(job for trial in trials for job in trial.jobs)
        open_trials: list[Trial] = []
        all_planned: list[PlannedJob] = []
        for trial in trials:
            planned_jobs = trial.study.plan_jobs(trial, driver)
            if planned_jobs:
                open_trials.append(trial)
                all_planned += planned_jobs
            else:
                trial.study.tell(trial, driver.job_table)
        return open_trials, all_planned


@contextlib.contextmanager
def _asking(sweep: SweepDir) -> Iterator[None]:
    """Hold the lock for proposals; wait for another process that holds it.

    Processes then propose at most `n_trials` together. After a while LockedError is raised.
    """
    patience = time.monotonic() + _ASK_SECONDS
    while True:
        try:
            with RunLock(sweep.asking):
                yield
                return
        except LockedError:
            if time.monotonic() > patience:
                raise
            time.sleep(0.05)
