"""Render a report as an HTML page and as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from markupsafe import Markup

from optrun.artifacts.run_dir import RunDir
from optrun.artifacts.samples import SampleLine, read_samples
from optrun.base.formatting import plain
from optrun.report.collect import Run
from optrun.report.confirmed import Confirmed
from optrun.report.curves import run_title
from optrun.report.figures import drawn_names
from optrun.report.findings import Findings
from optrun.report.pareto import pareto_sentence, pareto_table
from optrun.report.picture import Picture
from optrun.report.svg import to_svg
from optrun.report.table import Table, value
from optrun.report.tables import (
    arms_table,
    ranking_table,
    run_facts,
    runs_table,
    scores_table,
    speed_table,
    states,
    workloads_table,
)
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
    """A heading, what is said below it, and tables whose first column names what a row is about."""

    title: str
    paragraphs: Sequence[str] = ()
    tables: Sequence[Table] = ()


def render(content: Mapping[str, Any], drawn: Mapping[Picture, Path]) -> Iterator[str]:
    """Render HTML whose content policy forbids every request to anywhere, then Markdown that refers to the pictures.

    Args:
        content: What the page says; see `content_of`.
        drawn: The pictures, and the files that Markdown shows.
    """
    # The pictures are markup of our own.
    inline = [
        (one, Markup(to_svg(one.draw(PAGE), name=one.name, label=one.title)), _data_file(one, path))
        for one, path in drawn.items()
    ]
    colours = {"light": css_variables(LIGHT), "dark": css_variables(DARK)}
    yield fill_html("report.html", pictures=inline, **colours, **content)
    shown = [(one, path.name, _data_file(one, path)) for one, path in drawn.items()]
    yield fill_markdown("report.md", pictures=shown, **content)


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
        `title`, `subtitle`; `line` and `next` (the verdict and a command); `table` of contenders; for a single run
        `facts` and `samples` in their place; `warnings`, of which three stand open; `sections`, open, in both files;
        `switches`, the names of the contenders of the pictures; `folds`, folded, in HTML alone; `commands` that make
        the runs again; `tested`, how the verdict came about; `footer`.
    """
    single, first = len(comparison.runs) == 1, comparison.findings
    beside = confirmed is not None and confirmed.comparison is not comparison
    table = scores_table(comparison) if comparison.several else ranking_table(first)
    sections = [Section("The choice that was confirmed", tables=[table])] if beside else []
    if confirmed is not None and beside:
        table = ranking_table(confirmed.comparison.findings)
    return {
        "title": run_title(comparison.runs[0]) if single else _title(comparison),
        "subtitle": _subtitle(comparison),
        "line": "" if single else verdict.text,
        "next": "" if single else verdict.next,
        "table": table,
        "facts": _facts(first) if single else None,
        "samples": _last_samples(comparison.runs[0]) if single else [],
        "warnings": warnings,
        "sections": [] if single else sections + _sections(comparison),
        "switches": [] if single else drawn_names(comparison),
        "folds": [] if single else _folds(comparison),
        "commands": [*_commands(comparison), Command("report", "", command)],
        "tested": "" if single else _tested(comparison if confirmed is None else confirmed.comparison, verdict),
        "footer": _footer(comparison.runs),
        "refresh": refresh,
    }


def _sections(comparison: Comparison) -> list[Section]:
    """List what stands open below the table of the verdict: each workload by itself, and what is weighed."""
    found = [Section("Workloads", tables=[workloads_table(comparison)])] if comparison.several else []
    for each in comparison.workloads:
        if comparison.several:
            found.append(Section(f"Within {each.name}", tables=[ranking_table(each.findings)]))
        if each.findings.objectives:
            front = pareto_table(each.findings)
            found.append(Section("Pareto front", [pareto_sentence(each.findings)], [] if front is None else [front]))
    return found


def _folds(comparison: Comparison) -> list[Section]:
    """List what is folded away."""
    found = []
    for each in comparison.workloads:
        within, own = f" of {each.name}" if each.name else "", each.findings
        found.append(Section(f"Speed, memory, sensitivity{within}", tables=[speed_table(own)]))
        found.append(Section(f"Every configuration{within}", tables=[arms_table(own)]))
        found.append(
            Section(f"Every run{within}", tables=[runs_table(own.runs, own.keys, own.metric, own.mode, apart=True)])
        )
    return found


def _tested(comparison: Comparison, verdict: SweepVerdict) -> str:
    """Say how the verdict came about, in at most 150 words."""
    judged, found = comparison.judgement, comparison.findings
    return " ".join(
        fill_text(
            "tested.txt",
            metric=found.metric if not comparison.several else "main metric",
            several=comparison.several,
            lost=any(arm.lost for each in comparison.workloads for arm in each.findings.arms),
            tuned=any(each.findings.tuned_keys for each in comparison.workloads),
            judgement=judged,
            others=0 if judged is None else max(1, len(judged.ranking) - 1),
            is_tested=judged is not None and is_tested(judged),
            matters="" if judged is None else value(judged.matters),
            set_matters=judged is not None and judged.matters != judged.sd,
            selected=verdict.kind == "selected",
        ).split()
    )


def _title(comparison: Comparison) -> str:
    if comparison.several:
        names = {row.name for each in comparison.workloads for row in each.findings.rows}
        return f"{len(names)} contenders over {len(comparison.workloads)} workloads"
    found = comparison.findings
    parts = [
        sorted({str(run.config[key]) for run in found.runs if key in run.config}) for key in ("model.name", "data.name")
    ]
    where = " on ".join(", ".join(names) for names in parts if names)
    count = f"{len(found.rows)} contender{'s' * (len(found.rows) != 1)}"
    return f"{count}: {where}" if where else count


def _subtitle(comparison: Comparison) -> str:
    runs = comparison.runs
    total = "1 run" if len(runs) == 1 else f"{len(runs):,} runs"
    by = "the metric of each workload" if comparison.several else comparison.findings.metric
    made = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return f"{total} ({states(runs)}), compared by {by}, {made}"


@dataclass(frozen=True)
class Command:
    """How to run one contender's best configuration again."""

    name: str
    note: str
    line: str
    """For a shell, quoted."""


def _commands(comparison: Comparison) -> list[Command]:
    """List the shell line of each contender's best configuration."""
    found = []
    for each in comparison.workloads:
        for row in each.findings.rows:
            runs = row.arm.counted
            seeds = sorted({run.seed for run in runs if run.seed is not None})
            if runs and (line := runs[0].command(seeds=seeds)):
                changes = {key: value for run in runs for key, value in run.changed.items()}
                note = [each.name] if each.name else []
                note += [f"{len(seeds)} seeds"] if len(seeds) > 1 else []
                note += (
                    [f"changed when resumed: {', '.join(f'{k}={v}' for k, v in changes.items())}"] if changes else []
                )
                found.append(Command(row.name, "; ".join(note), plain(line)))
    return found


def _footer(runs: Sequence[Run]) -> str:
    """Say what the runs ran on, as far as all agree."""
    parts = []
    for section in ("versions", "hardware"):
        values = [run.summary.get(section) for run in runs]
        first = next((value for value in values if isinstance(value, dict)), None)
        if first and all(value == first for value in values if value):
            scalars = (f"{key} {value}" for key, value in first.items() if isinstance(value, (str, int, float)))
            parts.append(", ".join(scalars))
    return ". ".join(["Made by optrun report from the files of the runs alone", *parts]) + "."


def _facts(findings: Findings) -> Table:
    target = findings.target if findings.chosen_target else None
    return run_facts(findings.runs[0], findings.metric, findings.mode, target=target)


def _last_samples(run: Run) -> list[SampleLine]:
    """Read what the one run of a report answered at its last evaluation."""
    found = read_samples(RunDir(run.path).samples)
    return [line for line in found if line.step == found[-1].step]


def _data_file(picture: Picture, image: Path) -> str:
    """Name the file with the numbers of a picture; empty where there is none."""
    return image.with_suffix(".csv").name if picture.data is not None else ""
