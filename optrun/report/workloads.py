"""Compare over several workloads: runs of different tasks or data, ranked within each and judged over all.

A workload is what is learnt and judged by: the task and the rows that evaluation reads, with whatever else is the same
in all of its runs and another elsewhere, such as the model. Numbers of two workloads cannot be compared; scores put on
the scale of what was learnt in each can be (`workloads_statistics.normalised`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from optrun.artifacts.objective import Objective
from optrun.errors import ConfigError, did_you_mean
from optrun.formatting import plain
from optrun.report.arms import Arm, compared, describe, differing, telling
from optrun.report.collect import Run
from optrun.report.comparable import incomparable, workload_of
from optrun.report.findings import Findings, Row, find
from optrun.report.paths import respell
from optrun.report.statistics import BETTER, MIN_SEEDS, NO_DIFFERENCE, NO_SPREAD, REFERENCE, TOO_FEW, WORSE
from optrun.report.targets import first_reached
from optrun.report.workloads_statistics import (
    StratifiedTest,
    bootstrap_interval,
    compare_over_workloads,
    interquartile_mean,
    is_found,
    mean_score,
    normalised,
    optimality_gap,
    profile_score,
    ratios,
    sign_test,
)

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Workload:
    """Runs whose numbers can be compared."""

    name: str
    """For people: what differs between the workloads, such as `causal_lm on stdlib`."""
    findings: Findings
    """The verdict within it."""

    @property
    def floor(self) -> float:
        """The metric before learning, common to all contenders; NaN where it is not known."""
        return self.findings.level.start

    @property
    def best(self) -> float:
        """Mean of its best contender."""
        return self.findings.level.best

    @property
    def target(self) -> float:
        """Level of the metric that steps are counted to: what half of the contenders reach."""
        return self.findings.level.value

    @property
    def usable(self) -> bool:
        """Whether its scores can be normalised: something was learnt."""
        gain = self.floor - self.best if self.findings.mode == "min" else self.best - self.floor
        return gain > 0  # False for NaN


@dataclass(frozen=True)
class Standing:
    """One contender over all workloads."""

    name: str
    scores: Array
    """Normalised; shape (workloads, seeds), NaN where a seed or a workload has no score."""
    ratio: Array
    """Steps to the target by those of the quickest; infinite where it was not reached. Shape (workloads,)."""
    ranks: Array
    """Place by mean score, 1 is best; ties share. Shape (workloads,), NaN without a score."""
    missing: tuple[str, ...]
    """Workloads on which it has no score: it is not judged over all."""
    mean: float
    """Of the normalised score; NaN where workloads are missing, as all that follows."""
    interval: tuple[float, float]
    middle: float
    """Interquartile mean."""
    middle_interval: tuple[float, float]
    gap: float
    """Optimality gap."""
    gap_interval: tuple[float, float]
    profile: float
    """Score of the performance profile."""
    better: int
    """Workloads on which its mean is better than the reference's."""
    worse: int
    verdict: str
    """As of a single comparison, over these workloads."""
    test: StratifiedTest | None
    """Against the reference; None for itself and where it is not judged."""
    p: float
    """Of the test, corrected; NaN without one."""
    p_elsewhere: float
    """Sign test over workloads; NaN where there are too few."""


@dataclass(frozen=True)
class Overview:
    """What is known about contenders over several workloads."""

    workloads: list[Workload]
    left_out: dict[str, str]
    """Workloads without a normalised score, and why."""
    standings: list[Standing]
    """Best first; those with missing workloads last."""
    reference: str | None
    """None: no contender has a score on every workload."""
    chosen_baseline: bool

    @property
    def usable(self) -> list[Workload]:
        """The workloads that scores were normalised on, in the order of their arrays."""
        return [each for each in self.workloads if each.name not in self.left_out]


def over_workloads(
    runs: Sequence[Run],
    *,
    metric: str | None = None,
    baseline: str | None = None,
    by: Sequence[str] = (),
    objectives: Sequence[Objective] = (),
) -> Overview | None:
    """Split runs into workloads, and judge contenders over all of them.

    Args:
        runs: What was collected.
        metric: What to compare by wherever it was logged; default: the main metric of each workload.
        baseline: A contender to test the others against; default: the best over all.
        by: Configuration keys that separate contenders; default: as within a workload.
        objectives: What is weighed against each other within each workload.

    Returns:
        None where the runs are of one workload, or of several that do not share two contenders.

    Raises:
        ConfigError: A baseline that is no contender; as `findings.find`.
    """
    parts = split(runs)
    if len(parts) < 2:
        return None
    between = list(by) or _between(parts.values())
    shared = [key for key in between if all(any(key in run.config for run in part) for part in parts.values())]
    every = [_workload(name, part, metric, baseline, shared, objectives) for name, part in parts.items()]
    names = Counter(row.name for each in every for row in each.findings.rows if row.rank)
    if sum(count > 1 for count in names.values()) < 2:
        return None
    kept = [each for each in every if each.usable]
    left_out = {each.name: _why_unusable(each) for each in every if not each.usable}
    if baseline is not None and baseline not in names:
        raise ConfigError(f"baseline={baseline}: nothing compared here has this name. {did_you_mean(baseline, names)}")
    standings, reference = _standings(kept, baseline) if kept else ([], None)
    return Overview(every, left_out, standings, reference, baseline is not None)


def split(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Gather runs whose numbers can be compared, by the name of the workload, in order of their first run.

    Runs whose configuration is not known are left out.
    """
    described = [run for run in runs if run.described]
    respell(described)
    by_rows: dict[tuple[object, ...], list[Run]] = {}
    for run in described:
        by_rows.setdefault(workload_of(run), []).append(run)
    parts: list[list[Run]] = []
    for found in by_rows.values():
        # Other words for the same rows, such as a copy of the file, make no other workload.
        alike = next((part for part in parts if not incomparable([*part, *found])), None)
        if alike is None:
            parts.append(found)
        else:
            alike += found
    return dict(zip(_names(parts), parts, strict=True))


def _names(parts: Sequence[list[Run]]) -> list[str]:
    """Name workloads by their tasks, then by their data, then by what else tells them apart."""
    firsts = [part[0] for part in parts]
    tasks = [str(run.config.get("task.name") or "task") for run in firsts]
    data = [_data(run) for run in firsts]
    names = tasks if len(set(data)) == 1 else data if len(set(tasks)) == 1 else []
    names = names or [f"{task} on {source}" for task, source in zip(tasks, data, strict=True)]
    if len(set(names)) < len(names):
        keys = [key for key in differing(firsts) if key.partition(".")[0] in ("task", "data")]
        told = [describe({key: run.setting(key) for key in telling(keys, firsts)}) for run in firsts]
        names = [f"{name} ({more})" if names.count(name) > 1 else name for name, more in zip(names, told, strict=True)]
    seen: Counter[str] = Counter()
    found = []
    for name in names:
        seen[name] += 1
        found.append(plain(name if seen[name] == 1 else f"{name} #{seen[name]}"))
    return found


def _data(run: Run) -> str:
    """Name the data: files by the evaluation file, hub data by its path, other sources by their choice."""
    for key in ("data.eval", "data.path", "data.train", "data.name"):
        if (value := run.setting(key)) is not None:
            return str(value)
    return "data"


def _between(parts: Iterable[list[Run]]) -> list[str]:
    """Collect the keys that separate contenders within any workload."""
    found: dict[str, None] = {}
    for part in parts:
        found |= dict.fromkeys(telling(compared(differing(part)), part))
    return list(found)


def _workload(
    name: str,
    runs: list[Run],
    metric: str | None,
    baseline: str | None,
    by: Sequence[str],
    objectives: Sequence[Objective],
) -> Workload:
    logged = metric if metric is not None and any(metric in run.log.names() for run in runs) else None
    findings = find(runs, metric=logged, by=by, objectives=objectives)
    if baseline is not None and any(row.name == baseline for row in findings.rows):
        findings = find(runs, metric=logged, by=by, baseline=baseline, objectives=objectives)
    return Workload(name, findings)


def _why_unusable(workload: Workload) -> str:
    findings = workload.findings
    if findings.incomparable:
        return findings.incomparable
    if not any(row.rank for row in findings.rows):
        return "no run has finished with a result yet"
    return f"no contender ended better than {findings.metric} was before learning"


def _standings(workloads: Sequence[Workload], baseline: str | None) -> tuple[list[Standing], str | None]:
    rows = [{row.name: row for row in each.findings.rows if row.rank} for each in workloads]
    names = list(dict.fromkeys(name for part in rows for name in part))
    scores = _score_table(workloads, rows, names)
    ratio = ratios(
        {name: [_cost(each, part.get(name)) for each, part in zip(workloads, rows, strict=True)] for name in names}
    )
    missing = {
        name: tuple(each.name for each, part in zip(workloads, rows, strict=True) if name not in part) for name in names
    }
    whole = {name: scores[name] for name in names if not missing[name]}
    reference = (
        baseline if baseline in whole else max(whole, key=lambda name: float(mean_score(whole[name])), default=None)
    )
    tests = compare_over_workloads(whole, reference, named_beforehand=reference == baseline) if reference else {}
    ranks = _ranks(np.array([_means(scores[name]) for name in names]))
    found = [
        _standing(
            name, scores[name], ratio[name], ranks[index], missing[name], whole.get(reference or ""), tests.get(name)
        )
        for index, name in enumerate(names)
    ]
    return sorted(found, key=lambda each: (bool(each.missing), -each.mean if not each.missing else 0.0)), reference


def _score_table(
    workloads: Sequence[Workload], rows: Sequence[dict[str, Row]], names: Sequence[str]
) -> dict[str, Array]:
    """Lay out normalised scores; column i is the i-th seed of the workload, the same one for every contender."""
    seeds = [sorted({seed for row in part.values() for seed in row.arm.scores}) for part in rows]
    found = {name: np.full((len(workloads), max(map(len, seeds))), np.nan) for name in names}
    for index, (each, part) in enumerate(zip(workloads, rows, strict=True)):
        for name, row in part.items():
            for seed, score in row.arm.scores.items():
                column = seeds[index].index(seed)
                found[name][index, column] = normalised(score, each.floor, each.best)
    return found


def _cost(workload: Workload, row: Row | None) -> float:
    """Median steps of a contender's seeds to the target; infinite where fewer than half reach it."""
    if row is None or math.isnan(workload.target):
        return math.inf
    findings, arm = workload.findings, row.arm
    return float(np.median([_steps(run, findings, workload.target) for run in _counted(arm, findings)]))


def _counted(arm: Arm, findings: Findings) -> list[Run]:
    return [run for run in arm.runs if run not in arm.repeated and run.score(findings.metric) is not None]


def _steps(run: Run, findings: Findings, target: float) -> float:
    reached = first_reached(run, findings.metric, findings.mode, target)
    return math.inf if reached is None else reached[0]


def _means(scores: Array) -> Array:
    known = ~np.isnan(scores)
    count = known.sum(axis=1)
    means = np.full(len(scores), np.nan)
    np.divide(np.where(known, scores, 0.0).sum(axis=1), count, out=means, where=count > 0)
    return means


def _ranks(means: Array) -> Array:
    """Rank contenders on each workload; shape (contenders, workloads), equal means share the mean of their places."""
    above = (means[None] > means[:, None]).sum(axis=1)
    equal = (means[None] == means[:, None]).sum(axis=1)
    return np.asarray(np.where(np.isnan(means), np.nan, above + (equal + 1) / 2), dtype=np.float64)


def _standing(
    name: str,
    scores: Array,
    ratio: Array,
    ranks: Array,
    missing: tuple[str, ...],
    reference: Array | None,
    tested: tuple[StratifiedTest, float] | None,
) -> Standing:
    nan = math.nan
    if missing or reference is None:
        nowhere = (nan, nan)
        return Standing(name, scores, ratio, ranks, missing, nan, nowhere, nan, nowhere, nan, nowhere,
                        profile_score(ratio), 0, 0, "not ranked", None, nan, nan)  # fmt: skip
    gain = _means(scores) - _means(reference)
    better, worse = int((gain > 0).sum()), int((gain < 0).sum())
    test, p = tested if tested is not None else (None, nan)
    return Standing(
        name=name,
        scores=scores,
        ratio=ratio,
        ranks=ranks,
        missing=missing,
        mean=float(mean_score(scores)),
        interval=bootstrap_interval(mean_score, scores),
        middle=float(interquartile_mean(scores)),
        middle_interval=bootstrap_interval(interquartile_mean, scores),
        gap=float(optimality_gap(scores)),
        gap_interval=bootstrap_interval(optimality_gap, scores),
        profile=profile_score(ratio),
        better=better,
        worse=worse,
        verdict=_verdict(test, p),
        test=test,
        p=p,
        p_elsewhere=sign_test(better, worse) if test is not None else nan,
    )


def _verdict(test: StratifiedTest | None, p: float) -> str:
    if test is None:
        return REFERENCE
    if math.isnan(p):
        return TOO_FEW if test.seeds < MIN_SEEDS else NO_SPREAD
    if not is_found(p):
        return NO_DIFFERENCE
    return BETTER if test.difference > 0 else WORSE
