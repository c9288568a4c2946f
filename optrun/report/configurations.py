"""Group runs into configurations (all seeds of one setting), and these into contenders."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from optrun.artifacts.objective import loss_beside, score_of_diverged
from optrun.artifacts.provenance import (
    DISTRIBUTED_DTYPES,
    KEYS_WITHOUT_EFFECT,
    TRAINING_KEYS_WITHOUT_EFFECT,
    conditional_keys,
)
from optrun.base.errors import ConfigError, did_you_mean
from optrun.base.formatting import plain, rate
from optrun.config.tokens import key_of
from optrun.report.comparability import shorten_paths
from optrun.report.runs import Run, Setting, all_keys, normalise_setting
from optrun.report.statistics import ReferenceComparison

_KEYS_WITHOUT_EFFECT = {
    "seed",
    "hydra",
    *KEYS_WITHOUT_EFFECT,
    *(f"training.{key}" for key in TRAINING_KEYS_WITHOUT_EFFECT),
}
"""Keys and groups that do not change the result of a run, and the seed."""


@dataclass
class Configuration:
    """Runs of one configuration, alike but for the seed."""

    settings: dict[str, Setting]
    """The settings in which the configurations of this report differ."""
    runs: list[Run]
    scores: dict[int, float] = field(default_factory=dict)
    """Seed -> final value of the metric; a diverged run has that of `score_of_diverged` instead."""
    diverged_seeds: set[int] = field(default_factory=set)
    """Seeds whose run diverged."""
    loss: float = math.inf
    """Mean final loss of the same evaluation, which decides between configurations of equal score.
    """
    repeated: list[Run] = field(default_factory=list)
    """Runs left out of `scores` because a later run has the same configuration and seed."""

    def pick_settings(self, keys: Iterable[str]) -> dict[str, Setting]:
        """Pick the settings of these keys, without keys unknown to the configuration."""
        return {key: self.settings[key] for key in keys if key in self.settings}

    @property
    def latest_runs(self) -> list[Run]:
        """List one run for each seed: the latest finished one, else the latest."""
        repeated_ids = set(map(id, self.repeated))
        return [run for run in self.runs if id(run) not in repeated_ids]

    @property
    def mean(self) -> float:
        """Mean score; NaN without one."""
        if self.scores:
            return float(np.mean(list(self.scores.values())))
        return math.nan

    def cost(self, mode: str) -> float:
        """Return the mean score, less is better; infinite without one."""
        if not self.scores:
            return math.inf
        if mode == "min":
            return self.mean
        return -self.mean

    @property
    def sd(self) -> float:
        """Standard deviation over seeds; NaN below two."""
        if len(self.scores) > 1:
            return float(np.std(list(self.scores.values()), ddof=1))
        return math.nan

    @property
    def finished_scores(self) -> dict[int, float]:
        """Map each seed to its score, without the stand-ins of diverged seeds."""
        return {
            seed: score for seed, score in self.scores.items() if seed not in self.diverged_seeds
        }

    @property
    def diverged(self) -> list[Run]:
        """List the diverged runs."""
        return [run for run in self.runs if run.diverged]

    @property
    def lr(self) -> float | None:
        """Peak learning rate."""
        return self.runs[0].lr


@dataclass(frozen=True)
class LrCurve:
    """Metric against learning rate of one contender."""

    points: dict[float, Configuration]
    """By rising lr: the configuration with the best mean at this lr. Only rates with a score."""
    diverged: tuple[float, ...]
    """Learning rates at which some run diverged."""
    tried_lrs: tuple[float, ...]
    """Every learning rate, also of runs that have not ended."""
    best: Configuration | None

    @property
    def finished_lrs(self) -> tuple[float, ...]:
        """Every learning rate with an outcome: scored or diverged."""
        return tuple(sorted({*self.points, *self.diverged}))

    def neighbours_of_best(self) -> tuple[float | None, float | None]:
        """Find the tried learning rates next to the best, below and above; None at an edge."""
        best = self.tried_lrs[0] if self.best is None else self.best.lr or 0.0
        below = [lr for lr in self.tried_lrs if lr < best]
        above = [lr for lr in self.tried_lrs if lr > best]
        return max(below, default=None), min(above, default=None)


@dataclass(frozen=True)
class Contender:
    """One optimizer, or whatever else is compared, with all configurations tried for it.

    The verdict judges contenders.
    """

    name: str
    """Its settings in one line; unique in the report."""
    settings: dict[str, Setting]
    configurations: list[Configuration]
    configuration: Configuration
    """The chosen one, by which it is judged."""
    lr_curve: LrCurve
    rank: int | None = None
    """1 is best, equal means share; None without an outcome."""
    comparison: ReferenceComparison | None = None
    """Against the reference; None where nothing is compared."""


def _keys_with_effect(runs: Sequence[Run]) -> set[str]:
    """Find the keys that affect results although `_KEYS_WITHOUT_EFFECT` holds their group.

    The dtypes of ranks always do; others only if a run has a certain option, such as
    `checkpoint.metric` with early stopping, see `conditional_keys`.
    """
    # As pairs of group and name, such as ("checkpoint", "metric").
    keys = set(DISTRIBUTED_DTYPES)
    for run in runs:
        patience = run.config.get("training.early_stopping_patience")
        on_nonfinite = run.config.get("training.on_nonfinite")
        keys.update(conditional_keys(patience, on_nonfinite, run.config.get("branch_from")))
    return {f"{group}.{name}" for group, name in keys}


def differing_keys(runs: Sequence[Run]) -> list[str]:
    """Find the configuration keys with different values among the runs, the model's name first.

    Three kinds of keys are left out: those without effect on the result; seeds, also `data.seed` if
    it follows `seed`; and keys whose value always follows from the choice of their group, such as
    `optimizer.betas` if it differs only because `optimizer.name` does.
    """
    conditional = _keys_with_effect(runs)
    keys = []
    for key in all_keys(runs):
        group = key.partition(".")[0]
        is_without_effect = key in _KEYS_WITHOUT_EFFECT or group in _KEYS_WITHOUT_EFFECT
        if is_without_effect and key not in conditional:
            continue
        if _repeats_seed(key, runs):
            continue
        choice = f"{group}.name"
        # Nothing implies the choice itself. Without other keys "implied" means that all runs have
        # the same value, so it is listed if they differ.
        other_keys = [] if key in (choice, group) else [choice]
        if not is_implied(key, other_keys, runs):
            keys.append(key)
    first = ("model.name", "data.name", "task.name", "optimizer.name", "lr")
    rest = [key for key in keys if key not in first]
    return [key for key in first if key in keys] + rest


def _repeats_seed(key: str, runs: Iterable[Run]) -> bool:
    """Tell whether a key such as `data.seed` always equals the seed of the run."""
    configs = [run.config for run in runs if key in run.config]
    return key.endswith(".seed") and all(config[key] == config.get("seed") for config in configs)


def pick_compared_keys(keys: Sequence[str], tuned: Collection[str] = ()) -> list[str]:
    """Pick the keys to separate contenders by; the others were tuned for each contender.

    The others are lr, the options of an optimizer and `tuned`, unless nothing else differs.

    Args:
        keys: Keys in which the runs differ.
        tuned: Keys that the sweep declares as tuned.

    Example:
        >>> pick_compared_keys(["optimizer.name", "lr", "optimizer.weight_decay"])
        ['optimizer.name']
        >>> pick_compared_keys(["lr", "optimizer.weight_decay"])
        ['optimizer.weight_decay']
        >>> pick_compared_keys(["lr"])
        ['lr']
        >>> pick_compared_keys(["optimizer.name", "scheduler.name"], {"scheduler.name"})
        ['optimizer.name']
        >>> pick_compared_keys(["scheduler.name"], {"scheduler.name"})
        ['scheduler.name']
    """
    without_lr = [key for key in keys if key != "lr"]
    without_options = [
        key for key in without_lr if key == "optimizer.name" or not key.startswith("optimizer.")
    ]
    candidates = without_options or without_lr or list(keys)
    return [key for key in candidates if key not in tuned] or candidates


def drop_implied_keys(keys: Sequence[str], runs: Sequence[Run]) -> list[str]:
    """Drop each key whose value follows from the value of one other key in all runs.

    If batch size and warm-up were always changed together, one of them is enough. The key that the
    first run's command line names first stays, but never `eval_steps`: nobody compares by it. The
    order of the keys stays.

    If runs with batch 8 have warm-up 10 and those with batch 16 have warm-up 20, each implies the
    other: of a first run `optrun warmup=10 batch=8`, `warmup` stays.
    """
    # 1. Order the keys by where the first run typed them.
    overrides = runs[0].overrides if runs else []
    typed = [key_of(override) for override in overrides]

    def position(key: str) -> int:
        """Find where the key, or the choice of its group, was typed; last if it was not."""
        if key == "training.eval_steps":
            return len(typed) + 1
        for name in (key, key.removesuffix(".name")):
            if name in typed:
                return typed.index(name)
        return len(typed)

    # 2. From the last one to the first, drop each that a single one of the remaining keys implies.
    remaining = list(keys)
    for key in sorted(keys, key=position, reverse=True):
        other_keys = [other_key for other_key in remaining if other_key != key]
        if any(is_implied(key, [other_key], runs) for other_key in other_keys):
            remaining.remove(key)
    return remaining


def is_implied(key: str, other_keys: Sequence[str], runs: Iterable[Run]) -> bool:
    """Tell whether runs with the same values of other keys have the same value of this key.

    Without other keys: whether all runs have the same value. If runs have batch 8 and warm-up 10, 8
    and 10, 16 and 20, the batch implies the warm-up; one more with 8 and 20, and it does not.
    """
    # Values of the other keys -> the value of the first run with these.
    values: dict[tuple[object, ...], object] = {}
    for run in runs:
        value = run.settings([key])
        if values.setdefault(run.settings(other_keys), value) != value:
            return False
    return True


def build_configurations(
    runs: Sequence[Run],
    keys: Sequence[str],
    metric: str,
    mode: str,
) -> list[Configuration]:
    """Join runs with equal settings and different seeds into configurations.

    Args:
        runs: Runs whose whole configuration is known.
        keys: Keys in which the runs differ, see `differing_keys`.
        metric: Name of the metric that is the score.
        mode: "min" or "max".

    Returns:
        Configurations in the order of their first run. If a seed occurs twice, the finished run
        counts, then the one updated last. A diverged run gets the score of `score_of_diverged`.
    """
    # 1. The score of diverged runs.
    scores = [run.score(metric) for run in runs]
    finished_scores = [score for score in scores if score is not None]
    untrained_scores = [run.untrained_score(metric, mode) for run in runs]
    worst = score_of_diverged(finished_scores, untrained_scores, mode)
    # 2. Paths as short as they stay different; `short_paths` has none of other settings.
    short_paths = {}
    for key in keys:
        short_paths[key] = shorten_paths(run.setting(key) for run in runs if key in run.config)
    # 3. One configuration for all runs with the same settings.
    groups: dict[tuple[object, ...], list[Run]] = defaultdict(list)
    for run in runs:
        groups[run.settings(keys)].append(run)
    configurations = []
    for members in groups.values():
        settings: dict[str, Setting] = {}
        for key in keys:
            if key in members[0].config:
                setting = members[0].setting(key)  # that of all members
                settings[key] = short_paths[key].get(setting, setting)
        configurations.append(_join_seeds(settings, members, metric, worst))
    return configurations


def _join_seeds(
    settings: dict[str, Setting],
    runs: list[Run],
    metric: str,
    worst: float | None,
) -> Configuration:
    """Join the runs of one configuration: one score for each seed.

    If a seed occurs twice, the finished run counts, then the one updated last; the others are
    `repeated`. A run without a seed counts as seed 0.

    Args:
        settings: Settings of the configuration.
        runs: Its runs.
        metric: Name of the metric that is the score.
        worst: The score of a diverged run; None: it gets none.
    """
    configuration = Configuration(settings, runs)

    # 1. The run that counts for each seed.
    def priority(run: Run) -> tuple[bool, str]:
        """Order the run that counts last: finished before unfinished, then by its last update."""
        return run.finished, str(run.summary.get("updated_at", ""))

    by_update = sorted(runs, key=priority)
    latest = {run.seed or 0: run for run in by_update}  # the last run of a seed stays
    configuration.repeated = [run for run in by_update if run is not latest[run.seed or 0]]
    # 2. Its score, by rising seed.
    for seed, run in sorted(latest.items()):
        score = worst if run.diverged else run.score(metric)
        if score is None:
            continue
        configuration.scores[seed] = score
        if run.diverged:
            configuration.diverged_seeds.add(seed)
    # 3. The mean loss of all runs.
    losses = [run.last(loss_beside(metric)) for run in runs]
    finite_losses = [loss for loss in losses if loss is not None]
    if finite_losses:
        configuration.loss = float(np.mean(finite_losses))
    return configuration


def build_contenders(
    configurations: Sequence[Configuration],
    keys: Sequence[str],
    mode: str,
) -> list[Contender]:
    """Group configurations into contenders, best first, and choose one configuration for each.

    The chosen one has the most scored seeds, then the best mean, then the lowest loss. One that
    was run on several seeds is therefore preferred to a single lucky run.

    Args:
        configurations: All configurations.
        keys: Keys that separate contenders, see `pick_compared_keys`.
        mode: "min" or "max".
    """
    # 1. Group by the keys that separate contenders.
    groups: dict[tuple[object, ...], list[Configuration]] = defaultdict(list)
    for configuration in configurations:
        group = tuple(normalise_setting(configuration.settings.get(key)) for key in keys)
        groups[group].append(configuration)

    def preference(configuration: Configuration) -> tuple[float, float, float]:
        """Order the best first: the most seeds, then the best mean, then the lowest loss."""
        return -len(configuration.scores), configuration.cost(mode), configuration.loss

    # 2. Choose the configuration of each contender.
    contenders = []
    for members in groups.values():
        chosen = min(members, key=preference)
        settings = chosen.pick_settings(keys)
        name = describe_settings(settings) or chosen.runs[0].optimizer or "all runs"
        lr_curve = _build_lr_curve(members, chosen, mode)
        contenders.append(Contender(name, settings, members, chosen, lr_curve))
    # 3. Best first, with names that differ.
    contenders.sort(key=lambda contender: contender.configuration.cost(mode))
    names = number_labels([contender.name for contender in contenders])
    return [
        replace(contender, name=name) for contender, name in zip(contenders, names, strict=True)
    ]


def _build_lr_curve(
    configurations: Sequence[Configuration],
    chosen: Configuration,
    mode: str,
) -> LrCurve:
    """Build the curve of the metric over lr of a contender.

    1. The point at an lr is the configuration with the best mean, preferably one that never
       diverged. An lr at which no run finished has no point.
    2. The best point is that at the lr of the chosen configuration; if there is none, the one with
       the best mean over all rates, preferably one at which nothing diverged.
    """
    by_lr: dict[float, list[Configuration]] = defaultdict(list)
    for configuration in configurations:
        if configuration.lr:
            by_lr[configuration.lr].append(configuration)

    def preference(configuration: Configuration) -> tuple[bool, float]:
        """Order the best first: never diverged, then the best mean."""
        return bool(configuration.diverged), configuration.cost(mode)

    # 1. The point at each lr, lowest first.
    points = {}
    diverged = []
    for lr, members in sorted(by_lr.items()):
        if any(configuration.diverged for configuration in members):
            diverged.append(lr)
        finished = [configuration for configuration in members if configuration.finished_scores]
        if finished:
            points[lr] = min(finished, key=preference)
    # 2. The best point. The chosen configuration may have no point: if all its runs diverged, its
    # scores only stand in.
    best = None
    if chosen.scores and chosen.lr:
        best = points.get(chosen.lr)
    if best is None:
        stable = [configuration for lr, configuration in points.items() if lr not in diverged]
        candidates = stable or list(points.values())
        best = min(candidates, key=lambda configuration: configuration.cost(mode), default=None)
    return LrCurve(points, tuple(diverged), tuple(sorted(by_lr)), best)


def find_contender(name: str, contenders: Sequence[Contender]) -> Contender:
    """Find a contender by its name, or else by the text of one of its settings.

    Raises:
        ConfigError: No contender fits, or several do; the message lists all.
    """
    fitting = [contender for contender in contenders if contender.name == name]
    if not fitting:
        fitting = [contender for contender in contenders if name in _written_settings(contender)]
    if not fitting:
        names = [contender.name for contender in contenders]
        raise ConfigError(
            f"baseline={name}: no contender has this name or setting. {did_you_mean(name, names)}"
        )
    if len(fitting) > 1:
        names = [contender.name for contender in fitting]
        raise ConfigError(
            f"baseline={name}: several contenders have this setting. Expected one of"
            f" {', '.join(names)}."
        )
    return fitting[0]


def _written_settings(contender: Contender) -> set[str]:
    """Collect the settings of a contender as texts, with shortened and with full paths."""
    values = {str(value) for value in contender.settings.values()}
    for run in contender.configuration.runs:
        values |= {str(run.config.get(key)) for key in contender.settings}
    return values


def number_labels(labels: Sequence[str]) -> list[str]:
    """Number repeated labels.

    Example:
        >>> number_labels(["a", "b", "a"])
        ['a', 'b', 'a #2']
    """
    numbered = []
    for index, label in enumerate(labels):
        before = labels[:index].count(label)
        numbered.append(f"{label} #{before + 1}" if before else label)
    return numbered


def write_setting(key: str, value: object) -> str:
    """Write a setting as on the command line: an lr as 3e-3, another number with six digits.

    Example:
        >>> write_setting("lr", 0.003), write_setting("optimizer.eps", 1e-8)
        ('3e-3', '1e-8')
        >>> write_setting("training.max_steps", None), write_setting("model.n_embd", 64)
        ('null', '64')
    """
    if value is None:
        return "null"
    if not isinstance(value, float):
        return plain(str(value))
    if key.endswith("lr"):
        return rate(value)
    return re.sub(r"e([+-])0", r"e\1", f"{value:g}")  # 1e-08 becomes 1e-8


def describe_settings(settings: Mapping[str, Setting]) -> str:
    """Write settings in one line, cut to 80 characters: the last part of each key, and the value.

    The key is left out for a name, and written in full if two keys end alike.

    Example:
        >>> describe_settings({"optimizer.name": "lamb", "lr": 0.002, "seed": 1})
        'lamb lr 2e-3 seed 1'
    """
    leaves = [key.rpartition(".")[2] for key in settings]
    parts = []
    for leaf, (key, value) in zip(leaves, settings.items(), strict=True):
        if leaf != "name":
            parts.append(leaf if leaves.count(leaf) == 1 else key)
        parts.append(write_setting(key, value))
    line = plain(" ".join(parts))
    if len(line) <= 80:
        return line
    return line[:79] + "…"
