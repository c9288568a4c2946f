"""Answer in one line: which optimizer, at which lr, and how sure.

The sentences stand in `templates/line.txt`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from optrun.artifacts.generalisation import NOTHING_LEARNT, Generalisation, generalisation_of
from optrun.artifacts.objective import loss_beside
from optrun.base.formatting import plural, rate
from optrun.report.configurations import Contender
from optrun.report.findings import Findings
from optrun.report.runs import Run
from optrun.report.statistics import UNSET, TtestResult, Verdict
from optrun.report.table import format_metric
from optrun.report.tables import format_mean
from optrun.report.templating import fill_text
from optrun.report.workloads import Comparison

_EDGES = 3
"""Contenders at the edge of their grid that the line names."""


@dataclass(frozen=True)
class SweepVerdict:
    """The verdict of a report, as values and as its first line."""

    kind: str
    """`none`, `single`, `pilot` (fewer than 3 seeds, nothing tested), `selected` (judged by the
    seeds that chose the configurations), `compared`, `confirmed` (fresh seeds, configurations
    fixed before), `undecided` (the same, and no test tells anybody apart), `exploratory` (another
    metric than the sweep's own).
    """
    metric: str
    possible: tuple[str, ...]
    """Contenders that could be the best, best mean first; with a baseline, those that are not worse
    than it."""
    ruled_out: tuple[str, ...]
    """Contenders that could not; with a baseline, those that are worse."""
    chosen: Mapping[str, str]
    """Contender -> its chosen configuration, as `lamb at lr 2e-3`; over several workloads that of
    each."""
    text: str
    """The line."""
    next: str = ""
    """The command that would tell more; empty: none."""
    cost: str = ""
    """How many runs this command starts, and how long they train."""

    def __str__(self) -> str:
        return self.text


def kind_of(comparison: Comparison) -> str:
    """Name the kind of a verdict; see `SweepVerdict.kind`."""
    ttest = comparison.ttest
    ranked = [row for workload in comparison.workloads for row in workload.ranked]
    if ttest is None or not ranked:
        return "none"
    if len(ttest.ranking) < 2:
        return "single"
    if any(workload.metric != workload.own_metric for workload in comparison.workloads):
        return "exploratory"
    if not ttest.is_tested:
        return "pilot"
    if any(map(is_selected, ranked)):
        return "selected"
    return "compared"


def is_selected(row: Contender) -> bool:
    """Tell whether the chosen configuration was selected from several by the metric.

    Configurations on other and fewer seeds do not count: there the chosen one won by its number of
    seeds.
    """
    best = row.configuration
    other_configurations = [
        configuration
        for configuration in row.configurations
        if configuration is not best and configuration.scores
    ]
    return any(
        set(configuration.scores) & set(best.scores)
        or len(configuration.scores) >= len(best.scores)
        for configuration in other_configurations
    )


def write_verdict(
    comparison: Comparison,
    *,
    confirmed: str = "",
    looks: int = 1,
    note: str = "",
    waits: bool = False,
) -> SweepVerdict:
    """Write the verdict: the first line of a report.

    Args:
        comparison: Comparison of the runs.
        confirmed: Seeds of a confirmation, such as `5-9`; its configurations were fixed before any
            of these runs.
        looks: How often these contenders were judged while seeds were added, this time included.
        note: A note on unfinished or unplanned confirmations.
        waits: Whether this is the report of an unfinished confirmation, which decides nothing yet.
    """
    ttest = comparison.ttest
    kind = kind_of(comparison)
    if waits or ttest is None:
        kind = "none"
    elif confirmed and kind != "none":
        kind = "confirmed" if kind == "single" or is_decided(ttest) else "undecided"
    content: dict[str, object] = {
        "comparison": comparison,
        "ttest": ttest,
        "kind": kind,
        "confirmed": confirmed,
        "looks": looks,
        "note": note,
        "waits": waits,
    }
    possible: list[str] = []
    ruled_out: list[str] = []
    if ttest is not None and kind != "none":
        possible = ttest.possible
        ruled_out = [name for name in ttest.ranking if name not in possible]
        content |= _content_of_line(comparison, ttest)
    chosen: dict[str, list[str]] = {}
    for workload in comparison.workloads:
        where = f" on {workload.name}" if workload.name else ""
        for row in workload.ranked:
            chosen.setdefault(row.name, []).append(write_contender(row, workload) + where)
    return SweepVerdict(
        kind=kind,
        metric=comparison.findings.metric,
        possible=tuple(possible),
        ruled_out=tuple(ruled_out),
        chosen={name: "; ".join(texts) for name, texts in chosen.items()},
        text=fill_text("line.txt", **content),
    )


DECIDED = (
    Verdict.ruled_out,
    Verdict.either_will_do,
    Verdict.better,
    Verdict.worse,
    Verdict.differs_little,
)
"""Verdicts that say more than that nothing is known."""


def is_decided(ttest: TtestResult) -> bool:
    """Tell whether a test decided about any contender."""
    return any(result.verdict in DECIDED for result in ttest.comparisons.values())


def find_edges(findings: Findings) -> list[tuple[Contender, float]]:
    """List contenders with the best lr at an edge, each with the next lr.

    Possible best contenders come first. Without a test only the first contender is listed. Left
    out are contenders whose best lr is chance, see `is_chance`.
    """
    ttest = findings.ttest
    rows = findings.ranked
    if ttest is None or not ttest.is_tested:
        best = rows[0].configuration.mean if rows else math.nan
        rows = [row for row in rows if row.configuration.mean == best]
    else:
        rows = sorted(rows, key=lambda row: row.name not in ttest.possible)
    edges = []
    for row in rows:
        if is_chance(row, findings):
            continue
        lr = next_lr(row, findings)
        if lr is not None:
            edges.append((row, lr))
    return edges


def is_chance(row: Contender, findings: Findings) -> bool:
    """Tell whether the best lr of a contender is chance.

    It is if the contender learnt nothing, and either is ruled out or stands beside one that did
    learn. If no contender learnt anything, a wider grid may be what they lack.
    """
    if not _learnt_nothing(row):
        return False
    ttest = findings.ttest
    is_out = ttest is not None and row.name not in ttest.possible
    return is_out or not all(map(_learnt_nothing, findings.ranked))


def _content_of_line(comparison: Comparison, ttest: TtestResult) -> dict[str, object]:
    """Collect the numbers and names for the template of the first line."""
    scores = comparison.scores
    possible = ttest.possible
    names = {name: _write_with_diverged(name, comparison) for name in ttest.ranking}
    means = {name: sum(scores[name].values()) / len(scores[name]) for name in names}
    best_mean = means[ttest.ranking[0]]
    first = [name for name in names if means[name] == best_mean]
    groups: dict[str, list[str]] = {}
    for name, full_name in names.items():
        groups.setdefault(ttest.verdict_text(name), []).append(full_name)
    groups.pop(Verdict.baseline, None)
    baseline = ""
    if ttest.has_baseline:
        baseline = _write_with_diverged(ttest.reference, comparison)
    content: dict[str, object] = {
        "first": [names[name] for name in first],
        "mean": "",
        "seeds": min(len(scores[name]) for name in possible or names),
        "baseline": baseline,
        "groups": groups,
        "possible": [names[name] for name in possible],
        "ruled_out": groups.get(Verdict.ruled_out, []),
        "either": groups.get(Verdict.either_will_do.replace(UNSET, ttest.limit), []),
    }
    content |= _content_of_differences(ttest, content["seeds"])
    # With several workloads the line names no rates and no edges, since each has its own.
    if comparison.several:
        return content | {"edges": [], "more_edges": 0, "longer": "", "learnt": ""}
    rows = comparison.findings.ranked
    if rows:
        content["mean"] = format_mean(rows[0].configuration)
    # Without a test all contenders are possible, and the line names only the first.
    named = possible if ttest.is_tested else first
    return content | _content_of_advice(comparison.findings, named)


def _content_of_differences(ttest: TtestResult, seeds: object) -> dict[str, object]:
    """Collect the differences to the reference, for the template of the first line.

    `seeds` stands in if nobody shares a seed with the reference.
    """
    comparisons = {
        name: result
        for name, result in ttest.comparisons.items()
        if name != ttest.reference and result.seeds
    }
    undecided = [comparisons[name] for name in ttest.possible if name in comparisons]
    judging = list(comparisons.values()) if len(ttest.possible) == 1 else undecided
    widest = max((abs(result.difference) for result in undecided), default=0.0)
    if widest < 1e-12:  # rounding in the means: they are equal
        widest = 0.0
    smallest_lead = min((abs(result.difference) for result in comparisons.values()), default=0.0)
    detectable = [result.seen for result in undecided if not math.isnan(result.seen)]
    return {
        "judged_by": min((result.seeds for result in judging), default=seeds),
        "ahead": format_metric(smallest_lead),
        "apart": format_metric(widest) if widest else "",
        "shared": bool(undecided),
        "seen": format_metric(max(detectable)) if detectable else "",
    }


def _content_of_advice(findings: Findings, named: Sequence[str]) -> dict[str, object]:
    """Collect what to do next, for the template of the first line: one advice, not two.

    If a best lr is at the edge of its grid, a wider grid may be all that learning lacks, unless the
    runs are too short to tell: then it is longer training.

    Args:
        findings: Findings of the only workload.
        named: Contenders that the line names.
    """
    possible = [] if findings.ttest is None else findings.ttest.possible
    edges = find_edges(findings)
    longer = ""
    if needs_longer_training(findings):
        longer = fill_text("longer.txt", run=findings.ranked[0].configuration.runs[0])
    shown = [
        {"name": row.name, "lr": rate(lr), "is_out": row.name not in possible}
        for row, lr in edges[:_EDGES]
    ]
    rows = [row for row in findings.ranked if row.name in named and _learnt_nothing(row)]
    return {
        "edges": shown,
        "more_edges": len(edges[_EDGES:]),
        "longer": longer,
        "learnt": "; ".join(map(_explain_nothing_learnt, rows)),
    }


def _write_with_diverged(name: str, comparison: Comparison) -> str:
    """Write a contender with its lr, and how many of its seeds diverged."""
    text = name
    diverged = 0
    runs = 0
    for workload in comparison.workloads:
        for row in workload.rows:
            if row.name == name:
                diverged += len(row.configuration.diverged_seeds)
                runs += len(row.configuration.scores)
                if not comparison.several:
                    text = write_contender(row, workload)
    if diverged:
        return f"{text} ({diverged} of {runs} seeds diverged)"
    return text


def write_contender(row: Contender, findings: Findings) -> str:
    """Write a contender with its chosen lr."""
    lr = row.configuration.lr
    if lr is None or "lr" in findings.compared_keys:
        return row.name
    return f"{row.name} at lr {rate(lr)}"


def next_lr(row: Contender, findings: Findings) -> float | None:
    """Find the lr to try next if the best is at an edge of its grid; else None.

    It is twice the highest or half the lowest lr. Also None if lr was not tuned, if there are
    fewer than two rates, if the best mean is a perfect 1, or if the neighbour inside is as
    good.
    """
    curve = row.lr_curve
    if "lr" not in findings.tuned_keys or curve.best is None or len(curve.tried_lrs) < 2:
        return None
    below, above = curve.beside()
    if below and above:
        return None
    if findings.mode == "max" and curve.best.mean == 1:
        return None  # right every time: nothing is left to find
    inside = curve.points.get(below or above or 0.0)
    if inside is not None and inside.mean == curve.best.mean:
        return None  # as good inside: nothing says that further out is better
    best = curve.best.lr or 0.0
    if above is None:
        return best * 2
    return best / 2


def needs_longer_training(findings: Findings) -> bool:
    """Tell whether longer training is a better next step than other rates or more seeds.

    With a best lr at the edge of its grid it is if all contenders were trained too briefly to
    choose an lr; otherwise if nothing was learnt.
    """
    if not find_edges(findings):
        return learns_nothing(findings)
    loss = loss_beside(findings.metric)
    return all(_is_too_short(row, loss) for row in findings.ranked)


def _is_too_short(row: Contender, loss: str) -> bool:
    """Tell whether a contender was trained too briefly to choose its lr.

    Most of its runs are no better than the majority class, or in each run at least half of the fall
    of the evaluation loss came in the second half of training.
    """
    if _learnt_nothing(row) and _results_without_learning(row)[0].majority is not None:
        return True
    return all(_falls_late(run, loss) for run in row.configuration.runs)


def _falls_late(run: Run, loss: str) -> bool:
    """Tell whether half of the fall of a loss, or more, came in the second half of a run.

    False with fewer than three evaluations.
    """
    steps, values = run.line(loss, "step")
    if len(steps) < 3 or values[-1] >= values[0]:
        return False
    middle = np.interp(steps[-1] / 2, steps, values)
    return bool(middle - values[-1] >= values[0] - middle)


def learns_nothing(findings: Findings) -> bool:
    """Tell whether every contender that could be the best learnt nothing, see `_learnt_nothing`.

    False without a ttest, and if no contender could be the best.
    """
    ttest = findings.ttest
    if ttest is None:
        return False
    rows = [row for row in findings.ranked if row.name in ttest.possible]
    return bool(rows) and all(map(_learnt_nothing, rows))


def _learnt_nothing(row: Contender) -> bool:
    """Tell whether more than half of a contender's finished runs learnt nothing.

    A run learnt nothing if its `Generalisation` has a verdict of `NOTHING_LEARNT`: it memorised the
    training data, is no better on evaluation than before training or than always answering the
    majority class, or was evaluated on what it was trained on. A run without a `Generalisation`
    does not count as one that learnt nothing.
    """
    finished = [run for run in row.configuration.runs if run.finished]
    return 2 * len(_results_without_learning(row)) > len(finished)


def _results_without_learning(row: Contender) -> list[Generalisation]:
    """List the verdicts on a contender's finished runs that learnt nothing."""
    results = [generalisation_of(run.summary) for run in row.configuration.runs if run.finished]
    return [result for result in results if result and result.verdict in NOTHING_LEARNT]


def _explain_nothing_learnt(row: Contender) -> str:
    """Say how many of a contender's finished runs learnt nothing, and why, judged by the first."""
    results = _results_without_learning(row)
    problem = str(results[0]).partition(":")[0]
    runs = plural(sum(run.finished for run in row.configuration.runs), "run")
    return f"{len(results)} of {runs} of {row.name} show no learning ({problem})"
