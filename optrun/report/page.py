"""Render a report as an HTML page and as Markdown, from the templates beside this file.

Names of runs, labels and messages come from outside. Both environments escape every value by default; markup of our own
(inline pictures, tables, fenced commands) is marked as such where it is made.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from optrun.formatting import plain
from optrun.report.figures import Picture
from optrun.report.findings import Findings
from optrun.report.narrative import commands, footer, headline, notes, subtitle, title
from optrun.report.tables import (
    arms_table,
    cost_table,
    escape_markdown,
    ranking_table,
    run_facts,
    runs_table,
    to_markdown,
)
from optrun.report.theme import DARK, LIGHT, PAGE, css_variables, to_svg
from optrun.report.warnings import Warning

HTML_MARK = '<meta name="generator" content="optrun report">'
MARKDOWN_MARK = "<!-- optrun report -->"
"""By these an earlier report is told from a person's own file."""


def render(findings: Findings, warnings: Sequence[Warning], drawn: Mapping[Picture, Path]) -> Iterator[str]:
    """Render HTML whose content policy forbids every request to anywhere, then Markdown that refers to the pictures.

    Args:
        findings: What was found.
        warnings: What to take care of.
        drawn: The pictures, and the files that Markdown shows.
    """
    single = len(findings.runs) == 1
    content = {
        "title": title(findings),
        "subtitle": subtitle(findings),
        "warnings": warnings,
        "commands": commands(findings),
        "footer": footer(findings),
        "facts": run_facts(findings.runs[0], findings.metric, findings.mode) if single else None,
        "headline": "" if single else headline(findings),
        "ranking": ranking_table(findings),
        "cost": cost_table(findings),
        "arms": arms_table(findings),
        "runs": runs_table(findings.runs, findings.keys, findings.metric, findings.mode),
        "notes": notes(findings),
    }
    # The pictures are markup of our own.
    inline = [(one, Markup(to_svg(one.draw(PAGE), name=one.name, label=one.title))) for one in drawn]
    colours = {"light": css_variables(LIGHT), "dark": css_variables(DARK)}
    yield _render("report.html", plain, pictures=inline, **colours, **content)
    yield _render("report.md", _markdown, pictures=[(one, path.name) for one, path in drawn.items()], **content)


def _render(template: str, finalize: Callable[[str], str], **content: Any) -> str:
    return _environment(finalize).get_template(template).render(**content).strip() + "\n"


@cache
def _environment(escape: Callable[[str], str]) -> Environment:
    """Make an environment that passes every value through `escape`, and then, unless it is markup, through HTML's."""
    environment = Environment(
        loader=PackageLoader("optrun.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: value if isinstance(value, Markup) else escape(str(value)),
    )
    environment.filters |= {"table": lambda table: Markup(to_markdown(table)), "fenced": fenced}
    return environment


def _markdown(text: str) -> Markup:
    return Markup(escape_markdown(text))


def fenced(line: str, language: str = "sh") -> Markup:
    """Put a line into a code block whose fence is longer than any run of backticks in it."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", line)), default=0))
    return Markup(f"{fence}{language}\n{plain(line)}\n{fence}")
