"""List the sections of a comparison's page that are text and tables: one row a section."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from optrun.report.cost import cost_table
from optrun.report.findings import Findings
from optrun.report.pareto import pareto_sentence, pareto_table
from optrun.report.table import Table
from optrun.report.tables import speed_table, target_table


@dataclass(frozen=True)
class Section:
    """A heading, what is said below it, and tables whose first column names what a row is about."""

    title: str
    paragraphs: Sequence[str] = ()
    tables: Sequence[Table] = ()


def _pareto(findings: Findings) -> Section | None:
    front = pareto_table(findings)
    if not findings.objectives:
        return None
    return Section("Pareto front", [pareto_sentence(findings)], [] if front is None else [front])


def _cost(findings: Findings) -> Section:
    return Section("What it cost", tables=[cost_table(findings)])


def _target(findings: Findings) -> Section | None:
    return Section("To the target", tables=[target_table(findings)]) if findings.target == findings.target else None


def _speed(findings: Findings) -> Section:
    return Section("Speed, memory, sensitivity", tables=[speed_table(findings)])


SECTIONS: tuple[Callable[[Findings], Section | None], ...] = (_pareto, _cost, _target, _speed)
"""In the order of the page, after the pictures; None: nothing to say."""


def sections(findings: Findings) -> list[Section]:
    """Make the sections that this comparison has something to say in."""
    return [found for make in SECTIONS if (found := make(findings)) is not None]
