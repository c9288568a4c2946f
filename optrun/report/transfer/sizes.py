"""Sort runs of sweeps by contender and size, and say what is missing to predict a rate."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from optrun.base.errors import ConfigError, did_you_mean
from optrun.base.formatting import rate
from optrun.report.arms import (
    Arm,
    Contender,
    build_arms,
    build_contenders,
    differing,
    follows,
    telling,
)
from optrun.report.collect import Run, number
from optrun.report.transfer.fit import MIN_LRS, MIN_SEEDS, Array, Basin, best_of, fit_basin

OF_SIZE = ("model", "training", "data")
"""Groups whose numbers are a size; those of other groups tell contenders apart."""
_ON_LINE = 1e-6
"""Rounding of logarithms."""


@dataclass(frozen=True)
class Axes:
    """What makes a size."""

    keys: tuple[str, ...]
    """Named in `to`, each with an exponent of its own."""
    along: tuple[str, ...]
    """Keys that moved with these in every size, and have no exponent of their own."""
    target: Mapping[str, float]
    """All of both, at the size that is asked for."""


@dataclass(frozen=True)
class Size:
    """A sweep over lr at one size."""

    values: Mapping[str, float]
    """Of `Axes.keys`."""
    scores: Mapping[float, Mapping[int, float]]
    """Learning rate -> seed -> outcome, by rising lr; those at which a run diverged are left out.
    """
    diverged: Sequence[float]
    """Learning rates at which a run diverged."""
    basin: Basin
    runs: Sequence[Run]

    @property
    def label(self) -> str:
        """Name the size by its keys."""
        return label(self.values)


@dataclass
class Sweep:
    """All sizes of one contender."""

    name: str
    axes: Axes
    sizes: list[Size]
    missing: list[str]
    """Why a size has no part in the answer, and what to run."""


def label(values: Mapping[str, float]) -> str:
    """Write keys and values as they are typed.

    Example:
        >>> label({"model.config.n_embd": 64.0, "training.num_train_epochs": 0.5})
        'model.config.n_embd=64 training.num_train_epochs=0.5'
    """
    return " ".join(f"{key}={value:.12g}" for key, value in values.items())


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
    keys = differing(runs)
    _expect_varied(target, keys, runs)
    numeric = [
        key
        for key in keys
        if key != "lr" and all((number(run.setting(key)) or 0) > 0 for run in runs)
    ]
    rest = [key for key in keys if key != "lr" and key not in target]
    others = [key for key in rest if key not in numeric or key.partition(".")[0] not in OF_SIZE]
    others = [key for key in others if key not in numeric or not follows(key, [*target], runs)]
    between = telling(others, runs)
    found = []
    for contender in build_contenders(build_arms(runs, keys, metric, mode), between, mode):
        own = [run for arm in contender.arms for run in arm.counted]
        moved = [
            key
            for key in numeric
            if key not in others and len({*(run.setting(key) for run in own)}) > 1
        ]
        try:
            axes = find_axes(own, target, [key for key in moved if key not in target])
        except ConfigError as error:
            found.append(Sweep(contender.name, Axes((), (), target), [], [str(error).rstrip(".")]))
        else:
            found.append(fit_sizes(contender, axes, metric, mode))
    return found


def _expect_varied(target: Mapping[str, float], keys: Sequence[str], runs: Sequence[Run]) -> None:
    known = {key for run in runs for key in run.config}
    for key in target:
        if key in ("lr", "seed"):
            raise ConfigError(
                f"to: {key} is what is predicted or resampled. Name a size, such as"
                " training.max_steps."
            )
        if key not in known:
            raise ConfigError(
                f"to: {key}: no run has this key."
                f" {did_you_mean(key, keys if keys != ['lr'] else known)}"
            )
        if key not in keys:
            found = next(run.config[key] for run in runs if key in run.config)
            value = "null" if found is None else found
            raise ConfigError(
                f"to: {key} is {value} in all runs, and nothing tells how lr moves with it: sweep"
                " lr at another, too."
            )
        for run in runs:
            if not (number(run.setting(key)) or 0) > 0:
                raise ConfigError(
                    f"to: {key} is {run.setting(key)} in {run.label}: expected a number above 0."
                )


def find_axes(runs: Sequence[Run], target: Mapping[str, float], others: Sequence[str]) -> Axes:
    """Find which keys have exponents of their own, and what the others are at the target.

    Args:
        runs: Of one contender.
        target: What was asked for.
        others: Further keys that varied.

    Raises:
        ConfigError: The runs do not tell the keys apart, and the target is not on the line that
            they moved along.
    """
    asked = list(target)
    whole = dict(target)
    for key in others:
        value = _on_line(runs, asked, target, key)
        same_group = any(key.partition(".")[0] == one.partition(".")[0] for one in asked)
        if value is None or (key.partition(".")[0] in OF_SIZE and not same_group):
            goes_on = (
                ""
                if value is None
                else f", as in {key}={value:.12g}, which goes on as in the sweeps"
            )
            raise ConfigError(
                f"to: {key} varied, too, and lr may follow it as well as {', '.join(asked)}: name"
                f" it{goes_on}, or give sweeps that agree in it."
            )
        whole[key] = value
    keys: list[str] = []
    for key in asked:
        if _rank(runs, [*keys, key]) > 1 + len(keys):
            keys.append(key)
    if not keys:
        raise ConfigError(
            f"one size only ({label(_values(runs[0], asked))}): sweep lr at another {asked[0]},"
            " too."
        )
    for key in asked:
        if key not in keys:
            value = _on_line(runs, keys, target, key)
            if value is None or abs(math.log(value / target[key])) > _ON_LINE:
                raise ConfigError(_unidentified(runs, keys, key))
    return Axes(tuple(keys), tuple(key for key in whole if key not in keys), whole)


def _values(run: Run, keys: Sequence[str]) -> dict[str, float]:
    return {key: number(run.setting(key)) or math.nan for key in keys}


def _logs(runs: Sequence[Run], keys: Sequence[str]) -> Array:
    """Collect the sizes of runs as a design matrix: 1 and the logarithms.

    Shape (sizes, 1 + keys).
    """
    rows = {tuple(_values(run, keys).values()) for run in runs}
    return np.array([[1.0, *map(math.log, row)] for row in sorted(rows)])


def _rank(runs: Sequence[Run], keys: Sequence[str]) -> int:
    return int(np.linalg.matrix_rank(_logs(runs, keys), tol=_ON_LINE))


def _on_line(
    runs: Sequence[Run], keys: Sequence[str], target: Mapping[str, float], key: str
) -> float | None:
    """Find the value of a key at the target if it is a power law of others in all runs.

    None: it is none.
    """
    rows = _logs(runs, [*keys, key])
    design, logs = rows[:, :-1], rows[:, -1]
    powers = np.linalg.lstsq(design, logs, rcond=None)[0]
    if float(np.abs(design @ powers - logs).max()) > _ON_LINE:
        return None
    value = math.exp(float(powers @ [1.0, *(math.log(target[one]) for one in keys)]))
    whole = all((number(run.setting(key)) or 0.0).is_integer() for run in runs)
    if not whole:
        return value
    if abs(value - round(value)) > 1e-3:
        raise ConfigError(
            f"to: {key} moves with {', '.join(keys)} in the sweeps and would be {value:.4g} at"
            f" {label({one: target[one] for one in keys})}, which cannot be built: ask for a size"
            " where it is a whole number."
        )
    return float(round(value))


def _unidentified(runs: Sequence[Run], keys: Sequence[str], key: str) -> str:
    """Say which runs would tell two keys apart that moved together."""
    smallest, largest = (
        pick(runs, key=lambda run: number(run.setting(key)) or 0.0) for pick in (min, max)
    )
    lacking = label(_values(smallest, keys) | _values(largest, [key]))
    return (
        f"to: {key} moved with {' and '.join(keys)} in all sweeps, so their exponents cannot be"
        f" told apart: sweep lr at {lacking}, too, or ask for a size on the line that they moved"
        " along."
    )


def fit_sizes(contender: Contender, axes: Axes, metric: str, mode: str) -> Sweep:
    """Fit each size of a contender; what cannot be fitted is said in `missing`."""
    groups: dict[tuple[float, ...], list[Arm]] = defaultdict(list)
    for arm in contender.arms:
        groups[tuple(_values(arm.runs[0], axes.keys).values())].append(arm)
    found = Sweep(contender.name, axes, [], [])
    for values, arms in sorted(groups.items()):
        size = dict(zip(axes.keys, values, strict=True))
        diverged = sorted({arm.lr for arm in arms if arm.lr is not None and arm.diverged})
        tried = {
            arm.lr: arm.scores
            for arm in arms
            if arm.lr is not None and arm.lr not in diverged and arm.scores
        }
        scores = {lr: tried[lr] for lr in sorted(tried)}
        seeds = sorted({seed for row in scores.values() for seed in row})
        lrs = np.log([*scores])
        costs = np.array([[scores[lr].get(seed, math.nan) for lr in scores] for seed in seeds])
        costs = costs if mode == "min" else -costs
        reason = _lacking(np.exp(lrs), costs, diverged, seeds, metric)
        if reason:
            found.missing.append(f"{label(size)}: {reason}")
        else:
            found.sizes.append(
                Size(
                    size,
                    scores,
                    diverged,
                    fit_basin(lrs, costs),
                    [run for arm in arms for run in arm.counted],
                )
            )
            if holes := [rate(lr) for lr in scores if len(scores[lr]) < len(seeds)]:
                found.missing.append(
                    f"{label(size)}: not every seed has finished at lr {', '.join(holes)}; run the"
                    " rest"
                )
    return found


def _lacking(
    lrs: Array, costs: Array, diverged: Sequence[float], seeds: Sequence[int], metric: str
) -> str:
    """Say why no optimum can be read from a grid; empty if one can."""
    if not len(lrs):
        return f"no run finished with {metric}"
    if len(seeds) < MIN_SEEDS:
        return (
            f"one seed, {seeds[0]}: without another nothing says how sure an optimum is; add"
            f" seed={seeds[0] + 1}"
        )
    best = best_of(costs)
    above = min((lr for lr in diverged if lr > lrs[best]), default=math.inf)
    step = float(lrs[1] / lrs[0]) if len(lrs) > 1 else 2.0
    if 0 < best < len(lrs) - 1:
        whole = np.isfinite(costs[:, best - 1 : best + 2]).all(axis=1).sum()
        few = (
            f"fewer than {MIN_SEEDS} seeds have finished at the best lr, {rate(float(lrs[best]))},"
            " and beside it"
        )
        return "" if whole >= MIN_SEEDS else f"{few}: run the rest"
    edge = float(lrs[best])
    further = (
        edge / step if best == 0 else math.sqrt(edge * above) if above < math.inf else edge * step
    )
    more = f" below lr {rate(above)}, where runs diverged" if best and above < math.inf else ""
    if len(lrs) < MIN_LRS:
        return (
            f"{len(lrs)} learning rates with a result: expected {MIN_LRS} or more; add"
            f" lr={rate(further)}"
        )
    end = "lowest" if best == 0 else "highest"
    return (
        f"the best lr, {rate(edge)}, is the {end} of its grid{more}: its optimum is unknown; add"
        f" lr={rate(further)}"
    )
