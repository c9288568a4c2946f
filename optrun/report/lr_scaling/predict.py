"""Predict the learning rate of another size, or say which runs would tell it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from optrun.artifacts.target import locate
from optrun.base.errors import ConfigError, did_you_mean
from optrun.base.formatting import rate
from optrun.config.tokens import key_of
from optrun.report import configurations as grouping
from optrun.report.comparability import unify_paths
from optrun.report.confirmation_plan import find_plans
from optrun.report.findings import choose_metric
from optrun.report.lr_scaling import fit
from optrun.report.runs import Run, all_keys, flatten, require_runs, to_number
from optrun.report.statistics import tabulate_scores

Size = Mapping[str, float]
"""Key of the configuration -> its value, above 0."""

GROUPS = ("model.", "training.", "data.")
"""Groups with settings that count as a size; settings of other groups separate contenders."""
OF_EVALUATION = ("eval_steps", "per_device_eval_batch_size", "max_eval_examples", "sample_tokens")
"""Settings that do not change the best lr."""
ROUNDING = 1e-6
"""Largest difference of two logarithms that counts as rounding."""
DIGITS = 7
"""Significant digits of a computed size, so that 32.0000001 heads are 32."""
FAR = 4.0
"""No number is given for a size further than this factor from those that were swept."""
WIDEST = 4.0
"""No number is given if the ends of its interval are further apart than this factor."""


@dataclass(frozen=True)
class Answer:
    """The learning rate of one contender for another size."""

    contender: str
    lr: fit.Estimate
    target: Size
    """The size, with the keys that moved along in every sweep."""
    exponents: Mapping[str, fit.Estimate]
    """lr* ~ key^exponent at the middle of the sizes, by key; empty if the target was swept."""
    optima: Mapping[str, fit.Estimate]
    """Size -> its best lr, whose interval ends below the lowest lr at which a run diverged."""
    test: str
    """The command of the runs that would test the answer, at both ends of its interval."""


@dataclass(frozen=True)
class Prediction:
    """The learning rates of all contenders for another size."""

    answers: Sequence[Answer]
    refused: Mapping[str, str]
    """Contender -> why it has no answer, and what to run."""


def write_size(values: Size) -> str:
    """Write keys and values as on the command line.

    Example:
        >>> write_size({"model.config.n_embd": 64.0, "training.num_train_epochs": 0.5})
        'model.config.n_embd=64 training.num_train_epochs=0.5'
    """
    return " ".join(f"{key}={value:.12g}" for key, value in values.items())


def predict(dirs: Sequence[Path | str], target: Size, metric: str | None = None) -> Prediction:
    """Predict the learning rate of a size from sweeps over lr at other sizes.

    Args:
        dirs: Sweeps, or folders that hold sweeps.
        target: Keys of the configuration that varied, and their values at that size.
        metric: Metric that defines the optimum; default: the main metric of the runs.

    Raises:
        ConfigError: The sweeps of no contender suffice; the message says what is missing.
    """
    # 1. Check the target.
    runs = _load_sweeps(dirs)
    size_keys = [key for key in all_keys(runs) if key != "lr" and _is_size(key, runs)]
    for key, value in target.items():
        if key not in size_keys:
            raise ConfigError(
                f"to: {key}: expected a key whose value is a number above 0 in every run."
                f" {did_you_mean(key, size_keys)}"
            )
        if not 0 < value < math.inf:
            raise ConfigError(f"to: {key}={value:g}: expected a number above 0.")
    # 2. Predict for each contender; one may lack what another has.
    metric, mode = choose_metric(runs, metric)
    answers = []
    refused = {}
    for contender in _find_contenders(runs, target, metric, mode):
        try:
            answers.append(_predict_lr(contender, target, mode))
        except ConfigError as error:
            refused[contender.name] = str(error)
    if not answers:
        raise ConfigError("\n".join(f"{name}: {reason}" for name, reason in refused.items()))
    return Prediction(answers, refused)


def find_lr_for_run(
    folder: Path | str,
    config: Mapping[str, object],
    base: Mapping[str, object] | None,
) -> tuple[float, str]:
    """Find the lr for a new run, from the runs that differ from it only in lr, seed and size.

    Args:
        folder: A sweep over lr, or a folder of such sweeps.
        config: Configuration of the new run; its lr is ignored.
        base: Configuration of muP's base width in the standard parametrization. A sweep of it
            counts as a sweep of muP at the base (Yang et al. 2022). None without muP.

    Returns:
        The lr, and a sentence with its interval and where it came from.

    Raises:
        ConfigError: The sweep has another configuration, or cannot predict this size.
    """
    # 1. A sweep without muP counts for muP at its base.
    runs = _load_sweeps([folder])
    base_note = ""
    if base and all(run.setting("parametrization.name") != "mup" for run in runs):
        config = base
        base_note = ", at the base of muP"
    # The new run as a `Run` without files, so that its settings can be compared with the others'.
    run = Run(Path(), "this run", "", config=flatten(config), values=config)
    unify_paths([run, *runs])
    # 2. Collect the sizes of this run, and the runs that are equal in everything else.
    target = {}  # key -> value of this run
    for key in grouping.differing_keys([run, *runs]):
        if key == "lr" or key.rpartition(".")[2] in OF_EVALUATION:
            continue
        # Case 1: a size may differ. The prediction is for that of this run.
        if key.startswith(GROUPS) and _is_size(key, [run]):
            target[key] = _size_of(run, key)
            continue
        # Case 2: any other setting has to be the same. Leave out the runs with another value.
        swept_values = sorted({str(swept.setting(key)) for swept in runs})
        value = run.settings([key])
        runs = [swept for swept in runs if swept.settings([key]) == value]
        if not runs:
            raise ConfigError(
                f"this run has {key}={run.setting(key)}, but the runs of {folder} have"
                f" {', '.join(swept_values)}. Sweep lr at {key}={run.setting(key)}, or give lr."
            )
    # 3. Predict from the best contender; the runs that are left differ only in lr, seed and sizes.
    metric, mode = choose_metric(runs, None)
    best_contender = _find_contenders(runs, target, metric, mode)[0]
    answer = _predict_lr(best_contender, target, mode)
    source = "the optimum at this size"
    if answer.exponents:  # those of the power law; none if the sweep has runs of this size
        source = f"predicted for {write_size(answer.target)}"
    lr = f"lr {rate(answer.lr.value)}, 90 % interval {answer.lr.interval()}"
    return answer.lr.value, f"{folder}: {lr}, {source}{base_note}"


def _load_sweeps(dirs: Sequence[Path | str]) -> list[Run]:
    """Read the runs with a known configuration; leave out confirmations."""
    folders = [locate(str(directory)).runs_folder for directory in dirs]
    runs = [run for run in require_runs(folders, beside=find_plans(folders)) if run.has_config]
    if not runs:
        raise ConfigError(f"{', '.join(map(str, dirs))}: no run here has a readable config.yaml.")
    unify_paths(runs)
    return runs


def _find_contenders(
    runs: Sequence[Run],
    target: Size,
    metric: str,
    mode: str,
) -> list[grouping.Contender]:
    """Group runs into contenders, best first: runs of one differ in nothing but lr, seed and size.

    A key is a size if it is in the target. Another key is a size if all its values are numbers
    above 0, and it is of the model, the training or the data (`GROUPS`), or its value follows from
    those of the target. Every run belongs to a contender.
    """
    # 1. The keys that separate contenders: all but lr and sizes. Seeds are not in `keys`.
    keys = grouping.differing_keys(runs)
    compared = []
    for key in keys:
        if key == "lr" or key in target:
            continue
        may_be_size = key.startswith(GROUPS) or grouping.is_implied(key, [*target], runs)
        if not may_be_size or not _is_size(key, runs):
            compared.append(key)
    compared = grouping.drop_implied_keys(compared, runs)
    # 2. Group the runs by them.
    configurations = grouping.build_configurations(runs, keys, metric, mode)
    return grouping.build_contenders(configurations, compared, mode)


def _size_of(run: Run, key: str) -> float:
    """Read a setting as a number; NaN if it is none, or 0."""
    return to_number(run.setting(key)) or math.nan


def _is_size(key: str, runs: Sequence[Run]) -> bool:
    """Tell whether a key has a number above 0 in every run."""
    return all(_size_of(run, key) > 0 for run in runs)


def _predict_lr(contender: grouping.Contender, target: Size, mode: str) -> Answer:
    """Find the lr of one contender at the target: its optimum if swept there, else by a power law.

    With optima at n_embd=64, 128 and 256, the target n_embd=128 gets the optimum there, and 512
    gets lr = exp(law at ln 512), where ln lr is linear in ln n_embd up to a small bend.

    Raises:
        ConfigError: A size has no optimum, or the prediction is too uncertain to use.
    """
    # 1. Find the axes, the keys that a size is made of; `values` are those of the target.
    runs: list[Run] = []
    for configuration in contender.configurations:
        runs += configuration.latest_runs
    axes, values = _find_axes(runs, target)
    target_name = write_size({key: values[key] for key in axes})
    # 2. Fit the curve of cost over lr at each size. Grouped by the axes, each contender is a size;
    # its name, such as `n_embd=64`, is the key of both mappings.
    sizes = {}
    curves = {}
    for runs_of_size in grouping.build_contenders(contender.configurations, axes, mode):
        run = runs_of_size.configuration.runs[0]
        size = {key: _size_of(run, key) for key in axes}
        name = write_size(size)
        sizes[name] = [*size.values()]
        try:
            curves[name] = _fit_lr_curve(runs_of_size.lr_curve, mode)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from error
    # The optima are logarithms with one common variance; `exp` gives learning rates.
    variance = fit.pool_variance(curves.values())
    optima = {name: curve.optimum(variance).exp() for name, curve in curves.items()}
    # 3. Unless the target was swept, fit the power law of the optima over the sizes. The rows of
    # `size_table` are sizes, its columns axes.
    lr = optima.get(target_name)
    exponents = {}
    if lr is None:
        size_table = np.array([*sizes.values()])
        law = fit.fit_law(size_table, [*curves.values()])
        lr = law.predict([values[key] for key in axes]).exp()
        _refuse_useless(lr, law, dict(zip(axes, size_table.T, strict=True)), values)
        exponents = {key: law.exponent(index) for index, key in enumerate(axes)}
    return Answer(
        contender=contender.name,
        lr=lr,
        target=values,
        exponents=exponents,
        optima={name: optima[name] for name in sorted(sizes, key=sizes.__getitem__)},
        test=_write_test(runs[0], values, lr),
    )


def _find_axes(runs: Sequence[Run], target: Size) -> tuple[list[str], dict[str, float]]:
    """Find the axes, the keys with an exponent of their own, and all values at the target.

    A key that follows by a power law from the axes before it, in all runs, gets no exponent of its
    own, because no data would tell the two apart. A key that the target does not name has to follow
    so, and its value at the target is computed.

    If runs have n_embd=32, n_head=2 and n_embd=64, n_head=4, the target n_embd=128 gives the axis
    n_embd and the values n_embd=128, n_head=8.

    Raises:
        ConfigError: A key varied freely and is not in the target, a typed value contradicts the
            law, or a value should be a whole number and is not.
    """
    axes: list[str] = []
    values = dict(target)
    # Keys that differ between the runs, without lr and those that the target names.
    unnamed = [key for key in grouping.differing_keys(runs) if key not in {"lr", *target}]
    for key in [*target, *unnamed]:
        # Its value at the target, if in all runs it is a power law of the axes found so far. With
        # no axis yet, that is the value that all runs share.
        value = _extrapolate_key(runs, axes, target, key)
        # 1. None: it does not follow from the axes so far, and is an axis if the target names it.
        if value is None and key not in target:
            raise ConfigError(
                f"to: {key} varied, too: add {key}=VALUE, or give sweeps with the same {key}."
            )
        if value is None:
            axes.append(key)
            continue
        # 2. It follows: its value at the target is fixed.
        if key in target and not math.isclose(value, target[key], rel_tol=ROUNDING):
            same = "".join(f" and the same {axis}" for axis in axes)
            raise ConfigError(
                f"to: {key}={target[key]:.12g}: the sweeps predict lr only for {key}={value:.12g}."
                f" Sweep lr at another {key}{same}, too."
            )
        if not value.is_integer() and all(_size_of(run, key).is_integer() for run in runs):
            raise ConfigError(
                f"to: {key} would be {value:.4g} at {write_size(target)}, which cannot be built:"
                " expected a whole number."
            )
        values[key] = value
    return axes, values


def _extrapolate_key(
    runs: Sequence[Run],
    axes: Sequence[str],
    target: Size,
    key: str,
) -> float | None:
    """Compute the value of a key at the target, if it is a power law of the axes in all runs.

    That is ln value = c + sum of power * ln axis, up to rounding; else None. Without axes it is the
    value that all runs have.
    """
    # 1. Fit the law, and refuse it if one run does not follow it.
    log_values = np.log([_size_of(run, key) for run in runs])
    columns = [np.ones(len(runs))]
    columns.extend(np.log([_size_of(run, axis) for run in runs]) for axis in axes)
    design = np.column_stack(columns)
    powers = np.linalg.lstsq(design, log_values, rcond=None)[0]
    if float(np.abs(design @ powers - log_values).max()) > ROUNDING:
        return None
    # 2. Apply it to the target.
    log_target = [1.0, *(math.log(target[axis]) for axis in axes)]
    value = math.exp(powers @ log_target)
    return float(f"{value:.{DIGITS}g}")


def _fit_lr_curve(curve: grouping.LrCurve, mode: str) -> fit.FittedCurve:
    """Fit the optimum of lr at one size, without learning rates with a diverged run.

    Raises:
        ConfigError: The runs show no optimum; the message says what to run.
    """
    scores = {}
    for lr, point in curve.points.items():
        if lr not in curve.diverged:
            scores[lr] = point.scores
    if not scores:
        raise ConfigError("no run finished")
    # 1. Tabulate the costs, of which less is better: one row for each seed, one column for each lr,
    # rising.
    lrs = [*scores]
    costs = tabulate_scores(scores.values()).T
    if mode == "max":
        costs = -costs
    # 2. The best lr and both neighbours need enough seeds.
    best = fit.index_of_best_lr(costs)
    best_and_neighbours = costs[:, max(0, best - 1) : best + 2]
    complete_seeds = int(np.isfinite(best_and_neighbours).all(axis=1).sum())
    if complete_seeds < fit.MIN_SEEDS:
        raise ConfigError(
            f"{complete_seeds} seeds have finished at the best lr, {rate(lrs[best])}, and beside"
            f" it: expected {fit.MIN_SEEDS} or more"
        )
    # 3. The best lr has to lie inside the grid.
    diverged_above = [lr for lr in curve.diverged if lr > lrs[best]]
    limit = min(diverged_above, default=math.inf)
    if best in (0, len(lrs) - 1):
        end = "lowest"
        further = lrs[0] / 2
        if best > 0:
            end = "highest"
            # Twice the lr, or the geometric mean with the lowest lr that diverged if that is less.
            further = min(lrs[best] * 2, math.sqrt(lrs[best] * limit))
        raise ConfigError(
            f"the best lr, {rate(lrs[best])}, is the {end} of {len(lrs)}, so its optimum is"
            f" unknown: add lr={rate(further)}"
        )
    return fit.fit_lr_curve(np.log(lrs), costs, limit=math.log(limit))


def _refuse_useless(
    lr: fit.Estimate,
    law: fit.ScalingLaw,
    swept: Mapping[str, fit.Array],
    target: Size,
) -> None:
    """Refuse an unsupported prediction, and say what to sweep.

    Args:
        lr: The predicted lr.
        law: The power law behind it.
        swept: Key -> its values at the sizes with an optimum.
        target: Key -> its value at the size that is asked for.

    Raises:
        ConfigError: The target is too far, the optima follow no power law, or the interval is too
            wide to be of use.
    """
    for key, sizes in swept.items():
        # How many times each size is smaller or larger than the target.
        factors = np.maximum(sizes / target[key], target[key] / sizes)
        if factors.min() > FAR:
            raise ConfigError(
                f"{key}={target[key]:.12g} lies {factors.min():.3g} times beyond"
                f" {sizes[factors.argmin()]:.12g}, expected {FAR:g} at most: sweep lr at a size"
                " between them, too."
            )
    if law.is_broken:
        reason = "the optima follow no power law, as if the smallest size were too small"
    elif lr.is_bounded and lr.high > WIDEST * lr.low:
        reason = f"the 90 % interval of lr, {lr.interval()}, is wider than a factor of {WIDEST:g}"
    else:
        return
    raise ConfigError(f"{reason}: sweep lr at a size nearer to {write_size(target)}, too.")


def _write_test(run: Run, target: Size, lr: fit.Estimate) -> str:
    """Compose the command of a sweep over both ends of the interval of lr at a size, two seeds.

    Such as `optrun -m optimizer=lamb model.config.n_embd=128 lr=1e-3,2e-3 seed=0,1`. Without an
    interval it sweeps half and twice the lr.

    Args:
        run: A run of the contender, whose other overrides the command repeats.
        target: The size.
        lr: The predicted lr with its interval.
    """
    ends = [lr.low, lr.high]
    if not lr.is_bounded:
        ends = [lr.value / 2, lr.value * 2]
    values = {key: f"{value:.12g}" for key, value in target.items()}
    values["lr"] = ",".join(map(rate, ends))
    overrides = [token for token in run.overrides if key_of(token) not in values]
    overrides += [f"{key}={value}" for key, value in values.items()]
    return replace(run, overrides=overrides).command(seeds=[0, 1])
