"""Analyse the runs of one workload: group, rank and test them.

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
    """The contenders, ranking and tests of the runs of one workload."""

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
    """The other keys, except those that follow from the contender: each contender's best
    configuration was chosen over them."""
    configurations: list[Configuration]
    contenders: list[Contender]
    """Best first."""
    ttest: TtestResult | None
    """None where nothing is ranked."""
    untrained_metric: float
    """The metric before the first step: the median over runs; NaN where it was not evaluated."""
    incomparable: str
    """Why the scores of the runs cannot be ranked; empty if they can."""
    name: str = ""
    """Of several workloads, what differs between them, such as `causal_lm on stdlib`."""
    left_out: str = ""
    """Why the workload does not count in the score over all workloads; empty if it does."""

    @property
    def baseline(self) -> str | None:
        """Return the name of the baseline; None if nobody named one."""
        if self.ttest is None or not self.ttest.has_baseline:
            return None
        return self.ttest.reference

    @property
    def ranked(self) -> list[Contender]:
        """The contenders with a rank."""
        return [contender for contender in self.contenders if contender.rank]

    @property
    def best_mean(self) -> float:
        """Return the mean of the best contender; NaN if none is ranked."""
        return next((contender.configuration.mean for contender in self.ranked), math.nan)

    def scaled_scores(self) -> dict[str, dict[int, float]]:
        """Scale the scores of ranked contenders: 0 is the untrained model, 1 the best mean.

        If the untrained loss is 4.0 and the best mean 2.0, a loss of 3.0 becomes 0.5.

        Returns:
            Contender -> seed -> (untrained - score) / (untrained - best mean).
        """
        gain = self.untrained_metric - self.best_mean
        scaled = {}
        for contender in self.ranked:
            scores = contender.configuration.scores
            scaled[contender.name] = {
                seed: (self.untrained_metric - score) / gain for seed, score in scores.items()
            }
        return scaled


class Question(TypedDict, total=False):
    """The options of an analysis, typed or from the plan of a confirmation."""

    metric: str | None
    """To compare by; None: the main metric that most runs name."""
    baseline: str | None
    """A contender to test the others against; None: each is tested for being the best."""
    by: Sequence[str]
    """Configuration keys that separate contenders; none: see `pick_compared_keys`."""
    tuned: Collection[str]
    """Keys that a sweep tuned: they separate contenders only if they are in `by`, or if the runs
    differ in nothing else."""
    matters: float | None
    """The smallest difference that counts; None: that of the configuration, else the standard
    deviation between seeds."""
    waits: bool
    """Whether runs are left, so that nothing is ranked or tested yet."""
    looks: int
    """How often these contenders were tested while seeds were added, this time included."""


def analyse_runs(runs: Sequence[Run], **question: Unpack[Question]) -> Findings:
    """Group runs into configurations and contenders, then rank and test the contenders.

    Args:
        runs: All runs to analyse; at least one. Their `respelt` is set, see `unify_paths`.
        question: The options, see `Question`.

    Raises:
        ConfigError: No run has the metric, the metric cannot rank, or baseline or key is unknown.
    """
    by = list(question.get("by", ()))
    baseline = question.get("baseline")
    metric, mode = choose_metric(runs, question.get("metric"))
    # 1. Find the keys that differ: some separate contenders, the others were tuned for each.
    described = [run for run in runs if run.has_config]
    unify_paths(described)
    _name_trunks(described)
    keys = differing_keys(described)
    refuse_unknown_keys(by, described)
    keys += [key for key in by if key not in keys]
    compared = by
    if not by:
        candidates = pick_compared_keys(keys, question.get("tuned", ()))
        compared = drop_implied_keys(candidates, described)
    tuned = [
        key
        for key in keys
        if key not in compared and (key == "lr" or not is_implied(key, compared, described))
    ]
    # 2. Group the runs.
    configurations = build_configurations(described, keys, metric, mode)
    contenders = build_contenders(configurations, compared, mode)
    # 3. Rank and test the contenders, if their scores can be compared.
    scored = [run for run in described if run.score(metric) is not None]
    incomparable = explain_incomparable(scored)
    if metric.startswith("train/"):
        incomparable = (
            f"{metric} is a training metric, which cannot rank runs; give the runs an evaluation,"
            " such as data.eval=FILE"
        )
    baseline_name = find_contender(baseline, contenders).name if baseline else None
    ttest = None
    if (
        any(contender.configuration.finished_scores for contender in contenders)
        and not incomparable
        and not question.get("waits")
    ):
        matters = question.get("matters")
        ttest = compare(
            {contender.name: contender.configuration.scores for contender in contenders},
            mode=mode,
            baseline=baseline_name,
            matters=read_matters(runs) if matters is None else matters,
            sd=pooled_sd(
                contender.configuration.finished_scores.values() for contender in contenders
            ),
            looks=question.get("looks", 1),
        )
        contenders = _rank(contenders, ttest, mode)
    # 4. The metric of the untrained models.
    before = [run.before_training(metric) for run in described]
    untrained = [value for value in before if value is not None]
    return Findings(
        runs=list(runs),
        metric=metric,
        mode=mode,
        own_metric=choose_metric(runs, None)[0],
        keys=keys,
        compared_keys=compared,
        tuned_keys=tuned,
        configurations=configurations,
        contenders=contenders,
        ttest=ttest,
        untrained_metric=float(np.median(untrained)) if untrained else math.nan,
        incomparable=incomparable,
    )


def refuse_unknown_keys(keys: Sequence[str], runs: Sequence[Run]) -> None:
    """Refuse keys of `by=` without a value in any run."""
    known_keys = all_keys(runs)
    for key in keys:
        if key not in known_keys:
            raise ConfigError(
                f"by={key}: no run has this configuration key. {did_you_mean(key, known_keys)}"
            )


def _rank(contenders: Sequence[Contender], ttest: TtestResult, mode: str) -> list[Contender]:
    """Add the rank and the test to each contender.

    Equal means share a rank; a contender without a score has none.
    """
    costs = [contender.configuration.cost(mode) for contender in contenders]
    ranked = []
    for contender, cost in zip(contenders, costs, strict=True):
        rank = None
        if math.isfinite(cost):
            rank = 1 + sum(other_cost < cost for other_cost in costs)
        ranked.append(replace(contender, rank=rank, comparison=ttest.comparisons[contender.name]))
    return ranked


def choose_metric(runs: Sequence[Run], metric: str | None) -> tuple[str, str]:
    """Choose the metric to compare by, and its mode, `min` or `max`.

    Without the user's choice it is the main metric that most runs name, else `eval/loss`.

    Args:
        runs: The runs to compare.
        metric: The user's choice. Its mode is what the runs with this main metric say, else what
            `metric_mode` tells from its name.

    Raises:
        ConfigError: No run has logged the user's choice, or it is a training metric.
    """
    # 1. Count the main metrics that runs name, with their modes.
    main_metrics: Counter[tuple[str, str]] = Counter()
    for run in runs:
        name = str(run.from_summary("main_metric", "name") or "")
        mode = str(run.from_summary("main_metric", "mode"))
        if name and mode in ("min", "max"):
            main_metrics[name, mode] += 1
    if metric is None:
        if main_metrics:
            return main_metrics.most_common(1)[0][0]
        return DEFAULT_METRIC, "min"
    # 2. Check the user's choice.
    logged_metrics = set[str]().union(*(run.log.names() for run in runs))
    if metric not in logged_metrics:
        raise ConfigError(
            f"metric={metric}: no run has logged it. {did_you_mean(metric, logged_metrics)}"
        )
    if metric.startswith(("train/", "lr/")):
        evaluated = sorted(name for name in logged_metrics if name.startswith("eval/"))
        raise ConfigError(
            f"metric={metric}: a training metric cannot rank runs. Expected an evaluation metric: "
            f"{', '.join(evaluated[:8]) or 'these runs have none'}."
        )
    # 3. Its mode, if the runs do not contradict each other.
    modes = {mode for name, mode in main_metrics if name == metric}
    if len(modes) == 1:
        return metric, modes.pop()
    return metric, metric_mode(metric)


def read_matters(runs: Sequence[Run]) -> float | None:
    """Read the smallest difference that counts, the key `matters`, from the runs' configurations.

    Runs without a number there are ignored. None if no run has one, or two runs have different
    ones.
    """
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
    """Name the checkpoint that a fork continues from by its step alone, such as `step 100`.

    A fork continues from a checkpoint of another run, its trunk (`branch_from=`). Forks of several
    trunks are seeds of one configuration if their trunks differ only in the seed, so the path of
    the trunk may not separate them. If trunks differ in more, the name of one is added: `oak step
    100`.

    Args:
        runs: Changed in place: `respelt["branch_from"]` of each fork is set.
    """
    forks = forks_of(runs)
    # Kind of trunk -> a name; trunks that differ only in the seed are of one kind. In reverse, so
    # that the first run of a kind gives its name.
    kinds = {fork.kind: plain(fork.run.name) for fork in reversed(forks.values())}
    for run in runs:
        if run.path in forks:
            fork = forks[run.path]
            trunk = f"{kinds[fork.kind]} " if len(kinds) > 1 else ""
            run.respelt[BRANCH_FROM] = f"{trunk}step {fork.step:,}"
