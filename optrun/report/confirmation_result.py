"""Judge the confirmations of a choice by their own runs, together, as planned.

Compose the command that tells more.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Unpack

from optrun.artifacts.forks import Fork
from optrun.base.errors import ConfigError
from optrun.config.literal import quote_path
from optrun.report.confirmation_plan import (
    FOLDER,
    ConfirmationPlan,
    ConfirmationRequest,
    find_plans,
    load_or_make_plan,
    write_seeds,
)
from optrun.report.findings import Findings, Question, read_matters
from optrun.report.runs import Run, load_runs, plugins_of
from optrun.report.statistics import Judgement, Verdict
from optrun.report.sweep_folder import is_search
from optrun.report.verdict import find_edges, is_selected
from optrun.report.workloads import Comparison, compare_runs


@dataclass(frozen=True)
class ConfirmationResult:
    """What the confirmations of one choice found."""

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
        cls, folder: Path, made: ConfirmationPlan, comparison: Comparison, looks: int
    ) -> ConfirmationResult:
        """Make that of a report on one confirmation by itself."""
        found, note = comparison.findings, explain_waiting(made, comparison.runs)
        waiting = {folder: made} if note else {}
        asked = (found.metric, found.baseline, {*found.compared_keys})
        if not note and asked != (made.metric, made.reference, {*made.by}):
            note = (
                f"Not as planned, which was {made.metric} against {made.reference or 'the best'}."
            )
        return cls(
            {folder: made},
            comparison,
            "" if note else write_seeds(made.seeds),
            note,
            looks,
            waiting,
        )


def judge_together(
    planned: Mapping[Path, ConfirmationPlan],
    directories: Sequence[Path],
    choice: Comparison,
    **typed: Unpack[Question],
) -> ConfirmationResult | None:
    """Judge the confirmations directly beneath some directories by all their runs.

    None where there is none.

    One that has not come to its end is not looked at. Those of another choice than the last one are
    named alone.

    Args:
        planned: What `confirmation.confirmations` found.
        directories: The sweeps.
        choice: What was found in them.
        typed: What a person asked of the choice; `matters` alone goes for the confirmations, too.
    """
    sweeps = {directory.resolve() for directory in directories}
    plans = {folder: made for folder, made in planned.items() if folder.resolve().parent in sweeps}
    plans = dict(sorted(plans.items(), key=lambda item: min(item[1].seeds)))
    runs = {folder: load_runs([folder]) for folder in plans}
    notes = {
        folder: note
        for folder, made in plans.items()
        if (note := explain_waiting(made, runs[folder]))
    }
    waiting, ended = (
        {each: plans[each] for each in notes},
        [each for each in plans if each not in notes],
    )
    if not ended:
        return (
            ConfirmationResult(plans, choice, note=" ".join(notes.values()), waiting=waiting)
            if plans
            else None
        )
    last = plans[ended[-1]]
    alike = [
        each
        for each in ended
        if (plans[each].metric, plans[each].contenders) == (last.metric, last.contenders)
    ]
    notes |= {
        it: f"Seeds {write_seeds(plans[it].seeds)} confirmed another choice."
        for it in ended
        if it not in alike
    }
    fresh = [run for folder in alike for run in runs[folder]]
    question = question_of_plans([plans[it] for it in alike], fresh, matters=typed.get("matters"))
    made = compare_runs(fresh, **(question | {"looks": len(ended)}))
    lost = sum(len(plans[it].points()) for it in alike) - sum(
        len(configuration.scores) for configuration in made.findings.configurations
    )
    said = [
        *notes.values(),
        *(
            [f"{'1 of their runs has' if lost == 1 else f'{lost} of their runs have'} no result."]
            if lost > 0
            else []
        ),
    ]
    planned_as = {"baseline": question["baseline"], "metric": made.findings.metric}
    if other := [
        f"{key}={given}"
        for key, own in planned_as.items()
        if (given := typed.get(key)) not in (None, own)
    ]:
        said.append(f"Judged as planned: {', '.join(other)} is for the choice alone.")
    seeds = " and ".join(write_seeds(plans[folder].seeds) for folder in alike)
    return ConfirmationResult(plans, made, seeds, " ".join(said), len(ended), waiting)


def question_of_plans(
    plans: Sequence[ConfirmationPlan], runs: Sequence[Run], **typed: Unpack[Question]
) -> Question:
    """Ask as some plans of one choice do, as far as nothing else was typed."""
    last, references = plans[-1], {made.reference for made in plans}
    matters = min(
        (made.difference for made in plans if made.difference), default=read_matters(runs)
    )
    metric = last.metric if any(run.score(last.metric) is not None for run in runs) else None
    by, matters = typed.get("by") or last.by, typed.get("matters") or matters
    asked: Question = {"metric": typed.get("metric") or metric, "by": by, "matters": matters}
    names = {row.name for row in compare_runs(runs, **asked).findings.rows}
    planned = last.reference if len(references) == 1 and references <= names else None
    return {**asked, "baseline": typed.get("baseline") or planned}


def explain_waiting(made: ConfirmationPlan, runs: Sequence[Run]) -> str:
    """Say why a confirmation is not judged: it waits for runs, or none has a result.

    Empty where it is.
    """
    left = len(made.points()) - sum(run.finished or run.status == "failed" for run in runs)
    if left > 0:
        count = "1 run is" if left == 1 else f"{left} runs are"
        return f"Fresh seeds {write_seeds(made.seeds)} are judged with the last run: {count} left."
    scored = any(run.score(made.metric) is not None for run in runs)
    return (
        "" if scored else f"None of the runs on fresh seeds {write_seeds(made.seeds)} has a result."
    )


def count_ended_confirmations(folder: Path, made: ConfirmationPlan) -> int:
    """Count the confirmations of its sweep that have come to their end, one among them."""
    beneath = find_plans([sweep] if (sweep := find_confirmed_sweep(folder, made)) else [])
    others = [each for each in beneath if each.resolve() != folder.resolve()]
    return 1 + sum(not explain_waiting(beneath[each], load_runs([each])) for each in others)


def find_confirmed_sweep(folder: Path, made: ConfirmationPlan) -> Path | None:
    """Find whose choice is confirmed; None where that is not known or not there."""
    way = made.sweep or (".." if folder.resolve().name == FOLDER else None)
    sweep = Path(os.path.normpath(folder / way)) if way is not None else None
    return sweep if sweep is not None and sweep.is_dir() else None


_OPEN = (Verdict.could_be_best, Verdict.no_difference, Verdict.too_few)


def choose_next_command(
    comparison: Comparison,
    confirmed: ConfirmationResult | None,
    dirs: Sequence[Path],
    asked: ConfirmationRequest,
) -> str:
    """Choose the command; empty if there is nothing to do, or none that would be taken.

    Args:
        comparison: Of the report.
        confirmed: Of its confirmations, or the one that it is.
        dirs: What is reported.
        asked: The baseline, metric and keys that were given.
    """
    judged, found, sweep = comparison.judgement, comparison.findings, dirs[0]
    if (
        comparison.several
        or len(dirs) > 1
        or judged is None
        or any(Fork.of(run.summary) for run in found.runs)
    ):
        return ""
    if confirmed is not None:
        return _confirm_again(confirmed)
    wider = _widen(found, sweep)
    if wider:
        return wider
    if not is_open(judged) and not any(map(is_selected, found.ranked)):
        return ""
    return _confirm(sweep, sweep / FOLDER, asked, plugins_of(found.runs))


def is_open(judged: Judgement) -> bool:
    """Tell whether more seeds could tell more.

    Of some contender no more is known than that it may differ enough.
    """
    asked = [
        each
        for name, each in judged.comparisons.items()
        if name != judged.reference and each.verdict in _OPEN
    ]
    return any(not max(abs(each.low), abs(each.high)) <= judged.matters for each in asked)


def _widen(found: Findings, sweep: Path) -> str:
    """Compose the line that adds the next lr of each contender at the edge of its grid.

    One line for several contenders that differ in the optimizer alone; else for the first of them.
    Empty for a search, or a recipe that is a sweep: neither is widened by one value.
    """
    edges = find_edges(found)
    if not edges or found.tuned_keys != ["lr"] or is_search(sweep):
        return ""
    first = edges[0][0].configuration.runs[0]
    if any(
        "hydra.mode=RUN" in str(row.configuration.runs[0].summary.get("command"))
        for row, _ in edges
    ):
        return ""
    kept = _kept_overrides(first)
    seeds = sorted(edges[0][0].configuration.scores)
    grid = [f"lr={edges[0][1]:g}"]
    together = [
        (row, lr)
        for row, lr in edges
        if _without_optimizer(row.configuration.runs[0]) == _without_optimizer(first)
        and sorted(row.configuration.scores) == seeds
    ]
    if len(together) > 1 and found.compared_keys == ["optimizer.name"]:
        kept = _without_optimizer(first)
        grid = [f"search.{row.configuration.runs[0].optimizer}.lr={lr:g}" for row, lr in together]
    recipe = ["-cn", first.config_name] if first.config_name else []
    values = [*grid, f"seed={','.join(map(str, seeds))}", f"hydra.sweep.dir={_as_typed(sweep)}"]
    return shlex.join(["optrun", *first.plugins, "-m", *recipe, *first.config_dir, *kept, *values])


def _as_typed(path: Path) -> str:
    """Quote a path in which Hydra would read a sign of its grammar."""
    return quote_path(path) if re.search(r"[,'\"\[\](){}$\\]", str(path)) else str(path)


def _kept_overrides(run: Run) -> list[str]:
    """List what was typed for a run, without lr, seed and what is Hydra's."""
    own = ("resume=", "hydra", "lr=", "seed=")
    return [token for token in run.typed if not token.lstrip("+").startswith(own)]


def _without_optimizer(run: Run) -> list[str]:
    return [token for token in _kept_overrides(run) if not token.startswith("optimizer=")]


def _confirm_again(confirmed: ConfirmationResult) -> str:
    """Go on with an unfinished confirmation, or begin another on fresh seeds.

    Another one is begun if several contenders could be the best.
    """
    folder, plan = next(iter(confirmed.waiting.items()), [*confirmed.plans.items()][-1])
    sweep, judged = find_confirmed_sweep(folder, plan), confirmed.comparison.judgement
    if sweep is None or not (confirmed.waiting or (judged is not None and is_open(judged))):
        return ""
    plugins = plugins_of(confirmed.comparison.runs)
    if confirmed.waiting:
        return _confirm(sweep, folder, ConfirmationRequest(), plugins)
    stem = re.sub(r"-\d+$", "", folder.name)
    free = next(
        each for number in count(2) if not (each := folder.with_name(f"{stem}-{number}")).exists()
    )
    metric = None if plan.metric == confirmed.comparison.findings.own_metric else plan.metric
    again = ConfirmationRequest(baseline=plan.reference, metric=metric, by=plan.by)
    return _confirm(sweep, free, again, plugins)


def _confirm(sweep: Path, folder: Path, asked: ConfirmationRequest, plugins: Sequence[str]) -> str:
    """Compose the line that confirms a sweep; empty if the verb would refuse it."""
    try:
        load_or_make_plan(sweep, folder, asked)
    except ConfigError:
        return ""
    out = None if folder.resolve() == (sweep / FOLDER).resolve() else folder
    program, *words = asked.line(sweep, out)
    return shlex.join([program, *plugins, *words])
