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
from functools import partial
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
from optrun.report.runs import NOT_STARTED, Run, Setting, flatten
from optrun.report.statistics import Judgement, compare, pooled_sd

TEACHES = 5.0
"""Standard deviations between seeds that the best contender has to gain, or the workload
teaches nothing.
"""


@dataclass(frozen=True)
class Comparison:
    """All workloads of a report, and the judgement that its first line is about."""

    workloads: list[Findings]
    """One is the usual case."""
    scores: dict[str, dict[int, float]]
    """Contender -> seed -> outcome: of several workloads the mean score over those that count."""
    lost: Mapping[str, Collection[int]]
    """Contender -> seeds that diverged on some of them."""
    judgement: Judgement | None
    """That of the one workload, or over all; None where nothing is ranked."""

    @classmethod
    def of(cls, found: Findings) -> Comparison:
        """Make that of a single workload."""
        rows = found.rows
        scores, lost = (
            {row.name: row.configuration.scores for row in rows},
            {row.name: row.configuration.lost for row in rows},
        )
        return cls([found], scores, lost, found.judgement)

    @property
    def findings(self) -> Findings:
        """Those of the one workload; of several, the first's."""
        return self.workloads[0]

    @property
    def several(self) -> bool:
        """Whether the judgement is over several workloads."""
        return len(self.workloads) > 1

    @property
    def unit(self) -> str:
        """What is compared."""
        return "score" if self.several else self.findings.metric

    @property
    def counted(self) -> list[Findings]:
        """The workloads that the judgement is over."""
        return [each for each in self.workloads if not each.left_out]

    @property
    def runs(self) -> list[Run]:
        """Those of all workloads."""
        return [run for each in self.workloads for run in each.runs]


def compare_runs(runs: Sequence[Run], **asked: Unpack[Question]) -> Comparison:
    """Split runs into workloads, judge within each, and over all where there are several.

    Args:
        runs: What was collected; at least one.
        asked: As for `findings.find`. Of several workloads the metric goes for those that logged
            it; `matters` is in units of the score.

    Raises:
        ConfigError: As `findings.find`; a baseline that no workload has.
    """
    metric = asked.get("metric")
    baseline = asked.get("baseline")
    by = asked.get("by", ())
    parts = split_workloads(runs) if len(runs) > 1 else {}
    find_in = partial(analyse_runs, tuned=asked.get("tuned", ()))
    between = dict.fromkeys(
        key
        for part in parts.values()
        for key in drop_implied_keys(pick_compared_keys(differing_keys(part)), part)
    )
    shared = [
        key
        for key in by or between
        if all(any(key in run.config for run in part) for part in parts.values())
    ]
    several = []
    for name, part in parts.items() if len(parts) > 1 else ():
        logged = metric if any(metric in run.log.names() for run in part) else None
        several.append(replace(find_in(part, metric=logged, by=shared), name=name))
    names = Counter(row.name for each in several for row in each.ranked)
    if sum(count > 1 for count in names.values()) < 2:
        return Comparison.of(analyse_runs(runs, **asked))
    if baseline is not None and baseline not in names:
        raise ConfigError(
            f"baseline={baseline}: nothing compared here has this name."
            f" {did_you_mean(baseline, names)}"
        )
    several = [replace(each, left_out=_why_left_out(each)) for each in several]
    counted = [each for each in several if not each.left_out]
    rows = [row for each in counted for row in each.ranked]
    scores, judgement = _mean_scores(counted), None
    lost = {
        name: set[int]().union(*(row.configuration.lost for row in rows if row.name == name))
        for name in scores
    }
    if sum(map(bool, scores.values())) > 1:
        if baseline is not None:
            scores.setdefault(baseline, {})  # what has no score differs from nobody
        finished = (
            [x for seed, x in own.items() if seed not in lost.get(name, ())]
            for name, own in scores.items()
        )
        sd = pooled_sd(finished)
        matters, looks = asked.get("matters"), asked.get("looks", 1)
        judgement = compare(
            scores, mode="max", baseline=baseline, matters=matters, sd=sd, looks=looks
        )
    return Comparison(several, scores, lost, judgement)


def _why_left_out(found: Findings) -> str:
    if found.incomparable:
        return found.incomparable
    if not found.ranked:
        return "no run has finished with a result yet"
    if math.isnan(found.floor):
        return "no run was evaluated before its first step, so nothing says how much was learnt"
    gain = (found.floor - found.end) * (1 if found.mode == "min" else -1)
    sd = pooled_sd([row.configuration.finished for row in found.ranked])
    if gain <= 0 or gain < TEACHES * sd:
        return (
            f"it teaches nothing: the best contender gains {gain:.3g} {found.metric}, less than"
            f" {TEACHES:g} standard deviations between seeds ({sd:.2g})"
        )
    return ""


def _mean_scores(workloads: Sequence[Findings]) -> dict[str, dict[int, float]]:
    """Average each seed's scores over workloads.

    A contender without an outcome on one of them has none.
    """
    tables = [each.scaled() for each in workloads]
    found = {}
    for name in dict.fromkeys(name for table in tables for name in table):
        rows = [table.get(name, {}) for table in tables]
        found[name] = {
            seed: fmean(row[seed] for row in rows)
            for seed in rows[0]
            if all(seed in row for row in rows)
        }
    return found


def split_workloads(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Group comparable runs by workload, in the order of their first run.

    Runs whose configuration is not known are left out.
    """
    described = [run for run in runs if run.described]
    unify_paths(described)
    by_rows: dict[tuple[object, ...], list[Run]] = {}
    for run in described:
        by_rows.setdefault(identify_workload(run), []).append(run)
    parts: list[list[Run]] = []
    for found in by_rows.values():
        # Other words for the same rows, such as a copy of the file, make no other workload.
        alike = next((part for part in parts if not explain_incomparable([*part, *found])), None)
        if alike is None:
            parts.append(found)
        else:
            alike += found
    return dict(zip(_names(parts), parts, strict=True))


def count_planned_workloads(configs: Sequence[Mapping[str, object]]) -> int:
    """Count the workloads of resolved configurations of jobs that have not run."""
    workloads = set()
    for config in configs:
        settings = flatten(config)
        trunk = {BRANCH_FROM: _planned_step(settings.get(BRANCH_FROM))}
        planned = Run(Path(), "", NOT_STARTED, config=settings, respelt=trunk)
        workloads.add(identify_workload(planned))
    return len(workloads)


def _names(parts: Sequence[list[Run]]) -> list[str]:
    """Name workloads by their tasks, then by their data, then by what else tells them apart."""
    firsts = [part[0] for part in parts]
    tasks = [str(run.config.get("task.name") or "task") for run in firsts]
    data = [name_data(run) for run in firsts]
    names = tasks if len(set(data)) == 1 else data if len(set(tasks)) == 1 else []
    names = names or [f"{task} on {source}" for task, source in zip(tasks, data, strict=True)]
    if len(set(names)) < len(names):
        keys = [key for key in differing_keys(firsts) if key.partition(".")[0] in ("task", "data")]
        told = [
            describe_settings({key: run.setting(key) for key in drop_implied_keys(keys, firsts)})
            for run in firsts
        ]
        names = [
            f"{name} ({more})" if names.count(name) > 1 else name
            for name, more in zip(names, told, strict=True)
        ]
    return number_labels([*map(plain, names)])


def _planned_step(trunk: Setting) -> Setting:
    """Name where planned forks leave their trunks, whichever seeds' trunks these are.

    Example:
        >>> _planned_step("/runs/oak/checkpoints/step-00000100@0123456789abcdef")
        'step-00000100'
    """
    pinned = Trunk.parse(trunk) if isinstance(trunk, str) else None
    return trunk if pinned is None else pinned.folder.name
