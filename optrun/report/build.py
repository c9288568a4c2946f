"""The verb `report`: from directories to a table in the terminal and pages on disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from matplotlib.figure import Figure
from rich.console import Console
from rich.text import Text

from optrun.artifacts.atomic import replace_text
from optrun.artifacts.run_manifest import recorded
from optrun.errors import ConfigError, StorageError
from optrun.formatting import plain
from optrun.report import html
from optrun.report.collect import Run, load_runs
from optrun.report.curves import curves_figure, run_title
from optrun.report.figures import Picture, pictures
from optrun.report.findings import Findings, find
from optrun.report.narrative import headline, notes
from optrun.report.tables import (
    CSV_MARK,
    arms_table,
    cost_table,
    escape_markdown,
    filled,
    ranking_table,
    run_facts,
    runs_csv,
    runs_table,
    terminal_table,
    to_markdown,
    to_rich,
)
from optrun.report.theme import LIGHT, PAGE, SOFTWARE, Theme, new_figure, save_png, to_svg, write
from optrun.report.warnings import Warning, find_warnings

MARKDOWN_MARK = "<!-- optrun report -->"
HTML, MARKDOWN, CSV = "report.html", "report.md", "report.csv"


@dataclass(frozen=True)
class Report:
    """What was found and where it was written."""

    findings: Findings
    warnings: list[Warning]
    files: list[Path]
    """Pages, then pictures."""


def report(
    dirs: Sequence[Path],
    *,
    out: Path | None = None,
    baseline: str | None = None,
    metric: str | None = None,
    by: Sequence[str] = (),
    console: Console | None = None,
) -> Report:
    """Compare the runs at or beneath some directories.

    Args:
        dirs: Runs, sweeps, or folders of them.
        out: Where to write; default: the first directory. Made where missing.
        baseline: The contender to test the others against; default: the best one.
        metric: The metric to compare by; default: the main metric of the runs.
        by: Configuration keys that separate contenders; default: all that differ, but for lr and the optimizer's own.
        console: Where the table is printed; None prints nothing.

    Returns:
        The findings, the warnings and the files.

    Raises:
        ConfigError: No run there; an unknown metric, baseline or key; a file of a person's own in the way.
        StorageError: A file cannot be written.
    """
    dirs = [Path(directory) for directory in dirs]
    if not dirs:
        raise ConfigError("report: name at least one run or sweep directory, as in: optrun report outputs/sweeps")
    for directory in dirs:
        if not directory.is_dir():
            raise ConfigError(f"report {directory}: no such directory")
    runs = load_runs(dirs)
    if not runs:
        listed = ", ".join(str(directory) for directory in dirs)
        raise ConfigError(f"report {listed}: no run found here or beneath (a run has metrics.jsonl or summary.json)")
    findings = find(runs, metric=metric, baseline=baseline, by=by)
    cautions = find_warnings(findings)
    single = len(runs) == 1
    drawn = [_run_picture(runs[0])] if single else pictures(findings)
    folder = out if out is not None else dirs[0]
    files = _write(folder, findings, cautions, drawn)
    result = Report(findings, cautions, files)
    if console is not None:
        print_report(result, console)
    return result


def print_report(made: Report, console: Console) -> None:
    """The report in a terminal: finding, table, warnings, files."""
    findings = made.findings
    console.print()
    if len(findings.runs) == 1:
        console.print(to_rich(run_facts(findings.runs[0], findings.metric, findings.mode)))
    else:
        console.print(Text(headline(findings), style="bold"))
        console.print(to_rich(terminal_table(findings), width=console.width))
        rest = [run for run in findings.runs if not run.finished or run.diverged]
        if rest:
            shown = runs_table(rest[:20], findings.keys, findings.metric, findings.mode)
            title = f"{len(rest)} of {len(findings.runs)} runs without a result"
            title += ", the first 20" if len(rest) > 20 else ""
            console.print(to_rich(filled(shown), title=title, width=console.width))
    for caution in made.warnings:
        console.print(Text.assemble((f"{caution.kind}: ", "bold yellow"), caution.text))
    if made.warnings:
        console.print()
    for path in made.files[:3]:
        console.print(Text.assemble(("wrote ", "dim"), str(path)), soft_wrap=True)


def _write(folder: Path, findings: Findings, cautions: Sequence[Warning], drawn: Sequence[Picture]) -> list[Path]:
    """All files, none of them over a person's own."""
    images = {picture: folder / f"report-{picture.name}.png" for picture in drawn}
    pages: dict[Path, Callable[[], str]] = {
        folder / HTML: lambda: _html(findings, cautions, drawn),
        folder / MARKDOWN: lambda: _markdown(findings, cautions, images),
        folder / CSV: lambda: runs_csv(findings),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in [*pages, *images.values()]:
            if path.exists() and not is_own(path):
                raise ConfigError(
                    f"{path} exists and was not written by optrun report: move it away, or write elsewhere with out=DIR"
                )
        with recorded(*pages, *images.values()):
            for path, make in pages.items():
                replace_text(path, make())
            for picture, path in images.items():
                figure = picture.draw(LIGHT)
                if figure.get_suptitle() == "":
                    title = figure.suptitle(picture.title, x=0.012, ha="left", fontsize=12, color=LIGHT.ink)
                    write(title).set_fontweight("bold")
                save_png(figure, path)
    except OSError as error:
        raise StorageError(
            f"report: cannot write to {folder} ({error.strerror}); write elsewhere with out=DIR"
        ) from error
    return [*pages, *images.values()]


def is_own(path: Path) -> bool:
    """Whether an existing file is an earlier report of ours, which may be replaced."""
    try:
        with path.open("rb") as file:
            start = file.read(4096)
    except OSError:
        return False
    if path.suffix == ".html":
        return html.MARK.encode() in start
    if path.suffix == ".md":
        return start.startswith(MARKDOWN_MARK.encode())
    if path.suffix == ".csv":
        return start.split(b"\n", 1)[0].rstrip().endswith(b"," + CSV_MARK.encode())
    return start.startswith(b"\x89PNG") and SOFTWARE.encode() in start


def _run_picture(run: Run) -> Picture:
    """The curves of a single run."""
    title = run_title(run.summary, run.config, run.path)

    def draw(theme: Theme) -> Figure:
        if not run.log.records:
            return new_figure(9.0, 1.0, theme)
        return curves_figure(run.log, run.summary, title="" if theme is PAGE else title, theme=theme)

    return Picture(
        "curves", title, "The thin line is as logged, the thick one smoothed; the ring marks the best.", draw
    )


def _title(findings: Findings) -> str:
    if len(findings.runs) == 1:
        run = findings.runs[0]
        return run_title(run.summary, run.config, run.path)
    models = sorted({str(run.config["model.name"]) for run in findings.runs if "model.name" in run.config})
    data = sorted({str(run.config["data.name"]) for run in findings.runs if "data.name" in run.config})
    where = " on ".join(", ".join(names) for names in (models, data) if names)
    return f"{len(findings.rows)} contenders: {where}" if where else f"{len(findings.rows)} contenders"


def _subtitle(findings: Findings) -> str:
    runs = findings.runs
    states: dict[str, int] = {}
    for run in runs:
        state = "diverged" if run.diverged else run.status
        states[state] = states.get(state, 0) + 1
    counted = ", ".join(f"{number} {state}" for state, number in states.items())
    made = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    total = "1 run" if len(runs) == 1 else f"{len(runs):,} runs"
    return f"{total} ({counted}), compared by {findings.metric}, {made}"


def _commands(findings: Findings) -> list[tuple[str, str, str]]:
    """Name, what it is, and shell line of each contender's best configuration."""
    found = []
    for row in findings.rows:
        runs = [run for run in row.arm.runs if run not in row.arm.repeated]
        seeds = sorted({run.seed for run in runs if run.seed is not None})
        line = runs[0].command(seeds=seeds) if runs else ""
        if line:
            changed = {key: value for run in runs for key, value in run.changed.items()}
            what = [f"{len(seeds)} seeds"] if len(seeds) > 1 else []
            if changed:
                what.append("changed when resumed: " + ", ".join(f"{key}={value}" for key, value in changed.items()))
            found.append((row.name, plain("; ".join(what)), plain(line)))
    return found


def _footer(findings: Findings) -> str:
    """What the runs ran on, as far as all say the same."""
    parts = []
    for section in ("versions", "hardware"):
        values = [run.summary.get(section) for run in findings.runs]
        first = next((value for value in values if isinstance(value, dict)), None)
        if first and all(value == first for value in values if value):
            words = (f"{key} {value}" for key, value in first.items() if isinstance(value, (str, int, float)))
            parts.append(", ".join(words))
    return ". ".join(["Made by optrun report from the files of the runs alone", *parts]) + "."


def _html(findings: Findings, cautions: Sequence[Warning], drawn: Sequence[Picture]) -> str:
    single = len(findings.runs) == 1
    svgs = [
        (picture.title, to_svg(picture.draw(PAGE), name=picture.name, label=picture.title), picture.caption)
        for picture in drawn
    ]
    sections = [html.Section("Care", html.warning_list([(caution.kind, caution.text) for caution in cautions]))]
    if single:
        facts = run_facts(findings.runs[0], findings.metric, findings.mode)
        sections = [html.Section("The run", html.facts(facts)), *sections]
    else:
        sections += [html.Section("Result", html.table(ranking_table(findings)))]
    sections += [html.Section("Curves" if single else "Pictures", html.figures(svgs))]
    if not single:
        sections += [html.Section("Speed, memory, sensitivity", html.table(cost_table(findings)))]
    sections += [html.Section("Run it again", html.commands(_commands(findings)))]
    if not single:
        arms = html.table(arms_table(findings), fold="All configurations")
        listed = runs_table(findings.runs, findings.keys, findings.metric, findings.mode)
        sections += [
            html.Section("Every configuration", arms),
            html.Section("Every run", html.table(listed, fold="All runs")),
            html.Section("How to read this", html.paragraphs(notes(findings))),
        ]
    return html.page(
        title=_title(findings),
        subtitle=_subtitle(findings),
        lead="" if single else headline(findings),
        sections=sections,
        footer=_footer(findings),
    )


def _markdown(findings: Findings, cautions: Sequence[Warning], images: dict[Picture, Path]) -> str:
    single = len(findings.runs) == 1
    parts = [MARKDOWN_MARK, f"# {escape_markdown(_title(findings))}", escape_markdown(_subtitle(findings))]
    if single:
        facts = run_facts(findings.runs[0], findings.metric, findings.mode)
        parts.append(to_markdown(facts))
    else:
        parts += [f"**{escape_markdown(headline(findings))}**", "## Result", to_markdown(ranking_table(findings))]
    if cautions:
        parts.append("## Care")
        parts.append("\n".join(f"- **{item.kind}**: {escape_markdown(item.text)}" for item in cautions))
    for picture, path in images.items():
        parts += [f"![{escape_markdown(picture.title)}]({path.name})", escape_markdown(picture.caption)]
    if not single:
        parts += ["## Speed, memory, sensitivity", to_markdown(cost_table(findings))]
    parts.append("## Run it again")
    for name, what, line in _commands(findings):
        fence = "`" * max(3, 1 + max((len(run) for run in _backticks(line)), default=0))
        title = ", ".join(escape_markdown(words) for words in (name, what) if words)
        parts.append(f"{title}:\n\n{fence}sh\n{line}\n{fence}")
    if not single:
        parts += ["## How to read this", "\n".join(f"- {escape_markdown(note)}" for note in notes(findings))]
    return "\n\n".join(parts) + "\n"


def _backticks(line: str) -> list[str]:
    """Runs of backticks in a line."""
    found, current = [], ""
    for letter in line + " ":
        if letter == "`":
            current += letter
        elif current:
            found.append(current)
            current = ""
    return found
