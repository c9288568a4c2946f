"""Find what a report says, as data: runs joined to arms, arms to contenders, tests, basins, targets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from optrun.artifacts.objective import Objective
from optrun.errors import ConfigError, did_you_mean
from optrun.report.arms import (
    Arm,
    Contender,
    build_arms,
    build_contenders,
    compared,
    differing,
    find_contender,
    follows,
    telling,
)
from optrun.report.basin import Basin, basin
from optrun.report.branches import name_trunks
from optrun.report.budget import ScoreAgainstBudget, score_against_budget
from optrun.report.collect import Run
from optrun.report.comparable import incomparable
from optrun.report.curves import metric_mode
from optrun.report.level import Level, common_level
from optrun.report.paths import respell
from optrun.report.statistics import Comparison, bootstrap_intervals, compare
from optrun.report.targets import TimeToTarget, choose_target, time_to_target
from optrun.report.tuned import untuned

DEFAULT_METRIC = "eval/loss"


@dataclass(frozen=True)
class Row:
    """One contender at its best."""

    rank: int | None
    """1 is best; None without a score."""
    name: str
    """Unique in the report."""
    contender: Contender
    interval: tuple[float, float]
    """Bootstrap interval of the mean over seeds; NaN below three seeds."""
    versus: Comparison | None
    """Against the reference; None where nothing has a score."""
    basin: Basin
    target: TimeToTarget
    budget: ScoreAgainstBudget

    @property
    def arm(self) -> Arm:
        """The arm that stands for the contender."""
        return self.contender.best


@dataclass(frozen=True)
class Findings:
    """What is known about a set of runs."""

    runs: list[Run]
    metric: str
    mode: str
    """One of `min` and `max`."""
    keys: list[str]
    """Settings in which the arms differ."""
    compared_keys: list[str]
    """Those of them that separate contenders."""
    tuned_keys: list[str]
    """Those over which each contender's best was chosen, and the learning rate; not what follows from the contender."""
    arms: list[Arm]
    rows: list[Row]
    """One per contender, best first."""
    reference: str | None
    """The row the others are tested against."""
    chosen_baseline: bool
    """Whether a person named the reference, or it is the best."""
    target: float
    """Level of the metric for steps, tokens and time to target."""
    chosen_target: bool
    """Whether a person set it."""
    level: Level
    """Level of the metric for the width of lr basins."""
    intervals: dict[int, tuple[float, float]]
    """Bootstrap intervals by `id` of the arm."""
    incomparable: str = ""
    """Why nothing is ranked although there are scores; empty where that is not so."""
    objectives: Sequence[Objective] = ()
    """Numbers that are weighed against each other; none: the metric alone."""

    def ranked_arms(self) -> list[Arm]:
        """Sort all arms, best mean first, those without a score last."""
        sign = 1.0 if self.mode == "min" else -1.0
        return sorted(self.arms, key=lambda arm: (not arm.scores, sign * arm.mean if arm.scores else 0.0))


def find(
    runs: Sequence[Run],
    *,
    metric: str | None = None,
    baseline: str | None = None,
    by: Sequence[str] = (),
    tuned: Collection[str] = (),
    target: float | None = None,
    objectives: Sequence[Objective] = (),
) -> Findings:
    """Join, rank and test.

    Args:
        runs: What was collected; at least one.
        metric: What to compare by; default: the main metric that most runs name.
        baseline: A contender to test the others against; default: the best.
        by: Configuration keys that separate contenders; default: see `arms.compared`.
        tuned: Keys that separate none unless they stand in `by`, or nothing else does.
        target: Level of the metric for times to target and lr basins; default: see `targets.choose_target` and
            `level.common_level`.
        objectives: What is weighed against each other.

    Raises:
        ConfigError: A metric no run has, a baseline or a key that is none here.
    """
    name, mode = choose_metric(runs, metric)
    described = [run for run in runs if run.described]
    respell(described)
    name_trunks(described)
    keys = differing(described)
    for key in by:
        known = {key for run in described for key in run.config}
        if key not in known:
            raise ConfigError(f"by={key}: no run has this configuration key. {did_you_mean(key, known)}")
    keys += [key for key in by if key not in keys]
    between = list(by) or telling(untuned(compared(keys), tuned), described)
    free = [key for key in keys if key not in between]
    chosen_over = [key for key in free if key == "lr" or not follows(key, between, described)]
    arms = build_arms(described, keys, name)
    contenders = build_contenders(arms, between, mode)
    names = _unique([contender.label for contender in contenders])
    chosen = names[contenders.index(find_contender(baseline, contenders))] if baseline else None
    scores = {label: each.best.scores for label, each in zip(names, contenders, strict=True)}
    tests: dict[str, Comparison] = {}
    apart = incomparable([run for arm in arms for run in arm.runs if run.score(name) is not None])
    if any(scores.values()) and not apart:
        tests = compare(scores, mode=mode, reference=chosen)
    reference = next(iter(tests.values())).reference if tests else None
    reference_arm = contenders[names.index(reference)].best if reference else None
    reached = choose_target([reference_arm] if chosen and reference_arm else [each.best for each in contenders], mode)
    level = common_level([] if apart else contenders, name, mode, target=target)
    intervals = _intervals(arms)
    rows = [
        Row(
            rank=index if each.best.scores and not apart else None,
            name=label,
            contender=each,
            interval=intervals[id(each.best)],
            versus=tests.get(label),
            basin=basin(each, mode, level.value),
            target=time_to_target(each.best, name, mode, reached if target is None else target),
            budget=score_against_budget(each, name, mode, level.start),
        )
        for index, (label, each) in enumerate(zip(names, contenders, strict=True), start=1)
    ]
    return Findings(
        list(runs),
        name,
        mode,
        keys,
        between,
        chosen_over,
        arms,
        rows,
        reference,
        bool(baseline),
        reached if target is None else target,
        target is not None,
        level,
        intervals,
        apart,
        objectives,
    )


def choose_metric(runs: Sequence[Run], metric: str | None) -> tuple[str, str]:
    """Choose the metric to compare by and its mode.

    Raises:
        ConfigError: A metric was asked for that no run has.
    """
    declared = Counter(
        (str(main["name"]), str(main["mode"]))
        for run in runs
        if isinstance(main := run.summary.get("main_metric"), dict)
        and main.get("name")
        and main.get("mode") in ("min", "max")
    )
    if metric is None:
        return declared.most_common(1)[0][0] if declared else (DEFAULT_METRIC, "min")
    known = {name for run in runs for name in run.log.names()}
    if metric not in known:
        raise ConfigError(f"metric={metric}: no run has logged it. {did_you_mean(metric, known)}")
    modes = {mode for name, mode in declared if name == metric}
    return metric, modes.pop() if len(modes) == 1 else metric_mode(metric)


def _intervals(arms: Sequence[Arm]) -> dict[int, tuple[float, float]]:
    """Compute bootstrap intervals of all arms; those with equally many seeds in one call."""
    result = {id(arm): (float("nan"), float("nan")) for arm in arms}
    by_size: dict[int, list[Arm]] = {}
    for arm in arms:
        by_size.setdefault(len(arm.scores), []).append(arm)
    for size, members in by_size.items():
        if size:
            low, high = bootstrap_intervals(np.array([list(arm.scores.values()) for arm in members]))
            result |= {id(arm): (float(a), float(b)) for arm, a, b in zip(members, low, high, strict=True)}
    return result


def _unique(labels: Sequence[str]) -> list[str]:
    """Number labels where two would read the same."""
    seen: Counter[str] = Counter()
    result = []
    for label in labels:
        seen[label] += 1
        result.append(label if seen[label] == 1 else f"{label} #{seen[label]}")
    return result
