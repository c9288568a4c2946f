"""Measure which of the searched settings mattered: the share of the variance of ranks that one explains by itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optrun.report.arms import Arm, Contender
from optrun.report.findings import Findings, Row

Array = NDArray[np.float64]

BINS = 4
FEWEST = 8
"""Degrees of freedom within the bins below which no share is given."""


def searched_keys(findings: Findings) -> list[str]:
    """List the tuned settings of which some contender has tried several values, those that mattered most first."""
    keys = [key for key in findings.tuned_keys if any(len(set(tried(row.contender, key))) > 1 for row in findings.rows)]
    return sorted(keys, key=lambda key: -(importance(findings.rows, key, findings.mode) or 0.0))


def outcomes(contender: Contender, key: str) -> list[Arm]:
    """List the arms with an outcome that have the setting."""
    return [arm for arm in contender.arms if key in arm.settings and (arm.scores or arm.diverged)]


def tried(contender: Contender, key: str) -> list[Any]:
    """List the values of a setting, one for each arm with an outcome."""
    return [arm.settings[key] for arm in outcomes(contender, key)]


def is_number(values: Sequence[object]) -> bool:
    """Tell whether a setting is a finite number wherever it is set."""
    return bool(values) and all(
        isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) for value in values
    )


def importance(rows: Sequence[Row], key: str, mode: str) -> float | None:
    """Compute the share of the variance of ranks that lies between the values of one setting.

    Configurations are ranked within their contender, diverged ones last, and binned by the setting: each value by
    itself, or where there are more than `BINS` numbers, in as many bins of equally many configurations. With the sums
    of squares over all contenders, between and within the bins, and their degrees of freedom,

        epsilon^2 = (SS_between - df_between SS_within / df_within) / SS_total

    is 0 on average for a setting that does nothing, however many bins there are. It is a main effect: what two settings
    do only together is in neither share. A search that proposes more where it is good, as TPE does, confounds them.

    Returns:
        In [0, 1]; None where too few configurations were tried to say.

    Source: Kelley 1935, An unbiased correlation ratio measure; of ranks, as the first-order part of functional ANOVA
    (Hutter, Hoos, Leyton-Brown 2014, An efficient approach for assessing hyperparameter importance).
    """
    between = within = 0.0
    df_between = df_within = 0
    for row in rows:
        arms = outcomes(row.contender, key)
        groups = bins([arm.settings[key] for arm in arms])
        if len(set(groups)) < 2:
            continue
        ranks = _ranks(arms, mode)
        labels = np.array(groups)
        for label in set(groups):
            members = ranks[labels == label]
            between += len(members) * float(members.mean() - ranks.mean()) ** 2
            within += float(((members - members.mean()) ** 2).sum())
        df_between += len(set(groups)) - 1
        df_within += len(arms) - len(set(groups))
    if df_within < FEWEST or between + within == 0:
        return None
    return min(1.0, max(0.0, (between - df_between * within / df_within) / (between + within)))


def bins(values: Sequence[Any]) -> list[int]:
    """Number the bins that values fall into.

    Example:
        >>> bins(["a", "b", "a"]), bins([1, 2, 3, 4, 5, 6, 7, 8])
        ([0, 1, 0], [0, 0, 1, 1, 2, 2, 3, 3])
    """
    distinct = list(dict.fromkeys(values))
    if len(distinct) <= BINS or not is_number(values):
        return [distinct.index(value) for value in values]
    edges = np.quantile(np.asarray(values, dtype=np.float64), np.arange(1, BINS) / BINS)
    return [int(index) for index in np.searchsorted(edges, np.asarray(values, dtype=np.float64))]


def _ranks(arms: Sequence[Arm], mode: str) -> Array:
    """Rank arms within a contender, equal ones alike; those that diverged share the last place."""
    sign = 1.0 if mode == "min" else -1.0
    scores = np.array([math.inf if arm.diverged or not arm.scores else sign * arm.mean for arm in arms])
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    return np.asarray((np.cumsum(counts) - (counts - 1) / 2)[inverse], dtype=np.float64)
