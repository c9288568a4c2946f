"""Find what a report says of one workload, as data.

Runs joined to configurations, configurations to contenders, and ttest.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypedDict, Unpack

import numpy as np

from optrun.artifacts.forks import KEY as BRANCH_FROM
from optrun.artifacts.forks import Fork
from optrun.base.errors import ConfigError, did_you_mean
from optrun.base.formatting import plain
from optrun.config.schema.metric import metric_mode
from optrun.report.comparability import explain_incomparable, unify_paths
from optrun.report.configurations import (
    Configuration,
    Contender,
    build_configurations,
    build_contenders,
    differing_keys,
    drop_implied_keys,
    find_contender,
    is_implied,
    pick_compared_keys,
)
from optrun.report.runs import Run, all_keys, to_number
from optrun.report.statistics import TtestResult, compare, pooled_sd

DEFAULT_METRIC = "eval/loss"


@dataclass(frozen=True)
class Findings:
    """Contenders, tests and warnings of the runs of one workload."""

    runs: list[Run]
    metric: str
    mode: str
    """One of `min` and `max`."""
    own_metric: str
    """The main metric that the runs name."""
    keys: list[str]
    """Settings in which the configurations differ."""
    compared_keys: list[str]
    """Those of them that separate contenders."""
    tuned_keys: list[str]
    """Those over which each contender's best was chosen, and the learning rate; not what follows
    from the contender."""
    configurations: list[Configuration]
    rows: list[Contender]
    """Best first."""
    ttest: TtestResult | None
    """None where nothing is ranked."""
    floor: float
    """The metric before the first step: the median over runs; NaN where it was not evaluated."""
    incomparable: str = ""
    """Why nothing is ranked although there are scores; empty where that is not so."""
    name: str = ""
    """Of several workloads, what differs between them, such as `causal_lm on stdlib`."""
    left_out: str = ""
    """Why it has no part in the score over all workloads; empty where it has."""

    @property
    def baseline(self) -> str | None:
        """Return the name of the baseline; None if nobody named one."""
        if self.ttest is None or not self.ttest.has_baseline:
            return None
        return self.ttest.reference

    @property
    def ranked(self) -> list[Contender]:
        """The rows with a rank."""
        return [row for row in self.rows if row.rank]

    @property
    def end(self) -> float:
        """Return the mean of the best contender, scored as 1 over workloads.

        NaN without one.
        """
        return next((row.configuration.mean for row in self.ranked), math.nan)

    def scaled(self) -> dict[str, dict[int, float]]:
        """Scale outcomes from 0, the floor, to 1, the best mean.

        (floor - x) / (floor - end), contender -> seed -> score.
        """
        learnt = self.floor - self.end
        scores = {}
        for row in self.ranked:
            outcomes = row.configuration.scores.items()
            scores[row.name] = {seed: (self.floor - x) / learnt for seed, x in outcomes}
        return scores


class Question(TypedDict, total=False):
    """The options of an analysis, typed or from the plan of a confirmation."""

    metric: str | None
    """To compare by; None: the main metric that most runs name."""
    baseline: str | None
    """A contender to test the others against; None: each is asked whether it could be the best."""
    by: Sequence[str]
    """Configuration keys that separate contenders; none: see `pick_compared_keys`."""
    tuned: Collection[str]
    """Keys that separate none unless they stand in `by`, or nothing else does."""
    matters: float | None
    """The smallest difference that counts; None: that of the configuration, else what another seed
    changes."""
    looks: int
    """How often the growing set of seeds was asked, this time among them."""


def analyse_runs(runs: Sequence[Run], **question: Unpack[Question]) -> Findings:
    """Group runs into configurations and contenders, then rank and test the contenders.

    Args:
        runs: All runs to analyse; at least one.
        question: The options, see `Question`.

    Raises:
        ConfigError: No run has the metric, the metric cannot rank, or baseline or key is unknown.
    """
    by = list(question.get("by", ()))
    baseline = question.get("baseline")
    metric, mode = choose_metric(runs, question.get("metric"))
    described = [run for run in runs if run.described]
    unify_paths(described)
    _name_trunks(described)
    keys = differing_keys(described)
    _expect_keys(by, described)
    keys += [key for key in by if key not in keys]
    compared = by
    if not by:
        candidates = pick_compared_keys(keys, question.get("tuned", ()))
        compared = drop_implied_keys(candidates, described)
    free = [key for key in keys if key not in compared]
    configurations = build_configurations(described, keys, metric, mode)
    contenders = build_contenders(configurations, compared, mode)
    scored = [run for run in described if run.score(metric) is not None]
    incomparable = explain_incomparable(scored)
    if metric.startswith("train/"):
        incomparable = (
            f"{metric} is a training metric, and ranks nothing; give the runs an evaluation, as"
            " with data.eval"
        )
    baseline_name = find_contender(baseline, contenders).name if baseline else None
    ttest = None
    if any(contender.configuration.finished for contender in contenders) and not incomparable:
        matters = question.get("matters")
        ttest = compare(
            {contender.name: contender.configuration.scores for contender in contenders},
            mode=mode,
            baseline=baseline_name,
            matters=read_matters(runs) if matters is None else matters,
            sd=pooled_sd(contender.configuration.finished for contender in contenders),
            looks=question.get("looks", 1),
        )
        contenders = _rank(contenders, ttest, mode)
    before = [run.before_training(metric) for run in described]
    floors = [value for value in before if value is not None]
    return Findings(
        runs=list(runs),
        metric=metric,
        mode=mode,
        own_metric=choose_metric(runs, None)[0],
        keys=keys,
        compared_keys=compared,
        tuned_keys=[key for key in free if key == "lr" or not is_implied(key, compared, described)],
        configurations=configurations,
        rows=contenders,
        ttest=ttest,
        floor=float(np.median(floors)) if floors else math.nan,
        incomparable=incomparable,
    )


def _expect_keys(keys: Sequence[str], runs: Sequence[Run]) -> None:
    """Refuse keys of `by=` missing from every run."""
    known_keys = all_keys(runs)
    for key in keys:
        if key not in known_keys:
            raise ConfigError(
                f"by={key}: no run has this configuration key. {did_you_mean(key, known_keys)}"
            )


def _rank(contenders: Sequence[Contender], ttest: TtestResult, mode: str) -> list[Contender]:
    """Add rank and comparison to contenders with a score; equal means share a rank."""
    costs = [contender.configuration.cost(mode) for contender in contenders]
    ranked = []
    for contender, cost in zip(contenders, costs, strict=True):
        better = [other_cost for other_cost in costs if other_cost < cost]
        rank = 1 + len(better) if math.isfinite(cost) else None
        ranked.append(replace(contender, rank=rank, comparison=ttest.comparisons[contender.name]))
    return ranked


def choose_metric(runs: Sequence[Run], metric: str | None) -> tuple[str, str]:
    """Choose the metric to compare by and its mode.

    Raises:
        ConfigError: No run has the typed metric, or it is a training metric.
    """
    declared: Counter[tuple[str, str]] = Counter()
    for run in runs:
        name = str(run.at("main_metric", "name") or "")
        mode = str(run.at("main_metric", "mode"))
        if name and mode in ("min", "max"):
            declared[name, mode] += 1
    if metric is None:
        if declared:
            return declared.most_common(1)[0][0]
        return (DEFAULT_METRIC, "min")
    logged_metrics = set[str]().union(*(run.log.names() for run in runs))
    if metric not in logged_metrics:
        raise ConfigError(
            f"metric={metric}: no run has logged it. {did_you_mean(metric, logged_metrics)}"
        )
    if metric.startswith(("train/", "lr/")):
        judging = sorted(name for name in logged_metrics if name.startswith("eval/"))
        raise ConfigError(
            f"metric={metric}: a metric of training ranks nothing. Expected one of an evaluation: "
            f"{', '.join(judging[:8]) or 'these runs have none'}."
        )
    modes = {mode for name, mode in declared if name == metric}
    return metric, modes.pop() if len(modes) == 1 else metric_mode(metric)


def read_matters(runs: Sequence[Run]) -> float | None:
    """Read the smallest relevant difference from the configurations, if all agree."""
    values = [to_number(run.config.get("matters")) for run in runs]
    distinct = {value for value in values if value is not None}
    if len(distinct) == 1:
        return distinct.pop()
    return None


def forks_of(runs: Iterable[Run]) -> dict[Path, Fork]:
    """Read where runs branched from a trunk; runs that did not are left out."""
    forks = {run.path: Fork.of(run.summary) for run in runs}
    return {path: fork for path, fork in forks.items() if fork is not None}


def _name_trunks(runs: Sequence[Run]) -> None:
    """Respell the trunk of each fork as its step, so that forks of trunk seeds compare.

    Args:
        runs: Changed in place: `respelt` maps keys to the common spelling.
    """
    forks = forks_of(runs)
    kinds = {fork.kind: plain(fork.run.name) for fork in reversed(forks.values())}
    for run in runs:
        if run.path in forks:
            fork = forks[run.path]
            trunk = f"{kinds[fork.kind]} " if len(kinds) > 1 else ""
            run.respelt[BRANCH_FROM] = f"{trunk}step {fork.step:,}"
