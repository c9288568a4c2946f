"""Tabulate findings: contenders, workloads, configurations, runs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from statistics import mean, median
from typing import TypeVar

from optrun.artifacts.forks import Fork
from optrun.artifacts.run_dir import RunDir
from optrun.artifacts.samples import read_samples
from optrun.base.formatting import duration, plain, rate, size
from optrun.config.schema.metric import metric_mode
from optrun.report.comparability import shorten_paths
from optrun.report.configurations import Configuration, Contender, describe_settings
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
    """Lay out rows, a cell for each column."""
    listed = list(rows)
    cells = [[cell(row) for _, _, cell in columns] for row in listed]
    return Table(
        [name for name, _, _ in columns],
        [right for _, right, _ in columns],
        cells,
        [*map(style, listed)],
    )


def ranking_table(findings: Findings) -> Table:
    """Tabulate each contender at its best.

    What it is, what it came to, and what it cost to find.
    """
    judged = findings.judgement
    tuned = findings.tuned_keys
    several = len(findings.rows) > 1
    against = f"difference [{100 * judged.confidence:.3g} %]" if judged else "difference"
    columns: list[tuple[bool, Column[Contender]]] = [
        (True, ("#", True, lambda row: str(row.rank or NONE))),
        (True, ("contender", False, lambda row: row.name)),
        (
            bool(tuned),
            ("chosen", False, lambda row: describe_settings(row.configuration.of(tuned)) or NONE),
        ),
        (
            True,
            (f"{findings.metric} (mean ± sd)", True, lambda row: format_mean(row.configuration)),
        ),
        (several, ("verdict", False, partial(name_verdict, findings))),
        (True, ("seeds", True, lambda row: count_seeds(row.configuration))),
        (several, (against, True, lambda row: format_difference(row.versus))),
        (True, ("diverged", True, lambda row: _lost(_runs(row)))),
        (True, ("tried", True, _effort)),
        (True, ("wall time", True, lambda row: _total([run.wall_seconds for run in _runs(row)]))),
    ]
    return tabulate(findings.rows, [column for shown, column in columns if shown], row_style)


def scores_table(comparison: Comparison) -> Table:
    """Tabulate the mean score of each contender over several workloads, and on each of them."""
    judged, scores = comparison.judgement, comparison.scores
    found = judged.comparisons if judged is not None else {}
    words = {name: judged.words(name) for name in found} if judged is not None else {}
    columns: list[Column[str]] = [
        ("contender", False, str),
        ("mean score", True, partial(_score, scores)),
        ("verdict", False, lambda name: words.get(name, "no score on every workload")),
        ("difference", True, lambda name: format_difference(found.get(name), 3)),
        *((each.name, True, partial(_score, each.scaled())) for each in comparison.counted),
    ]
    order = dict.fromkeys([*(judged.ranking if judged is not None else ()), *scores])
    return tabulate(
        order,
        columns,
        lambda name: _STYLES.get(found[name].verdict, "") if name in found else "muted",
    )


def workloads_table(comparison: Comparison) -> Table:
    """Tabulate the workloads.

    What a score of 0 and of 1 is there, who is best, and why one does not count.
    """
    columns: list[Column[Findings]] = [
        ("workload", False, lambda each: each.name),
        ("metric", False, lambda each: each.metric),
        ("before training (0)", True, lambda each: _known(each.floor)),
        ("best (1)", True, lambda each: _known(each.end)),
        ("best contender", False, lambda each: next((row.name for row in each.ranked), NONE)),
        ("counts", False, lambda each: f"no: {each.left_out}" if each.left_out else "yes"),
    ]
    return tabulate(comparison.workloads, columns, lambda each: "muted" if each.left_out else "")


def configurations_table(findings: Findings) -> Table:
    """Tabulate every configuration, best first.

    Its settings, a column each, what it came to, speed and memory.
    """
    chosen = {id(row.configuration) for row in findings.ranked}
    columns: list[Column[Configuration]] = [
        *(
            (key, False, lambda configuration, key=key: _shown(configuration.settings.get(key)))
            for key in findings.keys
        ),
        (f"{findings.metric} (mean ± sd)", True, format_mean),
        ("seeds", True, count_seeds),
        ("states", False, lambda configuration: count_states(configuration.runs)),
        *((told, True, partial(_middle, name)) for name, (told, _) in _PERF.items()),
    ]
    ordered = sorted(
        findings.configurations, key=lambda configuration: configuration.cost(findings.mode)
    )
    return tabulate(
        ordered,
        columns,
        lambda configuration: (
            "best" * (id(configuration) in chosen) if configuration.scores else "muted"
        ),
    )


def runs_table(runs: Sequence[Run], keys: Sequence[str], metric: str, mode: str) -> Table:
    """Tabulate every run as its files tell it, a column for each setting."""
    short = {
        key: shorten_paths([run.config[key] for run in runs if key in run.config]) for key in keys
    }

    def setting(key: str, run: Run) -> str:
        found = run.config.get(key)
        return _shown(short[key].get(str(found), found))

    columns: list[Column[Run]] = [
        ("run", False, lambda run: run.label),
        *((key, False, partial(setting, key)) for key in keys),
        ("seed", True, lambda run: NONE if run.seed is None else str(run.seed)),
        (
            "status",
            False,
            lambda run: "diverged" if run.diverged and run.status != "failed" else run.status,
        ),
        ("step", True, _step),
        (f"last {metric}", True, lambda run: format_metric(run.last(metric))),
        ("best", True, lambda run: _best(run, metric, mode)),
        ("wall time", True, lambda run: _total([run.wall_seconds])),
        *(
            [("device", False, lambda run: run.device or NONE)]
            if any(run.device for run in runs)
            else []
        ),
        (
            "note",
            False,
            lambda run: run.diverged or run.message or "; ".join(run.problems) or _trunk_note(run),
        ),
    ]
    bad = [id(run) for run in runs if run.diverged or run.status == "failed"]
    return tabulate(
        runs, columns, lambda run: "worse" if id(run) in bad else "muted" * (not run.finished)
    )


def metrics_table(run: Run) -> Table:
    """Tabulate what a run logged of its evaluations."""
    columns: list[Column[str]] = [
        ("metric", False, str),
        ("last", True, lambda name: format_metric(run.last(name))),
        ("best", True, lambda name: _best(run, name, metric_mode(name))),
    ]
    return tabulate([name for name in run.log.names() if name.startswith("eval/")], columns)


def answers_table(run: Run) -> Table | None:
    """Tabulate what a run answered at its last evaluation; None where nothing was asked."""
    lines = read_samples(RunDir(run.path).samples)
    columns = [
        ("step", True, lambda line: str(line.step)),
        ("prompt", False, lambda line: plain(line.prompt)),
        (
            "the row says",
            False,
            lambda line: NONE if line.reference is None else plain(line.reference),
        ),
        ("the model answered", False, lambda line: plain(line.generated)),
    ]
    return (
        tabulate([line for line in lines if line.step == lines[-1].step], columns)
        if lines
        else None
    )


def runs_csv(comparison: Comparison) -> str:
    """Write every run as one line of CSV."""
    perf = (*_PERF, "samples_per_second")
    lines: list[Mapping[str, object]] = []
    for found in comparison.workloads:
        rank = {
            id(run): (row.rank, row.name)
            for row in found.rows
            for configuration in row.configurations
            for run in configuration.runs
        }
        unit = "" if comparison.several else f" {found.metric}"
        for run in found.runs:
            position, contender = rank.get(id(run), (None, ""))
            best = run.best(found.metric, found.mode) or (None, None)
            lines.append(
                {"run": run.label}
                | ({"workload": found.name, "metric": found.metric} if comparison.several else {})
                | {
                    "status": run.status,
                    "diverged": run.diverged,
                    "contender": contender,
                    "rank": position,
                }
                | {"seed": run.seed, "step": run.global_step, "max_steps": run.max_steps}
                | {f"config.{key}": run.config.get(key) for key in found.keys}
                | {
                    f"last{unit}": run.last(found.metric),
                    f"best{unit}": best[0],
                    "best_step": best[1],
                }
                | {"score": run.score(found.metric), "wall_seconds": run.wall_seconds}
                | {name: run.perf(name) for name in perf}
                | {"device": run.device, "message": run.message, "path": str(run.path)}
            )
    columns = list(dict.fromkeys(key for line in lines for key in line))
    return to_csv(columns, ([line.get(key) for key in columns] for line in lines))


def _step(run: Run) -> str:
    limit = f" / {run.max_steps:,}" if run.max_steps and run.global_step < run.max_steps else ""
    return f"{run.global_step:,}{limit}"


def _best(run: Run, metric: str, mode: str) -> str:
    found = run.best(metric, mode)
    return NONE if found is None else f"{format_metric(found[0])} at {found[1]:,}"


def _runs(row: Contender) -> list[Run]:
    return [
        run
        for configuration in row.configurations
        for run in configuration.runs
        if run.status != NOT_STARTED
    ]


def _lost(runs: Sequence[Run]) -> str:
    lost = sum(bool(run.diverged) for run in runs)
    return f"{lost} of {len(runs)}" if lost else "0"


def _effort(row: Contender) -> str:
    runs = _runs(row)
    configurations = sum(
        any(run in runs for run in configuration.runs) for configuration in row.configurations
    )
    return f"{configurations} in {len(runs)} run{'s' * (len(runs) != 1)}"


def _total(seconds: Sequence[float | None]) -> str:
    known = [each for each in seconds if each is not None]
    return (
        NONE if not known else f"{'≥ ' if len(known) < len(seconds) else ''}{duration(sum(known))}"
    )


def _score(scores: Scores, name: str) -> str:
    return f"{mean(own.values()):.3f}" if (own := scores.get(name)) else NONE


def _shown(setting: object) -> str:
    return (
        NONE
        if setting is None
        else rate(setting)
        if isinstance(setting, float)
        else plain(str(setting))
    )


def _known(number: float) -> str:
    return NONE if math.isnan(number) else format_metric(number)


def format_mean(configuration: Configuration) -> str:
    """Format mean and standard deviation over seeds, with as many decimals."""
    if not configuration.scores:
        return NONE
    mean = format_metric(configuration.mean)
    if math.isnan(configuration.sd):
        return mean
    decimals = len(mean.partition(".")[2])
    return (
        f"{mean} ± {format_metric(configuration.sd)}"
        if "e" in mean or not decimals
        else f"{mean} ± {configuration.sd:.{decimals}f}"
    )


def count_states(runs: Sequence[Run]) -> str:
    """Count runs by how they ended."""
    counted = Counter("diverged" if run.diverged else run.status for run in runs)
    return ", ".join(f"{number} {state}" for state, number in counted.items())


def count_seeds(configuration: Configuration) -> str:
    """Say how many seeds have a score, and of how many."""
    return (
        str(len(configuration.scores))
        if len(configuration.scores) == len(configuration.runs)
        else f"{len(configuration.scores)} of {len(configuration.runs)}"
    )


def format_difference(versus: Compared | None, digits: int = 4) -> str:
    """Format the difference to the reference with its interval and true minus signs."""
    if versus is None or versus.name == versus.reference or math.isnan(versus.difference):
        return NONE
    told, low, high = (
        f"{each:+.{digits}f}".replace("-", "−")
        for each in (versus.difference, versus.low, versus.high)
    )
    return told if math.isnan(versus.low) else f"{told} [{low}, {high}]"


def name_verdict(findings: Findings, row: Contender) -> str:
    """Name the verdict on a contender, and who rules it out if that is not the reference."""
    found = row.versus
    if found is None or row.rank is None or findings.judgement is None:
        return "not ranked"
    words = findings.judgement.words(row.name)
    return f"{words}, by {found.by}" if found.by not in ("", found.reference) else words


_STYLES = {
    Verdict.could_be_best: "best",
    Verdict.better: "better",
    Verdict.ruled_out: "worse",
    Verdict.worse: "worse",
}


def row_style(row: Contender) -> str:
    """Choose the style of a contender's row, by its verdict."""
    return (
        "muted" if row.rank is None or row.versus is None else _STYLES.get(row.versus.verdict, "")
    )


def _middle(name: str, configuration: Configuration) -> str:
    """Format the median of what is known of speed or memory."""
    known = [number for run in configuration.runs if (number := run.perf(name)) is not None]
    return _PERF[name][1](median(known)) if known else NONE


def _trunk_note(run: Run) -> str:
    """Name trunk and step of a fork; empty for any other run."""
    fork = Fork.of(run.summary)
    return "" if fork is None else f"branch of {fork.name}"
