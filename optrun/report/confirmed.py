"""Judge a confirmation by its own runs, in the way that was planned before any of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from optrun.report.collect import Run, load_runs
from optrun.report.confirmation import FOLDER, Confirmation, label, read
from optrun.report.findings import Findings, find


@dataclass(frozen=True)
class Confirmed:
    """What a confirmation found so far."""

    folder: Path
    plan: Confirmation
    findings: Findings

    @property
    def as_planned(self) -> bool:
        """Whether the findings are by the metric, against the reference and of the contenders that were planned."""
        found, plan = self.findings, self.plan
        named = found.chosen_baseline and found.reference == plan.reference
        return named and found.metric == plan.metric and set(found.compared_keys) == set(plan.by)

    @property
    def title(self) -> str:
        """Say what the verdict may be quoted as."""
        seeds = label(self.plan.seeds)
        if self.as_planned:
            return f"Confirmed on fresh seeds {seeds}"
        return f"Not as planned, which was {self.plan.metric} against {self.plan.reference} on fresh seeds {seeds}"

    @property
    def missing(self) -> int:
        """Runs without a result."""
        found = sum(len(arm.scores) for arm in self.findings.arms)
        return max(0, len(self.plan.contenders) * len(self.plan.seeds) - found)

    @property
    def pending(self) -> int:
        """Runs that are not begun, or did not come to an end."""
        ended = sum(run.finished or run.status == "failed" for run in self.findings.runs)
        return max(0, len(self.plan.contenders) * len(self.plan.seeds) - ended)

    @property
    def sweep(self) -> Path | None:
        """Whose choice it is; None where that is not known or not there."""
        folder = self.folder.resolve()
        if self.plan.sweep is None:
            return shown(folder.parent) if folder.name == FOLDER else None
        sweep = (folder / self.plan.sweep).resolve()
        return shown(sweep) if sweep.is_dir() else None


def shown(path: Path) -> Path:
    """Write a path as a person here types it: from the working directory, where it is beneath that."""
    whole, here = path.resolve(), Path.cwd()
    return whole.relative_to(here) if whole.is_relative_to(here) else whole


def judge(
    planned: Mapping[Path, Confirmation], directories: Sequence[Path], *, target: float | None = None
) -> list[Confirmed]:
    """Judge the confirmations directly beneath some directories by their own runs; none that has no result yet.

    Args:
        planned: What `confirmation.confirmations` found.
        directories: The sweeps.
        target: See `findings.find`.
    """
    found = []
    sweeps = {directory.resolve() for directory in directories}
    for folder, made in planned.items():
        if folder.resolve().parent not in sweeps:
            continue
        runs = load_runs([folder])
        if _has_result(made, runs):
            baseline = planned_reference(made, runs)
            judged = find(runs, metric=made.metric, by=made.by, baseline=baseline, target=target)
            found.append(Confirmed(folder, made, judged))
    return found


def plan_of(directories: Sequence[Path], runs: Sequence[Run]) -> Confirmation | None:
    """Find the plan of a report on one directory that is itself a confirmation with a result; else None."""
    made = read(directories[0]) if len(directories) == 1 else None
    return made if made is not None and _has_result(made, runs) else None


def planned_reference(
    made: Confirmation, runs: Sequence[Run], *, metric: str | None = None, by: Sequence[str] = ()
) -> str | None:
    """Name the planned reference, where it is among the contenders of some runs.

    Args:
        made: The plan.
        runs: Of the confirmation.
        metric: Another than the planned one.
        by: Other keys than the planned ones.
    """
    rows = find(runs, metric=metric or made.metric, by=by or made.by).rows
    return made.reference if made.reference in {row.name for row in rows} else None


def _has_result(made: Confirmation, runs: Sequence[Run]) -> bool:
    return any(run.score(made.metric) is not None for run in runs)
