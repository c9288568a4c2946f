"""Render a report as an HTML page and as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from markupsafe import Markup

from optrun.report.confirmation import Confirmed, label
from optrun.report.cost import cost_table
from optrun.report.figures import Picture
from optrun.report.findings import Findings
from optrun.report.narrative import commands, footer, headline, notes, subtitle, title, verdict_line
from optrun.report.tables import (
    arms_table,
    ranking_table,
    run_facts,
    runs_table,
    speed_table,
)
from optrun.report.templating import fill_html, fill_markdown
from optrun.report.theme import DARK, LIGHT, PAGE, css_variables, to_svg
from optrun.report.warnings import Warning

HTML_MARK = '<meta name="generator" content="optrun report">'
MARKDOWN_MARK = "<!-- optrun report -->"
"""By these an earlier report is told from a person's own file."""


def render(
    findings: Findings,
    warnings: Sequence[Warning],
    drawn: Mapping[Picture, Path],
    confirmed: Sequence[Confirmed] = (),
) -> Iterator[str]:
    """Render HTML whose content policy forbids every request to anywhere, then Markdown that refers to the pictures.

    Args:
        findings: What was found.
        warnings: What to take care of.
        drawn: The pictures, and the files that Markdown shows.
        confirmed: Confirmations of it.
    """
    single = len(findings.runs) == 1
    content = {
        "title": title(findings),
        "subtitle": subtitle(findings),
        "warnings": warnings,
        "commands": commands(findings),
        "footer": footer(findings),
        "facts": run_facts(findings.runs[0], findings.metric, findings.mode) if single else None,
        "headline": "" if single else verdict_line(findings, confirmed),
        "confirmed": [
            (f"Confirmed on fresh seeds {label(one.plan.seeds)}", headline(one.findings), ranking_table(one.findings))
            for one in confirmed
        ],
        "ranking": ranking_table(findings),
        "cost": cost_table(findings),
        "speed": speed_table(findings),
        "arms": arms_table(findings),
        "runs": runs_table(findings.runs, findings.keys, findings.metric, findings.mode),
        "notes": notes(findings),
    }
    # The pictures are markup of our own.
    inline = [(one, Markup(to_svg(one.draw(PAGE), name=one.name, label=one.title))) for one in drawn]
    colours = {"light": css_variables(LIGHT), "dark": css_variables(DARK)}
    yield fill_html("report.html", pictures=inline, **colours, **content)
    yield fill_markdown("report.md", pictures=[(one, path.name) for one, path in drawn.items()], **content)
