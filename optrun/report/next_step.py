"""Compose the command that would tell more than a report does."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from optrun.base.errors import ConfigError
from optrun.report.branches import fork_of
from optrun.report.confirmation import FOLDER, Asked, prepare
from optrun.report.confirmed import Confirmed, sweep_of
from optrun.report.findings import Findings
from optrun.report.statistics import Judgement, Verdict
from optrun.report.sweep_folder import is_search
from optrun.report.verdict import beyond, is_selected
from optrun.report.workloads import Comparison

_OPEN = (Verdict.could_be_best, Verdict.no_difference, Verdict.too_few)


def next_command(
    comparison: Comparison, confirmed: Confirmed | None, dirs: Sequence[Path], asked: Asked | None = None
) -> str:
    """Choose the command; empty if there is nothing to do, or none that would be taken.

    Args:
        comparison: Of the report.
        confirmed: Of its confirmations, or the one that it is.
        dirs: What is reported.
        asked: The baseline, metric and keys that were given.
    """
    judged, found, sweep = comparison.judgement, comparison.findings, dirs[0]
    if comparison.several or len(dirs) > 1 or judged is None or any(fork_of(run) for run in found.runs):
        return ""
    if confirmed is not None:
        return _confirm_again(confirmed)
    if line := _wider(found, sweep):
        return line
    left = is_open(judged) or any(map(is_selected, found.ranked))
    return _confirm(sweep, sweep / FOLDER, asked or Asked()) if left else ""


def is_open(judged: Judgement) -> bool:
    """Tell whether more seeds could tell more: of some contender no more is known than that it may differ enough."""
    asked = [each for name, each in judged.comparisons.items() if name != judged.reference and each.verdict in _OPEN]
    return any(not max(abs(each.low), abs(each.high)) <= judged.matters for each in asked)


def _wider(found: Findings, sweep: Path) -> str:
    """Compose the line that adds the next lr to a sweep whose winner stands at the edge of its grid."""
    best = found.ranked[0]
    lr, run = beyond(best, found), best.arm.runs[0]
    if (
        lr is None
        or found.tuned_keys != ["lr"]
        or is_search(sweep)
        or "hydra.mode=RUN" in str(run.summary.get("command"))
    ):
        return ""  # a search, or a recipe that is a sweep, is not widened by one value
    kept = [token for token in run.overrides if not token.lstrip("+").startswith(("resume=", "hydra", "lr=", "seed="))]
    recipe = [*(["-cn", run.config_name] if run.config_name else []), *run.config_dir]
    values = [f"lr={lr:g}", f"seed={','.join(map(str, sorted(best.arm.scores)))}", f"hydra.sweep.dir={sweep}"]
    return shlex.join(["optrun", "-m", *recipe, *kept, *values])


def _confirm_again(confirmed: Confirmed) -> str:
    """Go on with the confirmation that is not done, or begin another on fresh seeds if several could be the best."""
    folder, plan = next(iter(confirmed.waiting.items()), [*confirmed.plans.items()][-1])
    sweep, judged = sweep_of(folder, plan), confirmed.comparison.judgement
    if sweep is None or not (confirmed.waiting or (judged is not None and is_open(judged))):
        return ""
    if confirmed.waiting:
        return _confirm(sweep, folder, Asked())
    stem = re.sub(r"-\d+$", "", folder.name)
    free = next(each for number in count(2) if not (each := folder.with_name(f"{stem}-{number}")).exists())
    metric = None if plan.metric == confirmed.comparison.findings.own_metric else plan.metric
    return _confirm(sweep, free, Asked(baseline=plan.reference, metric=metric, by=plan.by))


def _confirm(sweep: Path, folder: Path, asked: Asked) -> str:
    """Compose the line that confirms a sweep; empty if the verb would refuse it."""
    try:
        prepare(sweep, folder, asked)
    except ConfigError:
        return ""
    return shlex.join(asked.line(sweep, None if folder.resolve() == (sweep / FOLDER).resolve() else folder))
