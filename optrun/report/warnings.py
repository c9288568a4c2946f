"""Find what a reader must know before quoting a comparison.

The texts stand in `templates/warnings.txt`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from optrun.artifacts.forks import MORE_TRUNKS, Fork
from optrun.base.formatting import rate
from optrun.report.findings import Findings
from optrun.report.runs import NOT_STARTED, Run
from optrun.report.statistics import MIN_SEEDS
from optrun.report.table import format_metric, list_names
from optrun.report.templating import fill_text
from optrun.report.verdict import next_lr

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
class Warning:
    """One reason for care."""

    kind: str
    """Of `_KINDS`."""
    text: str
    """One or two sentences with what to do."""
    runs: tuple[str, ...] = ()
    """Labels of the runs it is about, as far as it is about some."""


OF_THE_CHOICE = frozenset({"edge", "coarse", "single-lr", "tuning"})
"""What says how well configurations were chosen: nothing that the runs of a confirmation could have
done better."""


def find_warnings(findings: Findings) -> list[Warning]:
    """List every reason for care in a comparison, the gravest first."""
    found = chain(
        _edges(findings), _unlike(findings), _seeds(findings), _runs(findings), _versions(findings)
    )
    return sorted(found, key=lambda each: _KINDS.index(each.kind))


def _warn(kind: str, of: Sequence[Run] = (), /, **details: object) -> Warning:
    labels = tuple(run.label for run in of)
    count = "1 run" if len(labels) == 1 else f"{len(labels)} runs"
    text = fill_text("warnings.txt", kind=kind, count=count, runs=list_names(labels), **details)
    return Warning(kind, text, labels)


def _unequal(kind: str, of: Mapping[str, object], /, **details: object) -> Iterable[Warning]:
    """Warn where contenders differ in something."""
    told = {
        name: f"{each:,}" if isinstance(each, int) else str(each)
        for name, each in of.items()
        if each is not None
    }
    if len({*told.values()}) > 1:
        yield _warn(
            kind, listed="; ".join(f"{name} {each}" for name, each in told.items()), **details
        )


def _edges(findings: Findings) -> Iterable[Warning]:
    """Warn where the best lr has no other close by on both sides."""
    for row in findings.rows if "lr" in findings.tuned_keys else ():
        if row.lr_curve.best is None or len(row.lr_curve.begun) < 2:
            continue
        best, further = row.lr_curve.best.lr or 0.0, next_lr(row, findings)
        for end, lr in zip(("lowest", "highest"), row.lr_curve.beside(), strict=True):
            about: dict[str, object] = {"name": row.name, "best": rate(best), "end": end}
            if lr is None and further is not None:
                yield _warn(
                    "edge", (), try_lr=rate(further), tried=len(row.lr_curve.tried), **about
                )
            elif lr is not None and (factor := max(best / lr, lr / best)) > _COARSE:
                about |= {
                    "beside": rate(lr),
                    "gone": lr in row.lr_curve.diverged,
                    "factor": f"{factor:.3g}",
                }
                yield _warn("coarse", (), try_lr=rate(math.sqrt(best * lr)), **about)


def _unlike(findings: Findings) -> Iterable[Warning]:
    """Warn where contenders were not tuned alike, or did not run equally long."""
    rows = findings.ranked
    if findings.tuned_keys:
        yield from _unequal(
            "tuning", {row.name: sum(bool(a.scores) for a in row.configurations) for row in rows}
        )
    single = [
        row.name
        for row in rows
        if len(row.lr_curve.tried) == 1 and "lr" not in findings.compared_keys
    ]
    if single and len(findings.rows) > 1 and "optimizer.name" in findings.compared_keys:
        yield _warn("single-lr", listed=list_names(single))
    samples, steps = (
        {
            row.name: next(
                (n for run in row.configuration.runs if (n := getattr(run, name)) is not None), None
            )
            for row in rows
        }
        for name in ("samples", "max_steps")
    )
    examples = all(samples.values())
    unit = "training examples" if examples else "optimizer steps"
    yield from _unequal("budget", samples if examples else steps, unit=unit)


def _seeds(findings: Findings) -> Iterable[Warning]:
    """Warn where ranked contenders have too few seeds, or share too few."""
    rows = findings.ranked
    if len(rows) < 2:
        return
    yield from _unequal(
        "seeds", {row.name: _numbers(sorted(row.configuration.scores)) for row in rows}
    )
    few = [row.name for row in rows if row.versus is not None and row.versus.seeds < MIN_SEEDS]
    few += [
        row.name
        for row in rows
        if row.name not in few and len(row.configuration.scores) < MIN_SEEDS
    ]
    if few:
        branched = any(
            Fork.of(run.summary) is not None for row in rows for run in row.configuration.runs
        )
        more = (
            f"For more seeds {MORE_TRUNKS}."
            if branched
            else "Run the best configurations again with seed=0,1,2,3,4."
        )
        yield _warn("few-seeds", least=MIN_SEEDS, listed=list_names(few), more=more)


def _versions(findings: Findings) -> Iterable[Warning]:
    """Warn where ranked runs differ in what should be alike.

    Task, data, code, luck.
    """
    runs = [
        run
        for row in findings.rows
        for run in row.configuration.runs
        if run.score(findings.metric) is not None
    ]
    if text := _shared_luck(runs):
        yield _warn("trunk", text=text)
    if len(tasks := _distinct(run.config.get("task.name") for run in runs)) > 1:
        yield _warn("task", listed=list_names(tasks))
    prints = {
        (run.seed, str(mark)) for run in runs if (mark := run.at("data", "fingerprint")) is not None
    }
    # A split that is cut with the seed differs between seeds by design; it must not differ within
    # one.
    if len(prints) > len({seed for seed, _ in prints}):
        yield _warn("data")
    if differing := list(_different_code(runs)):
        yield _warn("code", listed="; ".join(differing))


def _different_code(runs: Sequence[Run]) -> Iterable[str]:
    """Yield each version and each digest of code that differs between runs."""
    places = [("versions", name, name) for name in ("optrun", "torch", "transformers")]
    codes = [run.summary.get("code") for run in runs]
    names = sorted({str(name) for code in codes if isinstance(code, Mapping) for name in code})
    places += [("code", name, f"code of {name}") for name in names]
    for section, name, title in places:
        values = _distinct(run.at(section, name) for run in runs)
        if len(values) > 1:
            yield f"{title} {list_names([format_metric[:10] for format_metric in values])}"


def _runs(findings: Findings) -> Iterable[Warning]:
    """Warn of runs that are not ranked, or not as they should be."""
    every = findings.runs
    worst = next(
        (
            configuration.scores[seed]
            for configuration in findings.configurations
            for seed in configuration.lost
        ),
        None,
    )
    lost = [run for run in every if run.diverged]
    failed = [run for run in every if run.status == "failed" and not run.diverged]
    cut = ("running", "interrupted", "unknown")
    ranked = [run for row in findings.rows for run in row.configuration.runs if not run.diverged]
    early = [run for run in ranked if run.max_steps and 0 < run.global_step < run.max_steps]
    broken = [run for run in every if run.problems]
    about = {
        "diverged": lost,
        "failed": failed,
        "unfinished": [run for run in every if run.status in cut and not run.diverged],
        "not-started": [run for run in every if run.status == NOT_STARTED],
        "repeated": [
            run for configuration in findings.configurations for run in configuration.repeated
        ],
        "metric": [
            run
            for run in every
            if run.finished and not run.diverged and run.score(findings.metric) is None
        ],
        "schedule": early,
        "files": broken,
    }
    details = {
        "reason": lost[0].diverged if len(lost) == 1 else "",
        "worst": "" if worst is None else format_metric(worst),
        "message": failed[0].message if failed else "",
        "metric": findings.metric,
        "early": list_names(
            [f"{run.label} at step {run.global_step:,} of {run.max_steps:,}" for run in early], 4
        ),
        "broken": list_names([f"{run.label}: {', '.join(run.problems)}" for run in broken], 3),
    }
    yield from (_warn(kind, of, **details) for kind, of in about.items() if of)


def _distinct(values: Iterable[object]) -> list[str]:
    """Sort the different known values."""
    return sorted({str(format_metric) for format_metric in values if format_metric is not None})


def _numbers(values: Sequence[int]) -> str:
    return (
        "{"
        + ", ".join(str(format_metric) for format_metric in values[:8])
        + (", …" if len(values) > 8 else "")
        + "}"
    )


def _shared_luck(runs: Iterable[Run]) -> str:
    """Say which ranked forks share a trunk, so that they count as one seed; else empty."""
    forks = [fork for fork in (Fork.of(run.summary) for run in runs) if fork is not None]
    trunks = {fork.trunk: fork.name for fork in forks}
    if len(forks) < 2 or len(trunks) > 1:
        return ""
    return (
        f"{len(forks)} runs branch from one trunk ({next(iter(trunks.values()))}) and share its"
        " luck: they may be compared with each other, and count as one seed. For a verdict"
        f" {MORE_TRUNKS}."
    )
