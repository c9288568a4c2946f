"""List the caveats of a comparison.

The texts stand in `templates/warnings.txt`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from optrun.artifacts.forks import MORE_TRUNKS
from optrun.base.formatting import list_names, plural, rate
from optrun.config.schema.metric import FEW_EXAMPLES
from optrun.report.configurations import LrCurve
from optrun.report.findings import Findings, forks_of
from optrun.report.runs import NOT_STARTED, Run, to_number
from optrun.report.statistics import MIN_SEEDS
from optrun.report.table import format_metric
from optrun.report.templating import fill_text
from optrun.report.verdict import is_best_lr_chance, needs_longer_training, next_lr

_COARSE = 5.0
"""A neighbour of the best lr further away than this factor gets a warning: a better lr may lie in
between."""
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
    "few-examples",
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
"""Kinds of warnings, the most serious first."""


@dataclass(frozen=True)
class RunWarning:
    """One warning of a report."""

    kind: str
    """Of `_KINDS`."""
    text: str
    """One or two sentences with what to do."""


KINDS_OF_THE_CHOICE = frozenset({"edge", "coarse", "single-lr", "tuning"})
"""Kinds of warnings about how the configurations were chosen. A report on a confirmation leaves
them out: its runs repeat a choice that was made before."""


def find_warnings(findings: Findings) -> list[RunWarning]:
    """List the warnings of a comparison, most serious first."""
    warnings = [
        *_warn_of_edges(findings),
        *_warn_of_unequal_effort(findings),
        *_warn_of_seeds(findings),
        *_warn_of_unfinished_runs(findings),
        *_warn_of_doubtful_runs(findings),
        *_warn_of_differing_runs(findings),
    ]
    return sorted(warnings, key=lambda warning: _KINDS.index(warning.kind))


def _write_warning(kind: str, runs: Sequence[Run] = (), /, **details: object) -> RunWarning:
    """Write a warning by its template.

    Args:
        kind: One of `_KINDS`.
        runs: The runs it is about; the template gets their number and the first five names.
        details: Other values of the template.
    """
    labels = [run.label for run in runs]
    count = plural(len(labels), "run")
    text = fill_text("warnings.txt", kind=kind, count=count, runs=list_names(labels, 5), **details)
    return RunWarning(kind, text)


def _warn_if_unequal(
    kind: str,
    values: Mapping[str, object],
    /,
    **details: object,
) -> Iterable[RunWarning]:
    """Yield one warning that lists the value of each contender, if two of them differ.

    Such as "... tuning: lamb 4; adamw 2". None is an unknown value, which is left out.

    Args:
        kind: One of `_KINDS`.
        values: Contender -> value.
        details: Other values of the template.
    """
    texts = {}
    for name, value in values.items():
        if value is not None:
            texts[name] = f"{value:,}" if isinstance(value, int) else str(value)
    if len(set(texts.values())) > 1:
        listed = "; ".join(f"{name} {text}" for name, text in texts.items())
        yield _write_warning(kind, listed=listed, **details)


def _warn_of_edges(findings: Findings) -> Iterable[RunWarning]:
    """Warn of each best lr at the edge of its grid, or far from the next tried lr.

    Nothing if lr was not tuned. Contenders with fewer than two tried rates are left out, and those
    that learnt nothing, whose best lr is chance, see `is_best_lr_chance`.
    """
    if "lr" not in findings.tuned_keys:
        return
    for contender in findings.contenders:
        best = contender.lr_curve.best
        if best is None or len(contender.lr_curve.tried_lrs) < 2:
            continue
        if is_best_lr_chance(contender, findings):
            continue
        beyond = next_lr(contender, findings)
        # Of runs that are too short the first line advises against a wider grid.
        if needs_longer_training(findings):
            beyond = None
        # With lr among the tuned keys every run has one; 0.0 is for the type checker.
        yield from _warn_of_neighbouring_lrs(
            contender.name, best.lr or 0.0, contender.lr_curve, beyond
        )


def _warn_of_neighbouring_lrs(
    name: str,
    best: float,
    curve: LrCurve,
    beyond: float | None,
) -> Iterable[RunWarning]:
    """Warn if the best lr of a contender is the lowest or highest, or far from its neighbours.

    Args:
        name: Name of the contender.
        best: Its best lr.
        curve: Its metric against lr.
        beyond: The lr to try beyond the edge; None: nothing suggests that it would be better.
    """
    for end, neighbour in zip(("lowest", "highest"), curve.neighbours_of_best(), strict=True):
        # 1. The grid ends here.
        if neighbour is None and beyond is not None:
            yield _write_warning(
                "edge",
                name=name,
                best=rate(best),
                end=end,
                tried=len(curve.finished_lrs),
                try_lr=rate(beyond),
            )
        if neighbour is None:
            continue
        # 2. The next lr is far away: advise the geometric mean, to one digit.
        factor = max(best / neighbour, neighbour / best)
        if factor > _COARSE:
            between = math.sqrt(best * neighbour)
            yield _write_warning(
                "coarse",
                name=name,
                best=rate(best),
                beside=rate(neighbour),
                gone=neighbour in curve.diverged,
                factor=f"{factor:.3g}",
                try_lr=rate(float(f"{between:.1g}")),
            )


def _warn_of_unequal_effort(findings: Findings) -> Iterable[RunWarning]:
    """Warn if contenders were tuned or trained unequally.

    Tuned: by the number of configurations with a score, and by one lr for an optimizer. Trained:
    by the training examples of their schedules if all are known, else by the optimizer steps.
    """
    contenders = findings.ranked
    compared = findings.compared_keys
    # 1. Configurations tried.
    if findings.tuned_keys:
        tried = {}
        for contender in contenders:
            tried[contender.name] = sum(
                bool(configuration.scores) for configuration in contender.configurations
            )
        yield from _warn_if_unequal("tuning", tried)
    # 2. Optimizers compared at a single lr.
    if len(findings.contenders) > 1 and "optimizer.name" in compared and "lr" not in compared:
        single = [
            contender.name for contender in contenders if len(contender.lr_curve.finished_lrs) == 1
        ]
        if single:
            yield _write_warning("single-lr", listed=list_names(single, 5))
    # 3. Length of training.
    samples = {}
    steps = {}
    for contender in contenders:
        runs = contender.configuration.runs
        samples[contender.name] = _first_known(run.samples for run in runs)
        steps[contender.name] = _first_known(run.max_steps for run in runs)
    if all(samples.values()):
        yield from _warn_if_unequal("budget", samples, unit="training examples")
    else:
        yield from _warn_if_unequal("budget", steps, unit="optimizer steps")


def _first_known(values: Iterable[int | None]) -> int | None:
    """Return the first value other than None, if there is one."""
    return next((value for value in values if value is not None), None)


def _warn_of_seeds(findings: Findings) -> Iterable[RunWarning]:
    """Warn if ranked contenders have unequal seeds, or share too few with the reference.

    Too few are fewer than `MIN_SEEDS`. Without a test the seeds of the contender itself count.
    """
    contenders = findings.ranked
    if len(contenders) < 2:
        return
    # 1. Unequal seeds, written as a set such as {0, 1, 2}.
    seeds = {}
    for contender in contenders:
        seeds[contender.name] = f"{{{list_names(sorted(contender.configuration.scores), 8)}}}"
    yield from _warn_if_unequal("seeds", seeds)
    # 2. Too few seeds.
    few = []
    for contender in contenders:
        n_seeds = len(contender.configuration.scores)
        if contender.comparison is not None:
            n_seeds = contender.comparison.seeds
        if n_seeds < MIN_SEEDS:
            few.append(contender.name)
    if few:
        more = f" For more seeds {MORE_TRUNKS}." if forks_of(findings.runs) else ""
        yield _write_warning("few-seeds", least=MIN_SEEDS, listed=list_names(few, 5), more=more)


def _warn_of_differing_runs(findings: Findings) -> Iterable[RunWarning]:
    """Warn if runs with a score differ in task, data or code, or fork from one trunk.

    The runs are those of the chosen configurations.
    """
    runs: list[Run] = []
    for contender in findings.contenders:
        members = contender.configuration.runs
        runs += [run for run in members if run.score(findings.metric) is not None]
    common_trunk = _explain_common_trunk(runs)
    if common_trunk:
        yield _write_warning("trunk", text=common_trunk)
    tasks = _distinct(run.config.get("task.name") for run in runs)
    if len(tasks) > 1:
        yield _write_warning("task", listed=list_names(tasks, 5))
    # A split that is drawn with the seed differs between seeds by design, never within one.
    fingerprint_of_seed: dict[int | None, object] = {}
    for run in runs:
        fingerprint = run.from_summary("data", "fingerprint")
        if fingerprint is None:
            continue
        if fingerprint_of_seed.setdefault(run.seed, fingerprint) != fingerprint:
            yield _write_warning("data")
            break
    differing = list(_different_code(runs))
    if differing:
        yield _write_warning("code", listed="; ".join(differing))


def _different_code(runs: Sequence[Run]) -> Iterable[str]:
    """Yield the package versions and the digests of code files with several values among runs.

    Such as `torch 2.9.0, 2.9.1`; values are cut to ten characters.
    """
    # Where a value stands in the summary -> its title.
    titles = {("versions", name): name for name in ("optrun", "torch", "transformers")}
    files: set[str] = set()
    for run in runs:
        digests = run.summary.get("code")
        if isinstance(digests, Mapping):
            files.update(map(str, digests))
    for name in sorted(files):
        titles["code", name] = f"code of {name}"
    for path, title in titles.items():
        values = _distinct(run.from_summary(*path) for run in runs)
        if len(values) > 1:
            yield f"{title} {list_names([value[:10] for value in values], 5)}"


def _warn_of_unfinished_runs(findings: Findings) -> Iterable[RunWarning]:
    """Yield one warning each for diverged, failed, unfinished and waiting runs.

    A diverged run is in no other warning of these. If it is the only one, the warning has the
    reason; that of failed runs has the message of the first.
    """
    runs = findings.runs
    diverged = [run for run in runs if run.diverged]
    not_diverged = [run for run in runs if not run.diverged]
    if diverged:
        reason = diverged[0].diverged if len(diverged) == 1 else ""
        yield _write_warning(
            "diverged", diverged, reason=reason, worst=_score_of_diverged(findings)
        )
    failed = [run for run in not_diverged if run.status == "failed"]
    if failed:
        yield _write_warning("failed", failed, message=failed[0].message)
    unfinished = [
        run for run in not_diverged if run.status in ("running", "interrupted", "unknown")
    ]
    if unfinished:
        yield _write_warning("unfinished", unfinished)
    waiting = [run for run in runs if run.status == NOT_STARTED]
    if waiting:
        yield _write_warning("not-started", waiting)


def _warn_of_doubtful_runs(findings: Findings) -> Iterable[RunWarning]:
    """Yield one warning each for runs with a doubtful result.

    They were repeated with the same seed, finished without a finite metric, were judged by few
    evaluation examples, ended before their schedule did, or have missing or torn files.
    """
    repeated: list[Run] = []
    for configuration in findings.configurations:
        repeated += configuration.repeated
    if repeated:
        yield _write_warning("repeated", repeated)
    finished = [run for run in findings.runs if run.finished and not run.diverged]
    unscored = [run for run in finished if run.score(findings.metric) is None]
    if unscored:
        yield _write_warning("metric", unscored, metric=findings.metric)
    sizes = [to_number(run.from_summary("data", "eval_examples")) for run in finished]
    fewest = min(filter(None, sizes), default=FEW_EXAMPLES)  # unknown sizes are left out
    if findings.mode == "max" and fewest < FEW_EXAMPLES:
        yield _write_warning("few-examples", fewest=fewest, metric=findings.metric)
    early: list[Run] = []
    for contender in findings.contenders:
        early += [run for run in contender.configuration.runs if _ended_early(run)]
    if early:
        steps = [f"{run.label} at step {run.global_step:,} of {run.max_steps:,}" for run in early]
        yield _write_warning("schedule", early, early=list_names(steps, 4))
    broken = [run for run in findings.runs if run.problems]
    if broken:
        problems = [f"{run.label}: {', '.join(run.problems)}" for run in broken]
        yield _write_warning("files", broken, broken=list_names(problems, 3))


def _ended_early(run: Run) -> bool:
    """Tell whether a run stopped before its last planned step, other than by divergence."""
    if run.diverged or run.max_steps is None:
        return False
    return 0 < run.global_step < run.max_steps


def _score_of_diverged(findings: Findings) -> str:
    """Write the stand-in score of diverged runs; empty if none is ranked."""
    for configuration in findings.configurations:
        for seed in configuration.diverged_seeds:
            return format_metric(configuration.scores[seed])
    return ""


def _distinct(values: Iterable[object]) -> list[str]:
    """Return the different values as sorted texts, without None."""
    return sorted({str(value) for value in values if value is not None})


def _explain_common_trunk(runs: Iterable[Run]) -> str:
    """Name the common trunk of two or more forks, in a sentence; empty without one.

    A fork continues from a checkpoint of another run, its trunk.
    """
    forks = forks_of(runs).values()
    trunks = {fork.trunk: fork.name for fork in forks}
    if len(forks) < 2 or len(trunks) > 1:
        return ""
    return (
        f"{len(forks)} runs branch from one trunk ({next(iter(trunks.values()))}) and share its"
        " luck: they may be compared with each other, and count as one seed. For a verdict"
        f" {MORE_TRUNKS}."
    )
