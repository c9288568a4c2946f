"""Find which settings a search varied, and which of them mattered, as far as optuna is installed."""

from __future__ import annotations

import importlib.util
import math
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from optrun.report.arms import Arm, Contender
from optrun.report.findings import Findings

FEWEST = 12
"""Fewer configurations of a contender weigh nothing."""
_GOOD = 0.25
"""The share of configurations that count as good ones."""


def searched_keys(findings: Findings) -> list[str]:
    """List the tuned settings of which some contender has tried several values."""
    return [
        key
        for key in findings.tuned_keys
        if any(len({arm.settings[key] for arm in outcomes(row.contender, key)}) > 1 for row in findings.rows)
    ]


def outcomes(contender: Contender, key: str = "") -> list[Arm]:
    """List the arms with an outcome that have the setting."""
    return [arm for arm in contender.arms if (not key or key in arm.settings) and (arm.finished or arm.diverged)]


def is_number(values: Sequence[object]) -> bool:
    """Tell whether a setting is a finite number wherever it is set."""
    return bool(values) and all(
        isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) for value in values
    )


def wide(values: Sequence[Any]) -> bool:
    """Tell whether numbers are better seen on a logarithmic axis."""
    return bool(min(values) > 0 and max(values) > 10 * min(values))


def places(values: Sequence[Any]) -> dict[Any, float]:
    """Place the values of a setting between 0 and 1: numbers to scale, linear or logarithmic, words evenly.

    Example:
        >>> places([1, 10, 100, 10]), places(["b", "a", None])
        ({1: 0.0, 10: 0.5, 100: 1.0}, {None: 0.0, 'a': 0.5, 'b': 1.0})
    """
    distinct = list(dict.fromkeys(values))
    if len(distinct) > 1 and is_number(distinct):
        scaled = np.log(distinct) if wide(distinct) else np.asarray(distinct, dtype=np.float64)
        return dict(zip(distinct, ((scaled - scaled.min()) / np.ptp(scaled)).tolist(), strict=True))
    distinct.sort(key=str)
    return {each: at / max(1, len(distinct) - 1) for at, each in enumerate(distinct)}


def importances(findings: Findings) -> dict[str, float]:
    """Weigh the searched settings: how much do the good quarter of configurations differ from all in each?

    Each contender is weighed by itself, since its good values are its own, and counts as often as it has
    configurations. One that diverged is as bad as the worst.

    Returns:
        Shares, 1 together, the largest first; empty without optuna or with too few configurations.

    Source: Watanabe, Bansal, Hutter 2023 (PED-ANOVA), `optuna.importance.PedAnovaImportanceEvaluator`.
    """
    keys = searched_keys(findings)
    if len(keys) < 2 or importlib.util.find_spec("optuna") is None:
        return {}
    total = dict.fromkeys(keys, 0.0)
    for row in findings.rows:
        arms = [arm for arm in outcomes(row.contender) if arm.settings.keys() >= set(keys)]
        weighed = len(arms) >= FEWEST and any(arm.finished for arm in arms)
        for key, share in _weigh(arms, keys, findings.mode).items() if weighed else ():
            total[key] += share * len(arms)
    whole = sum(total.values())
    return {key: total[key] / whole for key in sorted(keys, key=lambda key: -total[key])} if whole else {}


def _weigh(arms: Sequence[Arm], keys: Sequence[str], mode: str) -> dict[str, float]:
    """Ask optuna, with the arms as trials of a study."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)  # every study announces itself
    sign = 1.0 if mode == "min" else -1.0
    scores = [sign * arm.mean if arm.finished else math.nan for arm in arms]
    where = {key: places([arm.settings[key] for arm in arms]) for key in keys}
    spaces = {key: optuna.distributions.FloatDistribution(0.0, 1.0) for key in keys}
    study = optuna.create_study()
    for arm, score in zip(arms, np.nan_to_num(scores, nan=np.nanmax(scores)), strict=True):
        params = {key: where[key][arm.settings[key]] for key in keys}
        study.add_trial(optuna.create_trial(params=params, distributions=spaces, value=float(score)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of an evaluator that is called experimental
        evaluator = optuna.importance.PedAnovaImportanceEvaluator(target_quantile=_GOOD)
        return dict(optuna.importance.get_param_importances(study, evaluator=evaluator))
