"""Tabulate findings: contenders, workloads, configurations, runs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain
from statistics import mean, median

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
from optrun.report.statistics import ReferenceComparison, Scores, Verdict
from optrun.report.table import NONE, Table, format_metric, to_csv
from optrun.report.workloads import Comparison

_PERF: dict[str, tuple[str, Callable[[float], str]]] = {
    "tokens_per_second": ("tokens/s", "{:,.0f}".format),
    "peak_memory_bytes": ("peak memory", size),
    "optimizer_state_bytes": ("optimizer state", size),
}


def tabulate(
    rows: Sequence[Mapping[str, str]],
    styles: Sequence[str],
    *,
    left: Collection[str],
) -> Table:
    """Build a table from the cells of each row.

    Args:
        rows: Column name -> text; all rows have the columns of the first, in its order.
        styles: The style of each row, see `Table.styles`.
        left: Columns that are set flush left; the others are numbers.

    Returns:
        The table; without columns if there is no row.
    """
    columns = list(rows[0]) if rows else []
    numeric = [column not in left for column in columns]
    return Table(columns, numeric, [list(row.values()) for row in rows], list(styles))


def ranking_table(findings: Findings) -> Table:
    """Tabulate the chosen configuration of each contender: score, verdict, difference and cost.

    One row for each contender, best first. Verdict and difference are left out if there is one
    contender, or no test; the chosen settings if nothing was tuned. The columns of diverged runs,
    configurations and wall time count everything that was started for the contender, not only the
    chosen configuration.
    """
    ttest = findings.ttest
    tuned = findings.tuned_keys
    is_judged = ttest is not None and len(findings.contenders) > 1
    difference = "difference"
    if ttest is not None and ttest.has_intervals:
        difference += f" [{100 * ttest.confidence:.3g} %]"
    rows = []
    for contender in findings.contenders:
        runs = _started_runs(contender)
        cells = {"#": str(contender.rank or NONE), "contender": contender.name}
        if tuned:
            cells["chosen"] = (
                describe_settings(contender.configuration.pick_settings(tuned)) or NONE
            )
        cells[f"last {findings.metric} ± sd"] = format_mean(contender.configuration)
        if is_judged:
            cells["verdict"] = name_verdict(findings, contender)
        cells["seeds"] = count_seeds(contender.configuration)
        if is_judged:
            cells[difference] = format_difference(contender.comparison)
        cells["diverged"] = _count_diverged(runs)
        cells["configurations"] = _count_started(contender)
        cells["wall time"] = _add_wall_times([run.wall_seconds for run in runs])
        rows.append(cells)
    styles = [row_style(contender) if is_judged else "" for contender in findings.contenders]
    return tabulate(rows, styles, left=("contender", "chosen", "verdict"))


def scores_table(comparison: Comparison) -> Table:
    """Tabulate the mean score of each contender over several workloads, and on each of them.

    Columns: contender, mean score, its verdict, the difference to the reference (with an
    interval if there is one), and one column for each workload that counts. A contender is one
    optimizer, or whatever else is compared. Best first; contenders without a score on every
    workload come last, muted, with that as their verdict.

    A workload counts if its runs can be ranked and learnt something, see `Findings.left_out`.
    Verdict and difference are left out if there is no test (`comparison.ttest` is None): runs are
    left, or fewer than two contenders have a score on every workload that counts.
    """
    ttest = comparison.ttest
    ranking = [] if ttest is None else ttest.ranking
    rows = []
    styles = []
    for name in dict.fromkeys([*ranking, *comparison.scores]):
        cells = {"contender": name, "mean score": _write_mean_score(comparison.scores, name)}
        style = "" if comparison.scores.get(name) else "muted"
        if ttest is not None:
            cells["verdict"] = "no score on every workload"
            if name in ttest.comparisons:
                cells["verdict"] = ttest.verdict_text(name)
                style = _STYLES.get(ttest.comparisons[name].verdict, "")
            cells["difference"] = format_difference(ttest.comparisons.get(name), 3)
        for workload in comparison.counted:
            cells[workload.name] = _write_mean_score(workload.scaled_scores(), name)
        rows.append(cells)
        styles.append(style)
    return tabulate(rows, styles, left=("contender", "verdict"))


def workloads_table(comparison: Comparison) -> Table:
    """Tabulate the workloads.

    Columns: the metric values that score 0 and 1, the best contender, and whether the workload
    counts or why not.
    """
    rows = []
    styles = []
    for workload in comparison.workloads:
        rows.append(
            {
                "workload": workload.name,
                "metric": workload.metric,
                "before training (0)": _format_known(workload.untrained_metric),
                "best (1)": _format_known(workload.best_mean),
                "best contender": workload.ranked[0].name if workload.ranked else NONE,
                "counts": f"no: {workload.left_out}" if workload.left_out else "yes",
            }
        )
        styles.append("muted" if workload.left_out else "")
    return tabulate(rows, styles, left=("workload", "metric", "best contender", "counts"))


def configurations_table(findings: Findings) -> Table:
    """Tabulate every configuration, best mean first: settings, scores, speed and memory.

    Speed and memory are medians over its runs. Chosen configurations have the style "best", those
    without a score "muted".
    """
    chosen = {id(contender.configuration) for contender in findings.ranked}
    rows = []
    styles = []
    for configuration in sorted(
        findings.configurations, key=lambda configuration: configuration.cost(findings.mode)
    ):
        settings = configuration.settings
        cells = {key: _show_setting(key, settings.get(key)) for key in findings.keys}
        cells[f"last {findings.metric} ± sd"] = format_mean(configuration)
        cells["seeds"] = count_seeds(configuration)
        cells["states"] = count_states(configuration.runs)
        for name, (title, write) in _PERF.items():
            figures = [run.perf(name) for run in configuration.runs]
            known_figures = [figure for figure in figures if figure is not None]
            cells[title] = write(median(known_figures)) if known_figures else NONE
        rows.append(cells)
        style = "" if configuration.scores else "muted"
        if configuration.scores and id(configuration) in chosen:
            style = "best"
        styles.append(style)
    return tabulate(rows, styles, left=(*findings.keys, "states"))


def runs_table(runs: Sequence[Run], keys: Sequence[str], metric: str, mode: str) -> Table:
    """Tabulate every run, with one column for each setting.

    Paths are shortened; the column `device` is left out if no run was pinned to one.
    """
    short_paths = {
        key: shorten_paths(run.config[key] for run in runs if key in run.config) for key in keys
    }
    is_pinned = any(run.device for run in runs)
    rows = []
    styles = []
    for run in runs:
        cells = {"run": run.label}
        for key in keys:
            setting = run.config.get(key)
            cells[key] = _show_setting(key, short_paths[key].get(setting, setting))
        cells["seed"] = NONE if run.seed is None else str(run.seed)
        cells["status"] = write_status(run)
        cells["step"] = _write_step(run)
        cells[f"last {metric}"] = format_metric(run.last(metric))
        cells["best"] = _write_best(run, metric, mode)
        cells["wall time"] = _add_wall_times([run.wall_seconds])
        if is_pinned:
            cells["device"] = run.device or NONE
        cells["note"] = write_note(run)
        style = "" if run.finished else "muted"
        if run.diverged or run.status == "failed":
            style = "worse"
        rows.append(cells)
        styles.append(style)
    return tabulate(rows, styles, left=("run", *keys, "status", "device", "note"))


def write_status(run: Run) -> str:
    """Return the status of a run; `diverged` if it diverged and was not recorded as failed."""
    if run.diverged and run.status != "failed":
        return "diverged"
    return run.status


def write_note(run: Run) -> str:
    """Write the most important note on a run; empty without one.

    The first of these that it has: why it diverged, its message, what is wrong with its files, the
    run that it continues.
    """
    reason = run.diverged or run.message or "; ".join(run.problems)
    fork = Fork.of(run.summary)
    if reason or fork is None:
        return reason
    return f"branch of {fork.name}"


def metrics_table(run: Run) -> Table:
    """Tabulate the last and the best value of each evaluation metric, one row per metric."""
    rows = []
    for name in run.log.names():
        if name.startswith("eval/"):
            best = _write_best(run, name, metric_mode(name))
            rows.append({"metric": name, "last": format_metric(run.last(name)), "best": best})
    return tabulate(rows, [""] * len(rows), left=("metric",))


def runs_csv(comparison: Comparison) -> str:
    """Write every run as one line of CSV; the columns are those of all lines together.

    A value that a run lacks is empty.
    """
    lines = []
    for findings in comparison.workloads:
        contender_of_run: dict[int, Contender] = {}  # by the id of the run, which has no hash
        for contender in findings.contenders:
            for configuration in contender.configurations:
                contender_of_run |= {id(run): contender for run in configuration.runs}
        for run in findings.runs:
            lines.append(
                _csv_line(run, findings, contender_of_run.get(id(run)), several=comparison.several)
            )
    columns = list(dict.fromkeys(chain(*lines)))  # the keys of all lines, each once
    return to_csv(columns, [list(map(line.get, columns)) for line in lines])


def _csv_line(
    run: Run,
    findings: Findings,
    contender: Contender | None,
    *,
    several: bool,
) -> dict[str, object]:
    """Collect the values of one run for report.csv, by column; None is written as empty.

    Args:
        run: The run.
        findings: Findings of its workload.
        contender: The contender it belongs to; None: its configuration is not known.
        several: Whether the report has several workloads: then the line names workload and
            metric.
    """
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


def _write_step(run: Run) -> str:
    """Write the step of a run, with its planned last step if it did not reach it."""
    step = f"{run.global_step:,}"
    if run.max_steps and run.global_step < run.max_steps:
        step += f" / {run.max_steps:,}"
    return step


def _write_best(run: Run, metric: str, mode: str) -> str:
    """Write the best value of a metric and its step, such as `2.5031 at 40`."""
    best = run.best(metric, mode)
    if best is None:
        return NONE
    value, step = best
    return f"{format_metric(value)} at {step:,}"


def _started_runs(contender: Contender) -> list[Run]:
    """List the started runs of a contender."""
    runs: list[Run] = []
    for configuration in contender.configurations:
        runs += [run for run in configuration.runs if run.status != NOT_STARTED]
    return runs


def _count_diverged(runs: Sequence[Run]) -> str:
    """Write how many of some runs diverged, such as `2 of 5`; `0` if none did."""
    diverged = [run for run in runs if run.diverged]
    if diverged:
        return f"{len(diverged)} of {len(runs)}"
    return "0"


def _count_started(contender: Contender) -> str:
    """Count the started configurations of a contender."""
    count = 0
    for configuration in contender.configurations:
        count += any(run.status != NOT_STARTED for run in configuration.runs)
    return str(count)


def _add_wall_times(seconds: Sequence[float | None]) -> str:
    """Add up wall times, such as `≥ 3 min 05 s` if not all are known; `NONE` if none is."""
    known_seconds = [second for second in seconds if second is not None]
    if not known_seconds:
        return NONE
    total = duration(sum(known_seconds))
    if len(known_seconds) < len(seconds):
        return f"≥ {total}"
    return total


def _write_mean_score(scores: Scores, name: str) -> str:
    """Write the mean score of a contender; `NONE` without one."""
    by_seed = scores.get(name)
    if by_seed:
        return f"{mean(by_seed.values()):.3f}"
    return NONE


def _show_setting(key: str, setting: object) -> str:
    """Write the value of a setting; `NONE` for null."""
    if setting is None:
        return NONE
    return write_setting(key, setting)


def _format_known(number: float) -> str:
    """Format a metric; `NONE` for NaN."""
    if math.isnan(number):
        return NONE
    return format_metric(number)


def format_mean(configuration: Configuration) -> str:
    """Format mean and standard deviation over seeds with the same number of decimals.

    Without the deviation if fewer than two seeds have a score; `NONE` without a score.
    """
    if not configuration.scores:
        return NONE
    mean = format_metric(configuration.mean)
    if math.isnan(configuration.sd):
        return mean
    decimals = len(mean.partition(".")[2])
    # `1.2e+05` and `1234` have no decimals to share.
    if "e" in mean or not decimals:
        return f"{mean} ± {format_metric(configuration.sd)}"
    return f"{mean} ± {configuration.sd:.{decimals}f}"


def count_states(runs: Sequence[Run]) -> str:
    """Count runs by how they ended, such as `2 finished, 1 diverged`."""
    counted = Counter("diverged" if run.diverged else run.status for run in runs)
    return ", ".join(f"{number} {state}" for state, number in counted.items())


def count_seeds(configuration: Configuration) -> str:
    """Write how many runs have a score, such as `3`, or `2 of 3` if some have none."""
    if len(configuration.scores) == len(configuration.runs):
        return str(len(configuration.scores))
    return f"{len(configuration.scores)} of {len(configuration.runs)}"


def format_difference(comparison: ReferenceComparison | None, digits: int = 4) -> str:
    """Format the difference to the reference with its interval, with true minus signs.

    The difference alone if its interval is NaN, as it is with a single pair of seeds. `NONE` for
    the reference itself, and for a contender without a difference.
    """
    if comparison is None or comparison.name == comparison.reference:
        return NONE
    if math.isnan(comparison.difference):
        return NONE
    difference = f"{comparison.difference:+.{digits}f}"
    if not math.isnan(comparison.low):
        difference += f" [{comparison.low:+.{digits}f}, {comparison.high:+.{digits}f}]"
    return difference.replace("-", "−")


def name_verdict(findings: Findings, contender: Contender) -> str:
    """Name the verdict on a contender, and who rules it out if that is not the reference.

    `not ranked` without a rank or a test.
    """
    comparison = contender.comparison
    if comparison is None or contender.rank is None or findings.ttest is None:
        return "not ranked"
    verdict = findings.ttest.verdict_text(contender.name)
    if comparison.ruled_out_by not in ("", comparison.reference):
        return f"{verdict}, by {comparison.ruled_out_by}"
    return verdict


_STYLES = {
    Verdict.could_be_best: "best",
    Verdict.better: "better",
    Verdict.ruled_out: "worse",
    Verdict.worse: "worse",
}


def row_style(contender: Contender) -> str:
    """Choose the style of a contender's row, by its verdict."""
    if contender.rank is None or contender.comparison is None:
        return "muted"
    return _STYLES.get(contender.comparison.verdict, "")
