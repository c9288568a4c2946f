"""The lr basin of a contender: metric against learning rate, and what was tried beside the best."""

from __future__ import annotations

from dataclasses import dataclass

from optrun.report.arms import Arm, Contender

COARSE = 5.0
"""A grid whose values beside the best lr are further apart than this factor may have missed the best between them."""


@dataclass(frozen=True)
class Basin:
    """Metric against learning rate of one contender."""

    points: dict[float, Arm]
    """By rising lr the arm with the best mean; learning rates without a score left out."""
    diverged: tuple[float, ...]
    """Learning rates at which some run diverged."""
    begun: tuple[float, ...]
    """Every learning rate, one whose runs have not come to an end among them."""
    best: Arm | None

    @property
    def tried(self) -> tuple[float, ...]:
        """Every learning rate with an outcome: scored or diverged."""
        return tuple(sorted({*self.points, *self.diverged}))

    def beside(self) -> tuple[float | None, float | None]:
        """Find the learning rates below and above the best; None: it is the last."""
        best = self.begun[0] if self.best is None else self.best.lr or 0.0
        below, above = [lr for lr in self.begun if lr < best], [lr for lr in self.begun if lr > best]
        return (below[-1] if below else None, above[0] if above else None)


def basin(contender: Contender, mode: str) -> Basin:
    """Find the basin of a contender over all its arms; at each lr the arm with the best mean counts.

    Args:
        contender: With its arms.
        mode: "min" or "max".
    """
    arms = sorted((arm for arm in contender.arms if arm.lr), key=lambda arm: arm.lr or 0.0)
    begun = {arm.lr: bool(arm.diverged) for arm in sorted(arms, key=lambda arm: bool(arm.diverged)) if arm.lr}
    points: dict[float, Arm] = {}
    for arm in sorted(arms, key=lambda each: (each.lr or 0.0, bool(each.diverged), each.cost(mode))):
        if arm.finished and arm.lr:
            points.setdefault(arm.lr, arm)
    stable = [arm for lr, arm in points.items() if not begun[lr]] or [*points.values()]
    chosen = points.get(contender.best.lr or 0.0) if contender.best.scores else None
    best = chosen or min(stable, key=lambda arm: arm.cost(mode), default=None)
    return Basin(points, tuple(sorted(lr for lr in begun if begun[lr])), tuple(sorted(begun)), best)
