"""Tabulate findings: contenders, workloads, configurations, runs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from statistics import mean, median
from typing import TypeVar

from optrun.artifacts.forks import Fork
from optrun.base.formatting import duration, size
from optrun.config.schema.metric import metric_mode
from optrun.report.comparability import shorten_paths
from optrun.report.configurations import (
    Configuration,
    Contender,
    describe_settings,
    write_setting,
)
from optrun.report.findings import Findings
from optrun.report.runs import NOT_STARTED, Run
from optrun.report.statistics import Comparison as Compared
from optrun.report.statistics import Scores, Verdict
from optrun.report.table import NONE, Table, format_metric, to_csv
from optrun.report.workloads import Comparison

T = TypeVar("T")
Column = tuple[str, bool, Callable[[T], str]]
"""Its name, whether it is set flush right, and the cell of a row."""
_PERF: dict[str, tuple[str, Callable[[float], str]]] = {
    "tokens_per_second": ("tokens/s", "{:,.0f}".format),
    "peak_memory_bytes": ("peak memory", size),
    "optimizer_state_bytes": ("optimizer state", size),
}


def tabulate(
    rows: Iterable[T], columns: Sequence[Column[T]], style: Callable[[T], str] = lambda _: ""
) -> Table:
    """Build a table with one row per item and one cell per column."""
    row_list = list(rows)
    cells = [[cell(row) for _, _, cell in columns] for row in row_list]
    return Table(
        [name for name, _, _ in columns],
        [right for _, right, _ in columns],
        cells,
        [*map(style, row_list)],
    )


def ranking_table(findings: Findings) -> Table:
    """Tabulate the best of each contender, with its verdict and its cost."""
    judged = findings.judgement
    tuned = findings.tuned_keys
    columns: list[Column[Contender]] = [
        ("#", True, lambda row: str(row.rank or NONE)),
        ("contender", False, lambda row: row.name),
    ]
    if tuned:
        columns.append(("chosen", False, partial(_describe_chosen, tuned)))
    columns.append((f"{findings.metric} (mean ± sd)", True, _mean_of_row))
    several = len(findings.rows) > 1
    if several:
        columns.append(("verdict", False, partial(name_verdict, findings)))
    columns.append(("seeds", True, lambda row: count_seeds(row.configuration)))
    if several:
        against = "difference"
        if judged is not None and judged.is_tested:
            against += f" [{100 * judged.confidence:.3g} %]"
        columns.append((against, True, lambda row: format_difference(row.versus)))
    columns += [
        ("diverged", True, lambda row: _count_diverged(_runs(row))),
        ("configurations", True, _count_begun),
        ("wall time", True, lambda row: _total([run.wall_seconds for run in _runs(row)])),
    ]
    return tabulate(findings.rows, columns, row_style)


def _describe_chosen(keys: Sequence[str], row: Contender) -> str:
    return describe_settings(row.configuration.of(keys)) or NONE


def _mean_of_row(row: Contender) -> str:
    return format_mean(row.configuration)


def scores_table(comparison: Comparison) -> Table:
    """Tabulate the mean score of each contender over several workloads, and on each of them."""
    judged = comparison.judgement
    comparisons = {} if judged is None else judged.comparisons

    def verdict(name: str) -> str:
        if judged is None or name not in comparisons:
            return "no score on every workload"
        return judged.verdict_text(name)

    def style(name: str) -> str:
        if name in comparisons:
            return _STYLES.get(comparisons[name].verdict, "")
        return "muted"

    columns: list[Column[str]] = [
        ("contender", False, str),
        ("mean score", True, partial(_score, comparison.scores)),
        ("verdict", False, verdict),
        ("difference", True, lambda name: format_difference(comparisons.get(name), 3)),
    ]
    for workload in comparison.counted:
        columns.append((workload.name, True, partial(_score, workload.scaled())))
    ranking = [] if judged is None else judged.ranking
    return tabulate(dict.fromkeys([*ranking, *comparison.scores]), columns, style)


def workloads_table(comparison: Comparison) -> Table:
    """Tabulate the workloads.

    Columns: the metric values that score 0 and 1, the best contender, and whether the workload
    counts or why not.
    """
    columns: list[Column[Findings]] = [
        ("workload", False, lambda workload: workload.name),
        ("metric", False, lambda workload: workload.metric),
        ("before training (0)", True, lambda workload: _known(workload.floor)),
        ("best (1)", True, lambda workload: _known(workload.end)),
        (
            "best contender",
            False,
            lambda workload: next((row.name for row in workload.ranked), NONE),
        ),
        (
            "counts",
            False,
            lambda workload: f"no: {workload.left_out}" if workload.left_out else "yes",
        ),
    ]
    return tabulate(
        comparison.workloads, columns, lambda workload: "muted" if workload.left_out else ""
    )


def configurations_table(findings: Findings) -> Table:
    """Tabulate every configuration, best first: settings, scores, speed and memory."""
    chosen = {id(row.configuration) for row in findings.ranked}

    def style(configuration: Configuration) -> str:
        if not configuration.scores:
            return "muted"
        if id(configuration) in chosen:
            return "best"
        return ""

    columns: list[Column[Configuration]] = []
    for key in findings.keys:
        columns.append((key, False, partial(_setting_of, key)))
    columns += [
        (f"{findings.metric} (mean ± sd)", True, format_mean),
        ("seeds", True, count_seeds),
        ("states", False, lambda configuration: count_states(configuration.runs)),
    ]
    for name, (title, _) in _PERF.items():
        columns.append((title, True, partial(_middle, name)))
    ordered = sorted(
        findings.configurations, key=lambda configuration: configuration.cost(findings.mode)
    )
    return tabulate(ordered, columns, style)


def _setting_of(key: str, configuration: Configuration) -> str:
    return _show_setting(key, configuration.settings.get(key))


def runs_table(runs: Sequence[Run], keys: Sequence[str], metric: str, mode: str) -> Table:
    """Tabulate every run, with one column for each setting."""
    columns: list[Column[Run]] = [("run", False, lambda run: run.label)]
    for key in keys:
        short = shorten_paths(run.config[key] for run in runs if key in run.config)
        columns.append((key, False, partial(_short_setting, key, short)))
    columns += [
        ("seed", True, lambda run: NONE if run.seed is None else str(run.seed)),
        ("status", False, _status),
        ("step", True, _step),
        (f"last {metric}", True, lambda run: format_metric(run.last(metric))),
        ("best", True, lambda run: _best(run, metric, mode)),
        ("wall time", True, lambda run: _total([run.wall_seconds])),
    ]
    if any(run.device for run in runs):
        columns.append(("device", False, lambda run: run.device or NONE))
    columns.append(("note", False, _note))

    def style(run: Run) -> str:
        if run.diverged or run.status == "failed":
            return "worse"
        if run.finished:
            return ""
        return "muted"

    return tabulate(runs, columns, style)


def _short_setting(key: str, short: Mapping[object, str], run: Run) -> str:
    setting = run.config.get(key)
    return _show_setting(key, short.get(str(setting), setting))


def _status(run: Run) -> str:
    if run.diverged and run.status != "failed":
        return "diverged"
    return run.status


def _note(run: Run) -> str:
    return run.diverged or run.message or "; ".join(run.problems) or _trunk_note(run)


def metrics_table(run: Run) -> Table:
    """Tabulate the last and the best value of each evaluation metric, one row per metric."""
    columns: list[Column[str]] = [
        ("metric", False, str),
        ("last", True, lambda name: format_metric(run.last(name))),
        ("best", True, lambda name: _best(run, name, metric_mode(name))),
    ]
    return tabulate([name for name in run.log.names() if name.startswith("eval/")], columns)


def runs_csv(comparison: Comparison) -> str:
    """Write every run as one line of CSV."""
    lines = []
    for findings in comparison.workloads:
        contender_of_run: dict[int, Contender] = {}
        for row in findings.rows:
            for configuration in row.configurations:
                contender_of_run |= {id(run): row for run in configuration.runs}
        for run in findings.runs:
            lines.append(
                _csv_line(run, findings, contender_of_run.get(id(run)), several=comparison.several)
            )
    columns: dict[str, None] = {}
    for line in lines:
        columns |= dict.fromkeys(line)
    return to_csv(list(columns), ([line.get(key) for key in columns] for line in lines))


def _csv_line(
    run: Run, findings: Findings, contender: Contender | None, *, several: bool
) -> dict[str, object]:
    """Collect the values of one run for report.csv, by column."""
    line: dict[str, object] = {"run": run.label}
    if several:
        line |= {"workload": findings.name, "metric": findings.metric}
    line |= {
        "status": run.status,
        "diverged": run.diverged,
        "contender": "" if contender is None else contender.name,
        "rank": None if contender is None else contender.rank,
        "seed": run.seed,
        "step": run.global_step,
        "max_steps": run.max_steps,
    }
    for key in findings.keys:
        line[f"config.{key}"] = run.config.get(key)
    unit = "" if several else f" {findings.metric}"
    best, best_step = run.best(findings.metric, findings.mode) or (None, None)
    line |= {
        f"last{unit}": run.last(findings.metric),
        f"best{unit}": best,
        "best_step": best_step,
        "score": run.score(findings.metric),
        "wall_seconds": run.wall_seconds,
    }
    for name in (*_PERF, "samples_per_second"):
        line[name] = run.perf(name)
    return line | {"device": run.device, "message": run.message, "path": str(run.path)}


def _step(run: Run) -> str:
    limit = f" / {run.max_steps:,}" if run.max_steps and run.global_step < run.max_steps else ""
    return f"{run.global_step:,}{limit}"


def _best(run: Run, metric: str, mode: str) -> str:
    best = run.best(metric, mode)
    if best is None:
        return NONE
    value, step = best
    return f"{format_metric(value)} at {step:,}"


def _runs(row: Contender) -> list[Run]:
    """List the started runs of a contender."""
    runs: list[Run] = []
    for configuration in row.configurations:
        runs += [run for run in configuration.runs if run.status != NOT_STARTED]
    return runs


def _count_diverged(runs: Sequence[Run]) -> str:
    diverged = [run for run in runs if run.diverged]
    if diverged:
        return f"{len(diverged)} of {len(runs)}"
    return "0"


def _count_begun(row: Contender) -> str:
    """Count the configurations of a contender that were started."""
    n_begun = 0
    for configuration in row.configurations:
        n_begun += any(run.status != NOT_STARTED for run in configuration.runs)
    return str(n_begun)


def _total(seconds: Sequence[float | None]) -> str:
    """Add up wall times; `≥` if not all are known."""
    known_seconds = [second for second in seconds if second is not None]
    if not known_seconds:
        return NONE
    total = duration(sum(known_seconds))
    if len(known_seconds) < len(seconds):
        return f"≥ {total}"
    return total


def _score(scores: Scores, name: str) -> str:
    row = scores.get(name)
    if row:
        return f"{mean(row.values()):.3f}"
    return NONE


def _show_setting(key: str, setting: object) -> str:
    if setting is None:
        return NONE
    return write_setting(key, setting)


def _known(number: float) -> str:
    if math.isnan(number):
        return NONE
    return format_metric(number)


def format_mean(configuration: Configuration) -> str:
    """Format mean and standard deviation over seeds, with as many decimals."""
    if not configuration.scores:
        return NONE
    mean = format_metric(configuration.mean)
    if math.isnan(configuration.sd):
        return mean
    decimals = len(mean.partition(".")[2])
    if "e" in mean or not decimals:
        return f"{mean} ± {format_metric(configuration.sd)}"
    return f"{mean} ± {configuration.sd:.{decimals}f}"


def count_states(runs: Sequence[Run]) -> str:
    """Count runs by how they ended."""
    counted = Counter("diverged" if run.diverged else run.status for run in runs)
    return ", ".join(f"{number} {state}" for state, number in counted.items())


def count_seeds(configuration: Configuration) -> str:
    """Say how many seeds have a score, and of how many."""
    if len(configuration.scores) == len(configuration.runs):
        return str(len(configuration.scores))
    return f"{len(configuration.scores)} of {len(configuration.runs)}"


def format_difference(versus: Compared | None, digits: int = 4) -> str:
    """Format the difference to the reference with its interval and true minus signs."""
    if versus is None or versus.name == versus.reference or math.isnan(versus.difference):
        return NONE
    difference = f"{versus.difference:+.{digits}f}"
    if not math.isnan(versus.low):
        difference += f" [{versus.low:+.{digits}f}, {versus.high:+.{digits}f}]"
    return difference.replace("-", "−")


def name_verdict(findings: Findings, row: Contender) -> str:
    """Name the verdict on a contender.

    The contender that rules it out is named if it is not the reference.
    """
    versus = row.versus
    if versus is None or row.rank is None or findings.judgement is None:
        return "not ranked"
    verdict = findings.judgement.verdict_text(row.name)
    if versus.by not in ("", versus.reference):
        return f"{verdict}, by {versus.by}"
    return verdict


_STYLES = {
    Verdict.could_be_best: "best",
    Verdict.better: "better",
    Verdict.ruled_out: "worse",
    Verdict.worse: "worse",
}


def row_style(row: Contender) -> str:
    """Choose the style of a contender's row, by its verdict."""
    if row.rank is None or row.versus is None:
        return "muted"
    return _STYLES.get(row.versus.verdict, "")


def _middle(name: str, configuration: Configuration) -> str:
    """Format the median of the known speeds or memory sizes."""
    numbers = [number for run in configuration.runs if (number := run.perf(name)) is not None]
    if numbers:
        return _PERF[name][1](median(numbers))
    return NONE


def _trunk_note(run: Run) -> str:
    """Name trunk and step of a fork; empty for any other run."""
    fork = Fork.of(run.summary)
    if fork is None:
        return ""
    return f"branch of {fork.name}"
