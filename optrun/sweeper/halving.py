"""Stop the weaker jobs of a grid or a search at rungs; the others go on from their checkpoints.

One rule says who survives a rung: the best of those that are compared there. Successive halving
compares all jobs once the last of them is at the rung (Jamieson & Talwalkar 2016, arXiv:1502.07943,
Algorithm 1, with one bracket). ASHA compares a trial as soon as it is there with those that were
there before it (Li et al. 2018, arXiv:1810.05934, Algorithm 2, but that a stopped trial is not
taken up again). Hyperband gives each trial one of several first rungs (Li et al. 2016,
arXiv:1603.06560). The schedule of a job is that of its whole length throughout: a rung is a pause.
"""

from __future__ import annotations

import binascii
import bisect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, count

from optrun.artifacts.objective import stand_in
from optrun.base.errors import ConfigError
from optrun.config.schema.sweeper import OptunaConfig, Pruner, SweeperConfig
from optrun.sweeper.driver import Driver, Goal
from optrun.sweeper.jobs import Job
from optrun.sweeper.objectives import untrained

Group = tuple[Job, ...]
"""Jobs that are judged as one: those of a trial, which differ in the seed alone."""


def survivors(values: Mapping[str, float], mode: str, factor: int) -> list[str]:
    """Pick the best of those compared at a rung, at least one where any has a value.

    Equals in the order given.

    Args:
        values: Name to value at the rung; NaN survives nothing.
        mode: `min` or `max`.
        factor: Of so many one goes on.

    Example:
        >>> survivors({"a": 3.0, "b": 1.0, "c": float("nan"), "d": 2.0}, "min", 2)
        ['b', 'd']
    """
    known = [name for name in values if not math.isnan(values[name])]
    ranked = sorted(
        known, key=values.__getitem__, reverse=mode == "max"
    )  # of equals the first, either way
    return ranked[: max(1, len(values) // factor)]


def judge_together(
    driver: Driver,
    groups: Sequence[Group],
    report: Callable[[Group, int, float], object] | None = None,
) -> list[Goal]:
    """Say how far each job is to get, and stop the weaker ones at every rung that all of them have reached.

    Nobody is ranked before: where the time of one is up, the next start goes on with it. A job that
    was beyond the rung before there were rungs competes with what it had there; where it was not
    evaluated until then there is nothing to compare, and it goes on.

    Args:
        driver: Of the sweep; has the rungs among its options.
        groups: They compete with each other.
        report: Called with every value at a rung.
    """
    alive = list(groups)
    for rung in rungs_of(driver.options):
        goals = [Goal(job, rung) for group in alive for job in group]
        if any(map(driver.is_short_of, goals)):
            return goals
        known = [value for group in alive if (value := value_at(driver, group, rung)) is not None]
        found = {group[0].name: value_at(driver, group, rung, known) for group in alive}
        values = {name: value for name, value in found.items() if value is not None}
        mode = next(
            (row.state.mode for row in driver.board.rows.values() if row.state.metric), "min"
        )
        weak = values.keys() - (kept := survivors(values, mode, driver.options.reduction_factor))
        ranked = sum(not math.isnan(value) for value in values.values())
        for group in alive:
            name = group[0].name
            if report is not None and name in values:
                report(group, rung, values[name])
            if name in weak:
                driver.stop_at_rung(group, rung, f"{len(kept)} of {ranked} go on")
        alive = [group for group in alive if group[0].name not in weak]
    return [Goal(job) for group in alive for job in group]


def value_at(driver: Driver, group: Group, rung: int, known: Iterable[float] = ()) -> float | None:
    """Compute the value of a group at a rung: the mean of its jobs.

    A job that diverged until then counts as it does at the end: as the worst value, or its
    untrained model if that is worse.

    Args:
        driver: Of the sweep.
        group: All its jobs have ended, or are at the rung.
        rung: Optimizer steps.
        known: Values of others there.

    Returns:
        NaN where a job failed for another reason; None where one was not evaluated until then.
    """
    values = [_job_at(driver, job, rung, list(known)) for job in group]
    found = [value for value in values if value is not None]
    return sum(found) / len(found) if len(found) == len(values) else None


def _job_at(driver: Driver, job: Job, rung: int, known: Iterable[float]) -> float | None:
    state = driver.board.row(job).state
    if state.status != "failed" or state.step > rung:
        rungs = driver.sweep.read_record(job.name).rungs
        return rungs[str(rung)] if str(rung) in rungs else driver.sweep.best_until(job.name, rung)
    bad = (
        stand_in(known, [untrained(driver.sweep, job, state.metric or "")], state.mode)
        if state.diverged
        else None
    )
    return math.nan if bad is None else bad


def refuse_unreachable(options: OptunaConfig, max_steps: int | None) -> None:
    """Refuse a first rung that no trial reaches, or brackets without a known end.

    Args:
        options: Of the sweeper.
        max_steps: Optimizer steps of a whole trial; None: its configuration counts in epochs.

    Raises:
        ConfigError: With the key.
    """
    if (
        max_steps is not None
        and options.min_resource is not None
        and options.min_resource >= max_steps
    ):
        raise ConfigError(
            f"hydra.sweeper.min_resource={options.min_resource}: expected fewer steps than the"
            f" {max_steps} of a whole trial."
        )
    if max_steps is None and options.pruner is Pruner.hyperband:
        raise ConfigError(
            "hydra.sweeper.pruner=hyperband: its brackets follow from the steps of a whole trial."
            " Give training.max_steps, or take asha."
        )


def rungs_of(options: SweeperConfig, bracket: int = 0) -> Iterator[int]:
    """Yield the steps at which jobs are judged.

    Those that are named, or without end those that follow from the first.

    Example:
        >>> from types import SimpleNamespace
        >>> found = rungs_of(SimpleNamespace(rungs=[], min_resource=10, reduction_factor=3))
        >>> next(found), next(found), next(found)
        (10, 30, 90)
        >>> list(rungs_of(SimpleNamespace(rungs=[50, 100])))
        [50, 100]
    """
    yield from options.rungs
    if not options.rungs and (first := getattr(options, "min_resource", None)) is not None:
        yield from (first * options.reduction_factor ** (bracket + power) for power in count())


def bracket_of(options: OptunaConfig, study: str, number: int, max_steps: int | None) -> int:
    """Assign a trial to a bracket, as `HyperbandPruner` of Optuna does; asha has one.

    Example:
        >>> from types import SimpleNamespace
        >>> options = SimpleNamespace(pruner=Pruner.hyperband, min_resource=1, reduction_factor=2)
        >>> sorted({bracket_of(options, "optrun", number, 4) for number in range(20)})
        [0, 1, 2]
    """
    if options.pruner is not Pruner.hyperband or options.min_resource is None or max_steps is None:
        return 0
    brackets = math.floor(math.log(max_steps / options.min_resource, options.reduction_factor)) + 1
    shares = [
        math.ceil(brackets * options.reduction_factor**left / (left + 1))
        for left in reversed(range(brackets))
    ]
    place = binascii.crc32(f"{study}_{number}".encode()) % sum(shares)
    return bisect.bisect_right(list(accumulate(shares)), place)
