"""The sections of a page on several workloads: what each costs and weighs, and what is not computed over them."""

from __future__ import annotations

from functools import reduce
from operator import add

from optrun.formatting import duration
from optrun.report.cost import COST_COLUMNS, Cost, cost, cost_cells
from optrun.report.pareto import pareto_sentence, pareto_table
from optrun.report.sections import Section
from optrun.report.table import NONE, Table
from optrun.report.workloads import Overview, Workload


def cost_section(overview: Overview) -> Section:
    """Tabulate what each contender cost over all workloads, then what each workload cost."""
    by_contender: dict[str, dict[str, Cost]] = {}
    for each in overview.workloads:
        for row in each.findings.rows:
            by_contender.setdefault(row.name, {})[each.name] = cost(row.contender)
    standings = {each.name: each for each in overview.standings}
    contenders = Table(
        ["contender", "mean score", "workloads", *COST_COLUMNS], [False, *[True] * (2 + len(COST_COLUMNS))]
    )
    for name in dict.fromkeys([*standings, *by_contender]):
        spent = by_contender.get(name, {})
        if not spent:
            continue
        mean = standings[name].mean if name in standings else float("nan")
        cells = [name, f"{mean:.3f}" if mean == mean else NONE, str(len(spent))]
        contenders.rows.append([*cells, *cost_cells(reduce(add, spent.values()))])
        contenders.styles.append("")
    workloads = Table(["workload", *COST_COLUMNS, "a run"], [False, *[True] * (1 + len(COST_COLUMNS))])
    for each in overview.workloads:
        if costs := [cost(row.contender) for row in each.findings.rows]:
            total = reduce(add, costs)
            one = NONE if total.seconds is None or not total.runs else duration(total.seconds / total.runs)
            workloads.rows.append([each.name, *cost_cells(total), one])
            workloads.styles.append("")
    said = (
        "All runs that were begun, also those that failed or were not chosen; wall time as if one followed the other."
    )
    return Section("What it cost", [said], [contenders, workloads])


def pareto_section(workload: Workload) -> Section | None:
    """Say what no other configuration of a workload beats; None where nothing is weighed."""
    findings = workload.findings
    if not findings.objectives:
        return None
    front = pareto_table(findings)
    title = f"Pareto front of {workload.name}"
    return Section(title, [pareto_sentence(findings)], [] if front is None else [front])


def left_section(overview: Overview) -> Section:
    """Say what a report of one workload has, and this one has not."""
    first = overview.workloads[0].name
    return Section(
        "Not over several workloads",
        [
            "Score against budget, tokens and time to a target, speed and memory, what each searched setting is worth, "
            "curves against time and of the training loss, and the table of every configuration are of one workload: "
            f"optrun report with the run directories of one alone, such as those of {first}, has them, and "
            "optrun confirm is for a sweep over one."
        ],
    )
