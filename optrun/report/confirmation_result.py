"""Judge the confirmations of a sweep by their own runs, and choose the next command."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Unpack

from optrun.base import shell
from optrun.base.errors import ConfigError
from optrun.base.formatting import plain, plural, rate
from optrun.config.literal import quoted
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
from optrun.report.sweep_folder import in_sweep, is_search, read_list
from optrun.report.verdict import (
    could_more_seeds_decide,
    find_contenders_at_edge,
    is_selected_by_metric,
    learns_nothing,
    needs_longer_training,
)
from optrun.report.workloads import Comparison, compare_runs


@dataclass(frozen=True)
class ConfirmationResult:
    """Runs, tests and notes of all confirmations of one sweep."""

    plans: Mapping[Path, ConfirmationPlan]
    """By folder, in the order of their seeds."""
    comparison: Comparison
    """Of the runs of those that are judged; of the choice if none is."""
    seeds: str = ""
    """The fresh seeds behind the verdict, such as `5-9`; empty if there is none as planned."""
    note: str = ""
    """What is unfinished, or not as planned; empty if all is."""
    looks: int = 1
    """How many confirmations of the sweep have ended."""
    waiting: Mapping[Path, ConfirmationPlan] = field(default_factory=dict)
    """The plans whose runs have not all ended; they are not judged."""

    @classmethod
    def of(
        cls,
        folder: Path,
        plan: ConfirmationPlan,
        comparison: Comparison,
        looks: int,
    ) -> ConfirmationResult:
        """Build the result of a report on the folder of a single confirmation.

        It counts as fresh seeds only if all planned runs have ended, and if metric, baseline and
        keys of the report are the planned ones; else a note says what is missing or different.

        Args:
            folder: The folder of the confirmation.
            plan: Its plan.
            comparison: Comparison of its runs.
            looks: How many confirmations of the sweep have ended, this one included.
        """
        findings = comparison.findings
        note = explain_waiting(plan, comparison.runs)
        plans = {folder: plan}
        if note:
            return cls(plans, comparison, note=note, looks=looks, waiting=plans)
        question = (findings.metric, findings.baseline, set(findings.compared_keys))
        if question == (plan.metric, plan.reference, set(plan.by)):
            return cls(plans, comparison, write_seeds(plan.seeds), looks=looks)
        note = f"Not as planned, which was {plan.metric} against {plan.reference or 'the best'}."
        return cls(plans, comparison, note=note, looks=looks)


def judge_together(
    planned: Mapping[Path, ConfirmationPlan],
    directories: Sequence[Path],
    choice: Comparison,
    **typed: Unpack[Question],
) -> ConfirmationResult | None:
    """Test the contenders on the runs of all ended confirmations directly beneath the sweeps.

    A confirmation repeats the chosen configurations on fresh seeds. The runs of several are tested
    together; those that differ in metric or configurations from the last ended one do not count.
    Notes name these and the unfinished ones.

    Returns None if no confirmation was begun. If none has ended, the comparison of the result is
    `choice`, the same object.

    Args:
        planned: Folder -> plan, see `find_plans`.
        directories: Directories of the sweeps.
        choice: Comparison of the sweeps.
        typed: The options of the report; of these only `matters` applies to confirmations.
    """
    sweeps = {directory.resolve() for directory in directories}
    # By their seeds, which rise from one confirmation to the next: the last is the newest.
    plans = {
        folder: planned[folder]
        for folder in sorted(planned, key=lambda folder: min(planned[folder].seeds))
        if folder.resolve().parent in sweeps
    }
    if not plans:
        return None
    # 1. Set the unfinished confirmations apart.
    runs = {folder: load_runs([folder]) for folder in plans}
    notes = []
    waiting = {}
    ended = []
    for folder, plan in plans.items():
        reason = explain_waiting(plan, runs[folder])  # empty if it can be judged
        if reason:
            notes.append(reason)
            waiting[folder] = plan
        else:
            ended.append(folder)
    if not ended:
        return ConfirmationResult(plans, choice, note=" ".join(notes), waiting=waiting)
    # 2. Take those of the ended ones, and their runs, that confirm the same choice as the last.
    last = plans[ended[-1]]
    judged = []
    fresh: list[Run] = []
    for folder in ended:
        plan = plans[folder]
        if (plan.metric, plan.contenders) == (last.metric, last.contenders):
            judged.append(plan)
            fresh += runs[folder]
        else:
            notes.append(f"Seeds {write_seeds(plan.seeds)} confirmed another choice.")
    # 3. Judge them together. The question is the options of `compare_runs`: metric, baseline and
    # keys are those of the plans, whatever the report was asked; a note says so if they differ.
    question = question_of_plans(judged, fresh, matters=typed.get("matters"))
    comparison = compare_runs(fresh, **(question | {"looks": len(ended)}))
    planned_runs = sum(len(plan.points()) for plan in judged)
    notes.extend(_note_deviations(comparison.findings, planned_runs, question["baseline"], typed))
    seeds = " and ".join(write_seeds(plan.seeds) for plan in judged)
    return ConfirmationResult(plans, comparison, seeds, " ".join(notes), len(ended), waiting)


def _note_deviations(
    findings: Findings,
    planned_runs: int,
    baseline: str | None,
    typed: Question,
) -> Iterator[str]:
    """Yield notes on planned runs without a result and on ignored options.

    Args:
        findings: Findings of the judged runs.
        planned_runs: How many were planned.
        baseline: The planned baseline.
        typed: The options of the report; a baseline or metric that differs from the plan is
            ignored.
    """
    scored_runs = sum(len(configuration.scores) for configuration in findings.configurations)
    if scored_runs < planned_runs:
        yield f"{plural(planned_runs - scored_runs, 'planned run')} without a result."
    ignored_options = []
    planned_options = {"baseline": baseline, "metric": findings.metric}
    for key, planned in planned_options.items():
        value = typed.get(key)
        if value not in (None, planned):
            ignored_options.append(f"{key}={value}")
    if ignored_options:
        yield f"Judged as planned: {', '.join(ignored_options)} is for the choice alone."


def question_of_plans(
    plans: Sequence[ConfirmationPlan],
    runs: Sequence[Run],
    **typed: Unpack[Question],
) -> Question:
    """Build the options to analyse confirming runs with, from their plans; typed options win.

    - `metric` and `by` are those of the last plan; a metric that no run has a score in is left out.
    - `matters` is the smallest planned difference, else that of the runs' configuration.
    - `baseline` is the reference of the plans, if all have the same and one of the runs is of it.
    """
    # 1. Metric, keys and the smallest difference.
    last = plans[-1]
    differences = [plan.difference for plan in plans if plan.difference]
    matters = min(differences) if differences else read_matters(runs)
    is_scored = any(run.score(last.metric) is not None for run in runs)
    question: Question = {
        "metric": typed.get("metric") or (last.metric if is_scored else None),
        "by": typed.get("by") or last.by,
        "matters": typed.get("matters") or matters,
    }
    # 2. The baseline, if the runs have a contender of this name: only an analysis without one tells
    # their names.
    baseline = typed.get("baseline")
    if baseline is None and all(plan.reference == last.reference for plan in plans):
        names = {contender.name for contender in compare_runs(runs, **question).findings.contenders}
        baseline = last.reference if last.reference in names else None
    return {**question, "baseline": baseline}


def explain_waiting(plan: ConfirmationPlan, runs: Sequence[Run]) -> str:
    """Explain why a confirmation cannot be judged; empty if it can.

    Either planned runs have not ended, or all have and none has the metric. A failed run has
    ended, an interrupted one has not.
    """
    seeds = write_seeds(plan.seeds)
    ended = [run for run in runs if run.ended]
    missing = len(plan.points()) - len(ended)
    if missing > 0:
        return f"Fresh seeds {seeds} are judged when all have ended: {plural(missing, 'run')} left."
    if any(run.score(plan.metric) is not None for run in runs):
        return ""
    return f"None of the runs on fresh seeds {seeds} has a result."


def count_ended_confirmations(folder: Path, plan: ConfirmationPlan) -> int:
    """Count the ended confirmations of the sweep; this one counts in any case."""
    sweep = find_confirmed_sweep(folder, plan)
    if sweep is None:
        return 1
    count = 1
    for other_folder, other_plan in find_plans([sweep]).items():
        is_other = other_folder.resolve() != folder.resolve()
        if is_other and not explain_waiting(other_plan, load_runs([other_folder])):
            count += 1
    return count


def find_confirmed_sweep(folder: Path, plan: ConfirmationPlan) -> Path | None:
    """Find the sweep of a confirmation; None if unknown or missing."""
    if plan.sweep is None:
        return None
    sweep = Path(os.path.normpath(folder / plan.sweep))
    return sweep if sweep.is_dir() else None


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
    """Choose the next command.

    The first of these that applies: continue or repeat a confirmation, try failed jobs again, widen
    the lr grid, confirm the choice. None in any of these cases:

    - nothing is left to do, or optrun would refuse the command;
    - the report is on several directories or workloads, or on runs that continue from a checkpoint
      of another run (`branch_from=`);
    - no confirmation was begun, and nothing is ranked or longer training is needed instead;
    - only a confirmation is left, and no contender that could be the best learnt anything.

    Args:
        comparison: Comparison of the reported runs.
        confirmed: Result of its confirmations, or of the reported confirmation itself; None: no
            confirmation was begun.
        dirs: The reported directories.
        request: The typed baseline, metric and keys.
    """
    ttest = comparison.ttest
    findings = comparison.findings
    if comparison.several or len(dirs) > 1 or forks_of(findings.runs):
        return None
    # 1. A confirmation was begun: continue it, or begin another one. None: neither is of use.
    if confirmed is not None:
        return _continue_or_confirm_again(confirmed)
    # 2. The choice is not made yet: neither more seeds nor a confirmation would help.
    if ttest is None or needs_longer_training(findings):  # None: nothing is ranked
        return None
    # 3. Enlarge the sweep. The first is None if no failed job is worth another try, the second if
    # no best lr is at an edge of its grid, or if one command cannot extend the grid.
    sweep = dirs[0]
    larger_sweep = _compose_retry(findings, sweep) or _compose_wider_grid(findings, sweep)
    if larger_sweep or learns_nothing(findings):
        return larger_sweep  # None if nothing was learnt: no choice is worth a confirmation
    # 4. Confirm, if fresh seeds could decide, or if a configuration was chosen by the seeds that
    # judge it. None: `optrun confirm` would refuse.
    if could_more_seeds_decide(ttest) or any(map(is_selected_by_metric, findings.ranked)):
        return _compose_confirmation(sweep, sweep / FOLDER, request, findings.runs)
    return None


def compose_sweep_again(
    sweeps: Sequence[Path], runs: Sequence[Run], left: int, *options: str
) -> NextCommand | None:
    """Compose the last command of a sweep again; None if it is unknown, and for several sweeps.

    Args:
        sweeps: The reported directories.
        runs: Their runs.
        left: How many runs the command starts.
        options: Overrides to add, unless the last command has them.
    """
    words = read_list(sweeps[0], "command", plain)
    if len(sweeps) > 1 or not words:
        return None
    if not {"-m", "--multirun"}.intersection(words):  # optrun.sweep(...) of Python has none
        words.insert(0, "-m")
    words += [option for option in options if option not in words]
    line = shell.join(
        ["optrun", *plugins_of(runs), *words, f"hydra.sweep.dir={quoted(str(sweeps[0]))}"]
    )
    return NextCommand(line, write_cost(left, runs))


def _compose_retry(findings: Findings, sweep: Path) -> NextCommand | None:
    """Compose the last command of a sweep so that it tries failed jobs again.

    None if no job failed, if every seed of its configuration failed, so that another try would
    fail, too, and if the command made only some of the runs.
    """
    failed = 0
    for configuration in findings.configurations:
        if configuration.scores:
            failed += sum(run.status == "failed" for run in configuration.latest_runs)
    is_whole_sweep = len(read_list(sweep, "jobs", str)) == len(findings.runs)
    if not failed or not is_whole_sweep:
        return None
    return compose_sweep_again([sweep], findings.runs, failed, "hydra.sweeper.retry_failed=true")


def _compose_wider_grid(findings: Findings, sweep: Path) -> NextCommand | None:
    """Compose the command to extend the lr grid of contenders whose best lr is at its edge.

    A contender is one optimizer, or whatever else is compared, with all of its configurations.

    Such as `optrun -m optimizer=lamb lr=4e-3 seed=0,1 hydra.sweep.dir=...`, which adds runs to the
    sweep. One command covers several contenders if they differ only in the optimizer, by
    `search.lamb.lr=4e-3 search.adamw.lr=2e-3`; else it is for the first.

    None without such a contender, if more than lr was tuned, and for a search or a recipe that is a
    sweep: one more value does not widen those.
    """
    edges = find_contenders_at_edge(findings)  # each contender, and the lr to add to its grid
    if not edges or findings.tuned_keys != ["lr"]:
        return None
    runs = [contender.configuration.runs[0] for contender, _ in edges]
    if in_sweep(runs[0].path):  # the reported folder may hold several sweeps
        sweep = runs[0].path.parent
    if is_search(sweep):
        return None
    # A job of a recipe that is a sweep has `hydra.mode=RUN` in its command.
    if any("hydra.mode=RUN" in str(run.summary.get("command")) for run in runs):
        return None
    # 1. The contenders that one command covers: the first, and all that differ from it only in the
    # optimizer and ran on the same seeds.
    first = runs[0]
    first_contender, first_lr = edges[0]
    seeds = sorted(first_contender.configuration.scores)
    grid = []
    similar_runs: list[Run] = []
    for run, (contender, lr) in zip(runs, edges, strict=True):
        is_alike = _without_optimizer(run) == _without_optimizer(first)
        has_same_seeds = sorted(contender.configuration.scores) == seeds
        if is_alike and has_same_seeds:
            grid.append(f"search.{run.optimizer}.lr={rate(lr)}")
            similar_runs += contender.configuration.runs
    overrides = _without_optimizer(first)
    # 2. If that is the first alone, or other keys separate contenders, too: only the first.
    if len(grid) == 1 or findings.compared_keys != ["optimizer.name"]:
        grid = [f"lr={rate(first_lr)}"]
        similar_runs = first_contender.configuration.runs
        overrides = first.overrides_without(_SET_BY_THE_GRID)
    # 3. The command.
    tokens = ["optrun", *plugins_of([first]), "-m"]
    if first.config_name:
        tokens += ["-cn", first.config_name]
    tokens += first.config_dir
    tokens += overrides
    tokens += grid
    tokens.append(f"seed={','.join(map(str, seeds))}")
    tokens.append(f"hydra.sweep.dir={quoted(str(sweep))}")
    return NextCommand(shell.join(tokens), write_cost(len(grid) * len(seeds), similar_runs))


_SET_BY_THE_GRID = ("resume=", "hydra", "lr=", "seed=")
"""Beginnings of overrides that the command for a wider grid sets itself."""


def _without_optimizer(run: Run) -> list[str]:
    """List the typed overrides of a run without lr, seed, Hydra's keys and the optimizer."""
    return run.overrides_without((*_SET_BY_THE_GRID, "optimizer="))


def _continue_or_confirm_again(confirmed: ConfirmationResult) -> NextCommand | None:
    """Compose the command to continue an unfinished confirmation, or to begin another.

    Another one, on fresh seeds, begins only if more seeds could decide; its folder is numbered, as
    `confirm-2`. None if neither is of use, or the confirmed sweep is gone.
    """
    runs = confirmed.comparison.runs
    # 1. Continue the first unfinished confirmation; without one, go on from the last. The sweep is
    # None if it is unknown or gone.
    folder, plan = next(iter(confirmed.waiting.items()), list(confirmed.plans.items())[-1])
    sweep = find_confirmed_sweep(folder, plan)
    if sweep is None:
        return None
    if confirmed.waiting:
        return _compose_confirmation(sweep, folder, ConfirmationRequest(), runs)
    # 2. Another one is of use only if it could decide.
    ttest = confirmed.comparison.ttest
    if ttest is None or not could_more_seeds_decide(ttest):
        return None
    if learns_nothing(confirmed.comparison.findings):
        return None
    # 3. Begin it in the next folder: `confirm` is followed by `confirm-2`, `confirm-3`.
    stem = re.sub(r"-\d+$", "", folder.name)
    number = 2
    while folder.with_name(f"{stem}-{number}").exists():
        number += 1
    is_own_metric = plan.metric == confirmed.comparison.findings.own_metric
    request = ConfirmationRequest(
        baseline=plan.reference, metric=None if is_own_metric else plan.metric
    )
    next_folder = folder.with_name(f"{stem}-{number}")
    return _compose_confirmation(sweep, next_folder, request, runs, by=plan.by)


def _compose_confirmation(
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
    # 1. Plan as `optrun confirm` would, first without `by=`, then with it if the keys differ.
    try:
        plan, _ = load_or_make_plan(sweep, folder, request)
        if by and plan.by != by:
            request = replace(request, by=by)
            load_or_make_plan(sweep, folder, request)
    except ConfigError:
        return None
    # 2. The command, and the planned runs that have not finished.
    out = None if folder.resolve() == (sweep / FOLDER).resolve() else folder
    program, *arguments = request.line(sweep, out)
    line = shell.join([program, *plugins_of(similar_runs), *arguments])
    left = len(plan.points()) - sum(run.finished for run in load_runs([folder]))
    return NextCommand(line, write_cost(left, similar_runs))
