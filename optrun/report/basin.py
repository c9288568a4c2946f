"""The lr basin of a contender: metric against learning rate, and how wide the good region is."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

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
    level: float
    """What a mean has to reach, in units of the metric; NaN where there is no level."""
    low: float = math.nan
    high: float = math.nan
    """Ends of the good region around the best, interpolated in ln(lr); NaN where the best does not reach the level."""
    open_low: bool = False
    open_high: bool = False
    """Whether the good region reaches the end of the grid, so that it may be wider than was seen."""

    @property
    def width(self) -> float:
        """High / low: the factor by which lr may be off; NaN where there is no basin."""
        return self.high / self.low if self.low > 0 else math.nan

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

    def width_label(self) -> str:
        """Format the width, such as "×8" or "≥ ×4"; a dash where one lr was tried."""
        if self.best is None or len(self.tried) < 2 or math.isnan(self.level):
            return "–"
        if math.isnan(self.width):
            return "not reached"
        factor = f"×{self.width:.2g}" if self.width < 100 else f"×{self.width:,.0f}"
        return f"≥ {factor}" if self.open_low or self.open_high else factor


def basin(contender: Contender, mode: str, level: float) -> Basin:
    """Find the basin of a contender over all its arms; at each lr the arm with the best mean counts.

    Args:
        contender: With its arms.
        mode: "min" or "max".
        level: What a mean has to reach to be good, the same for all contenders; see `level.common_level`.

    Returns:
        The good region is where the mean reaches the level, joined with the best, linear in ln(lr) between the tried
        values. A diverged lr bounds it.
    """
    by_lr: dict[float, list[Arm]] = {}
    for arm in contender.arms:
        if arm.lr is not None and arm.lr > 0:
            by_lr.setdefault(arm.lr, []).append(arm)
    points: dict[float, BasinPoint] = {}
    for lr, arms in sorted(by_lr.items()):
        if scored := [arm for arm in arms if arm.finished]:
            arm = min(scored, key=lambda each: (bool(each.diverged), each.cost(mode)))
            points[lr] = BasinPoint(lr, arm.mean, min(arm.finished), max(arm.finished), len(arm.finished))
    diverged = tuple(lr for lr, arms in sorted(by_lr.items()) if any(arm.diverged for arm in arms))
    tried = tuple(sorted({*points, *diverged}))
    stable = [point for lr, point in points.items() if lr not in diverged] or [*points.values()]
    sign = 1.0 if mode == "min" else -1.0
    chosen = contender.best.lr if contender.best.scores else None
    best = points.get(chosen or 0.0) or min(stable, key=lambda point: sign * point.mean, default=None)
    unfinished = tuple(lr for lr, arms in sorted(by_lr.items()) if lr not in diverged and _is_open(arms, best, mode))
    found = Basin(tuple(points.values()), diverged, tried, unfinished, best, math.nan if best is None else level)
    if best is None or not sign * best.mean <= sign * level:
        return found

    def end(side: Iterable[float]) -> tuple[float, bool]:
        """Find where the good region ends on one side, and whether the grid ended first."""
        inside = best
        for lr in side:
            if lr in diverged:
                return inside.lr, False
            if sign * (point := points[lr]).mean > sign * level:
                share = (level - inside.mean) / (point.mean - inside.mean)
                return inside.lr * (lr / inside.lr) ** share, False
            inside = point
        return inside.lr, True

    low, open_low = end(lr for lr in reversed(tried) if lr < best.lr)
    high, open_high = end(lr for lr in tried if lr > best.lr)
    return replace(found, low=low, high=high, open_low=open_low, open_high=open_high)


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
