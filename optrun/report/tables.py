"""Tabulate findings, and render tables for the terminal, as Markdown and as CSV."""

from __future__ import annotations

import csv
import io
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from optrun.formatting import count, csv_cell, duration, plain, size
from optrun.report import branches
from optrun.report.arms import Arm, describe
from optrun.report.collect import Run
from optrun.report.findings import Findings, Row
from optrun.report.paths import shortened
from optrun.report.statistics import BETTER, NO_DIFFERENCE, REFERENCE, WORSE
from optrun.report.table import NONE, Table, value
from optrun.report.targets import first_reached

CSV_MARK = "optrun_report"
"""Name of the last CSV column: by it an earlier report is told from a person's own file."""


def ranking_table(findings: Findings) -> Table:
    """Tabulate result and verdict, one row per contender."""
    tuned = bool(findings.tuned_keys)
    unit = findings.metric
    head = ["#", "contender", *(["best with"] if tuned else []), f"{unit} (mean ± sd)", "verdict", "seeds"]
    tail = ["95 % interval", "difference", "p (Holm)", "effect g"]
    table = Table(head + tail, [True, False, *([False] if tuned else []), True, False, *[True] * 5])
    for row in findings.rows:
        against = row.versus
        tested = against is not None and not math.isnan(against.p_corrected)
        cells = [str(row.rank or NONE), row.name]
        if tuned:
            cells.append(describe(_tuned(row, findings)) or NONE)
        cells += [mean_sd(row.arm), verdict(row), seeds(row.arm), interval(*row.interval)]
        if against is not None and tested:
            cells += [f"{signed(against.difference)} [{signed(against.low)}, {signed(against.high)}]"]
            cells += [p_value(against.p_corrected), signed(against.effect, 2)]
        else:
            known = against is not None and against.verdict != REFERENCE and not math.isnan(against.difference)
            cells += [signed(against.difference) if against and known else NONE, NONE, NONE]
        table.rows.append(cells)
        table.styles.append(row_style(row))
    return table


def speed_table(findings: Findings) -> Table:
    """Tabulate speed and memory of the chosen configurations, and sensitivity to lr, one row per contender."""
    columns = ["contender", "wall time", "tokens/s", "peak memory", "optimizer state", "diverged"]
    columns.append(f"lr basin{at_least(findings.level.value, findings.mode)}")
    table = Table(columns, [False, *[True] * 6])
    for row in findings.rows:
        runs = row.arm.runs
        everything = [run for arm in row.contender.arms for run in arm.runs]
        bad = sum(bool(run.diverged) for run in everything)
        table.rows.append(
            [
                row.name,
                _middle([run.wall_seconds for run in runs if run.finished], duration),
                _middle([run.perf("tokens_per_second") for run in runs], lambda value: f"{value:,.0f}"),
                _middle([run.perf("peak_memory_bytes") for run in runs], size),
                _middle([run.perf("optimizer_state_bytes") for run in runs], size),
                f"{bad} of {len(everything)}" if bad else "0",
                row.basin.width_label(),
            ]
        )
        table.styles.append("best" if row.rank == 1 else "" if row.rank else "muted")
    return table


def target_table(findings: Findings) -> Table:
    """Tabulate when the chosen configurations reached the target, one row per contender."""
    columns = ["contender", f"reached{at_least(findings.target, findings.mode)}", "steps to target"]
    columns += ["tokens to target", "time to target"]
    table = Table(columns, [False, *[True] * 4])
    for row in findings.rows:
        found = row.target
        medians = [to_target(found.steps, lambda steps: f"{steps:,.0f}"), to_target(found.tokens, _whole)]
        table.rows.append([row.name, found.share if found.runs else NONE, *medians, to_target(found.seconds, duration)])
        table.styles.append(row_style(row))
    return table


def _whole(tokens: float) -> str:
    return count(round(tokens))


def at_least(level: float, mode: str) -> str:
    """Format a level as what has to be reached, in brackets; nothing where there is none."""
    return "" if math.isnan(level) else f" ({'≤' if mode == 'min' else '≥'} {value(level)})"


def to_target(median: float, show: Callable[[float], str]) -> str:
    """Format a median up to the target: infinite where half of the runs never reach it."""
    return NONE if math.isnan(median) else "never" if math.isinf(median) else show(median)


def arms_table(findings: Findings) -> Table:
    """Tabulate every configuration, best first."""
    columns = ["configuration", f"{findings.metric} (mean ± sd)", "95 % interval", "seeds", "states"]
    table = Table(columns, [False, True, True, True, False])
    chosen = {id(row.arm) for row in findings.rows if row.rank}
    for arm in findings.ranked_arms():
        score = [mean_sd(arm), interval(*findings.intervals[id(arm)]), seeds(arm)]
        table.rows.append([arm.label or NONE, *score, states(arm.runs)])
        table.styles.append("best" if id(arm) in chosen else "" if arm.scores else "muted")
    return table


def runs_table(runs: Sequence[Run], keys: Sequence[str], metric: str, mode: str) -> Table:
    """Tabulate every run as its files tell it."""
    columns = ["run", "settings", "seed", "status", "step", f"last {metric}", "best", "at step", "wall time", "note"]
    table = Table(columns, [False, False, True, False, True, True, True, True, True, False])
    pinned = any(run.device for run in runs)
    if pinned:
        table.columns.insert(-1, "device")
        table.numeric.insert(-1, False)
    short = {key: shortened([run.config[key] for run in runs if key in run.config]) for key in keys}
    for run in runs:
        last, best = run.last(metric), run.best(metric, mode)
        found = {key: run.config[key] for key in keys if key in run.config}
        settings = {key: short[key].get(value, value) for key, value in found.items()}
        limit = f" / {run.max_steps:,}" if run.max_steps and run.global_step < run.max_steps else ""
        note = run.diverged or run.message or "; ".join(run.problems) or branches.note(run)
        table.rows.append(
            [
                run.label,
                describe(settings) or NONE,
                NONE if run.seed is None else str(run.seed),
                "diverged" if run.diverged and run.status != "failed" else run.status,
                f"{run.global_step:,}{limit}",
                NONE if last is None else value(last),
                NONE if best is None else value(best[0]),
                NONE if best is None else f"{best[1]:,}",
                NONE if run.wall_seconds is None else duration(run.wall_seconds),
                *([run.device or NONE] if pinned else []),
                note,
            ]
        )
        bad = run.diverged or run.status == "failed"
        table.styles.append("worse" if bad else "" if run.finished else "muted")
    return table


def run_facts(run: Run, metric: str, mode: str, *, target: float | None = None) -> Table:
    """Tabulate one run: a name and a value each; when it reached the target, where a person set one."""
    table = Table(["", ""], [False, False])
    best = run.best(metric, mode)
    chosen: list[str] = ["model.name", "data.name", "optimizer.name", "lr"]
    settings = {key: run.config[key] for key in chosen if key in run.config}
    limit = f" of {run.max_steps:,}" if run.max_steps else ""
    facts: list[tuple[str, str | None]] = [
        ("run", str(run.path)),
        ("settings", describe(settings)),
        ("status", f"{run.status}: {run.message}" if run.message else run.status),
        ("diverged", run.diverged or None),
        ("steps", f"{run.global_step:,}{limit}"),
        *branches.facts(run),
    ]
    names = [name for name in run.log.names() if name.startswith("eval/")]
    for name in [metric, *[name for name in names if name != metric]][:8]:
        last = run.last(name)
        if last is not None:
            more = f"   (best {value(best[0])} at step {best[1]:,})" if name == metric and best else ""
            facts.append((name, value(last) + more))
    if target is not None:
        found = first_reached(run, metric, mode, target)
        told = "not reached" if found is None else f"at step {found[0]:,.0f}, after {to_target(found[1], duration)}"
        facts.append((f"{metric}{at_least(target, mode)}", told))
    loss = run.last("train/loss")
    facts += [
        ("train/loss", None if loss is None else value(loss)),
        ("wall time", None if run.wall_seconds is None else duration(run.wall_seconds)),
        ("device", run.device or None),
        ("tokens per second", _middle([run.perf("tokens_per_second")], lambda number: f"{number:,.0f}")),
        ("peak memory", _middle([run.perf("peak_memory_bytes")], size)),
        ("optimizer state", _middle([run.perf("optimizer_state_bytes")], size)),
    ]
    table.rows = [[name, plain(text)] for name, text in facts if text and text != NONE]
    table.styles = [""] * len(table.rows)
    return table


def terminal_table(findings: Findings) -> Table:
    """Reduce the ranking to the columns that fit a terminal."""
    full, speed = ranking_table(findings), speed_table(findings)
    tuned = bool(findings.tuned_keys)
    keep = list(range(5 + tuned))  # up to the seeds
    table = Table([full.columns[index] for index in keep], [full.numeric[index] for index in keep])
    table.columns += ["steps to target", "wall time", "state"]
    table.numeric += [True] * 3
    for row, extra, source in zip(full.rows, speed.rows, findings.rows, strict=True):
        cells = [row[index] for index in keep]
        cells[3 + tuned] = verdict(source, short=True)
        found = source.target
        reached = to_target(found.steps, lambda steps: f"{steps:,.0f}")
        reached += "" if found.reached == found.runs else f" ({found.share})"
        table.rows.append([*cells, reached, extra[1], extra[4]])
    table.styles = full.styles
    return table


def runs_csv(findings: Findings) -> str:
    """Write every run as one line of CSV; the last column marks the file as a report's."""
    rank: dict[int, tuple[int | None, str]] = {}
    for row in findings.rows:
        for arm in row.contender.arms:
            for run in arm.runs:
                rank[id(run)] = (row.rank, row.name)
    fixed = ["run", "status", "diverged", "contender", "rank", "seed", "step", "max_steps"]
    numbers = ["last", "best", "best_step", "score", "wall_seconds"]
    perf = ["tokens_per_second", "samples_per_second", "peak_memory_bytes", "optimizer_state_bytes"]
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    keys = [f"config.{key}" for key in findings.keys]
    named = [f"{name} {findings.metric}" if name in ("last", "best") else name for name in numbers]
    writer.writerow(map(csv_cell, [*fixed, *keys, *named, *perf, "device", "message", "path", CSV_MARK]))
    for run in findings.runs:
        position, contender = rank.get(id(run), (None, ""))
        best = run.best(findings.metric, findings.mode) or (None, None)
        line: list[object] = [
            run.label,
            run.status,
            run.diverged,
            contender,
            position,
            run.seed,
            run.global_step,
            run.max_steps,
        ]
        line += [run.config.get(key) for key in findings.keys]
        line += [run.last(findings.metric), *best, run.score(findings.metric), run.wall_seconds]
        line += [run.perf(name) for name in perf]
        writer.writerow(map(csv_cell, [*line, run.device, run.message, str(run.path), 1]))
    return buffer.getvalue()


def mean_sd(arm: Arm) -> str:
    """Format mean and standard deviation over seeds, with as many decimals."""
    if not arm.scores:
        return NONE
    mean = value(arm.mean)
    if math.isnan(arm.sd):
        return mean
    decimals = len(mean.partition(".")[2])
    return f"{mean} ± {value(arm.sd)}" if "e" in mean or not decimals else f"{mean} ± {arm.sd:.{decimals}f}"


def interval(low: float, high: float) -> str:
    """Format an interval; a dash where there is none."""
    return NONE if math.isnan(low) else f"[{value(low)}, {value(high)}]"


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


def p_value(p: float) -> str:
    """Format a p value."""
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def verdict(row: Row, *, short: bool = False) -> str:
    """Name the verdict; unless short, with the difference that could have been seen where none was."""
    if row.versus is None or row.rank is None:
        return "not ranked"
    if not short and row.versus.verdict == NO_DIFFERENCE and not math.isnan(row.versus.detectable):
        return f"{row.versus.verdict} (could see {value(row.versus.detectable)})"
    return row.versus.verdict


def row_style(row: Row) -> str:
    """Choose the style of a contender's row, by its verdict."""
    if row.rank is None:
        return "muted"
    found = row.versus.verdict if row.versus else ""
    if row.rank == 1:
        return "best"
    return {BETTER: "better", WORSE: "worse"}.get(found, "")


def _tuned(row: Row, findings: Findings) -> dict[str, Any]:
    return {key: row.arm.settings[key] for key in findings.tuned_keys if key in row.arm.settings}


def _middle(numbers: Sequence[float | None], show: Callable[[float], str]) -> str:
    """Format the median of what is known."""
    known = sorted(number for number in numbers if number is not None and math.isfinite(number))
    if not known:
        return NONE
    half = len(known) // 2
    return show(known[half] if len(known) % 2 else (known[half - 1] + known[half]) / 2)
