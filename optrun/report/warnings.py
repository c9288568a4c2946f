"""Find what a reader must know before quoting a comparison.

The texts stand in `templates/warnings.txt`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from optrun.artifacts.forks import MORE_TRUNKS
from optrun.base.formatting import list_names, plural, rate
from optrun.report.configurations import LrCurve
from optrun.report.findings import Findings, forks_of
from optrun.report.runs import NOT_STARTED, Run
from optrun.report.statistics import MIN_SEEDS
from optrun.report.table import format_metric
from optrun.report.templating import fill_text
from optrun.report.verdict import is_chance, next_lr

_COARSE = 5.0
"""A grid whose values beside the best lr are further apart than this factor may have missed the
best between them.
"""
_KINDS = (
    "edge",
    "coarse",
    "budget",
    "schedule",
    "task",
    "data",
    "code",
    "trunk",
    "seeds",
    "few-seeds",
    "diverged",
    "failed",
    "unfinished",
    "not-started",
    "single-lr",
    "tuning",
    "repeated",
    "metric",
    "files",
)
"""The gravest first."""


@dataclass(frozen=True)
class RunWarning:
    """One warning of a report."""

    kind: str
    """Of `_KINDS`."""
    text: str
    """One or two sentences with what to do."""


OF_THE_CHOICE = frozenset({"edge", "coarse", "single-lr", "tuning"})
"""What says how well configurations were chosen: nothing that the runs of a confirmation could have
done better."""


def find_warnings(findings: Findings) -> list[RunWarning]:
    """List the warnings of a comparison, most serious first."""
    warnings = [
        *_edges(findings),
        *_unlike(findings),
        *_seeds(findings),
        *_unfinished_runs(findings),
        *_doubtful_runs(findings),
        *_versions(findings),
    ]
    return sorted(warnings, key=lambda warning: _KINDS.index(warning.kind))


def _warn(kind: str, of: Sequence[Run] = (), /, **details: object) -> RunWarning:
    """Fill the text of a warning.

    Args:
        kind: One of `_KINDS`.
        of: The runs it is about.
        details: What else its template needs.
    """
    labels = [run.label for run in of]
    count = plural(len(labels), "run")
    text = fill_text("warnings.txt", kind=kind, count=count, runs=list_names(labels, 5), **details)
    return RunWarning(kind, text)


def _unequal(kind: str, of: Mapping[str, object], /, **details: object) -> Iterable[RunWarning]:
    """Yield a warning if contenders have different known values."""
    texts = {}
    for name, value in of.items():
        if value is not None:
            texts[name] = f"{value:,}" if isinstance(value, int) else str(value)
    if len(set(texts.values())) > 1:
        values_by_name = "; ".join(f"{name} {text}" for name, text in texts.items())
        yield _warn(kind, listed=values_by_name, **details)


def _edges(findings: Findings) -> Iterable[RunWarning]:
    """Warn if a best lr lacks a tried lr nearby on either side.

    Nothing if the runs do not differ in lr. Left out are contenders with fewer than two tried lrs,
    and those whose best lr is chance, see `is_chance`.
    """
    if "lr" not in findings.tuned_keys:
        return
    for row in findings.rows:
        best = row.lr_curve.best
        if best is None or len(row.lr_curve.tried_lrs) < 2:
            continue
        if not is_chance(row, findings):
            further = next_lr(row, findings)
            # With lr among the tuned keys every run has one; 0.0 is for the type checker.
            yield from _edges_of_curve(row.name, best.lr or 0.0, row.lr_curve, further)


def _edges_of_curve(
    name: str, best: float, curve: LrCurve, further: float | None
) -> Iterable[RunWarning]:
    """Warn if the best lr of a contender is the lowest or highest, or far from its neighbours.

    Args:
        name: Name of the contender.
        best: Its best lr.
        curve: Its metric against lr.
        further: The lr to try beyond the edge; None: nothing suggests that it would be better.
    """
    for end, lr in zip(("lowest", "highest"), curve.beside(), strict=True):
        if lr is None:
            if further is not None:
                tried = len(curve.finished_lrs)
                yield _warn(
                    "edge", name=name, best=rate(best), end=end, tried=tried, try_lr=rate(further)
                )
            continue
        factor = max(best / lr, lr / best)
        if factor > _COARSE:
            yield _warn(
                "coarse",
                name=name,
                best=rate(best),
                beside=rate(lr),
                gone=lr in curve.diverged,
                factor=f"{factor:.3g}",
                try_lr=rate(float(f"{math.sqrt(best * lr):.1g}")),
            )


def _unlike(findings: Findings) -> Iterable[RunWarning]:
    """Warn if contenders were not tuned alike, or did not run equally long.

    Tuned alike: equally many configurations with a score, and more than one lr for each
    optimizer. Equally long: in training examples if all are known, else in optimizer steps.
    """
    rows = findings.ranked
    compared = findings.compared_keys
    if findings.tuned_keys:
        tried = {}
        for row in rows:
            tried[row.name] = sum(
                bool(configuration.scores) for configuration in row.configurations
            )
        yield from _unequal("tuning", tried)
    if len(findings.rows) > 1 and "optimizer.name" in compared and "lr" not in compared:
        single = [row.name for row in rows if len(row.lr_curve.finished_lrs) == 1]
        if single:
            yield _warn("single-lr", listed=list_names(single, 5))
    samples = {row.name: _first(run.samples for run in row.configuration.runs) for row in rows}
    steps = {row.name: _first(run.max_steps for run in row.configuration.runs) for row in rows}
    if all(samples.values()):
        yield from _unequal("budget", samples, unit="training examples")
    else:
        yield from _unequal("budget", steps, unit="optimizer steps")


def _first(values: Iterable[int | None]) -> int | None:
    """Return the first known value."""
    return next((value for value in values if value is not None), None)


def _seeds(findings: Findings) -> Iterable[RunWarning]:
    """Warn if ranked contenders have too few seeds, or share too few."""
    rows = findings.ranked
    if len(rows) < 2:
        return
    seeds = {row.name: _write_set(sorted(row.configuration.scores)) for row in rows}
    yield from _unequal("seeds", seeds)
    few = [
        row.name for row in rows if row.comparison is not None and row.comparison.seeds < MIN_SEEDS
    ]
    for row in rows:
        if row.name not in few and len(row.configuration.scores) < MIN_SEEDS:
            few.append(row.name)
    if few:
        more = ""
        if forks_of(findings.runs):
            more = f" For more seeds {MORE_TRUNKS}."
        yield _warn("few-seeds", least=MIN_SEEDS, listed=list_names(few, 5), more=more)


def _versions(findings: Findings) -> Iterable[RunWarning]:
    """Warn if runs with a score differ in task, data or code, or fork from one trunk.

    Data differ if two runs of one seed have different fingerprints.
    """
    runs: list[Run] = []
    for row in findings.rows:
        members = row.configuration.runs
        runs += [run for run in members if run.score(findings.metric) is not None]
    luck = _shared_luck(runs)
    if luck:
        yield _warn("trunk", text=luck)
    tasks = _distinct(run.config.get("task.name") for run in runs)
    if len(tasks) > 1:
        yield _warn("task", listed=list_names(tasks, 5))
    fingerprints = {(run.seed, run.at("data", "fingerprint")) for run in runs}
    seed_fingerprints = {(seed, str(mark)) for seed, mark in fingerprints if mark is not None}
    # A split that is cut with the seed differs between seeds by design, never within one.
    if len(seed_fingerprints) > len({seed for seed, _ in seed_fingerprints}):
        yield _warn("data")
    differing = list(_different_code(runs))
    if differing:
        yield _warn("code", listed="; ".join(differing))


def _different_code(runs: Sequence[Run]) -> Iterable[str]:
    """Yield each version and code digest with several values among runs."""
    version_keys = [("versions", name, name) for name in ("optrun", "torch", "transformers")]
    files: set[str] = set()
    for run in runs:
        code = run.summary.get("code")
        files |= {str(name) for name in code} if isinstance(code, Mapping) else set()
    version_keys += [("code", name, f"code of {name}") for name in sorted(files)]
    for section, name, title in version_keys:
        values = _distinct(run.at(section, name) for run in runs)
        if len(values) > 1:
            yield f"{title} {list_names([value[:10] for value in values], 5)}"


def _unfinished_runs(findings: Findings) -> Iterable[RunWarning]:
    """Yield one warning each for diverged, failed, stopped and waiting runs.

    A run that diverged counts as nothing else. The reason is told of a single diverged run, and
    of the first failed one.
    """
    runs = findings.runs
    diverged = [run for run in runs if run.diverged]
    not_diverged = [run for run in runs if not run.diverged]
    if diverged:
        reason = diverged[0].diverged if len(diverged) == 1 else ""
        yield _warn("diverged", diverged, reason=reason, worst=_score_of_diverged(findings))
    failed = [run for run in not_diverged if run.status == "failed"]
    if failed:
        yield _warn("failed", failed, message=failed[0].message)
    unfinished = [
        run for run in not_diverged if run.status in ("running", "interrupted", "unknown")
    ]
    if unfinished:
        yield _warn("unfinished", unfinished)
    waiting = [run for run in runs if run.status == NOT_STARTED]
    if waiting:
        yield _warn("not-started", waiting)


def _doubtful_runs(findings: Findings) -> Iterable[RunWarning]:
    """Yield one warning per doubt about the result of runs.

    These are: repeated with the same seed; finished without the metric; ended before their
    schedule; files missing or torn.
    """
    repeated: list[Run] = []
    for configuration in findings.configurations:
        repeated += configuration.repeated
    if repeated:
        yield _warn("repeated", repeated)
    finished = [run for run in findings.runs if run.finished and not run.diverged]
    unscored = [run for run in finished if run.score(findings.metric) is None]
    if unscored:
        yield _warn("metric", unscored, metric=findings.metric)
    early: list[Run] = []
    for row in findings.rows:
        early += [run for run in row.configuration.runs if _ended_early(run)]
    if early:
        steps = [f"{run.label} at step {run.global_step:,} of {run.max_steps:,}" for run in early]
        yield _warn("schedule", early, early=list_names(steps, 4))
    broken = [run for run in findings.runs if run.problems]
    if broken:
        problems = [f"{run.label}: {', '.join(run.problems)}" for run in broken]
        yield _warn("files", broken, broken=list_names(problems, 3))


def _ended_early(run: Run) -> bool:
    """Tell whether a run stopped before its schedule did."""
    return not run.diverged and bool(run.max_steps) and 0 < run.global_step < (run.max_steps or 0)


def _score_of_diverged(findings: Findings) -> str:
    """Write the stand-in score of diverged runs; empty if none is ranked."""
    for configuration in findings.configurations:
        for seed in configuration.diverged_seeds:
            return format_metric(configuration.scores[seed])
    return ""


def _distinct(values: Iterable[object]) -> list[str]:
    """Sort the different known values."""
    return sorted({str(value) for value in values if value is not None})


def _write_set(numbers: Sequence[int]) -> str:
    """Write at most eight numbers as a set."""
    texts = [str(number) for number in numbers[:8]]
    if len(numbers) > 8:
        texts.append("…")
    return f"{{{', '.join(texts)}}}"


def _shared_luck(runs: Iterable[Run]) -> str:
    """Name the ranked forks of a common trunk; else empty. They count as one seed."""
    forks = forks_of(runs).values()
    trunks = {fork.trunk: fork.name for fork in forks}
    if len(forks) < 2 or len(trunks) > 1:
        return ""
    return (
        f"{len(forks)} runs branch from one trunk ({next(iter(trunks.values()))}) and share its"
        " luck: they may be compared with each other, and count as one seed. For a verdict"
        f" {MORE_TRUNKS}."
    )
