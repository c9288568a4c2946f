"""Say what the choice of each contender cost, counted from its runs."""

from __future__ import annotations

from dataclasses import dataclass

from optrun.report.collect import Run
from optrun.report.findings import Findings, Row


@dataclass(frozen=True)
class Spent:
    """What was tried for one contender."""

    configurations: int
    """Those that were evaluated or diverged; also where they were stopped early."""
    runs: int
    steps: int
    """Optimizer steps, counted from `metrics.jsonl`."""

    def __str__(self) -> str:
        of = f"{self.configurations} configuration{'s' * (self.configurations != 1)}"
        more = f" in {self.runs:,} runs" if self.runs != self.configurations else ""
        return f"{of}{more}, {self.steps:,} steps"


def spent(row: Row, findings: Findings) -> Spent:
    """Count what was tried for a contender."""
    arms = [[run for run in arm.runs if _was_judged(run, findings)] for arm in row.contender.arms]
    runs = [run for arm in arms for run in arm]
    steps = sum(max((int(record["step"]) for record in run.log.records), default=0) for run in runs)
    return Spent(len([arm for arm in arms if arm]), len(runs), steps)


def _was_judged(run: Run, findings: Findings) -> bool:
    return bool(run.diverged) or len(run.trained(findings.metric)[0]) > 0


def budget_line(findings: Findings) -> str:
    """Say whether contenders were tuned at equal expense; empty where nothing was tuned, or nobody compared."""
    found = {row.name: spent(row, findings) for row in findings.rows}
    if len(found) < 2 or all(one.configurations < 2 for one in found.values()):
        return ""
    if len(set(found.values())) == 1:
        return f"Budget: equal, {next(iter(found.values()))} for each of {', '.join(found)}."
    equal = [
        noun
        for noun, counted in (
            ("configurations", {one.configurations for one in found.values()}),
            ("optimizer steps", {one.steps for one in found.values()}),
        )
        if len(counted) == 1
    ]
    verdict = f"equal in {equal[0]}" if equal else "not equal"
    return f"Budget: {verdict}. {'; '.join(f'{name}: {one}' for name, one in found.items())}."
