"""Successive halving: at every rung the weaker jobs stop, and the others go on from their checkpoints.

Source: Jamieson & Talwalkar 2016, arXiv:1502.07943, Algorithm 1, with one bracket. The schedule of a job is that of its
whole length throughout: a rung is a pause.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from optrun.sweep.driver import Driver
from optrun.sweep.jobs import Job


class Told(Protocol):
    """Hears of values at rungs."""

    def __call__(self, job: Job, step: int, value: float | None) -> None:
        """The best value of a job until a step; None: none that is a number."""


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
        (sign * value, place, name)
        for place, (name, value) in enumerate(values.items())
        if value is not None and value == value
    )
    return [name for _, _, name in ranked[: max(1, len(values) // factor)]]


def through_rungs(driver: Driver, jobs: Sequence[Job], told: Told | None = None) -> None:
    """Bring jobs to their end, rung by rung.

    Args:
        driver: Of the sweep; has the rungs among its options.
        jobs: They compete with each other.
        told: Hears of every value at a rung.
    """
    alive = list(jobs)
    for rung in driver.options.rungs:
        driver.advance(alive, rung)
        if driver.stop.requested:
            return
        values = {job.name: _at_rung(driver, job, rung) for job in alive}
        if told is not None:
            for job in alive:
                told(job, rung, values[job.name])
        mode = next((state.mode for state in driver.board.states.values() if state.metric), "min")
        kept = set(survivors(values, mode, driver.options.reduction_factor))
        weak = [job for job in alive if job.name not in kept and not driver.board.states[job.name].ended]
        ranked = len([value for value in values.values() if value is not None])
        driver.rest(weak, rung, f"{len(kept)} of {ranked} go on")
        alive = [job for job in alive if job.name in kept]
    driver.advance(alive)


def _at_rung(driver: Driver, job: Job, rung: int) -> float | None:
    """What a job had reached at a rung; a job that ended before it, its result; a failed one, nothing."""
    state = driver.board.states[job.name]
    if state.status == "failed":
        return None
    return driver.sweep.read_record(job.name).rungs.get(str(rung), state.best)
