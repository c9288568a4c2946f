"""Say what several workloads say together, in sentences and tables, and what each says by itself."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from optrun.report.findings import Findings
from optrun.report.narrative import subtitle
from optrun.report.picture import drawn_rows
from optrun.report.sections import Section
from optrun.report.statistics import BETTER, WORSE
from optrun.report.table import NONE, Table, value
from optrun.report.tables import p_value, ranking_table, signed
from optrun.report.verdict import by_verdict, headline, kind
from optrun.report.warnings import CONFIRM, Warning, find_warnings
from optrun.report.workloads import Overview
from optrun.report.workloads_figures import ordered, shown
from optrun.report.workloads_methods import methods
from optrun.report.workloads_sections import cost_section, left_section, pareto_section
from optrun.report.workloads_statistics import FEWEST_WORKLOADS, LAST_TAU

_SAID = ("task", "data")
"""Kinds of warnings that say what the overview is about."""


def content(overview: Overview, findings: Findings, command: str) -> dict[str, Any]:
    """Make what a page says in place of one ranking.

    Args:
        overview: What was found over workloads.
        findings: Of all runs together; ranks nothing.
        command: What makes the report again.
    """
    return {
        "title": f"{len(overview.standings)} contenders over {len(overview.workloads)} workloads",
        "subtitle": subtitle(replace(findings, metric="the metric of each workload")),
        "headline": lead(overview),
        "result": "Over several workloads",
        "ranking": table(overview),
        "sections": [*sections(overview), cost_section(overview), left_section(overview)],
        "methods": methods(overview, findings, command),
        "arms": None,
        "notes": notes(overview),
    }


def cautions(overview: Overview, findings: Findings) -> list[Warning]:
    """Collect what to take care of within each workload; what is said of all of them once."""
    together = [warning for warning in find_warnings(findings) if warning.kind not in _SAID]
    found: dict[tuple[str, str], list[str]] = {}
    runs: dict[tuple[str, str], tuple[str, ...]] = {}
    for each in overview.workloads:
        for warning in find_warnings(each.findings):
            if not any(other.kind == warning.kind and other.runs for other in together):
                text = warning.text.replace(CONFIRM, "")  # which is of one workload
                found.setdefault((warning.kind, text), []).append(each.name)
                runs[warning.kind, text] = warning.runs
    named = [
        Warning(
            kind, text if len(names) == len(overview.workloads) else f"{', '.join(names)}: {text}", runs[kind, text]
        )
        for (kind, text), names in found.items()
    ]
    return [warning for warning in together if warning.runs] + named


def switches(overview: Overview) -> list[str]:
    """List the contenders that the page can switch off: the same ones in every picture, or none."""
    names = [each.name for each in shown(overview)]
    same = all([row.name for row in drawn_rows(ordered(each, overview).rows)] == names for each in overview.workloads)
    return names if same else []


def lead(overview: Overview) -> str:
    """Say the finding over all workloads in a few sentences, no stronger than the tests allow, and its kind."""
    kinds = {kind(each.findings) for each in overview.workloads}
    of_kind = next((name for name in ("Pilot", "Selected", "Compared") if name in kinds), "")
    return f"{of_kind}: {_finding(overview)}" if of_kind else _finding(overview)


def _finding(overview: Overview) -> str:
    judged = [each for each in overview.standings if not each.missing]
    count = len(overview.workloads) - len(overview.left_out)
    if not judged:
        found = f"{len(overview.workloads)} workloads, and no contender has a result on all of them yet"
        return f"{found}: read each by itself."
    first = judged[0]
    text = (
        f"Over {count} workloads {first.name} has the best mean score: {first.mean:.3f} of the way from no learning "
        "(0) to the best contender (1)."
    )
    verdicts = {each.name: each.verdict for each in judged if each.test is not None}
    if verdicts:
        text += f" Against {overview.reference}, on these workloads: {by_verdict(verdicts)}."
    return f"{text} {_elsewhere(count)}"


def _elsewhere(count: int) -> str:
    if count < FEWEST_WORKLOADS:
        return f"{count} workloads are too few to speak of others: a sign test over workloads needs {FEWEST_WORKLOADS}."
    return "The last column of the table says how far this holds for other workloads like these."


def table(overview: Overview) -> Table:
    """Tabulate all contenders over all workloads, best first."""
    elsewhere = len(overview.workloads) - len(overview.left_out) >= FEWEST_WORKLOADS
    columns = ["#", "contender", "mean score", "95 % interval", "verdict", "difference", "p (Holm)", "better / worse"]
    columns += ["p (other workloads)"] if elsewhere else []
    made = Table(columns, [True, False, True, True, False, *[True] * (len(columns) - 5)])
    for number, each in enumerate(overview.standings, start=1):
        test = each.test
        tested = test is not None and not math.isnan(test.low)
        made.rows.append(
            [
                NONE if each.missing else str(number),
                each.name,
                _number(each.mean),
                _interval(each.interval),
                f"no result on {', '.join(each.missing)}" if each.missing else each.verdict,
                NONE if test is None else _difference(test.difference, (test.low, test.high) if tested else None),
                p_value(each.p) if tested else NONE,
                NONE if each.missing or test is None else f"{each.better} / {each.worse}",
                *([NONE if math.isnan(each.p_elsewhere) else p_value(each.p_elsewhere)] if elsewhere else []),
            ]
        )
        best = number == 1 and not each.missing
        style = {BETTER: "better", WORSE: "worse"}.get(each.verdict, "")
        made.styles.append("muted" if each.missing else "best" if best else style)
    return made


def summaries_table(overview: Overview) -> Table:
    """Tabulate other ways to sum up over workloads; nothing is tested by these."""
    columns = ["contender", "interquartile mean", "optimality gap", "mean rank", "steps profile"]
    made = Table(columns, [False, *[True] * 4])
    for each in overview.standings:
        rank = float(np.mean(each.ranks)) if not np.isnan(each.ranks).any() else math.nan
        made.rows.append(
            [
                each.name,
                _with_interval(each.middle, each.middle_interval),
                _with_interval(each.gap, each.gap_interval),
                NONE if math.isnan(rank) else f"{rank:.1f}",
                f"{each.profile:.2f}",
            ]
        )
        made.styles.append("muted" if each.missing else "")
    return made


def scores_table(overview: Overview) -> Table:
    """Tabulate the normalised score of each contender on each workload, and the scale it is on."""
    usable = overview.usable
    names = [each.name for each in overview.standings]
    made = Table(
        ["workload", "metric", "before learning (0)", "best (1)", *names], [False, False, *[True] * (2 + len(names))]
    )
    for index, each in enumerate(usable):
        cells = [each.name, each.findings.metric, value(each.floor), value(each.best)]
        for standing in overview.standings:
            known = standing.scores[index][~np.isnan(standing.scores[index])]
            cells.append(_number(known.mean()) if len(known) else NONE)
        made.rows.append(cells)
        made.styles.append("")
    return made


def sections(overview: Overview) -> list[Section]:
    """List the scores on each workload, then the verdict within each, as a report of its runs alone gives it."""
    found = []
    if overview.standings:
        found.append(Section("Score on each workload", tables=[scores_table(overview)]))
        found.append(Section("Other summaries over workloads", tables=[summaries_table(overview)]))
    for each in overview.workloads:
        found.append(Section(f"Within {each.name}", [headline(each.findings)], [ranking_table(each.findings)]))
        if (front := pareto_section(each)) is not None:
            found.append(front)
    return found


def notes(overview: Overview) -> list[str]:
    """Explain how the numbers over workloads came about and what they do not say; one paragraph each."""
    seeds = max((each.scores.shape[1] for each in overview.standings), default=0)
    without = "; ".join(f"{name}: {reason}" for name, reason in overview.left_out.items())
    scope = "the comparisons with the baseline" if overview.chosen_baseline else "all pairs of contenders"
    found = [
        "Workload: runs of one task that are judged on the same rows; they are ranked among themselves alone, each "
        "contender at its best configuration there.",
        "Score: 0 is the metric before learning (the median evaluation before the first step), 1 the mean "
        "of the best contender of the workload, so that workloads can be averaged, each with the same weight. Since "
        "the best sets the scale, a contender that joins may move all scores. Interquartile mean and optimality gap as "
        "in Agarwal et al. 2021 (rliable). Intervals are stratified bootstrap intervals: 2,000 times, seeds are drawn "
        f"with replacement within each workload, stretched for the small number of them ({seeds} at most).",
        "Verdict over workloads: two-sided t test of the mean difference in score, seeds paired within each workload "
        "(those that all contenders share), variances moderated as within a workload, degrees of freedom by "
        f"Satterthwaite, p values doubled, Holm's method over {scope}: see docs/statistics.md. It speaks of these "
        "workloads with other seeds. Of other workloads only a test that counts workloads can speak, and below "
        f"{FEWEST_WORKLOADS} none can pass: where there are as many, a sign test stands in the last column, "
        "uncorrected. Better / worse counts workloads by means.",
        "Steps profile: the share of workloads on which a contender reached the target within a factor of the steps of "
        f"the quickest, averaged over factors from 1 to {LAST_TAU:g} (Dolan and Moré 2002, AlgoPerf). The target is a "
        "level of the metric that half of the contenders reach; one that does not reach it on a workload gets nothing "
        "there. Steps are whole evaluation intervals.",
    ]
    if without:
        found.append(f"Not in the score: {without}.")
    return found


def _number(number: float) -> str:
    return NONE if math.isnan(number) else f"{number:.3f}".replace("-", "\N{MINUS SIGN}")


def _interval(ends: tuple[float, float]) -> str:
    return NONE if math.isnan(ends[0]) else f"[{_number(ends[0])}, {_number(ends[1])}]"


def _with_interval(number: float, ends: tuple[float, float]) -> str:
    return NONE if math.isnan(number) else f"{number:.3f} {_interval(ends)}"


def _difference(difference: float, ends: tuple[float, float] | None) -> str:
    if ends is None:
        return signed(difference, 3)
    return f"{signed(difference, 3)} [{signed(ends[0], 3)}, {signed(ends[1], 3)}]"
