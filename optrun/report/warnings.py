"""Find what a reader must know before quoting a comparison."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from optrun.formatting import rate
from optrun.report.basin import COARSE
from optrun.report.branches import ADVICE, fork_of, shared_luck
from optrun.report.collect import NOT_STARTED, Run
from optrun.report.findings import Findings
from optrun.report.selection import configurations, find_selection
from optrun.report.statistics import ALPHA, MIN_SEEDS

_ALIKE = 1.4
"""So much may runs of one configuration differ in speed before their times say nothing."""
_TELLING_SECONDS = 10.0
"""A shorter run is slow or quick by how it started; its speed says nothing of the machine."""


@dataclass(frozen=True)
class Warning:
    """One reason for care."""

    kind: str
    """One of edge, coarse, single-lr, budget, tuning, seeds, few-seeds, schedule, unfinished, not-started, diverged,
    failed, repeated, task, data, code, hardware, speed, metric, files, trunk."""
    text: str
    """One or two sentences with what to do."""
    runs: tuple[str, ...] = ()
    """Labels of the runs it is about, as far as it is about some."""


CONFIRM = ", or run the chosen ones on fresh seeds with optrun confirm"
"""Advice for what one sweep compared on one workload."""
OF_THE_CHOICE = frozenset({"edge", "coarse", "single-lr", "tuning"})
"""What says how well configurations were chosen: nothing that the runs of a confirmation could have done better."""


def find_warnings(findings: Findings) -> list[Warning]:
    """List every reason for care in a comparison, the gravest first."""
    checks: tuple[Callable[[Findings], Iterable[Warning]], ...] = (
        _edge, _budget, _schedule, _task, _data, _code, _trunk, _seeds, _diverged, _failed, _unfinished, _not_started,
        _single_lr, _tuning, _repeated, _metric, _hardware, _speed, _files,
    )  # fmt: skip
    return [warning for check in checks for warning in check(findings)]


def _edge(findings: Findings) -> Iterable[Warning]:
    """Warn where the best lr has no result close by on both sides: it may be the best of a bad grid."""
    for row in findings.rows if "lr" in findings.tuned_keys else ():
        for side in row.basin.neighbours():
            assert row.basin.best is not None
            best = row.basin.best.lr
            if side.unfinished:
                listed = _listed([rate(lr) for lr in side.unfinished])
                yield Warning(
                    "edge",
                    f"{row.name}: lr {listed}, next to its best lr {rate(best)}, did not finish, so its true best may "
                    "lie there. Bring that to its end first.",
                )
            elif side.lr is None:
                further = rate(best * 2 if side.end == "highest" else best / 2)
                yield Warning(
                    "edge",
                    f"{row.name}: its best lr {rate(best)} is the {side.end} of {len(row.basin.tried)} tried, so its "
                    f"true best may lie outside the grid. Extend the grid, for instance with lr={further}.",
                )
            elif max(best / side.lr, side.lr / best) > COARSE:
                gone = " and diverged" if side.lr in row.basin.diverged else ""
                factor = max(best / side.lr, side.lr / best)
                yield Warning(
                    "coarse",
                    f"{row.name}: next to its best lr {rate(best)} stands {rate(side.lr)}, ×{factor:.3g} away{gone}, "
                    "so its true best may lie in between. Fill the gap, for instance with "
                    f"lr={rate(math.sqrt(best * side.lr))}.",
                )


def _budget(findings: Findings) -> Iterable[Warning]:
    rows = [row for row in findings.rows if row.rank]
    samples = {row.name: _first(row.arm.runs, lambda run: run.samples) for row in rows}
    steps = {row.name: _first(row.arm.runs, lambda run: run.max_steps) for row in rows}
    budgets, unit = (samples, "training examples") if all(samples.values()) else (steps, "optimizer steps")
    if len({value for value in budgets.values() if value is not None}) > 1:
        listed = "; ".join(f"{name} {value:,}" for name, value in budgets.items() if value is not None)
        yield Warning(
            "budget", f"Unequal budgets in {unit}: {listed}. A longer run may be better for that reason alone."
        )


def _tuning(findings: Findings) -> Iterable[Warning]:
    if not findings.tuned_keys:
        return
    tried = {row.name: configurations(row, findings) for row in findings.rows}
    if len(set(tried.values())) > 1:
        listed = "; ".join(f"{name} {number}" for name, number in tried.items())
        made = find_selection(findings)
        confirmed = "" if any(map(fork_of, findings.runs)) else CONFIRM
        more = (
            f" Such a report names a difference that is not there in {made.rate_label} of cases: try equally many for "
            f"each{confirmed}."
        )
        yield Warning(
            "tuning",
            f"Unequal tuning, in configurations tried: {listed}. The best of many looks better than the best of few."
            f"{more if made.judged_by_choice and made.rate > ALPHA else ''}",
        )


def _single_lr(findings: Findings) -> Iterable[Warning]:
    if len(findings.rows) < 2 or "optimizer.name" not in findings.compared_keys:
        return
    single = [row.name for row in findings.rows if row.rank and len(row.basin.tried) == 1]
    if single:
        yield Warning(
            "single-lr",
            f"Only one lr was tried for {_listed(single)}. Optimizers need different learning rates: sweep lr for "
            "each.",
        )


def _seeds(findings: Findings) -> Iterable[Warning]:
    rows = [row for row in findings.rows if row.rank]
    if len(rows) < 2:
        return
    seeds = {row.name: tuple(sorted(row.arm.scores)) for row in rows}
    if len(set(seeds.values())) > 1:
        listed = "; ".join(f"{name} {_numbers(values)}" for name, values in seeds.items())
        yield Warning("seeds", f"Unequal seeds: {listed}. Tests use only the seeds that both sides share.")
    few = [
        row.name
        for row in rows
        if len(row.arm.scores) < MIN_SEEDS or (row.versus is not None and row.versus.pairs < MIN_SEEDS)
    ]
    if few:
        branched = any(fork_of(run) for row in rows for run in row.arm.runs)
        more = f"For more seeds {ADVICE}." if branched else "Run the best configurations again with seed=0,1,2,3,4."
        yield Warning(
            "few-seeds",
            f"Fewer than {MIN_SEEDS} seeds, or fewer shared with the reference, for {_listed(few)}: differences may be "
            f"chance, and no test is made. {more}",
        )


def _trunk(findings: Findings) -> Iterable[Warning]:
    text = shared_luck(_ranked_runs(findings))
    if text:
        yield Warning("trunk", text)


def _schedule(findings: Findings) -> Iterable[Warning]:
    early = [
        run
        for row in findings.rows
        for run in row.arm.runs
        if not run.diverged and run.max_steps and 0 < run.global_step < run.max_steps
    ]
    if early:
        listed = "; ".join(f"{run.label} at step {run.global_step:,} of {run.max_steps:,}" for run in early[:4])
        more = f"; and {len(early) - 4} more" if len(early) > 4 else ""
        yield Warning(
            "schedule",
            f"Compared before the schedule ended: {listed}{more}. The lr has not come down yet, so these curves say "
            "little about the end.",
            tuple(run.label for run in early),
        )


def _unfinished(findings: Findings) -> Iterable[Warning]:
    runs = [run for run in findings.runs if run.status in ("running", "interrupted", "unknown") and not run.diverged]
    yield from _about("unfinished", runs, "{count} not finished and so not ranked: {runs}.")


def _not_started(findings: Findings) -> Iterable[Warning]:
    runs = [run for run in findings.runs if run.status == NOT_STARTED]
    text = "{count} of the sweep not started; the same command in the same hydra.sweep.dir begins them: {runs}."
    yield from _about("not-started", runs, text)


def _diverged(findings: Findings) -> Iterable[Warning]:
    runs = [run for run in findings.runs if run.diverged]
    reason = f" ({runs[0].diverged})" if len(runs) == 1 else ""
    yield from _about("diverged", runs, "{count} diverged{reason} and so have no score: {runs}.", reason=reason)


def _failed(findings: Findings) -> Iterable[Warning]:
    runs = [run for run in findings.runs if run.status == "failed" and not run.diverged]
    reason = f" First message: {runs[0].message}" if runs and runs[0].message else ""
    yield from _about("failed", runs, "{count} failed: {runs}.{reason}", reason=reason)


def _repeated(findings: Findings) -> Iterable[Warning]:
    runs = [run for arm in findings.arms for run in arm.repeated]
    text = "{count} repeated later with the same configuration and seed; the later one counts: {runs}."
    yield from _about("repeated", runs, text)


def _task(findings: Findings) -> Iterable[Warning]:
    tasks = _values(_ranked_runs(findings), lambda run: run.config.get("task.name"))
    if len(tasks) > 1:
        yield Warning("task", f"Different tasks ({_listed(tasks)}): their numbers cannot be compared.")


def _data(findings: Findings) -> Iterable[Warning]:
    by_seed: dict[int | None, list[Run]] = {}
    for run in _ranked_runs(findings):
        by_seed.setdefault(run.seed, []).append(run)
    # A split that is cut with the seed differs between seeds by design; it must not differ within one.
    if any(len(_values(runs, lambda run: _section(run, "data", "fingerprint"))) > 1 for runs in by_seed.values()):
        yield Warning("data", "The data differ between runs (other fingerprints): differences may come from the data.")


def _code(findings: Findings) -> Iterable[Warning]:
    runs = _ranked_runs(findings)
    differing = []
    for name in ("optrun", "torch", "transformers"):
        found = _values(runs, lambda run, name=name: _section(run, "versions", name))  # type: ignore[misc]
        if len(found) > 1:
            differing.append(f"{name} {_listed(found)}")
    commits = _values(runs, lambda run: _section(run, "git", "commit"))
    if len(commits) > 1:
        differing.append(f"commits {_listed([commit[:10] for commit in commits])}")
    if len(_values(runs, lambda run: _section(run, "git", "dirty"))) > 1:
        differing.append("some ran with uncommitted changes")
    if differing:
        yield Warning("code", f"Different code versions: {'; '.join(differing)}.")


def _hardware(findings: Findings) -> Iterable[Warning]:
    kinds = _values(_ranked_runs(findings), lambda run: repr(run.summary.get("hardware")))
    if len(kinds) > 1:
        yield Warning("hardware", "The runs ran on different hardware: wall time and throughput cannot be compared.")


def _speed(findings: Findings) -> Iterable[Warning]:
    worst, slowest = 1.0, None
    for arm in findings.arms:
        long = [run for run in arm.runs if run.finished and (run.wall_seconds or 0.0) >= _TELLING_SECONDS]
        speeds = [speed for run in long if (speed := run.perf("tokens_per_second"))]
        ratio = max(speeds) / min(speeds) if speeds else 1.0
        if ratio > max(worst, _ALIKE):
            worst, slowest = ratio, arm
    if slowest is not None:
        yield Warning(
            "speed",
            f"Runs alike but for the seed differ in speed, those of {slowest.label or 'one configuration'} by a factor "
            f"of {worst:.1f}. Something else may have used the machine, or they ran side by side: wall times and times "
            "to target cannot be compared.",
        )


def _metric(findings: Findings) -> Iterable[Warning]:
    lacking = [run for run in findings.runs if run.finished and not run.diverged and run.last(findings.metric) is None]
    yield from _about("metric", lacking, "{count} finished without {metric}: {runs}.", metric=findings.metric)


def _files(findings: Findings) -> Iterable[Warning]:
    broken = [run for run in findings.runs if run.problems]
    if broken:
        listed = "; ".join(f"{run.label}: {', '.join(run.problems)}" for run in broken[:3])
        more = f"; and {len(broken) - 3} more" if len(broken) > 3 else ""
        yield Warning("files", f"Incomplete files: {listed}{more}.", tuple(run.label for run in broken))


def _ranked_runs(findings: Findings) -> list[Run]:
    """Runs whose score stands in the ranking."""
    return [run for row in findings.rows for run in row.arm.runs if run.score(findings.metric) is not None]


def _values(runs: Iterable[Run], get: Callable[[Run], object]) -> list[str]:
    """Distinct known values, sorted."""
    return sorted({str(value) for run in runs if (value := get(run)) is not None})


def _section(run: Run, section: str, name: str) -> Any:
    value = run.summary.get(section)
    return value.get(name) if isinstance(value, dict) else None


def _first(runs: Sequence[Run], get: Callable[[Run], int | None]) -> int | None:
    return next((value for run in runs if (value := get(run)) is not None), None)


def _about(kind: str, runs: Sequence[Run], text: str, **details: str) -> Iterable[Warning]:
    """Warn about some runs, if there are any; `text` may hold {count}, {runs} and details."""
    if runs:
        labels = tuple(run.label for run in runs)
        count = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
        yield Warning(kind, text.format(count=count, runs=_listed(labels), **details), labels)


def _listed(names: Sequence[str], limit: int = 5) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def _numbers(values: Sequence[int]) -> str:
    return "{" + ", ".join(str(value) for value in values[:8]) + (", …" if len(values) > 8 else "") + "}"
