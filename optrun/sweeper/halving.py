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


class RungReport(Protocol):
    """Is called with the values at rungs."""

    def __call__(self, job: Job, step: int, value: float | None) -> None:
        """The best value of a job until a step, NaN where it was no number; None: it has none."""


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


def through_rungs(driver: Driver, jobs: Sequence[Job], report: RungReport | None = None) -> None:
    """Bring jobs to their end, rung by rung.

    Nobody is ranked before all have reached the rung: where the time of one is up, the next start goes on with it. A
    job that was beyond the rung before there were rungs competes with what it had there; where it was not evaluated
    until then there is nothing to compare, and it goes on.

    Args:
        driver: Of the sweep; has the rungs among its options.
        jobs: They compete with each other.
        report: Called with every value at a rung.
    """
    alive = list(jobs)
    for rung in driver.options.rungs:
        driver.advance(alive, rung)
        if driver.stop.requested or any(job.name in driver.out_of_time for job in alive):
            return
        found = {job.name: _at_rung(driver, job, rung) for job in alive}
        values = {name: value for name, value in found.items() if value is not None}
        if report is not None:
            for job in alive:
                report(job, rung, values.get(job.name))
        mode = next((state.mode for state in driver.board.states.values() if state.metric), "min")
        kept = set(survivors(values, mode, driver.options.reduction_factor))
        weak = [job for job in alive if job.name in values.keys() - kept and not driver.board.states[job.name].ended]
        ranked = len([value for value in values.values() if value == value])
        driver.rest(weak, rung, f"{len(kept)} of {ranked} go on")
        alive = [job for job in alive if job.name not in values.keys() - kept]
    driver.advance(alive)


def _at_rung(driver: Driver, job: Job, rung: int) -> float | None:
    """What a job had reached at a rung, NaN for one that failed; None: it was not evaluated until then."""
    if driver.board.states[job.name].status == "failed":
        return math.nan
    rungs = driver.sweep.read_record(job.name).rungs
    return rungs[str(rung)] if str(rung) in rungs else driver.sweep.best_until(job.name, rung)
