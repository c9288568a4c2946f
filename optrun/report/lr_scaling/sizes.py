"""Sort runs of sweeps by contender and size, and say which runs are missing."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from optrun.base.errors import ConfigError, did_you_mean
from optrun.base.formatting import rate
from optrun.report.configurations import (
    Configuration,
    Contender,
    build_configurations,
    build_contenders,
    differing_keys,
    drop_implied_keys,
    is_implied,
)
from optrun.report.lr_scaling.fit import (
    MIN_LRS,
    MIN_SEEDS,
    Array,
    FittedCurve,
    best_of,
    fit_lr_curve,
)
from optrun.report.runs import Run, to_number

GROUPS = ("model", "training", "data")
"""Groups whose numbers are a size; those of other groups tell contenders apart."""
ROUNDING = 1e-6
"""Of logarithms."""


@dataclass(frozen=True)
class Size:
    """A sweep over lr at one size."""

    values: Mapping[str, float]
    """Of the keys with an exponent."""
    scores: Mapping[float, Mapping[int, float]]
    """Learning rate -> seed -> outcome, by rising lr, without those at which a run diverged."""
    diverged: Sequence[float]
    """Learning rates at which a run diverged."""
    curve: FittedCurve
    runs: Sequence[Run]


@dataclass
class Sweep:
    """All sizes of one contender."""

    name: str
    keys: Sequence[str] = ()
    """Each with an exponent of its own."""
    target: Mapping[str, float] = field(default_factory=dict)
    """The size that is asked for, with the keys that moved along."""
    sizes: list[Size] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    """Why a size has no part in the answer, and what to run."""


def write_size(values: Mapping[str, float]) -> str:
    """Write keys and values as they are typed.

    Example:
        >>> write_size({"model.config.n_embd": 64.0, "training.num_train_epochs": 0.5})
        'model.config.n_embd=64 training.num_train_epochs=0.5'
    """
    return " ".join(f"{key}={value:.12g}" for key, value in values.items())


def size_of(run: Run, key: str) -> float:
    """Read a setting as a number above 0; NaN if it is none."""
    value = to_number(run.setting(key))
    return value if value is not None and value > 0 else math.nan


def is_size(key: str, runs: Sequence[Run]) -> bool:
    """Tell whether a key is a number above 0 in all runs."""
    return not any(math.isnan(size_of(run, key)) for run in runs)


def find_sweeps(
    runs: Sequence[Run], target: Mapping[str, float], metric: str, mode: str
) -> list[Sweep]:
    """Sort runs by contender and size.

    Args:
        runs: Whose configuration is known.
        target: The size that is asked for.
        metric: What is judged by.
        mode: "min" or "max".

    Raises:
        ConfigError: A key of the target that no run has, that did not vary, or that is no number
            above 0 in a run.
    """
    keys = differing_keys(runs)
    _expect_varied(target, keys, runs)
    rest = [key for key in keys if key != "lr" and key not in target]
    sizes = [key for key in rest if is_size(key, runs)]
    kind_keys = [
        key
        for key in rest
        if key not in sizes or (_group(key) not in GROUPS and not is_implied(key, [*target], runs))
    ]
    sweeps = []
    for contender in build_contenders(
        build_configurations(runs, keys, metric, mode), drop_implied_keys(kind_keys, runs), mode
    ):
        members = [
            run for configuration in contender.configurations for run in configuration.counted
        ]
        moved = [key for key in sizes if key not in kind_keys and _varies(key, members)]
        try:
            target_keys, values = find_axes(members, target, moved)
        except ConfigError as error:
            sweeps.append(Sweep(contender.name, missing=[str(error).rstrip(".")]))
        else:
            sweeps.append(fit_sizes(contender, target_keys, values, metric, mode))
    return sweeps


def _group(key: str) -> str:
    return key.partition(".")[0]


def _varies(key: str, runs: Sequence[Run]) -> bool:
    return len({run.setting(key) for run in runs}) > 1


def _expect_varied(target: Mapping[str, float], keys: Sequence[str], runs: Sequence[Run]) -> None:
    """Refuse target keys without influence on lr."""
    known_keys = {key for run in runs for key in run.config}
    for key in target:
        if key in ("lr", "seed"):
            raise ConfigError(f"to: {key} is no size. Name one, such as training.max_steps.")
        if key not in known_keys:
            hint = did_you_mean(key, keys if keys != ["lr"] else known_keys)
            raise ConfigError(f"to: {key}: no run has this key. {hint}")
        if key not in keys:
            value = next(run.config[key] for run in runs if key in run.config)
            raise ConfigError(
                f"to: {key} is {'null' if value is None else value} in all runs, and nothing tells"
                " how lr moves with it: sweep lr at another, too."
            )
        for run in runs:
            if not is_size(key, [run]):
                raise ConfigError(
                    f"to: {key} is {run.setting(key)} in {run.label}: expected a number above 0."
                )


def find_axes(
    runs: Sequence[Run], target: Mapping[str, float], other_keys: Sequence[str]
) -> tuple[list[str], dict[str, float]]:
    """Find the keys with an exponent of their own, and all values at the target.

    Args:
        runs: Of one contender.
        target: What was asked for.
        other_keys: Further keys that varied: each has to move with the named ones of its group.

    Raises:
        ConfigError: The runs do not tell two keys apart, or a value cannot be built.
    """
    keys: list[str] = []
    values = dict(target)
    for key in [*target, *other_keys]:
        value = _follow(runs, keys, target, key)
        if key in target and value is None:
            keys.append(key)
        elif key in target and not _varies(key, runs):
            raise ConfigError(
                f"one size only ({write_size({key: size_of(runs[0], key)})}): sweep lr at another"
                f" {key}, too."
            )
        elif key in target:
            if value is None or abs(math.log(value / target[key])) > ROUNDING:
                raise ConfigError(_not_told_apart(runs, keys, key))
        elif value is None or (_group(key) in GROUPS and _group(key) not in map(_group, target)):
            goes_on = "" if value is None else f", as in {key}={value:.12g}"
            raise ConfigError(
                f"to: {key} varied, too, and lr may follow it as well as {', '.join(target)}: name"
                f" it{goes_on}, or give sweeps that agree in it."
            )
        else:
            values[key] = value
    _expect_buildable(runs, target, values)
    return keys, values


def _follow(
    runs: Sequence[Run], keys: Sequence[str], target: Mapping[str, float], key: str
) -> float | None:
    """Find the value of a key at the target; None if it is no power law of the others."""
    rows = np.log([[size_of(run, size_key) for size_key in (*keys, key)] for run in runs])
    design = np.column_stack([np.ones(len(rows)), rows[:, :-1]])
    powers = np.linalg.lstsq(design, rows[:, -1], rcond=None)[0]
    if float(np.abs(design @ powers - rows[:, -1]).max()) > ROUNDING:
        return None
    value = math.exp(float(powers @ [1.0, *(math.log(target[size_key]) for size_key in keys)]))
    return float(round(value)) if abs(value - round(value)) < ROUNDING * value else value


def _expect_buildable(
    runs: Sequence[Run], target: Mapping[str, float], values: Mapping[str, float]
) -> None:
    """Refuse a size without a valid model.

    What is whole in all runs stays whole, and a number of heads that divides a width in all runs
    divides it at the target, too.
    """
    nearest = write_size(
        {key: round_to_grid(target[key], [size_of(run, key) for run in runs]) for key in target}
    )
    heads = {key for run in runs for key in run.config if "head" in key.rpartition(".")[2]}
    for key, value in values.items():
        sizes = [size_of(run, key) for run in runs]
        if not all(size.is_integer() for size in sizes):
            continue
        if not value.is_integer():
            raise ConfigError(
                f"to: {key} would be {value:.4g} at {write_size(target)}, which cannot be built:"
                f" expected a whole number. Ask for {nearest}."
            )
        for head in sorted(heads - {key}):
            counts = [size_of(run, head) for run in runs]
            divides = all(size % count == 0 for size, count in zip(sizes, counts, strict=True))
            count = values.get(head, counts[0])
            is_same_group = _group(head) == _group(key)
            if is_same_group and divides and count.is_integer() and value % count:
                raise ConfigError(
                    f"to: {key}={value:.12g} cannot be built: {head}={count:.12g} does not divide"
                    f" it. Ask for {nearest}."
                )


def round_to_grid(value: float, sizes: Sequence[float]) -> float:
    """Round to a multiple of the common divisor of all sizes.

    A model of such a size can be built.

    Example:
        >>> round_to_grid(362.04, [32.0, 64.0, 96.0]), round_to_grid(0.7, [0.5, 1.0])
        (352.0, 0.7)
    """
    if not all(size.is_integer() for size in sizes):
        return value
    grain = math.gcd(*map(int, sizes))
    return float(max(1, round(value / grain)) * grain)


def _not_told_apart(runs: Sequence[Run], keys: Sequence[str], key: str) -> str:
    """Name the runs needed to separate the exponents of coupled keys."""
    smallest = min(runs, key=lambda run: size_of(run, key))
    largest = max(runs, key=lambda run: size_of(run, key))
    lacking = {size_key: size_of(smallest, size_key) for size_key in keys} | {
        key: size_of(largest, key)
    }
    return (
        f"to: {key} moved with {' and '.join(keys)} in all sweeps, so their exponents cannot be"
        f" told apart: sweep lr at {write_size(lacking)}, too, or ask for a size on the line that"
        " they moved along."
    )


def fit_sizes(
    contender: Contender, keys: Sequence[str], target: Mapping[str, float], metric: str, mode: str
) -> Sweep:
    """Fit each size of a contender; `missing` explains gaps."""
    groups: dict[tuple[float, ...], list[Configuration]] = defaultdict(list)
    for configuration in contender.configurations:
        groups[tuple(size_of(configuration.runs[0], key) for key in keys)].append(configuration)
    sweep = Sweep(contender.name, keys, target)
    for values, configurations in sorted(groups.items()):
        size = dict(zip(keys, values, strict=True))
        by_lr = {
            configuration.lr: configuration
            for configuration in configurations
            if configuration.lr is not None
        }
        diverged = sorted(lr for lr, configuration in by_lr.items() if configuration.diverged)
        scores = {
            lr: configuration.scores
            for lr, configuration in sorted(by_lr.items())
            if configuration.finished
        }
        scores = {lr: row for lr, row in scores.items() if lr not in diverged}
        seeds = sorted(set[int]().union(*scores.values()))
        table = [[row.get(seed, math.nan) for row in scores.values()] for seed in seeds]
        costs = np.array(table) if mode == "min" else -np.array(table)
        reason = _find_gap(list(scores), costs, diverged, seeds, metric)
        if reason:
            sweep.missing.append(f"{write_size(size)}: {reason}" if size else reason)
            continue
        runs = [run for configuration in configurations for run in configuration.counted]
        curve = fit_lr_curve(np.log([*scores]), costs)
        sweep.sizes.append(Size(size, scores, diverged, curve, runs))
    return sweep


def _find_gap(
    lrs: Sequence[float], costs: Array, diverged: Sequence[float], seeds: Sequence[int], metric: str
) -> str:
    """Say why a grid shows no optimum; empty if it does."""
    if not lrs:
        return f"no run finished with {metric}"
    if len(seeds) < MIN_SEEDS:
        return (
            f"one seed, {seeds[0]}: without another nothing says how sure an optimum is; add"
            f" seed={seeds[0] + 1}"
        )
    best = best_of(costs)
    if 0 < best < len(lrs) - 1:
        complete = np.isfinite(costs[:, best - 1 : best + 2]).all(axis=1).sum()
        if complete >= MIN_SEEDS:
            return ""
        return (
            f"fewer than {MIN_SEEDS} seeds have finished at the best lr, {rate(lrs[best])}, and"
            " beside it: run the rest"
        )
    step = lrs[1] / lrs[0] if len(lrs) > 1 else 2.0
    above = min((lr for lr in diverged if lr > lrs[best]), default=math.inf)
    further = lrs[best] / step if best == 0 else min(lrs[best] * step, math.sqrt(lrs[best] * above))
    if len(lrs) < MIN_LRS:
        return (
            f"{len(lrs)} learning rates with a result: expected {MIN_LRS} or more; add"
            f" lr={rate(further)}"
        )
    end = "lowest" if best == 0 else "highest"
    limit = f" below lr {rate(above)}, where runs diverged" if best and above < math.inf else ""
    return (
        f"the best lr, {rate(lrs[best])}, is the {end} of its grid{limit}: its optimum is unknown;"
        f" add lr={rate(further)}"
    )
