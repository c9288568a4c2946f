"""Render a report as an HTML page and as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from markupsafe import Markup

from optrun.artifacts.run_dir import RunDir
from optrun.artifacts.samples import SampleLine, read_samples
from optrun.report import workloads_page
from optrun.report.confirmed import Confirmed
from optrun.report.findings import Findings
from optrun.report.methods import methods
from optrun.report.narrative import commands, footer, notes, subtitle, title, verdict_line
from optrun.report.open_questions import Asked
from optrun.report.picture import Picture, drawn_rows
from optrun.report.sections import sections
from optrun.report.svg import to_svg
from optrun.report.table import Table
from optrun.report.tables import (
    arms_table,
    ranking_table,
    run_facts,
    runs_table,
)
from optrun.report.templating import fill_html, fill_markdown
from optrun.report.theme import DARK, LIGHT, PAGE, css_variables
from optrun.report.verdict import headline
from optrun.report.warnings import Warning
from optrun.report.workloads import Overview

HTML_MARK = '<meta name="generator" content="optrun report">'
MARKDOWN_MARK = "<!-- optrun report -->"
"""By these an earlier report is told from a person's own file."""


def render(
    findings: Findings,
    warnings: Sequence[Warning],
    drawn: Mapping[Picture, Path],
    confirmed: Sequence[Confirmed] = (),
    command: str = "",
    overview: Overview | None = None,
    asked: Asked | None = None,
) -> Iterator[str]:
    """Render HTML whose content policy forbids every request to anywhere, then Markdown that refers to the pictures.

    Args:
        findings: What was found.
        warnings: What to take care of.
        drawn: The pictures, and the files that Markdown shows.
        confirmed: Confirmations of it, or of which it is the result.
        command: What makes the report again.
        overview: Of runs of several workloads: what is said in place of a ranking of all.
        asked: Of what the report is.
    """
    single = len(findings.runs) == 1
    beside = [one for one in confirmed if one.findings is not findings]
    content = {
        "title": title(findings),
        "subtitle": subtitle(findings),
        "warnings": warnings,
        "commands": commands(findings),
        "footer": footer(findings),
        "samples": last_samples(findings) if single else [],
        "facts": facts_of(findings) if single else None,
        "headline": "" if single else verdict_line(findings, confirmed),
        "confirmed": [(one.title, headline(one.findings), ranking_table(one.findings)) for one in beside],
        "result": "The choice" if beside else "Result",
        "ranking": ranking_table(findings),
        "sections": [] if single else sections(findings),
        "methods": None if single else methods(findings, confirmed, command),
        "arms": arms_table(findings),
        "runs": runs_table(findings.runs, findings.keys, findings.metric, findings.mode),
        "notes": notes(findings, confirmed, asked),
    }
    switches = [] if single else [row.name for row in drawn_rows(findings.rows)]
    if overview is not None:
        content |= workloads_page.content(overview, findings, command)
        switches = workloads_page.switches(overview)
    # The pictures are markup of our own.
    inline = [
        (one, Markup(to_svg(one.draw(PAGE), name=one.name, label=one.title)), data_file(one, path))
        for one, path in drawn.items()
    ]
    colours = {"light": css_variables(LIGHT), "dark": css_variables(DARK)}
    yield fill_html("report.html", pictures=inline, switches=switches, **colours, **content)
    shown = [(one, path.name, data_file(one, path)) for one, path in drawn.items()]
    yield fill_markdown("report.md", pictures=shown, **content)


def facts_of(findings: Findings) -> Table:
    """Tabulate the one run of a report."""
    target = findings.target if findings.chosen_target else None
    return run_facts(findings.runs[0], findings.metric, findings.mode, target=target)


def last_samples(findings: Findings) -> list[SampleLine]:
    """Read what the one run of a report answered at its last evaluation."""
    found = read_samples(RunDir(findings.runs[0].path).samples)
    return [line for line in found if line.step == found[-1].step]


def data_file(picture: Picture, image: Path) -> str:
    """Name the file with the numbers of a picture; empty where there is none."""
    return image.with_suffix(".csv").name if picture.data is not None else ""
