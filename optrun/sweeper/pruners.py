"""Asynchronous halving: a trial that is at a rung is judged at once, by those that were there before it.

Optuna's pruners decide. ASHA: Li et al. 2018, arXiv:1810.05934, Algorithm 2, but that a trial which was stopped is not
taken up again when others turn out weaker. Hyperband: Li et al. 2016, arXiv:1603.06560; each trial is given a bracket.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import optuna

from optrun.base.errors import ConfigError
from optrun.config.schema.sweeper import OptunaConfig, Pruner


def build_pruner(options: OptunaConfig, max_steps: int | None) -> Any:
    """Make the pruner of a study.

    Args:
        options: Of the sweeper.
        max_steps: Optimizer steps of a whole trial; None: its configuration counts in epochs.

    Raises:
        ConfigError: A first rung that no trial reaches, or brackets without a known end.
    """
    first, factor = options.min_resource, options.reduction_factor
    if options.pruner is Pruner.none or first is None:
        return optuna.pruners.NopPruner()
    given = f"hydra.sweeper.min_resource={first}"
    if max_steps is not None and first >= max_steps:
        raise ConfigError(f"{given}: expected fewer steps than the {max_steps} of a whole trial.")
    if options.pruner is Pruner.asha:
        return optuna.pruners.SuccessiveHalvingPruner(min_resource=first, reduction_factor=factor)
    if max_steps is None:
        raise ConfigError(
            "hydra.sweeper.pruner=hyperband: its brackets follow from the steps of a whole trial. Give "
            "training.max_steps, or take asha."
        )
    return optuna.pruners.HyperbandPruner(min_resource=first, max_resource=max_steps, reduction_factor=factor)


def rungs(options: OptunaConfig) -> Iterator[int]:
    """The steps at which a trial is judged, without end.

    Example:
        >>> from types import SimpleNamespace
        >>> found = rungs(SimpleNamespace(min_resource=10, reduction_factor=3))
        >>> next(found), next(found), next(found)
        (10, 30, 90)
    """
    step = options.min_resource or 1
    while True:
        yield step
        step *= options.reduction_factor
