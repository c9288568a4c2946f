"""Successive halving: at every rung the weaker jobs stop, and the others go on from their checkpoints.

Source: Jamieson & Talwalkar 2016, arXiv:1502.07943, Algorithm 1, with one bracket. The schedule of a job is that of its
whole length throughout: a rung is a pause.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

from optrun.sweeper.driver import Driver
from optrun.sweeper.jobs import Job

Group = tuple[Job, ...]
"""Jobs that are judged as one: those of a trial, which differ in the seed alone."""


class RungReport(Protocol):
    """Is called with the values at rungs."""

    def __call__(self, group: Group, step: int, value: float | None) -> None:
        """The mean best value of a group until a step, NaN where one was no number; None: one has none."""


def survivors(values: Mapping[str, float | None], mode: str, factor: int) -> list[str]:
    """The names of the best, at least one where any has a value; equals in the order given.

    Args:
        values: Name to value at the rung; None: it has none.
        mode: `min` or `max`.
        factor: Of so many one goes on.

    Example:
        >>> survivors({"a": 3.0, "b": 1.0, "c": None, "d": 2.0}, "min", 2)
        ['b', 'd']
    """
    sign = 1 if mode == "min" else -1
    ranked = sorted(
        (sign * value, index, name)
        for index, (name, value) in enumerate(values.items())
        if value is not None and value == value
    )
    return [name for _, _, name in ranked[: max(1, len(values) // factor)]]


def through_rungs(driver: Driver, groups: Sequence[Group], report: RungReport | None = None) -> None:
    """Bring jobs to their end, rung by rung.

    Nobody is ranked before all have reached the rung: where the time of one is up, the next start goes on with it. A
    job that was beyond the rung before there were rungs competes with what it had there; where it was not evaluated
    until then there is nothing to compare, and it goes on.

    Args:
        driver: Of the sweep; has the rungs among its options.
        groups: They compete with each other.
        report: Called with every value at a rung.
    """
    alive = list(groups)
    for rung in driver.options.rungs:
        jobs = _jobs(alive)
        driver.advance(jobs, rung)
        if driver.stop.requested or any(job.name in driver.out_of_time for job in jobs):
            return
        found = {group[0].name: at_rung(driver, group, rung) for group in alive}
        values = {name: value for name, value in found.items() if value is not None}
        if report is not None:
            for group in alive:
                report(group, rung, values.get(group[0].name))
        mode = next((state.mode for state in driver.board.states.values() if state.metric), "min")
        kept = set(survivors(values, mode, driver.options.reduction_factor))
        gone = values.keys() - kept
        ranked = len([value for value in values.values() if value == value])
        weak = [group for group in alive if group[0].name in gone]
        stop_at_rung(driver, weak, rung, f"{len(kept)} of {ranked} go on")
        alive = [group for group in alive if group[0].name not in gone]
    driver.advance(_jobs(alive))


def stop_at_rung(driver: Driver, groups: Sequence[Group], rung: int, why: str) -> None:
    """Stop what of some groups has not ended."""
    driver.rest([job for job in _jobs(groups) if not driver.board.states[job.name].ended], rung, why)


def at_rung(driver: Driver, group: Group, rung: int) -> float | None:
    """Compute what a group had reached at a rung: the mean of its jobs, NaN where one failed.

    Returns:
        None where one was not evaluated until then.
    """
    values = [_job_at_rung(driver, job, rung) for job in group]
    found = [value for value in values if value is not None]
    return sum(found) / len(found) if len(found) == len(values) else None


def _jobs(groups: Sequence[Group]) -> list[Job]:
    return [job for group in groups for job in group]


def _job_at_rung(driver: Driver, job: Job, rung: int) -> float | None:
    if driver.board.states[job.name].status == "failed":
        return math.nan
    rungs = driver.sweep.read_record(job.name).rungs
    return rungs[str(rung)] if str(rung) in rungs else driver.sweep.best_until(job.name, rung)
