"""Predict the learning rate of another size, or say which runs would tell it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from optrun.artifacts.target import locate
from optrun.base.errors import ConfigError
from optrun.base.formatting import rate
from optrun.report.comparability import explain_incomparable, unify_paths
from optrun.report.configurations import build_configurations, build_contenders, differing_keys
from optrun.report.confirmation_plan import find_plans
from optrun.report.findings import choose_metric
from optrun.report.lr_scaling.fit import NORMAL, ScalingLaw, fit_law
from optrun.report.lr_scaling.sizes import (
    GROUPS,
    Size,
    Sweep,
    find_sweeps,
    fit_sizes,
    is_size,
    round_to_grid,
    size_of,
    write_size,
)
from optrun.report.runs import NOT_STARTED, Run, flatten, require_runs

_OF_EVALUATION = {
    "training.eval_steps",
    "training.per_device_eval_batch_size",
    "data.max_eval_examples",
    "task.sample_tokens",
}
"""Keys that move no optimum."""
FAR = 4.0
"""No number is given for a size further than this factor beyond those that were swept."""
WIDEST = 4.0
"""No number is given if the ends of its interval are further apart than this factor."""


@dataclass(frozen=True)
class Estimate:
    """A number and the ends of its interval, at a confidence of 0.9."""

    value: float
    low: float
    high: float

    @property
    def is_bounded(self) -> bool:
        """Whether there is an interval."""
        return math.isfinite(self.high)


@dataclass(frozen=True)
class Optimum:
    """The best learning rate of one size."""

    size: Mapping[str, float]
    lr: Estimate
    """Its interval ends below the lowest lr at which a run diverged."""
    cost: float
    """The metric there."""
    seeds: int


@dataclass(frozen=True)
class Answer:
    """The prediction for one contender."""

    contender: str
    lr: Estimate
    exponents: Mapping[str, Estimate]
    """lr* ~ key^exponent at the middle of the sizes, by key."""
    along: Mapping[str, float]
    """Keys that moved with these in every sweep, and what they are at the target."""
    optima: Sequence[Optimum]
    notes: Sequence[str]
    """What carries the prediction, and what speaks against it."""
    tests: Sequence[str]
    """The two runs that would test it, at the ends of the interval, as command lines."""


@dataclass(frozen=True)
class Transfer:
    """The predictions for another size, and the files that hold them."""

    target: Mapping[str, float]
    metric: str
    mode: str
    """`min` or `max`."""
    answers: Sequence[Answer]
    """One for each contender whose sweeps suffice."""
    refused: Mapping[str, str]
    """Contender -> why it has no answer, and what to run."""
    sweeps: Sequence[Sweep]
    """What was fitted, in the order of the answers."""
    files: Sequence[Path] = ()
    """`transfer.md` and `transfer.png`."""


def read_target(target: Mapping[str, object]) -> dict[str, float]:
    """Read the size of the target.

    Raises:
        ConfigError: A value is no number above 0.
    """
    values = {}
    for key, value in target.items():
        try:
            size = math.nan if isinstance(value, bool) else float(str(value).replace("_", ""))
        except ValueError:
            size = math.nan
        if not 0 < size < math.inf:
            raise ConfigError(f"to: {key}={value}: expected a number above 0.")
        values[key] = size
    return values


def predict(
    dirs: Sequence[Path], target: Mapping[str, object], metric: str | None = None
) -> Transfer:
    """Predict the learning rate of a size from sweeps at others.

    Args:
        dirs: Sweeps, or folders of them.
        target: Keys of the configuration that varied, and their values at that size.
        metric: What to judge by; default: the main metric of the runs.

    Raises:
        ConfigError: No contender's sweeps suffice; the message says what is missing.
    """
    sizes = read_target(target)
    every = _load_sweeps(dirs)
    runs = [run for run in every if run.described]
    mains = {str(run.at("main_metric", "name")) for run in runs} - {"None"}
    if metric is None and len(mains) > 1:
        raise ConfigError(
            f"the runs have several main metrics ({', '.join(sorted(mains))}): say which counts"
            " with metric=NAME."
        )
    name, mode = choose_metric(runs, metric)
    difference = explain_incomparable(
        [run for run in runs if run.score(name) is not None or run.diverged]
    )
    if difference:
        raise ConfigError(f"{difference}: ask for each kind by itself.")
    answers = []
    refused = {}
    fitted = []
    for sweep in find_sweeps(runs, sizes, name, mode):
        try:
            answers.append(_answer(sweep, mode))
        except ConfigError as error:
            refused[sweep.name] = str(error).rstrip(".")
        else:
            fitted.append(sweep)
    if not answers:
        reasons = [f"{contender}: {reason}" for contender, reason in refused.items()]
        raise ConfigError(f"{'; '.join(reasons)}.")
    waiting = sum(run.status in ("running", NOT_STARTED) for run in every)
    if waiting:
        runs_have = "1 run has" if waiting == 1 else f"{waiting} runs have"
        note = f"{runs_have} not ended: ask again later"
        answers = [replace(answer, notes=[*answer.notes, note]) for answer in answers]
    return Transfer(sizes, name, mode, answers, refused, fitted)


def _load_sweeps(dirs: Sequence[Path]) -> list[Run]:
    """Read all runs of sweeps, without their confirmations."""
    folders = [locate(str(directory)).runs_folder for directory in dirs]
    runs = require_runs(folders, beside=find_plans(folders))
    if not any(run.described for run in runs):
        raise ConfigError(f"{', '.join(map(str, dirs))}: no run here has a readable config.yaml.")
    unify_paths([run for run in runs if run.described])
    return runs


def _answer(sweep: Sweep, mode: str) -> Answer:
    """Fit the power law of a contender's sizes and predict the target.

    Raises:
        ConfigError: The sizes do not suffice, or carry no useful number.
    """
    keys = sweep.keys
    rows = np.array([[size.values[key] for key in keys] for size in sweep.sizes])
    needed = 1 + len(keys)
    design = np.column_stack([np.ones(len(rows)), np.log(rows)]) if len(rows) else rows
    if not keys or not len(rows) or np.linalg.matrix_rank(design, tol=1e-6) < needed:
        have = f"expected {needed} sizes or more with an optimum inside of their grid"
        reasons = [f"{have}, found {len(rows)}"] if keys else []
        raise ConfigError("; ".join([*reasons, *sweep.missing]))
    law = fit_law(rows, [size.curve for size in sweep.sizes])
    lr = _estimate(*law.predict([sweep.target[key] for key in keys]))
    _refuse_useless(lr, law, sweep)
    exponents = {key: Estimate(*law.exponent(at)) for at, key in enumerate(keys)}
    nearest = min(sweep.sizes, key=lambda size: _distance(size, sweep.target))
    ends = (lr.low, lr.high) if lr.is_bounded else (lr.value / 2, lr.value * 2)
    return Answer(
        contender=sweep.name,
        lr=lr,
        exponents=exponents,
        along={key: value for key, value in sweep.target.items() if key not in keys},
        optima=[_optimum(size, law.variance, mode) for size in sweep.sizes],
        notes=_notes(sweep, exponents),
        tests=[_command(nearest.runs, sweep.target, end) for end in ends],
    )


def _distance(size: Size, target: Mapping[str, float]) -> float:
    return sum(abs(math.log(target[key] / value)) for key, value in size.values.items())


def _refuse_useless(lr: Estimate, law: ScalingLaw, sweep: Sweep) -> None:
    """Refuse an unsupported prediction, and name the missing runs.

    Raises:
        ConfigError: The target is too far, the optima follow no power law, or the interval is too
            wide to be of use.
    """
    beyond = {}
    halfway = {}
    for key in sweep.keys:
        sizes = [size.values[key] for size in sweep.sizes]
        target = sweep.target[key]
        edge = max(sizes) if target > max(sizes) else min(sizes)
        beyond[key] = max(target / max(sizes), min(sizes) / target)
        halfway[key] = round_to_grid(math.sqrt(edge * target), sizes)
    key = max(beyond, key=lambda size_key: beyond[size_key])
    between = write_size({key: halfway[key]})
    if beyond[key] > FAR:
        raise ConfigError(
            f"{key}={sweep.target[key]:.6g} lies {beyond[key]:.3g} times beyond what was swept;"
            f" expected {FAR:g} at most: sweep lr at {between}, too."
        )
    if law.is_broken:
        raise ConfigError(
            "the optima follow no power law: they lie further from it than seeds and a slight bend"
            f" explain. Sweep lr at {between}, or leave the smallest size out."
        )
    if lr.is_bounded and lr.high > WIDEST * lr.low:
        raise ConfigError(
            f"the 90 % interval of lr, {write_interval(lr)}, is wider than a factor of"
            f" {WIDEST:g}: sweep lr at {between}, too, or add seeds to all sizes."
        )


def _estimate(value: float, low: float, high: float) -> Estimate:
    """Turn logarithms into numbers."""
    if math.isinf(high):
        return Estimate(math.exp(value), -math.inf, math.inf)
    return Estimate(math.exp(value), math.exp(low), math.exp(min(high, 700.0)))


def _optimum(size: Size, variance: float, mode: str) -> Optimum:
    """Put an interval around the best lr of a size."""
    curve = size.curve
    half = NORMAL * math.sqrt(variance) + abs(curve.shift)
    lr = _estimate(curve.best, curve.best - half, curve.best + half)
    above = min(
        (diverged_lr for diverged_lr in size.diverged if diverged_lr > lr.value), default=math.inf
    )
    cost = curve.level if mode == "min" else -curve.level
    return Optimum(size.values, replace(lr, high=min(lr.high, above)), cost, curve.seeds)


def _notes(sweep: Sweep, exponents: Mapping[str, Estimate]) -> list[str]:
    """List the grounds of a prediction and its weaknesses."""
    ranges = []
    for key in sweep.keys:
        sizes = [size.values[key] for size in sweep.sizes]
        ranges.append(f"{key} from {min(sizes):.6g} to {max(sizes):.6g}")
    notes = [
        f"Carried by: lr* is nearly a power law in {' and '.join(ranges)}, and goes on so to"
        f" {write_size(sweep.target)}; all else is as in the sweeps"
    ]
    if len(sweep.sizes) == 1 + len(sweep.keys):
        notes.append(
            f"{len(sweep.sizes)} sizes test no law: they are as many as a straight line needs"
        )
    along = {key: value for key, value in sweep.target.items() if key not in sweep.keys}
    if along:
        notes.append(
            f"{', '.join(along)} moved along in every sweep: the exponents are of all of it"
        )
    for key, exponent in exponents.items():
        if exponent.is_bounded and exponent.low <= 0 <= exponent.high:
            notes.append(f"The exponent of {key} could be 0: its interval holds it")
    return [*notes, *(f"At {reason}" for reason in sweep.missing)]


def _command(runs: Sequence[Run], target: Mapping[str, float], lr: float) -> str:
    """Compose the line of a run at the target."""
    run = next((run for run in runs if run.finished), runs[0])
    values = {key: f"{value:.12g}" for key, value in target.items()}
    values |= {"lr": rate(lr), "seed": str(run.seed or 0)}
    tokens = []
    for token in run.overrides:
        name = token.partition("=")[0]
        value = values.pop(name.lstrip("+"), None)
        tokens.append(token if value is None else f"{name}={value}")
    tokens += [f"{key}={value}" for key, value in values.items()]
    return replace(run, overrides=tokens).command()


def write_interval(lr: Estimate) -> str:
    """Write the ends of the interval of a learning rate."""
    if not lr.is_bounded:
        return "none: two sizes test no law"
    return f"{rate(lr.low)} to {rate(lr.high)}"


def find_lr_for_run(
    folder: Path, config: Mapping[str, object], base: Mapping[str, object] | None = None
) -> tuple[float, str]:
    """Find the lr for a new run.

    Args:
        folder: A sweep over lr, or a folder of them.
        config: Of the run; its own lr does not count.
        base: Configuration of the base of muP, in the standard parametrization: a sweep of that
            is a sweep of muP at its base (Yang et al. 2022).

    Returns:
        The lr, and a sentence with its interval and where it came from.

    Raises:
        ConfigError: The sweep is of another recipe, or does not tell this size.
    """
    try:
        runs = [run for run in _load_sweeps([folder]) if run.described]
        is_mup = any(run.setting("parametrization.name") == "mup" for run in runs)
        if base is None or is_mup:
            lr, source = _lr_of_sweep(runs, config)
        else:
            lr, source = _lr_of_sweep(runs, base)
            source += ", at the base of muP"
    except ConfigError as error:
        raise ConfigError(f"lr=auto lr_from={folder}: {error}") from error
    sentence = f"{folder}: lr {rate(lr.value)}, 90 % interval {write_interval(lr)}, {source}"
    return lr.value, sentence


def _lr_of_sweep(runs: list[Run], config: Mapping[str, object]) -> tuple[Estimate, str]:
    """Find the best lr at a run's own size, or predict it, with a note."""
    run = Run(Path(), "this run", "", config=flatten(config), values=config)
    unify_paths([run, *runs])
    keys = [key for key in differing_keys([run, *runs]) if key not in {"lr", *_OF_EVALUATION}]
    sizes = [key for key in keys if key.partition(".")[0] in GROUPS and is_size(key, [run])]
    for key in keys:
        if key in sizes:
            continue
        same_kind = [
            sweep_run for sweep_run in runs if sweep_run.settings([key]) == run.settings([key])
        ]
        if not same_kind:
            sweep_values = ", ".join(sorted({str(sweep_run.setting(key)) for sweep_run in runs}))
            raise ConfigError(
                f"this run has {key}={run.setting(key)}, the sweep {sweep_values}: sweep lr with"
                " the same."
            )
        runs = same_kind
    metric, mode = choose_metric(runs, None)
    same = [sweep_run for sweep_run in runs if sweep_run.settings(sizes) == run.settings(sizes)]
    if not same:
        target = {key: size_of(run, key) for key in sizes}
        answer = _answer(find_sweeps(runs, target, metric, mode)[0], mode)
        return answer.lr, f"predicted for {write_size(target)}"
    contender = build_contenders(build_configurations(same, ["lr"], metric, mode), [], mode)[0]
    sweep = fit_sizes(contender, [], {}, metric, mode)
    if not sweep.sizes:
        raise ConfigError(f"{'; '.join(sweep.missing)}.")
    size = sweep.sizes[0]
    return _optimum(
        size, fit_law(np.empty((1, 0)), [size.curve]).variance, mode
    ).lr, "the optimum at this size"
