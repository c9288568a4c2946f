"""Judge the confirmations of a choice by their own runs, together, in the way that was planned before any of them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from optrun.report.collect import Run, load_runs
from optrun.report.confirmation import FOLDER, Confirmation, confirmations, label
from optrun.report.findings import matters_of
from optrun.report.workloads import Comparison, compare_runs


@dataclass(frozen=True)
class Confirmed:
    """What the confirmations of one choice found."""

    plans: Mapping[Path, Confirmation]
    """By folder, in the order of their seeds."""
    comparison: Comparison
    """Of the runs of those that are judged; of the choice if none is."""
    seeds: str = ""
    """The fresh seeds that its verdict may be quoted with; empty where it may not."""
    note: str = ""
    """What is not judged yet, or not as planned; empty where there is no such thing."""
    looks: int = 1
    """How many confirmations of the sweep were judged."""
    waiting: Mapping[Path, Confirmation] = field(default_factory=dict)
    """Those of the plans that have not come to their end, and are not looked at."""

    @classmethod
    def of(cls, folder: Path, made: Confirmation, comparison: Comparison, looks: int) -> Confirmed:
        """Make that of a report on one confirmation by itself."""
        found, note = comparison.findings, waits(made, comparison.runs)
        waiting = {folder: made} if note else {}
        asked = (found.metric, found.reference if found.named else None, {*found.compared_keys})
        if not note and asked != (made.metric, made.reference, {*made.by}):
            note = f"Not as planned, which was {made.metric} against {made.reference or 'the best'}."
        return cls({folder: made}, comparison, "" if note else label(made.seeds), note, looks, waiting)


def judge_together(
    planned: Mapping[Path, Confirmation],
    directories: Sequence[Path],
    choice: Comparison,
    *,
    matters: float | None = None,
    **of_choice: Any,
) -> Confirmed | None:
    """Judge the confirmations directly beneath some directories by all their runs; None where there is none.

    One that has not come to its end is not looked at. Those of another choice than the last one are named alone.

    Args:
        planned: What `confirmation.confirmations` found.
        directories: The sweeps.
        choice: What was found in them.
        matters: The smallest difference that counts; None: as planned.
        of_choice: Options of `compare_runs` that a person gave for the choice alone.
    """
    sweeps = {directory.resolve() for directory in directories}
    plans = {folder: made for folder, made in planned.items() if folder.resolve().parent in sweeps}
    plans = dict(sorted(plans.items(), key=lambda item: min(item[1].seeds)))
    runs = {folder: load_runs([folder]) for folder in plans}
    notes = {folder: note for folder, made in plans.items() if (note := waits(made, runs[folder]))}
    waiting, ended = {each: plans[each] for each in notes}, [each for each in plans if each not in notes]
    if not ended:
        return Confirmed(plans, choice, note=" ".join(notes.values()), waiting=waiting) if plans else None
    last = plans[ended[-1]]
    alike = [each for each in ended if (plans[each].metric, plans[each].contenders) == (last.metric, last.contenders)]
    notes |= {it: f"Seeds {label(plans[it].seeds)} confirmed another choice." for it in ended if it not in alike}
    fresh = [run for folder in alike for run in runs[folder]]
    options = planned_options([plans[it] for it in alike], fresh, matters=matters)
    made = compare_runs(fresh, looks=len(ended), **options)
    lost = sum(len(plans[it].points()) for it in alike) - sum(len(arm.scores) for arm in made.findings.arms)
    said = [*notes.values(), *([f"{lost} of their runs failed and have no result."] if lost > 0 else [])]
    planned_as = {"baseline": options["baseline"], "metric": made.findings.metric}
    if other := [
        f"{key}={given}" for key in planned_as if (given := of_choice.get(key)) not in (None, planned_as[key])
    ]:
        said.append(f"Judged as planned: {', '.join(other)} is for the choice alone.")
    seeds = " and ".join(label(plans[folder].seeds) for folder in alike)
    return Confirmed(plans, made, seeds, " ".join(said), len(ended), waiting)


def planned_options(plans: Sequence[Confirmation], runs: Sequence[Run], **typed: Any) -> dict[str, Any]:
    """Collect what `compare_runs` takes to judge by some plans of one choice, as far as nothing else was typed."""
    last, references = plans[-1], {made.reference for made in plans}
    matters = min((made.difference for made in plans if made.difference), default=matters_of(runs))
    metric = last.metric if any(run.score(last.metric) is not None for run in runs) else None
    options: dict[str, Any] = {"metric": metric, "by": last.by, "matters": matters}
    options |= {key: given for key, given in typed.items() if given}
    names = {row.name for row in compare_runs(runs, **{**options, "baseline": None}).findings.rows}
    return {"baseline": last.reference if len(references) == 1 and references <= names else None} | options


def waits(made: Confirmation, runs: Sequence[Run]) -> str:
    """Say why a confirmation is not judged: it waits for runs, or none has a result; empty where it is."""
    left = len(made.points()) - sum(run.finished or run.status == "failed" for run in runs)
    if left > 0:
        return f"Fresh seeds {label(made.seeds)} are judged with the last run: {left} are left."
    scored = any(run.score(made.metric) is not None for run in runs)
    return "" if scored else f"None of the runs on fresh seeds {label(made.seeds)} has a result."


def looks_at(folder: Path, made: Confirmation) -> int:
    """Count the confirmations of its sweep that have come to their end, one among them."""
    beneath = confirmations([sweep] if (sweep := sweep_of(folder, made)) else [])
    others = [each for each in beneath if each.resolve() != folder.resolve()]
    return 1 + sum(not waits(beneath[each], load_runs([each])) for each in others)


def sweep_of(folder: Path, made: Confirmation) -> Path | None:
    """Find whose choice is confirmed; None where that is not known or not there."""
    way = made.sweep or (".." if folder.resolve().name == FOLDER else None)
    sweep = Path(os.path.normpath(folder / way)) if way is not None else None
    return sweep if sweep is not None and sweep.is_dir() else None
