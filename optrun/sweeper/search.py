"""`hydra/sweeper=optuna`: a thin sweeper on Optuna's ask-and-tell interface.

Optuna proposes and remembers; a trial is a job like any other, found by its identity. A study that was killed goes on:
trials that were under way are finished first, from their checkpoints, and no trial is proposed twice for one number.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from optrun.artifacts.lock import RunLock
from optrun.artifacts.provenance import identity
from optrun.config.hydra_internals import Hydra
from optrun.config.kind import saved_kind
from optrun.config.saved import flat
from optrun.config.schema.metric import metric_mode
from optrun.config.schema.sweeper import STORAGE, OptunaConfig
from optrun.config.schema.task import SCHEMAS as TASKS
from optrun.errors import ConfigError, LockedError
from optrun.sweeper.driver import Driver
from optrun.sweeper.folder import JobState, SweepDir
from optrun.sweeper.halving import through_rungs
from optrun.sweeper.jobs import Composer, Job, build_jobs, label_of, parse

try:
    import optuna
    from optuna.trial import FrozenTrial, TrialState

    from optrun.sweeper import study as study_of
    from optrun.sweeper.samplers import build_sampler, is_hashed
    from optrun.sweeper.space import any_value, space_of, written
    from optrun.sweeper.storage import open_storage, told_by_name
except ImportError as error:
    raise ConfigError("hydra/sweeper=optuna needs Optuna: install optrun[sweep].") from error

_ASK_SECONDS = 60.0
_OF_PLACEMENT = {"distributed", "distributed.nnodes", "training.device", "training.nproc_per_node"}
"""Keys that decide which devices a job takes."""


class Search:
    """A study over the values that are ranges or lists.

    Args:
        hydra: Parses the overrides.
        compose: Resolves the overrides of a trial.
        options: Of the sweeper.
        overrides: Fixed ones and ranges, checked by name.

    Raises:
        ConfigError: Nothing to search over, or a range that means nothing.
    """

    def __init__(self, hydra: Hydra, compose: Composer, options: OptunaConfig, overrides: Sequence[str]) -> None:
        try:
            with _no_experimental_warnings():
                build_sampler(options.sampler, options.seed, 0)
        except ImportError as error:
            package = getattr(error, "name", None) or str(error).splitlines()[0]
            raise ConfigError(f"hydra.sweeper.sampler={options.sampler.value} needs more: {package}") from error
        parsed = list(zip(overrides, parse(hydra, overrides), strict=True))
        self.compose = compose
        self.options = options
        self.fixed = [token for token, override in parsed if not override.is_sweep_override()]
        swept = [override for _, override in parsed if override.is_sweep_override()]
        if not swept:
            raise ConfigError(
                "hydra/sweeper=optuna: nothing to search over. Give a range or a list, such as "
                "lr='tag(log, interval(1e-4, 1e-1))' or optimizer=lamb,adamw."
            )
        self.space = space_of(swept, lambda params: flat(self._job(params).values))
        self.example = self._job({key: any_value(found) for key, found in self.space.items()})
        """A trial that may never be: what is common to all can be seen in it."""
        self._hashed = True

    def placements(self) -> list[Job]:
        """Trials that may never be: the example, and one for each way of taking devices that is searched over."""
        found = [self.example]
        for key in _OF_PLACEMENT & self.space.keys():
            other = {name: any_value(kind) for name, kind in self.space.items()}
            choices = getattr(self.space[key], "choices", None) or [self.space[key].high]
            found += [self._job({**other, key: choice}) for choice in choices]
        return found

    def __call__(self, driver: Driver) -> None:
        """Run trials until there are as many as asked for, those of earlier starts among them."""
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        with _no_experimental_warnings():
            study = self._open(driver.sweep)
            driver.board.expected = self.options.n_trials
            self._go_back_to(study, driver, self._know_before(study, driver))
            while not driver.stop.requested and not driver.out_of_time:
                wave = self._wave(study, driver)
                if not wave:
                    break
                self._run(study, driver, wave)

    # The study ------------------------------------------------------------------------------------------------------

    def _open(self, sweep: SweepDir) -> Any:
        name = STORAGE if self.options.storage else str(sweep.study)
        with _asking(sweep):
            with told_by_name(name):
                found = study_of.open_study(open_storage(self.options.storage, sweep.study), self.mode())
            self._hashed = is_hashed(found)
            study_of.refuse_other(found, name, self.space, self.shared())
        return found

    def shared(self) -> dict[str, Any]:
        """What every trial has alike, by dotted name, and what judges it.

        Values that follow from a searched number, as `model.config.n_positions` does from `data.max_length`, are not
        among them: the range may change while the study lasts.
        """
        ends = {key: getattr(found, "high", any_value(found)) for key, found in self.space.items()}
        one, other = (flat(identity(values)) for values in (self.example.values, self._job(ends).values))
        searched = {key.lstrip("+") for key in self.space}
        alike = {key: value for key, value in one.items() if key not in searched and other.get(key) == value}
        metric = self.example.values["checkpoint"]["metric"]
        return {
            **alike,
            "checkpoint.metric": metric if metric is None or "/" in metric else f"eval/{metric}",
            "checkpoint.mode": self.mode(),
        }

    def mode(self) -> str:
        """Which direction of the objective is better: `checkpoint.mode`, or what belongs to the metric."""
        saving = self.example.values["checkpoint"]
        if saving["mode"] is not None:
            return str(saving["mode"])
        if saving["metric"] is not None:
            return metric_mode(str(saving["metric"]))
        return str(TASKS[saved_kind("task", TASKS, self.example.values["task"])].MODE)

    def _job(self, params: Mapping[str, Any]) -> Job:
        proposed = [written(key, value) for key, value in params.items()]
        job = build_jobs(self.compose, [[*self.fixed, *proposed]])[0]
        return replace(job, label=label_of(proposed))

    def _whole(self, trial: FrozenTrial) -> bool:
        return study_of.whole(trial, self.space) and study_of.proposed(trial)

    def _know_before(self, study: Any, driver: Driver) -> list[tuple[FrozenTrial, Job]]:
        """Trials that ended in earlier starts, with their jobs.

        Raises:
            ConfigError: They ended in another sweep directory.
        """
        trials = study.get_trials(deepcopy=False)
        over = [trial for trial in trials if trial.state.is_finished() and self._whole(trial)]
        ended = [(trial, self._job(trial.params)) for trial in over]
        if self.options.storage is not None:
            self._refuse_elsewhere(driver.sweep, ended)
        driver.add(job for _, job in ended)
        under_way = sum(trial.state == TrialState.RUNNING and self._whole(trial) for trial in trials)
        left = max(0, self.options.n_trials - len(ended) - under_way)
        driver.view.note(
            f"study of {self.options.n_trials} trials -> {driver.sweep.path} · {len(ended)} done before · "
            f"{under_way} under way · {left} to propose"
        )
        return ended

    def _refuse_elsewhere(self, sweep: SweepDir, ended: Sequence[tuple[FrozenTrial, Job]]) -> None:
        for trial, job in ended:
            if trial.state == TrialState.COMPLETE and sweep.state(job.name).status == "new":
                raise ConfigError(
                    f"hydra.sweeper.storage: trial {trial.number} of this study is done, and its job {job.name} is not "
                    f"in hydra.sweep.dir={sweep.path}. Give the hydra.sweep.dir that the study began with, or another "
                    "hydra.sweeper.storage."
                )

    def _go_back_to(self, study: Any, driver: Driver, ended: Sequence[tuple[FrozenTrial, Job]]) -> None:
        """Bring to their end what earlier starts left, and let the study know.

        That is a job that is gone, one that failed and is to be tried again, and one that a rung stopped where there
        are no rungs now.
        """
        at_rest = {job.name for trial, job in ended if trial.state == TrialState.PRUNED and self.options.rungs}
        jobs = {job.name: job for _, job in ended if job.name not in at_rest}
        driver.advance(list(jobs.values()))
        with _asking(driver.sweep):
            for trial, job in ended:
                state = driver.board.states[job.name]
                if state.status == "finished" and state.best is not None and state.best == state.best:
                    self._check_mode(state)
                    study_of.tell_again(study, trial, state.best)

    def _wave(self, study: Any, driver: Driver) -> list[tuple[int, Job]]:
        """Pick the next trials: those that were under way, then new ones."""
        with _asking(driver.sweep):
            trials = study.get_trials(deepcopy=False)
            for trial in trials:
                if trial.state == TrialState.RUNNING and not self._whole(trial):
                    study.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)
            whole = [trial for trial in trials if self._whole(trial)]
            open_trials = [trial for trial in whole if trial.state == TrialState.RUNNING]
            found = [(trial.number, self._job(trial.params)) for trial in open_trials][: self.options.n_jobs]
            count = len(whole)
            while len(found) < self.options.n_jobs and count < self.options.n_trials:
                number = len(study.get_trials(deepcopy=False))
                study.sampler = build_sampler(self.options.sampler, self.options.seed, number, hashed=self._hashed)
                trial = study.ask(fixed_distributions=self.space)
                found.append((trial.number, self._job(trial.params)))
                count += 1
        return found

    def _run(self, study: Any, driver: Driver, wave: list[tuple[int, Job]]) -> None:
        jobs = list({job.name: job for _, job in wave}.values())
        numbers = {job.name: [number for number, other in wave if other.name == job.name] for job in jobs}
        driver.add(jobs)

        def report(job: Job, step: int, value: float | None) -> None:
            for number in numbers[job.name]:
                _report(study, number, step, value)

        through_rungs(driver, jobs, report)
        for job in jobs:
            state = driver.board.states[job.name]
            self._check_mode(state)
            for number in numbers[job.name]:
                if state.status == "finished" and state.best is not None and state.best == state.best:
                    study.tell(number, state.best, skip_if_finished=True)
                elif state.ended:
                    study.tell(number, state=TrialState.FAIL, skip_if_finished=True)
                elif job.name in driver.board.resting:
                    study.tell(number, state=TrialState.PRUNED, skip_if_finished=True)

    def _check_mode(self, state: JobState) -> None:
        if state.metric is not None and state.mode != self.mode():
            raise ConfigError(
                f"the study goes for the {self.mode()}imum, but {state.metric} is best at its {state.mode}imum: say so "
                f"with checkpoint.mode={state.mode}, and choose a new hydra.sweep.dir."
            )


@contextlib.contextmanager
def _no_experimental_warnings() -> Iterator[None]:
    """Optuna calls some samplers experimental, whose interface nobody sees here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", category=optuna.exceptions.ExperimentalWarning)
        yield


def _report(study: Any, number: int, step: int, value: float | None) -> None:
    """Report the value at a rung to the sampler, once; NaN is not reported."""
    if value is None or value != value:
        return
    frozen = study.get_trials(deepcopy=False)[number]
    if frozen.state == TrialState.RUNNING and step not in frozen.intermediate_values:
        optuna.trial.Trial(study, frozen._trial_id).report(value, step)


@contextlib.contextmanager
def _asking(sweep: SweepDir) -> Iterator[None]:
    """One process at a time proposes, so that there are never more trials than asked for."""
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
