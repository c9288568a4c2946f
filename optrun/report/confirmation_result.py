"""Judge the confirmations of a choice by their own runs, together, as planned.

Compose the command that tells more.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Unpack

from optrun.base import shell
from optrun.base.errors import ConfigError
from optrun.base.formatting import plural, rate
from optrun.config.literal import quote_path
from optrun.report.confirmation_plan import (
    FOLDER,
    ConfirmationPlan,
    ConfirmationRequest,
    find_plans,
    load_or_make_plan,
    write_cost,
    write_seeds,
)
from optrun.report.findings import Findings, Question, forks_of, read_matters
from optrun.report.runs import Run, load_runs, plugins_of
from optrun.report.statistics import TtestResult, Verdict
from optrun.report.sweep_folder import is_search
from optrun.report.verdict import find_edges, is_selected, learns_nothing, needs_longer_training
from optrun.report.workloads import Comparison, compare_runs


@dataclass(frozen=True)
class ConfirmationResult:
    """Runs, tests and notes of all confirmations of one sweep."""

    plans: Mapping[Path, ConfirmationPlan]
    """By folder, in the order of their seeds."""
    comparison: Comparison
    """Of the runs of those that are judged; of the choice if none is."""
    seeds: str = ""
    """The fresh seeds that its verdict may be quoted with; empty where it may not."""
    note: str = ""
    """What is not judged yet, or not as planned; empty where there is no such thing."""
    looks: int = 1
    """How many confirmations of the sweep were judged."""
    waiting: Mapping[Path, ConfirmationPlan] = field(default_factory=dict)
    """Those of the plans that have not come to their end, and are not looked at."""

    @classmethod
    def of(
        cls, folder: Path, plan: ConfirmationPlan, comparison: Comparison, looks: int
    ) -> ConfirmationResult:
        """Build the result of a report on a single confirmation."""
        findings = comparison.findings
        note = explain_waiting(plan, comparison.runs)
        if note:
            waiting = {folder: plan}
            return cls({folder: plan}, comparison, note=note, looks=looks, waiting=waiting)
        question = (findings.metric, findings.baseline, set(findings.compared_keys))
        if question == (plan.metric, plan.reference, set(plan.by)):
            return cls({folder: plan}, comparison, write_seeds(plan.seeds), looks=looks)
        note = f"Not as planned, which was {plan.metric} against {plan.reference or 'the best'}."
        return cls({folder: plan}, comparison, note=note, looks=looks)


def judge_together(
    planned: Mapping[Path, ConfirmationPlan],
    directories: Sequence[Path],
    choice: Comparison,
    **typed: Unpack[Question],
) -> ConfirmationResult | None:
    """Judge the confirmations directly beneath some directories by all their runs.

    An unfinished confirmation is left out. If the sweep has chosen other configurations since, only
    confirmations of the last choice count and the others are named. None if there are none.

    Args:
        planned: Folder -> plan, see `find_plans`.
        directories: Directories of the sweeps.
        choice: Comparison of the sweeps.
        typed: The options of the report; of these only `matters` applies to confirmations.
    """
    sweeps = {directory.resolve() for directory in directories}
    beneath = [folder for folder in planned if folder.resolve().parent in sweeps]
    plans = {
        folder: planned[folder]
        for folder in sorted(beneath, key=lambda folder: min(planned[folder].seeds))
    }
    if not plans:
        return None
    runs = {folder: load_runs([folder]) for folder in plans}
    notes = []
    waiting = {}
    ended = []
    for folder, plan in plans.items():
        reason = explain_waiting(plan, runs[folder])
        if reason:
            notes.append(reason)
            waiting[folder] = plan
        else:
            ended.append(folder)
    if not ended:
        return ConfirmationResult(plans, choice, note=" ".join(notes), waiting=waiting)
    last = plans[ended[-1]]
    judged = []
    for folder in ended:
        plan = plans[folder]
        if (plan.metric, plan.contenders) == (last.metric, last.contenders):
            judged.append(folder)
        else:
            notes.append(f"Seeds {write_seeds(plan.seeds)} confirmed another choice.")
    fresh = [run for folder in judged for run in runs[folder]]
    question = question_of_plans(
        [plans[confirmed_folder] for confirmed_folder in judged],
        fresh,
        matters=typed.get("matters"),
    )
    comparison = compare_runs(fresh, **(question | {"looks": len(ended)}))
    planned_runs = sum(len(plans[folder].points()) for folder in judged)
    notes.extend(_deviations(comparison.findings, planned_runs, question["baseline"], typed))
    seeds = " and ".join(write_seeds(plans[folder].seeds) for folder in judged)
    return ConfirmationResult(plans, comparison, seeds, " ".join(notes), len(ended), waiting)


def _deviations(
    findings: Findings, planned_runs: int, baseline: str | None, typed: Question
) -> Iterator[str]:
    """Yield notes on planned runs without a result and on ignored options.

    Args:
        findings: Findings of the judged runs.
        planned_runs: How many were planned.
        baseline: The planned baseline.
        typed: The options of the report; a baseline or metric that differs from the plan is
            ignored.
    """
    lost = planned_runs - sum(
        len(configuration.scores) for configuration in findings.configurations
    )
    if lost:
        yield f"{plural(lost, 'planned run')} without a result."
    ignored_options = []
    for key, value, planned in (
        ("baseline", typed.get("baseline"), baseline),
        ("metric", typed.get("metric"), findings.metric),
    ):
        if value not in (None, planned):
            ignored_options.append(f"{key}={value}")
    if ignored_options:
        yield f"Judged as planned: {', '.join(ignored_options)} is for the choice alone."


def question_of_plans(
    plans: Sequence[ConfirmationPlan], runs: Sequence[Run], **typed: Unpack[Question]
) -> Question:
    """Build the question of some plans of one sweep; typed values win.

    The metric and keys are those of the last plan, `matters` is the smallest planned
    difference, else that of the configurations. The baseline counts only if all plans name the
    same one and it has runs. A planned metric without a score in any run is left out.
    """
    last = plans[-1]
    differences = [plan.difference for plan in plans if plan.difference]
    matters = min(differences) if differences else read_matters(runs)
    is_scored = any(run.score(last.metric) is not None for run in runs)
    question: Question = {
        "metric": typed.get("metric") or (last.metric if is_scored else None),
        "by": typed.get("by") or last.by,
        "matters": typed.get("matters") or matters,
    }
    baseline = typed.get("baseline")
    references = {plan.reference for plan in plans}
    if baseline is None and len(references) == 1:
        names = {row.name for row in compare_runs(runs, **question).findings.rows}
        baseline = last.reference if last.reference in names else None
    return {**question, "baseline": baseline}


def explain_waiting(plan: ConfirmationPlan, runs: Sequence[Run]) -> str:
    """Explain why a confirmation cannot be judged; empty if it can.

    Either planned runs have not ended, or all have and none has the metric. A failed run has
    ended, an interrupted one has not.
    """
    seeds = write_seeds(plan.seeds)
    ended = [run for run in runs if run.finished or run.status == "failed"]
    missing = len(plan.points()) - len(ended)
    if missing > 0:
        return f"Fresh seeds {seeds} are judged when all have ended: {plural(missing, 'run')} left."
    if any(run.score(plan.metric) is not None for run in runs):
        return ""
    return f"None of the runs on fresh seeds {seeds} has a result."


def count_ended_confirmations(folder: Path, plan: ConfirmationPlan) -> int:
    """Count the ended confirmations of the sweep, this one included."""
    sweep = find_confirmed_sweep(folder, plan)
    count = 1
    for other_folder, other_plan in find_plans([sweep] if sweep else []).items():
        if other_folder.resolve() != folder.resolve():
            count += not explain_waiting(other_plan, load_runs([other_folder]))
    return count


def find_confirmed_sweep(folder: Path, plan: ConfirmationPlan) -> Path | None:
    """Find the sweep of a confirmation; None if unknown or missing."""
    if plan.sweep is None:
        return None
    sweep = Path(os.path.normpath(folder / plan.sweep))
    if sweep.is_dir():
        return sweep
    return None


_OPEN = (Verdict.could_be_best, Verdict.no_difference, Verdict.too_few)


@dataclass(frozen=True)
class NextCommand:
    """A command that would tell more, and its cost."""

    line: str
    cost: str
    """How many runs it starts, and how long they train."""


def choose_next_command(
    comparison: Comparison,
    confirmed: ConfirmationResult | None,
    dirs: Sequence[Path],
    request: ConfirmationRequest,
) -> NextCommand | None:
    """Choose the most useful next command.

    None if nothing is left to do, or if optrun would refuse every command.

    Args:
        comparison: Comparison of the reported runs.
        confirmed: Result of its confirmations, or of the reported confirmation itself.
        dirs: The reported directories.
        request: The typed baseline, metric and keys.
    """
    ttest = comparison.ttest
    findings = comparison.findings
    if comparison.several or len(dirs) > 1 or ttest is None or forks_of(findings.runs):
        return None
    if confirmed is not None:
        return _confirm_again(confirmed)
    if needs_longer_training(findings):
        return None
    sweep = dirs[0]
    wider = _widen(findings, sweep)
    if wider or learns_nothing(findings):
        return wider
    if is_open(ttest) or any(is_selected(row) for row in findings.ranked):
        return _confirm(sweep, sweep / FOLDER, request, findings.runs)
    return None


def is_open(ttest: TtestResult) -> bool:
    """Tell whether more seeds could decide: some contender may differ by `matters`."""
    for name, result in ttest.comparisons.items():
        if name == ttest.reference or result.verdict not in _OPEN:
            continue
        is_small = max(abs(result.low), abs(result.high)) <= ttest.matters
        if not is_small:
            return True
    return False


def _widen(findings: Findings, sweep: Path) -> NextCommand | None:
    """Compose the command to widen the grids with the best lr at an edge.

    One command covers several contenders if they differ only in the optimizer; else it is for the
    first. None for a search or a sweep recipe: one more value does not widen those.
    """
    edges = find_edges(findings)
    if not edges or findings.tuned_keys != ["lr"] or is_search(sweep):
        return None
    first = edges[0][0].configuration.runs[0]
    if any(
        "hydra.mode=RUN" in str(row.configuration.runs[0].summary.get("command"))
        for row, _ in edges
    ):
        return None
    kept_overrides = _kept_overrides(first)
    seeds = sorted(edges[0][0].configuration.scores)
    grid = [f"lr={rate(edges[0][1])}"]
    together = [
        (row, lr)
        for row, lr in edges
        if _without_optimizer(row.configuration.runs[0]) == _without_optimizer(first)
        and sorted(row.configuration.scores) == seeds
    ]
    if len(together) == 1 or findings.compared_keys != ["optimizer.name"]:
        together = edges[:1]
    else:
        kept_overrides = _without_optimizer(first)
        grid = []
        for row, lr in together:
            optimizer = row.configuration.runs[0].optimizer
            grid.append(f"search.{optimizer}.lr={rate(lr)}")
    recipe = ["-cn", first.config_name] if first.config_name else []
    values = [*grid, f"seed={','.join(map(str, seeds))}", f"hydra.sweep.dir={_as_typed(sweep)}"]
    line = shell.join(
        ["optrun", *plugins_of([first]), "-m", *recipe, *first.config_dir, *kept_overrides, *values]
    )
    similar_runs = [run for row, _ in together for run in row.configuration.runs]
    return NextCommand(line, write_cost(len(together) * len(seeds), similar_runs))


def _as_typed(path: Path) -> str:
    """Quote a path if it has characters of Hydra's grammar."""
    if re.search(r"[,'\"\[\](){}$\\]", str(path)):
        return quote_path(path)
    return str(path)


def _kept_overrides(run: Run) -> list[str]:
    """List the typed overrides of a run, without lr, seed and Hydra's keys."""
    own_prefixes = ("resume=", "hydra", "lr=", "seed=")
    return [token for token in run.typed if not token.lstrip("+").startswith(own_prefixes)]


def _without_optimizer(run: Run) -> list[str]:
    return [token for token in _kept_overrides(run) if not token.startswith("optimizer=")]


def _confirm_again(confirmed: ConfirmationResult) -> NextCommand | None:
    """Go on with an unfinished confirmation, or begin another on fresh seeds.

    It begins another if several contenders could still be the best.
    """
    runs = confirmed.comparison.runs
    for folder, plan in confirmed.waiting.items():
        sweep = find_confirmed_sweep(folder, plan)
        if sweep:
            return _confirm(sweep, folder, ConfirmationRequest(), runs)
        return None
    folder, plan = list(confirmed.plans.items())[-1]
    sweep = find_confirmed_sweep(folder, plan)
    ttest = confirmed.comparison.ttest
    if sweep is None or ttest is None or not is_open(ttest):
        return None
    if learns_nothing(confirmed.comparison.findings):
        return None
    stem = re.sub(r"-\d+$", "", folder.name)
    number = 2
    while folder.with_name(f"{stem}-{number}").exists():
        number += 1
    is_own = plan.metric == confirmed.comparison.findings.own_metric
    again = ConfirmationRequest(baseline=plan.reference, metric=None if is_own else plan.metric)
    return _confirm(sweep, folder.with_name(f"{stem}-{number}"), again, runs, by=plan.by)


def _confirm(
    sweep: Path,
    folder: Path,
    request: ConfirmationRequest,
    similar_runs: Sequence[Run],
    by: Sequence[str] = (),
) -> NextCommand | None:
    """Compose the command to confirm a sweep; none if `optrun confirm` would refuse.

    Args:
        sweep: The sweep to confirm.
        folder: Directory of the confirming runs; `out=` is left out for the usual one.
        request: The options of the command.
        similar_runs: Runs of these contenders; their plugins are in the command, and their wall
            time estimates the cost.
        by: Keys that must separate the contenders; `by=` is left out if they do so anyway.
    """
    try:
        plan, _ = load_or_make_plan(sweep, folder, request)
        if by and plan.by != by:
            request = replace(request, by=by)
            load_or_make_plan(sweep, folder, request)
    except ConfigError:
        return None
    out = None if folder.resolve() == (sweep / FOLDER).resolve() else folder
    program, *arguments = request.line(sweep, out)
    line = shell.join([program, *plugins_of(similar_runs), *arguments])
    left = len(plan.points()) - sum(run.finished for run in load_runs([folder]))
    return NextCommand(line, write_cost(left, similar_runs))
