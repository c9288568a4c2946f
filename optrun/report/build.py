"""Make a report: from directories to a table in the terminal and pages on disk."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from matplotlib.figure import Figure
from rich.console import Console
from rich.text import Text

from optrun.artifacts.atomic import replace_text
from optrun.artifacts.objective import Objective
from optrun.artifacts.run_dir import RunDir
from optrun.artifacts.run_manifest import recorded
from optrun.errors import ConfigError, StorageError, UnreadableFileError
from optrun.reading import open_file
from optrun.report import verdict, workloads_figures, workloads_page
from optrun.report.collect import NOT_STARTED, Run, load_runs
from optrun.report.confirmation import confirmations
from optrun.report.confirmed import Confirmed, judge, plan_of, planned_reference
from optrun.report.curves import curves_figure, run_title
from optrun.report.figures import pictures
from optrun.report.findings import Findings, find
from optrun.report.narrative import verdict_line
from optrun.report.open_questions import Asked
from optrun.report.page import HTML_MARK, MARKDOWN_MARK, facts_of, render
from optrun.report.pareto import expected, pareto_sentence, pareto_table
from optrun.report.picture import Data, Picture
from optrun.report.spent import budget_line
from optrun.report.table import filled, to_rich
from optrun.report.tables import CSV_MARK, runs_csv, runs_table, terminal_table
from optrun.report.theme import LIGHT, PAGE, SOFTWARE, Theme, new_figure, save_png, write
from optrun.report.tuned import objectives_of, tuned_keys
from optrun.report.warnings import OF_THE_CHOICE, Warning, find_warnings
from optrun.report.workloads import Overview, over_workloads

_REPORTS = Path("outputs", "reports")


@dataclass(frozen=True)
class Report:
    """What was found and where it was written."""

    findings: Findings
    warnings: list[Warning]
    files: list[Path]
    """Pages, then pictures, then the data of the pictures."""
    confirmed: list[Confirmed] = field(default_factory=list)
    """What confirmations beneath the directories found, or the one that the directory is."""
    overview: Overview | None = None
    """Of runs of several workloads; then `findings` ranks nothing."""


def report(
    dirs: Sequence[Path],
    *,
    out: Path | None = None,
    baseline: str | None = None,
    metric: str | None = None,
    by: Sequence[str] = (),
    target: float | None = None,
    objectives: Sequence[Objective] = (),
    console: Console | None = None,
    brief: bool = False,
) -> Report:
    """Compare the runs at or beneath some directories.

    Args:
        dirs: Runs, sweeps, or folders of them.
        out: Where to write; default: the first directory, or where that is one run of several, `outputs/reports/` and
            date and time. Made where missing.
        baseline: The contender to test the others against; default: the best one.
        metric: The metric to compare by; default: the main metric of the runs, of several workloads that of each.
            A confirmation is judged by its plan where none of these three is given.
        by: Configuration keys that separate contenders; default: all that differ, but for lr and the optimizer's own.
        target: Level of the metric for times to target and lr basins; default: one that the contenders reach.
        objectives: Two or more numbers to weigh against each other; default: those of the sweeps.
        console: Where the table is printed; None prints nothing.
        brief: Print one line and where the page lies: the whole report follows when more is known.

    Returns:
        The findings, the warnings and the files.

    Raises:
        ConfigError: No run there; an unknown metric, objective, baseline or key; a file of a person's own in the way.
        StorageError: A file cannot be written.
    """
    dirs = [Path(directory) for directory in dirs]
    if not dirs:
        raise ConfigError("report: name at least one run or sweep directory, as in: optrun report outputs/sweeps")
    for directory in dirs:
        if not directory.is_dir():
            raise ConfigError(f"report {directory}: no such directory")
    planned = confirmations(dirs)
    runs = load_runs(dirs, beside=planned)
    if not runs:
        listed = ", ".join(str(directory) for directory in dirs)
        raise ConfigError(f"report {listed}: no run found here or beneath (a run has metrics.jsonl or summary.json)")
    options = {"baseline": baseline, "metric": metric, "by": ",".join(by)}
    typed = [f"{key}={given}" for key, given in options.items() if given not in (None, "")]
    own = plan_of(dirs, runs)
    if own is not None:
        metric, by = metric or own.metric, by or own.by
        baseline = baseline or planned_reference(own, runs, metric=metric, by=by)
    tuned = tuned_keys(runs)
    weighed = expected(objectives, runs) or objectives_of(runs)
    overview = over_workloads(runs, metric=metric, baseline=baseline, by=by, objectives=weighed)
    if overview is not None:
        if target is not None:
            raise ConfigError(
                f"target={target}: {len(overview.workloads)} workloads have a metric each, and no level in common. "
                "Leave it out, or make a report of each workload by itself."
            )
        findings = find(runs, metric=metric, by=by, tuned=tuned)
        cautions, drawn = workloads_page.cautions(overview, findings), workloads_figures.pictures(overview)
    else:
        findings = find(runs, metric=metric, baseline=baseline, by=by, tuned=tuned, target=target, objectives=weighed)
        cautions = [each for each in find_warnings(findings) if own is None or each.kind not in OF_THE_CHOICE]
        drawn = [_run_picture(runs[0])] if len(runs) == 1 else pictures(findings)
    folder = out if out is not None else _folder_for(dirs[0], runs)
    same = all(one.metric == findings.metric for one in planned.values())
    confirmed = judge(planned, dirs, target=findings.target if same and math.isfinite(findings.target) else None)
    if own is not None and overview is None:
        confirmed.insert(0, Confirmed(dirs[0], own, findings))
    asked = Asked(dirs, list(typed))
    if target is not None:
        typed.append(f"target={target}")
    if objectives:
        typed.append(f"objectives={','.join(f'{each.name}:{each.mode}' for each in objectives)}")
    command = shlex.join(["optrun", "report", *map(str, dirs), *typed])
    files = _write(folder, findings, cautions, drawn, confirmed, command, overview, asked)
    result = Report(findings, cautions, files, confirmed, overview)
    if console is not None and brief:
        line = verdict.brief(findings) if overview is None else workloads_page.lead(overview)
        console.print(f"{line} More in {files[0]}", markup=False, highlight=False, soft_wrap=True)
    elif console is not None:
        print_report(result, console)
    return result


def _folder_for(first: Path, runs: Sequence[Run]) -> Path:
    """Choose where a report goes: no run directory holds what was found of others."""
    if len(runs) == 1 or not RunDir(first).is_run():
        return first
    made = datetime.now().astimezone()
    folder = free = _REPORTS / made.strftime("%Y-%m-%d") / made.strftime("%H-%M-%S")
    number = 2
    while free.exists():
        free, number = folder.with_name(f"{folder.name}-{number}"), number + 1
    return free


def print_report(made: Report, console: Console) -> None:
    """Print the report in a terminal: finding, table, warnings, files."""
    findings = made.findings
    console.print()
    if len(findings.runs) == 1:
        console.print(to_rich(facts_of(findings)))
    else:
        if made.overview is not None:
            _print_overview(made.overview, console)
        else:
            console.print(Text(verdict_line(findings, made.confirmed), style="bold"))
        for one in made.confirmed:
            if one.findings is not findings:
                console.print(to_rich(terminal_table(one.findings), title=one.title, width=console.width))
        if made.overview is None:
            console.print(to_rich(terminal_table(findings), width=console.width))
            if budget := budget_line(findings):
                console.print(budget, markup=False, highlight=False)
            _print_front(findings, console)
        begun = [run for run in findings.runs if run.status != NOT_STARTED]
        rest = [run for run in begun if not run.finished or run.diverged]
        if rest:
            shown = runs_table(rest[:20], findings.keys, findings.metric, findings.mode)
            title = f"{len(rest)} of {len(begun)} runs without a result"
            title += ", the first 20" if len(rest) > 20 else ""
            console.print(to_rich(filled(shown), title=title, width=console.width))
    for caution in made.warnings:
        console.print(Text.assemble((f"{caution.kind}: ", "bold yellow"), caution.text))
    if made.warnings:
        console.print()
    for path in made.files[:3]:
        console.print(Text.assemble(("wrote ", "dim"), str(path)), soft_wrap=True)


def _print_overview(overview: Overview, console: Console) -> None:
    """Print what holds over all workloads, then the verdict within each."""
    console.print(Text(workloads_page.lead(overview), style="bold"))
    console.print(to_rich(workloads_page.table(overview), width=console.width))
    for each in overview.workloads:
        console.print(Text(each.name, style="bold"))
        console.print(to_rich(terminal_table(each.findings), width=console.width))
        _print_front(each.findings, console)


def _print_front(findings: Findings, console: Console) -> None:
    """Print what no other beats, where several numbers are weighed."""
    if (front := pareto_table(findings)) is not None:
        console.print(to_rich(front, title="Pareto front", width=console.width))
    elif findings.objectives:
        console.print(pareto_sentence(findings), markup=False, highlight=False)


def _write(
    folder: Path,
    findings: Findings,
    cautions: Sequence[Warning],
    drawn: Sequence[Picture],
    confirmed: Sequence[Confirmed],
    command: str,
    overview: Overview | None,
    asked: Asked | None,
) -> list[Path]:
    """Write all files, none of them over a person's own."""
    images = {picture: folder / f"report-{picture.name}.png" for picture in drawn}
    numbers = {path.with_suffix(".csv"): one.data for one, path in images.items() if one.data is not None}
    pages = [folder / name for name in ("report.html", "report.md", "report.csv")]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in [*pages, *images.values(), *numbers]:
            if path.exists() and not is_own(path):
                raise ConfigError(
                    f"{path} exists and was not written by optrun report: move it away, or write elsewhere with out=DIR"
                )
        contents = [*render(findings, cautions, images, confirmed, command, overview, asked), runs_csv(findings)]
        texts = dict(zip(pages, contents, strict=True)) | {path: data().to_csv() for path, data in numbers.items()}
        with recorded(*pages, *images.values(), *numbers):
            for path, content in texts.items():
                replace_text(path, content)
            for picture, path in images.items():
                figure = picture.draw(LIGHT)
                if figure.get_suptitle() == "":
                    title = figure.suptitle(picture.title, x=0.012, ha="left", fontsize=12, color=LIGHT.ink)
                    write(title).set_fontweight("bold")
                save_png(figure, path, dpi=160 if figure.get_figwidth() > 8 else 240)
    except OSError as error:
        raise StorageError(
            f"report: cannot write to {folder} ({error.strerror}); write elsewhere with out=DIR"
        ) from error
    return [*pages, *images.values(), *numbers]


def is_own(path: Path) -> bool:
    """Tell whether an existing file is an earlier report of ours, which may be replaced."""
    try:
        with open_file(path) as file:
            start = file.read(4096)
    except (OSError, UnreadableFileError):
        return False
    if path.suffix == ".html":
        return HTML_MARK.encode() in start
    if path.suffix == ".md":
        return start.startswith(MARKDOWN_MARK.encode())
    if path.suffix == ".csv":
        return start.split(b"\n", 1)[0].rstrip().endswith(b"," + CSV_MARK.encode())
    return start.startswith(b"\x89PNG") and SOFTWARE.encode() in start


def _run_picture(run: Run) -> Picture:
    """Describe the picture of a single run."""
    title = run_title(run)

    def draw(theme: Theme) -> Figure:
        if not run.log.records:
            return new_figure(9.0, 1.0, theme)
        return curves_figure(run, title="" if theme is PAGE else title, theme=theme, stacked=theme is PAGE)

    def data() -> Data:
        names = run.log.names()
        return Data(["step", *names], [[each["step"], *map(each.get, names)] for each in run.log.records])

    caption = "The thin line is as logged, the thick one smoothed; the ring marks the best."
    return Picture("curves", title, caption, draw, data)
