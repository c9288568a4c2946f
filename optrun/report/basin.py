"""The lr basin of a contender: metric against learning rate, and what was tried beside the best."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from optrun.report.arms import Arm, Contender

COARSE = 5.0
"""A grid whose values beside the best lr are further apart than this factor may have missed the best between them."""


@dataclass(frozen=True)
class BasinPoint:
    """The outcome at one learning rate."""

    lr: float
    mean: float
    """Mean score of the best arm at this lr."""
    low: float
    high: float
    """Worst and best seed, in rising order of the value."""
    seeds: int


@dataclass(frozen=True)
class Neighbour:
    """What was tried next to the best learning rate, on one side of it."""

    end: str
    """What the best is where nothing was tried on this side: the `lowest` or the `highest`."""
    lr: float | None
    """The nearest whose outcome is known, scored or diverged; None: there is none."""
    unfinished: tuple[float, ...]
    """Nearer ones of which it is not: runs failed, were cut, or run still."""


@dataclass(frozen=True)
class Basin:
    """Metric against learning rate of one contender."""

    points: tuple[BasinPoint, ...]
    """By rising lr; learning rates without a score left out."""
    diverged: tuple[float, ...]
    """Learning rates at which some run diverged."""
    tried: tuple[float, ...]
    """Every learning rate with an outcome: scored or diverged."""
    unfinished: tuple[float, ...]
    """Learning rates without any, or with a better mean than the best over fewer seeds, since runs did not finish."""
    best: BasinPoint | None

    def neighbours(self) -> tuple[Neighbour, ...]:
        """Look at both sides of the best lr; nothing where less than two were begun."""
        if self.best is None or len({*self.tried, *self.unfinished}) < 2:
            return ()
        best = self.best.lr
        known = [lr for lr in self.tried if lr not in self.unfinished]
        below = max((lr for lr in known if lr < best), default=None)
        above = min((lr for lr in known if lr > best), default=None)
        return (
            Neighbour("lowest", below, tuple(lr for lr in self.unfinished if (below or 0.0) < lr < best)),
            Neighbour("highest", above, tuple(lr for lr in self.unfinished if best < lr < (above or math.inf))),
        )


def basin(contender: Contender, mode: str) -> Basin:
    """Find the basin of a contender over all its arms; at each lr the arm with the best mean counts.

    Args:
        contender: With its arms.
        mode: "min" or "max".
    """
    by_lr: dict[float, list[Arm]] = {}
    for arm in contender.arms:
        if arm.lr is not None and arm.lr > 0:
            by_lr.setdefault(arm.lr, []).append(arm)
    by_lr = dict(sorted(by_lr.items()))
    points: dict[float, BasinPoint] = {}
    for lr, arms in by_lr.items():
        if scored := [arm for arm in arms if arm.finished]:
            arm = min(scored, key=lambda each: (bool(each.diverged), each.cost(mode)))
            points[lr] = BasinPoint(lr, arm.mean, min(arm.finished), max(arm.finished), len(arm.finished))
    diverged = tuple(lr for lr, arms in by_lr.items() if any(arm.diverged for arm in arms))
    stable = [point for lr, point in points.items() if lr not in diverged] or [*points.values()]
    sign = 1.0 if mode == "min" else -1.0
    chosen = contender.best.lr if contender.best.scores else None
    best = points.get(chosen or 0.0) or min(stable, key=lambda point: sign * point.mean, default=None)
    unfinished = tuple(lr for lr, arms in by_lr.items() if lr not in diverged and _is_open(arms, best, mode))
    return Basin(tuple(points.values()), diverged, tuple(sorted({*points, *diverged})), unfinished, best)


def _is_open(arms: Sequence[Arm], best: BasinPoint | None, mode: str) -> bool:
    """Tell whether runs that did not finish hide how good a learning rate is.

    Fewer seeds than the best one has tell enough where their mean is worse, as it is wherever a failed run is rare.
    """
    scored = [arm for arm in arms if arm.finished]
    if not scored or best is None:
        return not scored
    return any(
        len(arm.scores) < best.seeds
        and (arm.mean < best.mean if mode == "min" else arm.mean > best.mean)
        and any(not run.finished and run.seed not in arm.scores for run in arm.runs)
        for arm in scored
    )
