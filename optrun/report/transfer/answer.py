"""Answer which lr another size needs.

For each contender a prediction with its interval, and what would test it.

The same answers `lr=auto`, from sweeps of a run's own size or of others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from optrun.base.errors import ConfigError
from optrun.base.formatting import rate
from optrun.report.alike import incomparable, respell
from optrun.report.arms import build_arms, build_contenders, differing
from optrun.report.collect import NOT_STARTED, Run, flatten, load_runs, number
from optrun.report.confirmation import confirmations
from optrun.report.findings import choose_metric
from optrun.report.transfer.fit import Law, fit_law, quantile
from optrun.report.transfer.sizes import OF_SIZE, Axes, Size, Sweep, find_sweeps, fit_sizes, label

_OF_EVALUATION = (
    "training.eval_steps",
    "training.per_device_eval_batch_size",
    "data.max_eval_examples",
    "task.sample_tokens",
)
"""Keys that move no optimum."""
FAR = 4.0
"""No number is given for a size beyond the largest, or below the smallest, by more than this."""
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

    @property
    def interval(self) -> str:
        """The ends, of a learning rate."""
        if not self.is_bounded:
            return "none: two sizes test no law"
        return f"{rate(self.low)} to {rate(self.high)}"


@dataclass(frozen=True)
class Optimum:
    """What one size says."""

    size: Mapping[str, float]
    lr: Estimate
    """The bottom of its basin; no higher than the lowest lr at which a run diverged."""
    cost: float
    """The metric there."""
    seeds: int


@dataclass(frozen=True)
class Answer:
    """What the sweeps of one contender say of the target."""

    contender: str
    lr: Estimate
    exponents: Mapping[str, Estimate]
    """lr* ~ key^exponent, by key."""
    along: Mapping[str, float]
    """Keys that moved with these in every sweep, and what they are at the target."""
    optima: Sequence[Optimum]
    """By size."""
    assumption: str
    """What carries the prediction."""
    notes: Sequence[str]
    tests: Sequence[str]
    """The two runs that would test it, at the ends of the interval, as command lines."""


@dataclass(frozen=True)
class Transfer:
    """What the sweeps say of another size, and where it was written."""

    target: Mapping[str, float]
    """The size that was asked for."""
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
    """`transfer.md`, `transfer.json`, `transfer.png`."""


def parse_target(text: str) -> dict[str, float]:
    """Read a size such as `model.config.n_embd=512 training.max_steps=10000`.

    Raises:
        ConfigError: It is no list of keys with numbers above 0.
    """
    target: dict[str, float] = {}
    for token in text.split():
        key, equals, value = token.partition("=")
        if not equals or not key:
            raise ConfigError(
                f'to: {token!r}: expected KEY=VALUE, as in to="training.max_steps=10000".'
            )
        if key in target:
            raise ConfigError(f"to: {key} is given twice: which one is meant?")
        target[key] = _positive(key, value)
    if not target:
        raise ConfigError(
            'to: expected the size that lr is for, as in to="model.config.n_embd=512".'
        )
    return target


def _positive(key: str, value: object) -> float:
    try:
        given = math.nan if isinstance(value, bool) else float(str(value).replace("_", ""))
    except ValueError:
        given = math.nan
    if not 0 < given < math.inf:
        raise ConfigError(f"to: {key}={value}: expected a number above 0.")
    return given


def answer(
    dirs: Sequence[Path], target: Mapping[str, object], metric: str | None = None
) -> Transfer:
    """Predict the learning rate of a size from sweeps at others.

    Args:
        dirs: Sweeps, or folders of them.
        target: Keys of the configuration that varied, and their values at the size that is asked
            for.
        metric: What to judge by; default: the main metric of the runs.

    Raises:
        ConfigError: No contender's sweeps suffice; the message says what is missing.
    """
    asked = {key: _positive(key, value) for key, value in target.items()}
    loaded = load_sweeps(dirs)
    waiting = sum(run.status in ("running", NOT_STARTED) for run in loaded)
    runs = [run for run in loaded if run.described]
    names = sorted(
        {
            str(main["name"])
            for run in runs
            if isinstance(main := run.summary.get("main_metric"), dict)
        }
    )
    if metric is None and len(names) > 1:
        raise ConfigError(
            f"the runs have several main metrics ({', '.join(names)}): say which counts with"
            " metric=NAME."
        )
    name, mode = choose_metric(runs, metric)
    if apart := incomparable([run for run in runs if run.score(name) is not None or run.diverged]):
        raise ConfigError(f"{apart}: ask for each kind by itself.")
    found, refused, kept = [], {}, []
    for sweep in find_sweeps(runs, asked, name, mode):
        if reason := refusal(sweep):
            refused[sweep.name] = reason
            continue
        try:
            made = answer_of(sweep, mode)
        except ConfigError as error:
            refused[sweep.name] = str(error).rstrip(".")
            continue
        notes = [
            *made.notes,
            *([f"{waiting} runs have not ended: ask again when they have"] if waiting else []),
        ]
        found.append(replace(made, notes=notes))
        kept.append(sweep)
    if not found:
        raise ConfigError(
            "; ".join(f"{contender}: {reason}" for contender, reason in refused.items()) + "."
        )
    return Transfer(asked, name, mode, found, refused, kept)


def load_sweeps(dirs: Sequence[Path]) -> list[Run]:
    """Read all runs of sweeps, confirmations left out.

    Raises:
        ConfigError: There is none.
    """
    for directory in dirs:
        if not directory.is_dir():
            raise ConfigError(f"transfer {directory}: no such directory.")
    runs = load_runs(dirs, beside=confirmations(dirs))
    if not any(run.described for run in runs):
        raise ConfigError(f"transfer {', '.join(map(str, dirs))}: no run found here or beneath.")
    respell([run for run in runs if run.described])
    return runs


def refusal(sweep: Sweep) -> str:
    """Say why a contender's sizes do not suffice; empty if they do."""
    if not sweep.axes.keys:
        return "" if sweep.sizes else "; ".join(sweep.missing)
    needed = 1 + len(sweep.axes.keys)
    rows = np.array([[1.0, *map(math.log, size.values.values())] for size in sweep.sizes]).reshape(
        -1, needed
    )
    if len(rows) and np.linalg.matrix_rank(rows, tol=1e-6) == needed:
        return ""
    have = (
        f"expected {needed} sizes or more with an optimum inside of their grid, found {len(rows)}"
    )
    return "; ".join([have, *sweep.missing])


def answer_of(sweep: Sweep, mode: str) -> Answer:
    """Fit the power law of a contender's sizes and predict the target.

    Args:
        sweep: Of which `refusal` says nothing.
        mode: "min" or "max".
    """
    keys, target = sweep.axes.keys, sweep.axes.target
    law = fit_law(
        np.array([[*size.values.values()] for size in sweep.sizes]),
        [size.basin for size in sweep.sizes],
    )
    lr = _estimate(law.predict([target[key] for key in keys]))
    seen = {key: [size.values[key] for size in sweep.sizes] for key in keys}
    beyond = {key: max(target[key] / max(seen[key]), min(seen[key]) / target[key]) for key in keys}
    nearest = min(
        sweep.sizes,
        key=lambda size: sum(abs(math.log(target[key] / size.values[key])) for key in keys),
    )
    optima = [_optimum(size, law, mode) for size in sweep.sizes]
    exponents = {key: Estimate(*law.exponent(at)) for at, key in enumerate(keys)}
    if keys:
        _refuse_useless(lr, law, beyond, sweep.axes, seen)
    ends = (lr.low, lr.high) if lr.is_bounded else (lr.value / 2, lr.value * 2)
    ranges = " and ".join(
        f"{key} from {min(seen[key]):.6g} to {max(seen[key]):.6g}" for key in keys
    )
    return Answer(
        contender=sweep.name,
        lr=lr,
        exponents=exponents,
        along={key: target[key] for key in sweep.axes.along},
        optima=optima,
        assumption=(
            f"lr* is a power law in {ranges}, and goes on so to "
            f"{label({key: target[key] for key in keys})}; all else is as in the sweeps"
        ),
        notes=_notes(sweep, law, exponents),
        tests=[_command(nearest.runs, target, end) for end in ends],
    )


def _refuse_useless(
    lr: Estimate,
    law: Law,
    beyond: Mapping[str, float],
    axes: Axes,
    seen: Mapping[str, Sequence[float]],
) -> None:
    """Give no number that nothing carries, and name the runs that would.

    Raises:
        ConfigError: The target is too far, the optima follow no power law, or the interval is too
            wide to be of use.
    """
    key = max(beyond, key=lambda one: beyond[one])
    is_above = axes.target[key] > max(seen[key])
    edge = max(seen[key]) if is_above else min(seen[key])
    halfway = label({key: _like(math.sqrt(edge * axes.target[key]), seen[key])})
    if beyond[key] > FAR:
        raise ConfigError(
            f"{key}={axes.target[key]:.6g} lies {beyond[key]:.3g} times beyond what was swept;"
            f" expected {FAR:g} at most: sweep lr at {halfway}, too."
        )
    if law.bends:
        raise ConfigError(
            f"the optima lie a factor of {math.exp(law.misfit):.3g} from any power law, more than"
            f" seeds explain: sweep lr at {halfway}, or leave the smallest size out."
        )
    if lr.is_bounded and lr.high > WIDEST * lr.low:
        raise ConfigError(
            f"the 90 % interval of lr, {lr.interval}, is wider than a factor of {WIDEST:g}: sweep"
            f" lr at {halfway}, too, or add seeds to all sizes."
        )


def _like(value: float, examples: Sequence[float]) -> float:
    """Round a size to a whole number if its examples are whole."""
    return float(round(value)) if all(one.is_integer() for one in examples) else value


def _estimate(logs: tuple[float, float, float]) -> Estimate:
    value, low, high = logs
    if high > 700:
        return Estimate(math.exp(value), -math.inf, math.inf)
    return Estimate(math.exp(value), math.exp(low), math.exp(high))


def _optimum(size: Size, law: Law, mode: str) -> Optimum:
    basin = size.basin
    bent = 0.0 if math.isnan(basin.wide) else basin.wide - basin.best
    half = quantile(basin.seeds - 1) * math.sqrt(law.seed_variance) + abs(bent)
    lr = _estimate((basin.best, basin.best - half, basin.best + half))
    above = min((lr for lr in size.diverged if math.log(lr) > basin.best), default=math.inf)
    cost = basin.level if mode == "min" else -basin.level
    return Optimum(size.values, replace(lr, high=min(lr.high, above)), cost, basin.seeds)


def _notes(sweep: Sweep, law: Law, exponents: Mapping[str, Estimate]) -> list[str]:
    axes, notes = sweep.axes, []
    if math.isnan(law.misfit):
        notes.append(
            f"{len(sweep.sizes)} sizes: a line through as many points as it needs, which nothing"
            " tests"
        )
    else:
        notes.append(
            f"The optima lie within a factor of {math.exp(law.misfit):.3g} of the power law"
        )
    if axes.along:
        moved = ", ".join(f"{key} (here {axes.target[key]:.6g})" for key in axes.along)
        notes.append(
            f"Along with that, {moved} moved in every sweep: the exponents are of all of it"
            " together"
        )
    notes += [
        f"The exponent of {key} could be 0: its interval holds it"
        for key, one in exponents.items()
        if one.is_bounded and one.low <= 0 <= one.high
    ]
    if any(math.isnan(size.basin.wide) for size in sweep.sizes):
        notes.append(
            "A size has three learning rates around its best: nothing tells how far its parabola"
            " holds"
        )
    return [*notes, *(f"At {each}" for each in sweep.missing)]


def _command(runs: Sequence[Run], target: Mapping[str, float], lr: float) -> str:
    """Compose the line of a run at the target."""
    run = next((run for run in runs if run.finished), runs[0])
    put = {key: f"{value:.12g}" for key, value in target.items()} | {
        "lr": rate(lr),
        "seed": str(run.seed or 0),
    }
    tokens = [(token, token.lstrip("+").partition("=")[0]) for token in run.overrides]
    typed = {key for _, key in tokens}
    kept = [
        f"{token.partition('=')[0]}={put[key]}" if key in put else token for token, key in tokens
    ]
    return replace(
        run, overrides=[*kept, *(f"{key}={put[key]}" for key in put if key not in typed)]
    ).command()


def sentence(found: Answer, target: Mapping[str, float]) -> str:
    """Write the answer as one line."""
    return (
        f"{found.contender}: lr {rate(found.lr.value)} (90 % interval {found.lr.interval}) for"
        f" {label(target)}"
    )


def rate_from(
    folder: Path, config: Mapping[str, object], base: Mapping[str, object] | None = None
) -> tuple[Answer, str]:
    """Find the lr of a run that is about to start.

    Args:
        folder: A sweep over lr, or a folder of them.
        config: Of the run; its own lr does not count.
        base: Configuration of the base of muP, in the standard parametrization: a sweep of that
            is a sweep of muP at its base (Yang et al. 2022).

    Returns:
        The answer, and a sentence with the lr, its interval and where it came from.

    Raises:
        ConfigError: The sweep is of another recipe, or does not tell this size.
    """
    try:
        runs = [run for run in load_sweeps([folder]) if run.described]
        is_standard = all(run.setting("parametrization.name") != "mup" for run in runs)
        if base is None or not is_standard:
            return _rate_from(folder, runs, config)
        answer, said = _rate_from(folder, runs, base)
        return answer, f"{said}, at the base of muP"
    except ConfigError as error:
        raise ConfigError(f"lr=auto lr_from={folder}: {error}") from error


def _rate_from(folder: Path, runs: list[Run], config: Mapping[str, object]) -> tuple[Answer, str]:
    asked = Run(folder, "this run", "", config=flatten(config), values=config)
    respell([asked, *runs])
    keys = [key for key in differing([asked, *runs]) if key != "lr" and key not in _OF_EVALUATION]
    sizes = [
        key
        for key in keys
        if key.partition(".")[0] in OF_SIZE and (number(asked.setting(key)) or 0) > 0
    ]
    for key in keys:
        alike = [run for run in runs if run.settings([key]) == asked.settings([key])]
        if key not in sizes and not alike:
            there = ", ".join(sorted({str(run.setting(key)) for run in runs}))
            raise ConfigError(
                f"this run has {key}={asked.setting(key)}, the sweep {there}: sweep lr with the"
                " same."
            )
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
    return found, f"{folder}: lr {rate(found.lr.value)}, 90 % interval {found.lr.interval}, {how}"
