"""Take the learning rate of a run from sweeps of the same recipe: of its own size, or of others that tell."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from optrun.base.errors import ConfigError
from optrun.base.formatting import rate
from optrun.report.alike import unify
from optrun.report.arms import build_arms, build_contenders, differing
from optrun.report.collect import Run, flatten, number
from optrun.report.findings import choose_metric
from optrun.report.transfer.answer import Answer, answer_of, load_sweeps, refusal
from optrun.report.transfer.sizes import OF_SIZE, Axes, find_sweeps, fit_sizes, label

_OF_EVALUATION = (
    "training.eval_steps",
    "training.per_device_eval_batch_size",
    "data.max_eval_examples",
    "task.sample_tokens",
)
"""Keys that move no optimum."""


def rate_from(folder: Path, config: Mapping[str, object]) -> tuple[Answer, str]:
    """Find the lr of a run that is about to start.

    Args:
        folder: A sweep over lr, or a folder of them.
        config: Of the run; its own lr does not count.

    Returns:
        The answer, and a sentence with the lr, its interval and where it came from.

    Raises:
        ConfigError: The sweep is of another recipe, or does not tell this size.
    """
    try:
        return _rate_from(folder, config)
    except ConfigError as error:
        raise ConfigError(f"lr=auto lr_from={folder}: {error}") from error


def _rate_from(folder: Path, config: Mapping[str, object]) -> tuple[Answer, str]:
    runs = [run for run in load_sweeps([folder]) if run.described]
    asked = Run(folder, "this run", "", config=flatten(config), values=config)
    unify([asked, *runs])
    keys = [key for key in differing([asked, *runs]) if key != "lr" and key not in _OF_EVALUATION]
    sizes = [key for key in keys if key.partition(".")[0] in OF_SIZE and (number(asked.setting(key)) or 0) > 0]
    for key in keys:
        alike = [run for run in runs if run.settings([key]) == asked.settings([key])]
        if key not in sizes and not alike:
            there = ", ".join(sorted({str(run.setting(key)) for run in runs}))
            raise ConfigError(f"this run has {key}={asked.setting(key)}, the sweep {there}: sweep lr with the same.")
        runs = runs if key in sizes else alike
    metric, mode = choose_metric(runs, None)
    own = [run for run in runs if run.settings(sizes) == asked.settings(sizes)]
    if own:
        contender = build_contenders(build_arms(own, ["lr"], metric, mode), [], mode)[0]
        sweep = fit_sizes(contender, Axes((), (), {}), metric, mode)
        how = "the bottom of its basin"
    else:
        target = {key: number(asked.setting(key)) or math.nan for key in sizes}
        sweep = find_sweeps(runs, target, metric, mode)[0]
        how = f"predicted for {label(target)}"
    if reason := refusal(sweep):
        raise ConfigError(f"{reason.rstrip('.')}.")
    found = answer_of(sweep, mode)
    interval = f"90 % interval {rate(found.lr.low)} to {rate(found.lr.high)}"
    return found, f"{folder}: lr {rate(found.lr.value)}, {interval}, {how}"
