"""Tabulate findings, and render tables for the terminal, as Markdown and as CSV."""

from __future__ import annotations

import csv
import io
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from statistics import mean, median
from typing import Any, TypeVar

from optrun.base.formatting import csv_cell, duration, plain, rate, size
from optrun.report import branches
from optrun.report.arms import Arm, describe
from optrun.report.collect import NOT_STARTED, Run
from optrun.report.findings import Findings, Row
from optrun.report.milestones import expected_best, first_reached
from optrun.report.paths import shortened
from optrun.report.statistics import Comparison as Compared
from optrun.report.statistics import Verdict
from optrun.report.table import NONE, Table, value
from optrun.report.workloads import Comparison, Workload

CSV_MARK = "optrun_report"
"""Name of the last CSV column: by it an earlier report is told from a person's own file."""


_NO_SCORE = "no score on every workload"
T = TypeVar("T")
Column = tuple[str, bool, Callable[[T], str]]
"""Its name, whether it is set flush right, and the cell of a row."""


def tabulate(rows: Iterable[T], columns: Sequence[Column[T]], style: Callable[[T], str]) -> Table:
    """Lay out rows, a cell for each column."""
    listed = list(rows)
    cells = [[cell(row) for _, _, cell in columns] for row in listed]
    return Table([name for name, _, _ in columns], [right for _, right, _ in columns], cells, [*map(style, listed)])


def ranking_table(findings: Findings) -> Table:
    """Tabulate each contender at its best: what it is, what it came to, and what it cost to find."""
    judged, target = findings.judgement, findings.target
    same = min((len(_tried(row)) for row in findings.ranked), default=0)
    tuned, unequal = findings.tuned_keys, any(len(_tried(row)) > same for row in findings.ranked)
    against = f"difference [{100 * judged.confidence:.3g} %]" if judged else "difference"
    columns: list[tuple[bool, Column[Row]]] = [
        (True, ("#", True, lambda row: str(row.rank or NONE))),
        (True, ("contender", False, lambda row: row.name)),
        (bool(tuned), ("chosen", False, lambda row: describe(_settings(row, tuned)) or NONE)),
        (True, (f"{findings.metric} (mean ± sd)", True, lambda row: mean_sd(row.arm))),
        (True, ("verdict", False, partial(verdict, findings))),
        (True, ("seeds", True, lambda row: seeds(row.arm))),
        (True, (against, True, lambda row: difference(row.versus))),
        (True, ("diverged", True, lambda row: _lost(_runs(row)))),
        (not math.isnan(target), (f"steps to {at_least(target, findings.mode)}", True, _steps_to_target)),
        (bool(tuned) and unequal, (f"expected best of {same}", True, lambda row: _best_of(row, same, findings.mode))),
        (True, ("tried", True, _effort)),
        (True, ("wall time", True, lambda row: _total([run.wall_seconds for run in _runs(row)]))),
    ]
    return tabulate(findings.rows, [column for shown, column in columns if shown], row_style)


def scores_table(comparison: Comparison) -> Table:
    """Tabulate the mean score of each contender over several workloads, and on each of them."""
    judged, scores = comparison.judgement, comparison.scores
    found = judged.comparisons if judged is not None else {}
    columns: list[Column[str]] = [
        ("contender", False, str),
        ("mean score", True, lambda name: _score(scores[name])),
        (
            "verdict",
            False,
            lambda name: judged.words(name) if judged and name in found else _NO_SCORE,
        ),
        ("difference", True, lambda name: difference(found.get(name), 3)),
        *((each.name, True, partial(_score_of, each.scores())) for each in comparison.workloads if not each.left_out),
    ]
    order = dict.fromkeys([*(judged.ranking if judged is not None else ()), *scores])
    return tabulate(order, columns, lambda name: _STYLES.get(found[name].verdict, "") if name in found else "muted")


def workloads_table(comparison: Comparison) -> Table:
    """Tabulate the workloads: what a score of 0 and of 1 is there, who is best, and why one does not count."""
    columns: list[Column[Workload]] = [
        ("workload", False, lambda each: each.name),
        ("metric", False, lambda each: each.findings.metric),
        ("before training (0)", True, lambda each: _known(each.findings.floor)),
        ("best (1)", True, lambda each: _known(each.end)),
        ("best contender", False, lambda each: next((row.name for row in each.findings.ranked), NONE)),
        ("counts", False, lambda each: f"no: {each.left_out}" if each.left_out else "yes"),
    ]
    return tabulate(comparison.workloads, columns, lambda each: "muted" if each.left_out else "")


def speed_table(findings: Findings) -> Table:
    """Tabulate speed and memory of the chosen configurations, and sensitivity to lr, one row per contender."""
    columns: list[Column[Row]] = [
        ("contender", False, lambda row: row.name),
        ("tokens/s", True, lambda row: _middle(row.arm.runs, "tokens_per_second", "{:,.0f}".format)),
        ("peak memory", True, lambda row: _middle(row.arm.runs, "peak_memory_bytes", size)),
        ("optimizer state", True, lambda row: _middle(row.arm.runs, "optimizer_state_bytes", size)),
        (f"lr basin {at_least(findings.level, findings.mode)}", True, lambda row: row.basin.width_label()),
        ("time to target", True, lambda row: to_target(row.target.seconds, duration)),
    ]
    return tabulate(findings.rows, columns, lambda row: "" if row.rank else "muted")


def arms_table(findings: Findings) -> Table:
    """Tabulate every configuration, best first: its settings, a column each, and what it came to."""
    chosen = {id(row.arm) for row in findings.ranked}
    columns: list[Column[Arm]] = [
        *((key, False, partial(_setting, key)) for key in findings.keys),
        (f"{findings.metric} (mean ± sd)", True, mean_sd),
        ("seeds", True, seeds),
        ("states", False, lambda arm: states(arm.runs)),
    ]
    sort = {True: "best", False: ""}
    return tabulate(findings.ranked_arms(), columns, lambda arm: sort[id(arm) in chosen] if arm.scores else "muted")


def runs_table(runs: Sequence[Run], keys: Sequence[str], metric: str, mode: str, *, apart: bool = False) -> Table:
    """Tabulate every run as its files tell it; `apart`: a column for each setting, to filter and group by."""
    short = {key: shortened([run.config[key] for run in runs if key in run.config]) for key in keys}

    def settings(run: Run) -> str:
        found = {key: run.config[key] for key in keys if key in run.config}
        return describe({key: short[key].get(value, value) for key, value in found.items()}) or NONE

    def setting(key: str, run: Run) -> str:
        found = run.config.get(key)
        return _shown(short[key].get(str(found), found))

    def step(run: Run) -> str:
        limit = f" / {run.max_steps:,}" if run.max_steps and run.global_step < run.max_steps else ""
        return f"{run.global_step:,}{limit}"

    def best(run: Run) -> str:
        found = run.best(metric, mode)
        return NONE if found is None else f"{value(found[0])} at {found[1]:,}"

    columns: list[Column[Run]] = [
        ("run", False, lambda run: run.label),
        *([(key, False, partial(setting, key)) for key in keys] if apart else [("settings", False, settings)]),
        ("seed", True, lambda run: NONE if run.seed is None else str(run.seed)),
        ("status", False, lambda run: "diverged" if run.diverged and run.status != "failed" else run.status),
        ("step", True, step),
        (f"last {metric}", True, lambda run: _number(run.last(metric))),
        ("best", True, best),
        ("wall time", True, lambda run: NONE if run.wall_seconds is None else duration(run.wall_seconds)),
        *([("device", False, lambda run: run.device or NONE)] if any(run.device for run in runs) else []),
        ("note", False, lambda run: run.diverged or run.message or "; ".join(run.problems) or branches.note(run)),
    ]
    sort = {True: "", False: "muted"}
    bad = ("failed", "diverged")
    return tabulate(runs, columns, lambda run: "worse" if run.diverged or run.status in bad else sort[run.finished])


def run_facts(run: Run, metric: str, mode: str, *, target: float | None = None) -> Table:
    """Tabulate one run: a name and a value each; when it reached the target, where a person set one."""
    best, names = run.best(metric, mode), [name for name in run.log.names() if name.startswith("eval/")]
    settings: dict[str, Any] = {
        key: run.config[key] for key in ("model.name", "data.name", "optimizer.name", "lr") if key in run.config
    }
    limit = f" of {run.max_steps:,}" if run.max_steps else ""
    facts: list[tuple[str, str | None]] = [
        ("run", str(run.path)),
        ("settings", describe(settings)),
        ("status", f"{run.status}: {run.message}" if run.message else run.status),
        ("diverged", run.diverged),
        ("steps", f"{run.global_step:,}{limit}"),
        *branches.facts(run),
        *((name, _number(run.last(name))) for name in dict.fromkeys([metric, *names][:9])),
        (f"best {metric}", f"{value(best[0])} at step {best[1]:,}" if best else ""),
    ]
    if target is not None:
        found = first_reached(run, metric, mode, target)
        told = "not reached" if found is None else f"at step {found[0]:,.0f}, after {to_target(found[1], duration)}"
        facts.append((f"{metric} {at_least(target, mode)}", told))
    facts += [
        ("train/loss", _number(run.last("train/loss"))),
        ("wall time", "" if run.wall_seconds is None else duration(run.wall_seconds)),
        ("device", run.device),
        ("tokens per second", _middle([run], "tokens_per_second", "{:,.0f}".format)),
        ("peak memory", _middle([run], "peak_memory_bytes", size)),
        ("optimizer state", _middle([run], "optimizer_state_bytes", size)),
    ]
    rows = [[name, plain(text)] for name, text in facts if text and text != NONE]
    return Table(["", ""], [False, False], rows, [""] * len(rows))


def runs_csv(comparison: Comparison) -> str:
    """Write every run as one line of CSV; the last column marks the file as a report's."""
    perf = ("tokens_per_second", "samples_per_second", "peak_memory_bytes", "optimizer_state_bytes")
    lines: list[dict[str, object]] = []
    for each in comparison.workloads:
        found = each.findings
        rank = {id(run): (row.rank, row.name) for row in found.rows for arm in row.contender.arms for run in arm.runs}
        unit = "" if comparison.several else f" {found.metric}"
        for run in found.runs:
            position, contender = rank.get(id(run), (None, ""))
            best = run.best(found.metric, found.mode) or (None, None)
            lines.append(
                {"run": run.label}
                | ({"workload": each.name, "metric": found.metric} if comparison.several else {})
                | {"status": run.status, "diverged": run.diverged, "contender": contender, "rank": position}
                | {"seed": run.seed, "step": run.global_step, "max_steps": run.max_steps}
                | {f"config.{key}": run.config.get(key) for key in found.keys}
                | {f"last{unit}": run.last(found.metric), f"best{unit}": best[0], "best_step": best[1]}
                | {"score": run.score(found.metric), "wall_seconds": run.wall_seconds}
                | {name: run.perf(name) for name in perf}
                | {"device": run.device, "message": run.message, "path": str(run.path)}
            )
    columns = list(dict.fromkeys(key for line in lines for key in line))
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow([*map(csv_cell, columns), CSV_MARK])
    writer.writerows([*(csv_cell(line.get(key)) for key in columns), 1] for line in lines)
    return buffer.getvalue()


def _steps_to_target(row: Row) -> str:
    reached = to_target(row.target.steps, "{:,.0f}".format)
    return (
        reached if row.target.reached == row.target.runs else f"{reached} ({row.target.reached} of {row.target.runs})"
    )


def _tried(row: Row) -> list[float]:
    """List the means of a contender's configurations that came to an outcome."""
    return [arm.mean for arm in row.contender.arms if arm.scores]


def _best_of(row: Row, number: int, mode: str) -> str:
    return _known(expected_best(_tried(row), number, mode))


def _runs(row: Row) -> list[Run]:
    return [run for arm in row.contender.arms for run in arm.runs if run.status != NOT_STARTED]


def _lost(runs: Sequence[Run]) -> str:
    lost = sum(bool(run.diverged) for run in runs)
    return f"{lost} of {len(runs)}" if lost else "0"


def _effort(row: Row) -> str:
    runs = _runs(row)
    configurations = sum(any(run in runs for run in arm.runs) for arm in row.contender.arms)
    return f"{configurations} in {len(runs)} run{'s' * (len(runs) != 1)}"


def _total(seconds: Sequence[float | None]) -> str:
    known = [each for each in seconds if each is not None]
    return NONE if not known else f"{'≥ ' if len(known) < len(seconds) else ''}{duration(sum(known))}"


def _score(scores: Mapping[int, float]) -> str:
    return f"{mean(scores.values()):.3f}" if scores else NONE


def _score_of(scores: Mapping[str, Mapping[int, float]], name: str) -> str:
    return _score(scores.get(name, {}))


def _shown(setting: object) -> str:
    return NONE if setting is None else rate(setting) if isinstance(setting, float) else plain(str(setting))


def _setting(key: str, arm: Arm) -> str:
    return _shown(arm.settings.get(key))


def _settings(row: Row, keys: Sequence[str]) -> dict[str, Any]:
    return {key: row.arm.settings[key] for key in keys if key in row.arm.settings}


def _number(number: float | None) -> str:
    return NONE if number is None else value(number)


def _known(number: float) -> str:
    return NONE if math.isnan(number) else value(number)


def at_least(level: float, mode: str) -> str:
    """Format a level as what has to be reached; nothing where there is none."""
    return "" if math.isnan(level) else f"{'≤' if mode == 'min' else '≥'} {value(level)}"


def to_target(steps: float, show: Callable[[float], str]) -> str:
    """Format a median up to the target: infinite where half of the runs never reach it."""
    return NONE if math.isnan(steps) else "never" if math.isinf(steps) else show(steps)


def mean_sd(arm: Arm) -> str:
    """Format mean and standard deviation over seeds, with as many decimals."""
    if not arm.scores:
        return NONE
    mean = value(arm.mean)
    if math.isnan(arm.sd):
        return mean
    decimals = len(mean.partition(".")[2])
    return f"{mean} ± {value(arm.sd)}" if "e" in mean or not decimals else f"{mean} ± {arm.sd:.{decimals}f}"


def states(runs: Sequence[Run]) -> str:
    """Count runs by how they ended."""
    counted = Counter("diverged" if run.diverged else run.status for run in runs)
    return ", ".join(f"{number} {state}" for state, number in counted.items())


def seeds(arm: Arm) -> str:
    """Say how many seeds have a score, and of how many."""
    return str(len(arm.scores)) if len(arm.scores) == len(arm.runs) else f"{len(arm.scores)} of {len(arm.runs)}"


def signed(number: float, digits: int = 4) -> str:
    """Format a number with its sign, a true minus among them."""
    if math.isnan(number):
        return NONE
    return f"{number:+.{digits}f}".replace("-", "−")


def difference(versus: Compared | None, digits: int = 4) -> str:
    """Format the difference to the reference, with its interval where there is one."""
    if versus is None or versus.name == versus.reference or math.isnan(versus.difference):
        return NONE
    if math.isnan(versus.low):
        return signed(versus.difference, digits)
    return f"{signed(versus.difference, digits)} [{signed(versus.low, digits)}, {signed(versus.high, digits)}]"


def verdict(findings: Findings, row: Row) -> str:
    """Name the verdict on a contender, and who rules it out where that is not the one it is shown against."""
    found = row.versus
    if found is None or row.rank is None or findings.judgement is None:
        return "not ranked"
    words = findings.judgement.words(row.name)
    return f"{words}, by {found.by}" if found.by not in ("", found.reference) else words


_STYLES = {
    Verdict.could_be_best: "best", Verdict.better: "better", Verdict.ruled_out: "worse", Verdict.worse: "worse",
}  # fmt: skip


def row_style(row: Row) -> str:
    """Choose the style of a contender's row, by its verdict."""
    return "muted" if row.rank is None or row.versus is None else _STYLES.get(row.versus.verdict, "")


def _middle(runs: Sequence[Run], name: str, show: Callable[[float], str]) -> str:
    """Format the median of what is known."""
    known = [number for run in runs if (number := run.perf(name)) is not None]
    return show(median(known)) if known else NONE
