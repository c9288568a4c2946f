"""Split runs into workloads, and judge contenders over all of them.

A report is a list of workloads, mostly of one.

A workload is what is learnt and judged by: the task and the rows that evaluation reads. Numbers of
two workloads cannot be compared; scores on the scale of what was learnt in each can be.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Unpack

from optrun.artifacts.forks import KEY as BRANCH_FROM
from optrun.artifacts.forks import Trunk
from optrun.base.errors import ConfigError, did_you_mean
from optrun.base.formatting import plain
from optrun.report.comparability import (
    explain_incomparable,
    identify_workload,
    name_data,
    unify_paths,
)
from optrun.report.configurations import (
    Contender,
    describe_settings,
    differing_keys,
    drop_implied_keys,
    number_labels,
    pick_compared_keys,
)
from optrun.report.findings import (
    Findings,
    Question,
    analyse_runs,
    choose_metric,
    refuse_unknown_keys,
)
from optrun.report.runs import NOT_STARTED, Run, Setting, all_keys, flatten
from optrun.report.statistics import TtestResult, compare, pooled_sd

TEACHES = 5.0
"""A workload teaches nothing if its best contender gains less over the untrained model than this
many standard deviations between seeds."""


@dataclass(frozen=True)
class Comparison:
    """All workloads of a report, and the test behind its first line."""

    workloads: list[Findings]
    """One is the usual case."""
    scores: dict[str, dict[int, float]]
    """Contender -> seed -> score. Over several workloads the mean of the scaled scores of those
    that count."""
    diverged_seeds: Mapping[str, Collection[int]]
    """Contender -> seeds that diverged on some of them."""
    ttest: TtestResult | None
    """The test on `scores`; None if nothing is ranked, or runs are left."""

    @classmethod
    def of(cls, findings: Findings) -> Comparison:
        """Build the comparison of a single workload."""
        scores = {
            contender.name: contender.configuration.scores for contender in findings.contenders
        }
        diverged_seeds = {
            contender.name: contender.configuration.diverged_seeds
            for contender in findings.contenders
        }
        return cls([findings], scores, diverged_seeds, findings.ttest)

    @property
    def findings(self) -> Findings:
        """Return the findings of the only workload, or of the first one."""
        return self.workloads[0]

    @property
    def several(self) -> bool:
        """Tell whether the report is on several workloads."""
        return len(self.workloads) > 1

    @property
    def unit(self) -> str:
        """Name what `scores` are: the metric, or `score` over several workloads."""
        return "score" if self.several else self.findings.metric

    @property
    def counted(self) -> list[Findings]:
        """List the workloads counted in `scores`."""
        return [workload for workload in self.workloads if not workload.left_out]

    @property
    def ranked(self) -> list[Contender]:
        """List the ranked contenders of all workloads."""
        return [*chain.from_iterable(workload.ranked for workload in self.workloads)]

    @property
    def runs(self) -> list[Run]:
        """List the runs of all workloads."""
        return [*chain.from_iterable(workload.runs for workload in self.workloads)]


def compare_runs(runs: Sequence[Run], **question: Unpack[Question]) -> Comparison:
    """Split runs into workloads; judge each, and all together if there are several.

    Unless two contenders are ranked in two workloads each, there is nothing to judge together, and
    all runs are analysed as one workload.

    Args:
        runs: All runs to analyse; at least one. Their `respelt` is set, see `unify_paths`.
        question: As for `findings.analyse_runs`. With several workloads, the metric applies to
            those that logged it, a key that some workload lacks separates contenders in none, and
            `matters` is in units of the score.

    Raises:
        ConfigError: As `findings.analyse_runs`; also if no workload has the baseline.
    """
    # 1. Refuse what no run has; a workload may lack a metric or a key that another one has.
    choose_metric(runs, question.get("metric"))
    refuse_unknown_keys(question.get("by", ()), runs)
    # 2. Analyse each workload, and count on how many each contender is ranked.
    workloads: list[Findings] = []
    if len(runs) > 1:
        workloads = _analyse_workloads(split_workloads(runs), question)
    workload_counts: Counter[str] = Counter()
    for workload in workloads:
        workload_counts.update(contender.name for contender in workload.ranked)
    if sum(count > 1 for count in workload_counts.values()) < 2:
        return Comparison.of(analyse_runs(runs, **question))
    baseline = question.get("baseline")
    if baseline is not None and baseline not in workload_counts:
        raise ConfigError(
            f"baseline={baseline}: no contender has this name."
            f" {did_you_mean(baseline, workload_counts)}"
        )
    # 3. Judge the mean scores over the workloads that count, unless runs are left.
    workloads = [replace(workload, left_out=_why_left_out(workload)) for workload in workloads]
    counted = [workload for workload in workloads if not workload.left_out]
    scores = _mean_scores(counted)
    diverged_seeds = _diverged_seeds(counted)
    ttest = None
    if question.get("waits"):
        workloads = [replace(workload, ttest=None) for workload in workloads]
    elif sum(bool(by_seed) for by_seed in scores.values()) > 1:
        ttest = _judge_scores(scores, diverged_seeds, question)
    return Comparison(workloads, scores, diverged_seeds, ttest)


def _analyse_workloads(
    runs_by_workload: Mapping[str, Sequence[Run]], question: Question
) -> list[Findings]:
    """Analyse each workload separately; empty if there is only one.

    The same keys separate contenders in all workloads: those typed, else all that separate
    contenders in some workload, without keys that a workload lacks. A typed metric counts only in
    workloads that logged it.
    """
    if len(runs_by_workload) < 2:
        return []
    # 1. The keys that separate contenders.
    keys = dict.fromkeys(question.get("by", ()))
    if not keys:
        for runs in runs_by_workload.values():
            compared = pick_compared_keys(differing_keys(runs))
            keys |= dict.fromkeys(drop_implied_keys(compared, runs))
    shared_keys = list(keys)
    for runs in runs_by_workload.values():
        keys_of_workload = all_keys(runs)
        shared_keys = [key for key in shared_keys if key in keys_of_workload]
    # 2. The findings of each workload.
    metric = question.get("metric")
    workloads = []
    for name, runs in runs_by_workload.items():
        is_logged = any(metric in run.log.names() for run in runs)
        findings = analyse_runs(
            runs,
            metric=metric if is_logged else None,
            by=shared_keys,
            tuned=question.get("tuned", ()),
        )
        workloads.append(replace(findings, name=name))
    return workloads


def _diverged_seeds(workloads: Sequence[Findings]) -> dict[str, set[int]]:
    """Collect the seeds of diverged runs over all workloads, by contender."""
    diverged_seeds: dict[str, set[int]] = {}
    for workload in workloads:
        for contender in workload.ranked:
            diverged_seeds.setdefault(contender.name, set()).update(
                contender.configuration.diverged_seeds
            )
    return diverged_seeds


def _judge_scores(
    scores: dict[str, dict[int, float]],
    diverged_seeds: Mapping[str, set[int]],
    question: Question,
) -> TtestResult:
    """Test contenders on their mean scores over workloads.

    Args:
        scores: Contender -> seed -> score, more is better. Changed in place: a baseline without
            scores gets an empty mapping, so that the test knows it.
        diverged_seeds: Contender -> seeds that diverged. Their scores, which stand in for a result,
            count in the test, not in the spread between seeds.
        question: `baseline`, `matters` in units of the score, and `looks` are read.
    """
    baseline = question.get("baseline")
    if baseline is not None:
        scores.setdefault(baseline, {})
    finished = []
    for name, by_seed in scores.items():
        diverged = diverged_seeds.get(name, set())
        finished.append([score for seed, score in by_seed.items() if seed not in diverged])
    return compare(
        scores,
        mode="max",
        baseline=baseline,
        matters=question.get("matters"),
        sd=pooled_sd(finished),
        looks=question.get("looks", 1),
    )


def _why_left_out(findings: Findings) -> str:
    """Explain why a workload does not count in the score over all workloads; empty if it does.

    Reasons: nothing in it is ranked, its metric before training is unknown, or its best
    contender gains less than `TEACHES` standard deviations between seeds.
    """
    if findings.incomparable:
        return findings.incomparable
    if not findings.ranked:
        return "no run has finished with a result yet"
    if math.isnan(findings.untrained_metric):
        return "no run was evaluated before its first step, so nothing says how much was learnt"
    sign = 1 if findings.mode == "min" else -1  # so that a gain is positive
    gain = (findings.untrained_metric - findings.best_mean) * sign
    sd = pooled_sd(
        [contender.configuration.finished_scores.values() for contender in findings.ranked]
    )
    if gain <= 0 or gain < TEACHES * sd:
        return (
            f"it teaches nothing: the best contender gains {gain:.3g} {findings.metric}, less than"
            f" {TEACHES:g} standard deviations between seeds ({sd:.2g})"
        )
    return ""


def _mean_scores(workloads: Sequence[Findings]) -> dict[str, dict[int, float]]:
    """Average the scaled score of each contender on each seed over workloads.

    A seed that lacks a score on one of the workloads is left out. Every contender of any workload
    is in the result, one without such a seed with an empty mapping.

    Returns:
        Contender -> seed -> mean score; see `Findings.scaled_scores`.
    """
    scores_by_workload = [workload.scaled_scores() for workload in workloads]
    names: dict[str, None] = {}
    for scores in scores_by_workload:
        names |= dict.fromkeys(scores)
    means: dict[str, dict[int, float]] = {}
    for name in names:
        means[name] = {}
        # A seed with a score on every workload is among those of the first.
        for seed in scores_by_workload[0].get(name, {}):
            on_workloads = [scores.get(name, {}).get(seed) for scores in scores_by_workload]
            known_scores = [score for score in on_workloads if score is not None]
            if len(known_scores) == len(workloads):
                means[name][seed] = fmean(known_scores)
    return means


def split_workloads(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Group comparable runs by the name of their workload, in the order of their first run.

    Runs belong together if task and evaluation settings are equal, or if their examples show that
    the evaluation rows are, see `explain_incomparable`. Runs with an unknown configuration are left
    out. `respelt` of the others is set, see `unify_paths`.
    """
    # 1. Group by settings.
    runs_with_config = [run for run in runs if run.has_config]
    unify_paths(runs_with_config)
    by_settings: dict[tuple[object, ...], list[Run]] = {}
    for run in runs_with_config:
        by_settings.setdefault(identify_workload(run), []).append(run)
    # 2. Join groups that were evaluated on the same rows.
    workloads: list[list[Run]] = []
    for members in by_settings.values():
        # Other settings may lead to the same rows, such as the path of a copy of the file.
        comparable = [
            workload for workload in workloads if not explain_incomparable([*workload, *members])
        ]
        if comparable:
            comparable[0].extend(members)
        else:
            workloads.append(members)
    return dict(zip(_name_workloads(workloads), workloads, strict=True))


def count_planned_workloads(configs: Sequence[Mapping[str, object]]) -> int:
    """Count the workloads of jobs before they run, from their resolved configurations.

    By their settings alone: two paths to the same rows count as two workloads.
    """
    workloads = set()
    for config in configs:
        settings = flatten(config)
        trunk = {BRANCH_FROM: _planned_step(settings.get(BRANCH_FROM))}
        planned = Run(Path(), "", NOT_STARTED, config=settings, respelt=trunk)
        workloads.add(identify_workload(planned))
    return len(workloads)


def _name_workloads(workloads: Sequence[list[Run]]) -> list[str]:
    """Name workloads by their task, their data or both, whatever differs.

    Such as `causal_lm on stdlib`, `stdlib` if the task is the same, `causal_lm` if the data are.
    Equal names get the differing settings of task and data in parentheses, then numbers.
    """
    # 1. Task and data.
    first_runs = [workload[0] for workload in workloads]
    tasks = [str(run.config.get("task.name") or "task") for run in first_runs]
    data = [name_data(run) for run in first_runs]
    if len(set(data)) == 1:
        names = tasks
    elif len(set(tasks)) == 1:
        names = data
    else:
        names = [f"{task} on {source}" for task, source in zip(tasks, data, strict=True)]
    # 2. What else tells equal names apart.
    repeated = [name for name in names if names.count(name) > 1]
    if repeated:
        keys = [key for key in differing_keys(first_runs) if key.startswith(("task.", "data."))]
        keys = drop_implied_keys(keys, first_runs)
        for index, run in enumerate(first_runs):
            if names[index] in repeated:
                details = describe_settings({key: run.setting(key) for key in keys})
                names[index] = f"{names[index]} ({details})"
    return number_labels([plain(name) for name in names])


def _planned_step(trunk: Setting) -> Setting:
    """Name the checkpoint that a planned fork continues from, without the seed of its run.

    Returns other values unchanged.

    Example:
        >>> _planned_step("/runs/oak/checkpoints/step-00000100@0123456789abcdef")
        'step-00000100'
    """
    pinned = Trunk.parse(trunk) if isinstance(trunk, str) else None
    if pinned is None:
        return trunk
    return pinned.folder.name
