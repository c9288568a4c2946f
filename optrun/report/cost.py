"""Add up what was spent on each contender: over everything that was tried for it, not only what was chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from optrun.formatting import count, duration
from optrun.report.arms import Contender
from optrun.report.collect import NOT_STARTED
from optrun.report.findings import Findings, Row
from optrun.report.table import NONE, Table, value
from optrun.report.tables import mean_sd, row_style


@dataclass(frozen=True)
class Cost:
    """What one contender has cost so far."""

    configurations: int
    """Begun, whatever became of them."""
    runs: int
    """Begun, those that failed or were done twice among them."""
    steps: int
    """Optimizer steps."""
    tokens: float | None
    """Trained on; None where no run knows."""
    seconds: float | None
    """Wall seconds, one run after the other; None where no run knows."""
    untold: int
    """Runs of which tokens or seconds are not known."""

    def __add__(self, other: Cost) -> Cost:
        """What both cost together."""
        return Cost(
            self.configurations + other.configurations,
            self.runs + other.runs,
            self.steps + other.steps,
            _sum([self.tokens, other.tokens]),
            _sum([self.seconds, other.seconds]),
            self.untold + other.untold,
        )


def cost(contender: Contender) -> Cost:
    """Add up all runs of a contender."""
    begun = [[run for run in arm.runs if run.status != NOT_STARTED] for arm in contender.arms]
    runs = [run for members in begun for run in members]
    return Cost(
        sum(map(bool, begun)),
        len(runs),
        sum(run.global_step for run in runs),
        _sum(run.tokens for run in runs),
        _sum(run.wall_seconds for run in runs),
        sum(run.tokens is None or run.wall_seconds is None for run in runs),
    )


def _sum(numbers: Iterable[float | None]) -> float | None:
    known = [number for number in numbers if number is not None]
    return sum(known) if known else None


def equal_budget(rows: Sequence[Row]) -> int:
    """The number of configurations that every ranked contender has tried; 0 where none is ranked."""
    return min((row.budget.tried for row in rows if row.rank), default=0)


def cost_table(findings: Findings) -> Table:
    """Tabulate each contender's result beside all that was spent to get it."""
    same = equal_budget(findings.rows)
    unequal = any(row.budget.tried > same for row in findings.rows if row.rank)
    columns = ["contender", findings.metric, *([f"expected best of {same}"] if unequal else [])]
    table = Table([*columns, *COST_COLUMNS], [False, *[True] * 5])
    table.numeric += [True] * (len(table.columns) - len(table.numeric))
    for row in findings.rows:
        spent = cost(row.contender)
        expected = row.budget.at(same) if row.rank else float("nan")
        table.rows.append(
            [
                row.name,
                mean_sd(row.arm),
                *([value(expected) if expected == expected else NONE] if unequal else []),
                *cost_cells(spent),
            ]
        )
        table.styles.append(row_style(row))
    return table


COST_COLUMNS = ("configurations", "runs", "steps", "tokens", "wall time")


def cost_cells(spent: Cost) -> list[str]:
    """Format a cost for `COST_COLUMNS`."""
    return [
        f"{spent.configurations:,}",
        f"{spent.runs:,}",
        f"{spent.steps:,}",
        _at_least(spent.tokens or None, count, spent),  # images have none
        _at_least(spent.seconds, duration, spent),
    ]


def _at_least(total: float | None, show: Callable[[float], str], spent: Cost) -> str:
    """Format a sum; where some run keeps its share to itself, as a bound."""
    if total is None:
        return NONE
    return f"≥ {show(total)}" if spent.untold else show(total)
