"""Make a report: from directories to a table in the terminal and pages on disk."""

from __future__ import annotations

import os
import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from hashlib import sha256
from pathlib import Path

from rich.console import Console
from rich.text import Text

from optrun.artifacts.atomic import replace_bytes, replace_text
from optrun.artifacts.run_dir import RunDir
from optrun.artifacts.target import locate
from optrun.base import shell
from optrun.base.errors import ConfigError, StorageError, UnreadableFileError
from optrun.base.formatting import plain, plural
from optrun.base.reading import open_file
from optrun.report import curves, tables
from optrun.report.confirmation_plan import ConfirmationRequest, find_plans, read_plan
from optrun.report.confirmation_result import (
    ConfirmationResult,
    choose_next_command,
    compose_sweep_again,
    count_ended_confirmations,
    explain_waiting,
    judge_together,
    question_of_plans,
)
from optrun.report.figures import all_pictures
from optrun.report.findings import Question
from optrun.report.picture import Picture
from optrun.report.runs import NOT_STARTED, Run, require_runs
from optrun.report.sweep_folder import dated_folder, record_look, tuned_keys
from optrun.report.table import CSV_MARK, Table, to_rich
from optrun.report.templating import fill_html, fill_markdown, fill_text
from optrun.report.theme import SOFTWARE, to_png
from optrun.report.verdict import SweepVerdict, write_verdict
from optrun.report.warnings import KINDS_OF_THE_CHOICE, RunWarning, find_warnings
from optrun.report.workloads import Comparison, compare_runs

_REPORTS = Path("outputs", "reports")
_LISTED_RUNS = 20
"""Most runs without a result that the terminal lists."""
HTML_MARK = '<meta name="generator" content="optrun report">'
MARKDOWN_MARK = "<!-- optrun report -->"
"""Marks at the beginning of a page. A file without its mark is not overwritten."""


@dataclass(frozen=True)
class Section:
    """A heading and a table whose first column names what a row is about."""

    title: str
    table: Table
    note: str = ""
    """An explanation below the table."""


@dataclass(frozen=True)
class Report:
    """The findings of a report, and the files written."""

    comparison: Comparison
    """The comparison of all runs; usually of one workload."""
    verdict: SweepVerdict
    """The first line."""
    warnings: list[RunWarning]
    command: str
    """The shell line to make the report again."""
    confirmed: ConfirmationResult | None
    """The result of the confirmations beneath the directories, or of the reported confirmation."""
    files: list[Path] = field(default_factory=list)
    """Pages, then pictures."""


def report(
    directories: Sequence[Path | str],
    *,
    out: Path | None = None,
    baseline: str | None = None,
    metric: str | None = None,
    by: Sequence[str] = (),
    matters: float | None = None,
    console: Console | None = None,
    brief: bool = False,
) -> Report:
    """Compare the runs at or beneath some directories.

    Args:
        directories: Runs, sweeps, or folders that hold runs or sweeps.
        out: Where to write; created if missing. Default: the directory, or a dated folder in
            `outputs/reports/` if there are several directories or the directory is a run with other
            runs beneath it. The file names contain a metric, baseline or key that differs from the
            sweep's own.
        baseline: The contender to test the others against; default: test for each whether it could
            be the best.
        metric: The metric to compare by; default: the main metric of each workload. A confirmation
            uses the question of its plan unless metric, baseline or by is given.
        by: Configuration keys that separate contenders; default: all that differ, except lr and the
            optimizer's own keys.
        matters: The smallest difference that counts; default: the one in the runs' configuration,
            else one standard deviation between seeds.
        console: Where the table is printed; None prints nothing.
        brief: Print only one line and the path of the page, because a fuller report follows.

    Returns:
        The findings, the warnings and the files.

    Raises:
        ConfigError: There is no run; metric, baseline or key is unknown; or a person's file or
            the report of other runs would be overwritten.
        StorageError: A file cannot be written.
    """
    # 1. Read the runs. The question is the typed one; for a confirmation, that of its plan.
    dirs = [locate(str(directory)).runs_folder for directory in directories]
    planned = find_plans(dirs)
    runs = require_runs(dirs, beside=planned)
    typed: Question = {"baseline": baseline, "metric": metric, "by": by, "matters": matters}
    plan = read_plan(dirs[0]) if len(dirs) == 1 else None
    question = typed if plan is None else question_of_plans([plan], runs, **typed)
    question["tuned"] = tuned_keys(run.path.parent for run in runs)
    # 2. Compare them; again at a stricter level if they were tested with fewer seeds before.
    left = 0 if plan or planned else sum(run.is_waiting for run in runs)
    question["waits"] = bool(left or (plan and explain_waiting(plan, runs)))
    comparison = compare_runs(runs, **question)
    looks = (
        _record_look(dirs, comparison) if plan is None else count_ended_confirmations(dirs[0], plan)
    )
    if looks > 1:
        comparison = compare_runs(runs, **(question | {"looks": looks}))
    # 3. Judge the confirmations beneath the directories, or take these runs for one.
    if plan is None:
        confirmed = judge_together(planned, dirs, comparison, **question)
    else:
        confirmed = ConfirmationResult.of(dirs[0], plan, comparison, looks)
    confirmation = confirmed or ConfirmationResult({}, comparison, looks=looks)
    # 4. Write the verdict, and the command that would tell more.
    verdict = write_verdict(
        confirmation.comparison,
        confirmed=confirmation.seeds,
        looks=confirmation.looks,
        note=confirmation.note,
        waits=len(confirmation.waiting) if plan else left,
    )
    following = (
        compose_sweep_again(dirs, runs, left)
        if left
        else choose_next_command(
            comparison,
            confirmed,
            dirs,
            ConfirmationRequest(baseline=baseline, metric=metric, by=by),
        )
    )
    if following:
        verdict = replace(verdict, next=following.line, cost=following.cost)
    # 5. Put the report together.
    typed_options = {"baseline": baseline, "metric": metric, "by": ",".join(by), "matters": matters}
    options = {key: value for key, value in typed_options.items() if value not in (None, "")}
    finished_report = Report(
        comparison,
        verdict,
        _collect_warnings(comparison, with_choice=plan is None and not left),
        shell.join(
            [
                "optrun",
                "report",
                *map(str, dirs),
                *(f"{key}={value}" for key, value in options.items()),
            ]
        ),
        confirmed,
    )
    sections = _unfolded_sections(finished_report)
    # 6. Choose its folder and the names of its files.
    folder = out or dirs[0]
    is_run_with_others = len(runs) > 1 and RunDir(dirs[0]).is_run()
    if out is None and (len(dirs) > 1 or is_run_with_others):
        folder = dated_folder(_REPORTS)
    stem = "report"
    if out is not None or folder.resolve() == dirs[0].resolve():
        # A folder keeps the report of a sweep's own question: another one has files of its own.
        if metric == comparison.findings.own_metric:
            options.pop("metric", None)
        stem += _file_suffix(options)
    # 7. Write them.
    if len(runs) > 1:
        pictures = all_pictures(comparison, confirmation.comparison)
    else:
        caption = "The thin line is as logged, the thick one smoothed; the ring marks the best."
        draw = partial(curves.curves_figure, runs[0])
        pictures = [Picture("curves", curves.run_title(runs[0]), caption, draw)]
    content = _content(finished_report, sections)
    content["directories"] = _digest_of_directories(dirs, folder)
    finished_report.files.extend(
        _write_files(folder, stem, content, tables.runs_csv(comparison), pictures)
    )
    # 8. Print it.
    if console is not None and brief:
        line = f"{verdict} More in {finished_report.files[0]}"
        console.print(Text(line), soft_wrap=True)
    elif console is not None:
        _print(finished_report, sections, console)
    return finished_report


def _file_suffix(options: Mapping[str, object]) -> str:
    """Write the typed options as the suffix of a file name, such as `-metric-eval-accuracy`.

    It has letters, digits, dots and dashes, at most 100.
    """
    parts = [f"-{key}-{value}" for key, value in options.items()]
    return re.sub(r"[^A-Za-z0-9.-]+", "-", "".join(parts))[:100]


def _digest_of_directories(dirs: Sequence[Path], folder: Path) -> str:
    """Compute a digest of the paths of the reported directories, relative to the report's folder.

    A new report may replace a page only if both have the same digest. It stays the same if the
    directories and the report are moved together.
    """
    paths = sorted(os.path.relpath(directory.resolve(), folder.resolve()) for directory in dirs)
    return sha256("\n".join(paths).encode()).hexdigest()[:16]


def _record_look(dirs: Sequence[Path], comparison: Comparison) -> int:
    """Record this test in the folder of each sweep, and return its number among the tests so far.

    Seeds may be added after each test, so the second one has number 2, see `record_look`. Two
    reports of the same metric (`comparison.unit`) and the same largest number of seeds make the
    same test, with the same number.

    Args:
        dirs: The reported directories; single runs among them are passed over.
        comparison: The comparison of their runs.

    Returns:
        1, without a record, if the report tests nothing, as while runs are left.
    """
    if comparison.ttest is None or not comparison.ttest.is_tested:
        return 1
    most_seeds = max(len(contender.configuration.scores) for contender in comparison.ranked)
    sweeps = [directory for directory in dirs if not RunDir(directory).is_run()]
    return record_look(sweeps, comparison.unit, most_seeds)


def _collect_warnings(comparison: Comparison, *, with_choice: bool) -> list[RunWarning]:
    """Collect the warnings of all workloads, each once.

    A warning that only some workloads have begins with their names.

    Args:
        comparison: The reported runs.
        with_choice: Whether to include the warnings on how the configurations were chosen.
    """
    workload_names: dict[RunWarning, list[str]] = {}
    for workload in comparison.workloads:
        for warning in find_warnings(workload):
            if with_choice or warning.kind not in KINDS_OF_THE_CHOICE:
                workload_names.setdefault(warning, []).append(workload.name)
    warnings = []
    for warning, names in workload_names.items():
        if len(names) < len(comparison.workloads):
            warning = replace(warning, text=f"{', '.join(names)}: {warning.text}")
        warnings.append(warning)
    return warnings


def _print(report: Report, sections: Sequence[Section], console: Console) -> None:
    """Print the report in a terminal: verdict, tables, runs without a result, warnings, files."""
    console.print()
    console.print(Text(report.verdict.text, style="bold"))
    if report.verdict.next:
        line = f"next: {report.verdict.next}  ({report.verdict.cost})"
        console.print(Text(line), soft_wrap=True)
    for section in sections:
        table = to_rich(section.table, title=section.title or None, width=console.width)
        console.print(table)
        # A narrow terminal has no room for the column of differences, of which the note speaks.
        if section.note and any(
            str(column.header).startswith("difference") for column in table.columns
        ):
            console.print(Text(section.note, style="dim"))
            console.print()
    _print_runs_without_result(report.comparison.runs, console)
    for warning in report.warnings:
        console.print(Text.assemble((f"{warning.kind}: ", "bold yellow"), warning.text))
    if report.warnings:
        console.print()
    for path in report.files[:3]:  # HTML, Markdown and CSV; the pictures follow
        console.print(Text.assemble(("wrote ", "dim"), str(path)), soft_wrap=True)


def _print_runs_without_result(runs: Sequence[Run], console: Console) -> None:
    """List the started runs that diverged or did not finish; nothing if only one run started."""
    started = [run for run in runs if run.status != NOT_STARTED]
    # `diverged` is the reason, or empty.
    without_result = [run for run in started if not run.finished or run.diverged]
    if len(started) < 2 or not without_result:
        return
    title = f"{len(without_result)} of {len(started)} runs without a result"
    if len(without_result) > _LISTED_RUNS:
        title += f", the first {_LISTED_RUNS}"
    console.print(Text(f"{title}:", style="bold"))
    for run in without_result[:_LISTED_RUNS]:
        note = tables.write_note(run) or f"step {run.global_step:,}"
        console.print(Text(f"  {run.label}: {tables.write_status(run)}, {note}"))
    console.print()


def _unfolded_sections(report: Report) -> list[Section]:
    """List the tables that a page shows without a click, that of the contenders first.

    If a confirmation beneath the sweep has ended, the contenders on its fresh seeds come first, and
    those of the sweep second. A single run adds its metrics; several workloads add a table of all
    of them, and the contenders of each.
    """
    comparison = report.comparison
    confirmed = report.confirmed
    # 1. The contenders.
    if comparison.several:
        table = tables.scores_table(comparison)
    else:
        table = tables.ranking_table(comparison.findings)
    # Below a table stands the confidence level of its intervals; nothing if there are none.
    note = fill_text("interval.txt", ttest=comparison.ttest)
    sections = [Section("", table, note)]
    # 2. Those on fresh seeds before them. If no confirmation has ended, the two are one object.
    if confirmed is not None and confirmed.comparison is not comparison:
        fresh = confirmed.comparison.findings
        note_of_fresh = fill_text("interval.txt", ttest=fresh.ttest)
        first = Section("", tables.ranking_table(fresh), note_of_fresh)
        sections = [first, Section("The choice that was confirmed", table, note)]
    # 3. The run, or the workloads.
    if len(comparison.runs) == 1:
        sections.append(Section("Metrics", tables.metrics_table(comparison.runs[0])))
    elif comparison.several:
        sections.append(Section("Workloads", tables.workloads_table(comparison)))
        for workload in comparison.workloads:
            table = tables.ranking_table(workload)
            note = fill_text("interval.txt", ttest=workload.ttest)
            sections.append(Section(f"Within {workload.name}", table, note))
    return sections


def _content(report: Report, unfolded: Sequence[Section]) -> dict[str, object]:
    """Collect the values of the page templates.

    Args:
        report: The finished report.
        unfolded: The sections of `_unfolded_sections`.

    Returns:
        `title`, `subtitle`; `line` (the verdict) and `next` (a command) with its `cost`; `table`
        and `table_note` of the first unfolded section; `warnings`; the other unfolded `sections`;
        `folds`, the folded sections, which only HTML has; `commands` that repeat the runs, see
        `_list_commands`; `tested`, the test behind the verdict.
    """
    comparison = report.comparison
    runs = comparison.runs
    single = len(runs) == 1
    # 1. The subtitle.
    by = "the metric of each workload" if comparison.several else comparison.findings.metric
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    counts = f"{plural(len(runs), 'run')} ({tables.count_states(runs)})"
    confirmed = report.confirmed
    if confirmed and confirmed.comparison is not comparison:
        counts += f" and {plural(len(confirmed.comparison.runs), 'run')} of the confirmation"
    # 2. The folded tables: all configurations and all runs of each workload.
    folds = []
    for workload in comparison.workloads:
        within = f" of {workload.name}" if workload.name else ""
        by_run = tables.runs_table(workload.runs, workload.keys, workload.metric, workload.mode)
        folds += [
            Section(f"Every configuration{within}", tables.configurations_table(workload)),
            Section(f"Every run{within}", by_run),
        ]
    # 3. The test behind the verdict: that of the confirmation if there is one.
    decisive = comparison if confirmed is None else confirmed.comparison
    tested = fill_text("tested.txt", comparison=decisive, kind=report.verdict.kind)
    return {
        "title": curves.run_title(runs[0]) if single else _title(comparison),
        "subtitle": f"{counts}, compared by {by}, {now}",
        "line": report.verdict.text,
        "next": report.verdict.next,
        "cost": report.verdict.cost,
        "table": unfolded[0].table,
        "table_note": unfolded[0].note,
        "warnings": report.warnings,
        "sections": unfolded[1:],
        "folds": folds,
        "commands": [*_list_commands(comparison), ("report", "", report.command)],
        "tested": "" if single else tested,
    }


def _title(comparison: Comparison) -> str:
    """Write the title of a report, such as `2 contenders: gpt_tiny on stdlib`.

    Over several workloads, such as `2 contenders over 3 workloads`.
    """
    names: set[str] = set()
    for workload in comparison.workloads:
        names.update(contender.name for contender in workload.contenders)
    count = plural(len(names), "contender")
    if comparison.several:
        return f"{count} over {len(comparison.workloads)} workloads"
    models = dict.fromkeys(filter(None, map(curves.model_name, comparison.runs)))
    data = dict.fromkeys(filter(None, map(curves.data_name, comparison.runs)))
    where = " on ".join(", ".join(names) for names in (models, data) if names)
    if where:
        return f"{count}: {where}"
    return count


def _list_commands(comparison: Comparison) -> list[tuple[str, str, str]]:
    """List the name of each contender, a note, and the shell line of its chosen configuration.

    Such as ("lamb", "3 seeds", "optrun -m optimizer=lamb lr=2e-3 seed=0,1,2"). The note names the
    workload if there are several, counts the seeds, and says whether a run was changed when it was
    resumed. Contenders without a run are left out.
    """
    commands = []
    for workload in comparison.workloads:
        for contender in workload.contenders:
            runs = contender.configuration.latest_runs
            if not runs:
                continue
            seeds = sorted({run.seed for run in runs if run.seed is not None})
            notes = [workload.name] if workload.name else []
            if len(seeds) > 1:
                notes.append(f"{len(seeds)} seeds")
            # Each resume records the settings that it changed, an empty mapping if none.
            if any(any(run.values_in_records("resumes", "changes", dict)) for run in runs):
                notes.append("changed when resumed")
            line = plain(runs[0].command(seeds=seeds))
            commands.append((contender.name, "; ".join(notes), line))
    return commands


def render(
    content: Mapping[str, object], images: Mapping[Picture, tuple[Path, bytes]]
) -> list[str]:
    """Render the HTML page with its pictures inside, and the Markdown page with links to them.

    The content policy of the HTML page forbids every request.

    Args:
        content: Values of the page templates, from `_content`.
        images: Picture -> the PNG file that Markdown links to, and its bytes.
    """
    inline = [(picture, b64encode(png).decode()) for picture, (_, png) in images.items()]
    links = [(picture, path) for picture, (path, _) in images.items()]
    return [
        fill_html("report.html", pictures=inline, **content),
        fill_markdown("report.md", pictures=links, **content),
    ]


def _draw(picture: Picture) -> bytes:
    """Draw a picture with its title above it, as a PNG file."""
    figure = picture.draw()
    figure.write_title(picture.title).set_wrap(True)
    return to_png(figure, dpi=160 if figure.get_figwidth() > 8 else 240)


def _write_files(
    folder: Path,
    stem: str,
    content: Mapping[str, object],
    csv: str,
    pictures: Sequence[Picture],
) -> list[Path]:
    """Write the HTML and Markdown pages, the CSV file and the pictures; return the paths.

    The folder is created if it is missing. Every picture is drawn before the first file is written.

    Raises:
        ConfigError: A file of that name is not a report, or the page reports on other runs;
            nothing is written then.
        StorageError: The disk refused a write.
    """
    # 1. Draw.
    images = {}
    for picture in pictures:
        images[picture] = (folder / f"{stem}-{picture.name}.png", _draw(picture))
    pages = [folder / f"{stem}.{ending}" for ending in ("html", "md", "csv")]
    files = [*pages, *(path for path, _ in images.values())]
    try:
        # 2. Refuse to replace what is not an earlier report on the same runs.
        folder.mkdir(parents=True, exist_ok=True)
        for path in files:
            if path.exists() and not is_earlier_report(path):
                raise ConfigError(
                    f"{path} exists and was not written by optrun report: move it away, or write"
                    " elsewhere with out=DIR"
                )
        if pages[0].exists():  # the HTML page names its runs by a digest near its beginning
            with open_file(pages[0]) as file:
                beginning = file.read(4096)
            if str(content["directories"]).encode() not in beginning:
                raise ConfigError(f"{pages[0]} reports on other runs: choose another out=DIR.")
        # 3. Write.
        for path, text in zip(pages, [*render(content, images), csv], strict=True):
            replace_text(path, text)
        for path, png in images.values():
            replace_bytes(path, png)
    except OSError as error:
        raise StorageError(
            f"report: cannot write to {folder} ({error.strerror}); write elsewhere with out=DIR"
        ) from error
    return files


def is_earlier_report(path: Path) -> bool:
    """Tell whether an existing file was written by `optrun report`, by a mark at its beginning.

    path: A file that ends in .html, .md, .csv or .png.
    """
    try:
        with open_file(path) as file:
            beginning = file.read(4096)
    except (OSError, UnreadableFileError):
        return False
    if path.suffix == ".html":
        return HTML_MARK.encode() in beginning
    if path.suffix == ".md":
        return beginning.startswith(MARKDOWN_MARK.encode())
    if path.suffix == ".csv":
        header = beginning.split(b"\n", 1)[0].rstrip()
        return header.endswith(b"," + CSV_MARK.encode())
    return beginning.startswith(b"\x89PNG") and SOFTWARE.encode() in beginning
