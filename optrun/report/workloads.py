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
    describe_settings,
    differing_keys,
    drop_implied_keys,
    number_labels,
    pick_compared_keys,
)
from optrun.report.findings import Findings, Question, analyse_runs
from optrun.report.runs import NOT_STARTED, Run, Setting, all_keys, flatten
from optrun.report.statistics import TtestResult, compare, pooled_sd

TEACHES = 5.0
"""Standard deviations between seeds that the best contender has to gain, or the workload
teaches nothing.
"""


@dataclass(frozen=True)
class Comparison:
    """All workloads of a report, and the ttest behind its first line."""

    workloads: list[Findings]
    """One is the usual case."""
    scores: dict[str, dict[int, float]]
    """Contender -> seed -> outcome: of several workloads the mean score over those that count."""
    diverged_seeds: Mapping[str, Collection[int]]
    """Contender -> seeds that diverged on some of them."""
    ttest: TtestResult | None
    """That of the one workload, or over all; None where nothing is ranked."""

    @classmethod
    def of(cls, findings: Findings) -> Comparison:
        """Build the comparison of a single workload."""
        scores = {row.name: row.configuration.scores for row in findings.rows}
        diverged_seeds = {row.name: row.configuration.diverged_seeds for row in findings.rows}
        return cls([findings], scores, diverged_seeds, findings.ttest)

    @property
    def findings(self) -> Findings:
        """Return the findings of the only workload, or of the first one."""
        return self.workloads[0]

    @property
    def several(self) -> bool:
        """Whether the ttest is over several workloads."""
        return len(self.workloads) > 1

    @property
    def unit(self) -> str:
        """Name the unit of comparison."""
        if self.several:
            return "score"
        return self.findings.metric

    @property
    def counted(self) -> list[Findings]:
        """List the workloads of the ttest."""
        return [workload for workload in self.workloads if not workload.left_out]

    @property
    def runs(self) -> list[Run]:
        """List the runs of all workloads."""
        return [run for workload in self.workloads for run in workload.runs]


def compare_runs(runs: Sequence[Run], **question: Unpack[Question]) -> Comparison:
    """Split runs into workloads; judge each, and all together if there are several.

    Args:
        runs: All runs to analyse; at least one.
        question: As for `findings.analyse_runs`. With several workloads, the metric applies to
            those that logged it, and `matters` is in units of the score.

    Raises:
        ConfigError: As `findings.analyse_runs`; also if no workload has the baseline.
    """
    parts = split_workloads(runs) if len(runs) > 1 else {}
    workloads = _analyse_parts(parts, question) if len(parts) > 1 else []
    names = Counter(row.name for workload in workloads for row in workload.ranked)
    shared = [name for name, count in names.items() if count > 1]
    if len(shared) < 2:
        return Comparison.of(analyse_runs(runs, **question))
    baseline = question.get("baseline")
    if baseline is not None and baseline not in names:
        raise ConfigError(
            f"baseline={baseline}: nothing compared here has this name."
            f" {did_you_mean(baseline, names)}"
        )
    workloads = [replace(workload, left_out=_why_left_out(workload)) for workload in workloads]
    counted = [workload for workload in workloads if not workload.left_out]
    scores = _mean_scores(counted)
    diverged_seeds = _diverged_seeds(counted)
    ttest = None
    if sum(bool(row) for row in scores.values()) > 1:
        ttest = _judge_scores(scores, diverged_seeds, question)
    return Comparison(workloads, scores, diverged_seeds, ttest)


def _analyse_parts(parts: Mapping[str, Sequence[Run]], question: Question) -> list[Findings]:
    """Analyse each workload, with the same keys to separate contenders in all.

    Keys are those typed, else all that separate contenders in some workload; one that a
    workload lacks is dropped. A typed metric counts only where it was logged.
    """
    keys = dict.fromkeys(question.get("by", ()))
    if not keys:
        for part in parts.values():
            compared = pick_compared_keys(differing_keys(part))
            keys |= dict.fromkeys(drop_implied_keys(compared, part))
    in_each = [set(all_keys(part)) for part in parts.values()]
    shared = [key for key in keys if all(key in part_keys for part_keys in in_each)]
    metric = question.get("metric")
    workloads = []
    for name, part in parts.items():
        is_logged = any(metric in run.log.names() for run in part)
        findings = analyse_runs(
            part, metric=metric if is_logged else None, by=shared, tuned=question.get("tuned", ())
        )
        workloads.append(replace(findings, name=name))
    return workloads


def _diverged_seeds(workloads: Sequence[Findings]) -> dict[str, set[int]]:
    """Collect the seeds of diverged runs over all workloads, by contender."""
    diverged_seeds: dict[str, set[int]] = {}
    for workload in workloads:
        for row in workload.ranked:
            diverged_seeds.setdefault(row.name, set()).update(row.configuration.diverged_seeds)
    return diverged_seeds


def _judge_scores(
    scores: dict[str, dict[int, float]], diverged_seeds: Mapping[str, set[int]], question: Question
) -> TtestResult:
    """Judge contenders by their mean scores over workloads.

    Args:
        scores: Contender -> seed -> score; a baseline without scores is added, in place.
        diverged_seeds: Contender -> seeds that diverged; they count in the test, not in the spread.
        question: `baseline`, `matters` in units of the score, and `looks`.
    """
    baseline = question.get("baseline")
    if baseline is not None:
        scores.setdefault(baseline, {})  # what has no score differs from nobody
    finished = []
    for name, row in scores.items():
        gone = diverged_seeds.get(name, set())
        finished.append([score for seed, score in row.items() if seed not in gone])
    return compare(
        scores,
        mode="max",
        baseline=baseline,
        matters=question.get("matters"),
        sd=pooled_sd(finished),
        looks=question.get("looks", 1),
    )


def _why_left_out(findings: Findings) -> str:
    """Explain why a workload is left out of the ttest; empty if it is not.

    Reasons: nothing in it is ranked, its metric before training is unknown, or its best
    contender gains less than `TEACHES` standard deviations between seeds.
    """
    if findings.incomparable:
        return findings.incomparable
    if not findings.ranked:
        return "no run has finished with a result yet"
    if math.isnan(findings.floor):
        return "no run was evaluated before its first step, so nothing says how much was learnt"
    sign = 1 if findings.mode == "min" else -1
    gain = (findings.floor - findings.end) * sign
    sd = pooled_sd([row.configuration.finished for row in findings.ranked])
    if gain <= 0 or gain < TEACHES * sd:
        return (
            f"it teaches nothing: the best contender gains {gain:.3g} {findings.metric}, less than"
            f" {TEACHES:g} standard deviations between seeds ({sd:.2g})"
        )
    return ""


def _mean_scores(workloads: Sequence[Findings]) -> dict[str, dict[int, float]]:
    """Average each seed's scores over workloads.

    A seed that lacks a score on any workload is left out.
    """
    tables = [workload.scaled() for workload in workloads]
    names: dict[str, None] = {}
    for table in tables:
        names |= dict.fromkeys(table)
    scores: dict[str, dict[int, float]] = {}
    for name in names:
        rows = [table.get(name, {}) for table in tables]
        scores[name] = {}
        for seed in rows[0]:
            if all(seed in row for row in rows):
                scores[name][seed] = fmean(row[seed] for row in rows)
    return scores


def split_workloads(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Group comparable runs by workload, in the order of their first run.

    Runs with an unknown configuration are left out.
    """
    described = [run for run in runs if run.described]
    unify_paths(described)
    by_rows: dict[tuple[object, ...], list[Run]] = {}
    for run in described:
        by_rows.setdefault(identify_workload(run), []).append(run)
    parts: list[list[Run]] = []
    for members in by_rows.values():
        # Other words for the same rows, such as a copy of the file, make no other workload.
        same = [part for part in parts if not explain_incomparable([*part, *members])]
        if same:
            same[0].extend(members)
        else:
            parts.append(members)
    return dict(zip(_name_workloads(parts), parts, strict=True))


def count_planned_workloads(configs: Sequence[Mapping[str, object]]) -> int:
    """Count the workloads of jobs before they run, from their resolved configurations."""
    workloads = set()
    for config in configs:
        settings = flatten(config)
        trunk = {BRANCH_FROM: _planned_step(settings.get(BRANCH_FROM))}
        planned = Run(Path(), "", NOT_STARTED, config=settings, respelt=trunk)
        workloads.add(identify_workload(planned))
    return len(workloads)


def _name_workloads(parts: Sequence[list[Run]]) -> list[str]:
    """Name workloads by what differs: the task, the data, or both.

    Equal names get the differing settings of task and data in parentheses, then numbers.
    """
    firsts = [part[0] for part in parts]
    tasks = [str(run.config.get("task.name") or "task") for run in firsts]
    data = [name_data(run) for run in firsts]
    if len(set(data)) == 1:
        names = tasks
    elif len(set(tasks)) == 1:
        names = data
    else:
        names = [f"{task} on {source}" for task, source in zip(tasks, data, strict=True)]
    if len(set(names)) < len(names):
        keys = [key for key in differing_keys(firsts) if key.startswith(("task.", "data."))]
        keys = drop_implied_keys(keys, firsts)
        details = [describe_settings({key: run.setting(key) for key in keys}) for run in firsts]
        names = [
            f"{name} ({detail})" if names.count(name) > 1 else name
            for name, detail in zip(names, details, strict=True)
        ]
    return number_labels([plain(name) for name in names])


def _planned_step(trunk: Setting) -> Setting:
    """Name the trunk step of planned forks, without the trunk's seed.

    Example:
        >>> _planned_step("/runs/oak/checkpoints/step-00000100@0123456789abcdef")
        'step-00000100'
    """
    pinned = Trunk.parse(trunk) if isinstance(trunk, str) else None
    if pinned is None:
        return trunk
    return pinned.folder.name
