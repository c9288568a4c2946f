"""Render a report as an HTML page and as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from markupsafe import Markup

from optrun.base.formatting import plain
from optrun.report import tables
from optrun.report.confirmed import Confirmed
from optrun.report.curves import run_title
from optrun.report.figures import drawn_names
from optrun.report.pareto import pareto_sentence, pareto_table
from optrun.report.picture import Picture
from optrun.report.svg import to_svg
from optrun.report.table import Table, value
from optrun.report.templating import fill_html, fill_markdown, fill_text
from optrun.report.theme import DARK, LIGHT, PAGE, css_variables
from optrun.report.verdict import SweepVerdict, is_tested
from optrun.report.warnings import Warning
from optrun.report.workloads import Comparison

HTML_MARK = '<meta name="generator" content="optrun report">'
MARKDOWN_MARK = "<!-- optrun report -->"
"""By these an earlier report is told from a person's own file."""


@dataclass(frozen=True)
class Section:
    """A heading, what is said below it, and a table whose first column names what a row is about."""

    title: str
    table: Table | None
    text: str = ""


def render(content: Mapping[str, Any], drawn: Mapping[Picture, Path]) -> Iterator[str]:
    """Render HTML whose content policy forbids every request to anywhere, then Markdown that refers to the pictures.

    Args:
        content: What the page says; see `content_of`.
        drawn: The pictures, and the files that Markdown shows.
    """
    # The pictures are markup of our own.
    inline = [
        (one, Markup(to_svg(one.draw(PAGE), name=one.name, label=one.title)), path) for one, path in drawn.items()
    ]
    colours = {"light": css_variables(LIGHT), "dark": css_variables(DARK)}
    yield fill_html("report.html", pictures=inline, **colours, **content)
    yield fill_markdown("report.md", pictures=[(*pair, pair[1]) for pair in drawn.items()], **content)


def content_of(
    comparison: Comparison,
    verdict: SweepVerdict,
    warnings: Sequence[Warning],
    *,
    confirmed: Confirmed | None = None,
    command: str = "",
    refresh: int = 0,
) -> dict[str, Any]:
    """Collect what the page of a report says.

    Args:
        comparison: What was found.
        verdict: Its first line.
        warnings: What to take care of.
        confirmed: Confirmations of it, or of which it is the result.
        command: What makes the report again.
        refresh: Seconds until the page loads itself anew; 0: never.

    Returns:
        `title`, `subtitle`; `line` and `next` (the verdict and a command); `table` of contenders; `warnings`, of which
        three stand open; `sections`, open, in both files; `switches`, the names of the contenders of the pictures;
        `folds`, folded, in HTML alone; `commands` that make the runs again; `tested`, how the verdict came about.
    """
    runs, found = comparison.runs, comparison.findings
    table, sections = (
        tables.scores_table(comparison) if comparison.several else tables.ranking_table(found),
        _sections(comparison),
    )
    if single := len(runs) == 1:
        sections = [Section("Metrics", tables.metrics_table(runs[0]))]
        sections += [Section("Answers", told)] if (told := tables.answers_table(runs[0])) is not None else []
    if confirmed is not None and confirmed.comparison is not comparison:
        sections = [Section("The choice that was confirmed", table), *sections]
        table = tables.ranking_table(confirmed.comparison.findings)
    by = "the metric of each workload" if comparison.several else found.metric
    made = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return {
        "title": run_title(runs[0]) if single else _title(comparison),
        "subtitle": f"{len(runs):,} run{'s' * (not single)} ({tables.states(runs)}), compared by {by}, {made}",
        "line": verdict.text,
        "next": verdict.next,
        "table": table,
        "warnings": warnings,
        "sections": sections,
        "switches": [] if single else drawn_names(comparison),
        "folds": _folds(comparison),
        "commands": [*_commands(comparison), ("report", "", command)],
        "tested": "" if single else _tested(comparison if confirmed is None else confirmed.comparison, verdict),
        "refresh": refresh,
    }


def _sections(comparison: Comparison) -> list[Section]:
    """List what stands open below the table of the verdict: each workload by itself, and what is weighed."""
    found = [Section("Workloads", tables.workloads_table(comparison))] if comparison.several else []
    for each in comparison.workloads:
        if comparison.several:
            found.append(Section(f"Within {each.name}", tables.ranking_table(each.findings)))
        if each.findings.objectives:
            found.append(Section("Pareto front", pareto_table(each.findings), pareto_sentence(each.findings)))
    return found


def _folds(comparison: Comparison) -> list[Section]:
    """List what is folded away."""
    found = []
    for each in comparison.workloads:
        within, own = f" of {each.name}" if each.name else "", each.findings
        found.append(Section(f"Every configuration{within}", tables.arms_table(own)))
        found.append(Section(f"Every run{within}", tables.runs_table(own.runs, own.keys, own.metric, own.mode)))
    return found


def _tested(comparison: Comparison, verdict: SweepVerdict) -> str:
    """Say how the verdict came about, in at most 150 words."""
    judged, every = comparison.judgement, [each.findings for each in comparison.workloads]
    text = fill_text(
        "tested.txt", comparison=comparison, judged=judged, is_tested=judged is not None and is_tested(judged),
        matters="" if judged is None else value(judged.matters), selected=verdict.kind == "selected",
        lost=any(arm.lost for each in every for arm in each.arms), tuned=any(each.tuned_keys for each in every),
    )  # fmt: skip
    return " ".join(text.split())


def _title(comparison: Comparison) -> str:
    names = {row.name for each in comparison.workloads for row in each.findings.rows}
    count = f"{len(names)} contender{'s' * (len(names) != 1)}"
    if comparison.several:
        return f"{count} over {len(comparison.workloads)} workloads"
    values = ({str(run.config[key]): 0 for run in comparison.runs if key in run.config} for key in _WHERE)
    where = " on ".join(", ".join(each) for each in values if each)
    return f"{count}: {where}" if where else count


_WHERE = ("model.name", "data.name")


def _commands(comparison: Comparison) -> list[tuple[str, str, str]]:
    """List the shell line of each contender's best configuration: its name, a note, the line."""
    found = []
    for each in comparison.workloads:
        for row in each.findings.rows:
            runs = row.arm.counted
            seeds = sorted({run.seed for run in runs if run.seed is not None})
            if runs and (line := runs[0].command(seeds=seeds)):
                changed = any(each for run in runs for each in run.of_resumes("changes", dict))
                notes = [each.name, f"{len(seeds)} seeds" * (len(seeds) > 1), "changed when resumed" * changed]
                found.append((row.name, "; ".join(filter(None, notes)), plain(line)))
    return found
