"""Group runs by configuration.

Which settings differ, which runs differ in the seed alone, what is compared.

The scores of a configuration are here, too.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from optrun.artifacts.objective import loss_beside, stand_in
from optrun.artifacts.provenance import (
    DISTRIBUTED_DTYPES,
    NOT_IDENTITY,
    NOT_IDENTITY_OF_TRAINING,
    conditional_keys,
)
from optrun.base.errors import ConfigError, did_you_mean
from optrun.base.formatting import plain, rate
from optrun.report.comparability import shorten_paths
from optrun.report.runs import Run, Setting, normalise_setting, to_number
from optrun.report.statistics import Comparison

_BESIDE_THE_POINT = {
    "seed",
    "hydra",
    *NOT_IDENTITY,
    *(f"training.{key}" for key in NOT_IDENTITY_OF_TRAINING),
}
"""Keys and groups that say where and how a run is written, not what it computes."""


MIXED = 0.01
"""If one learning rate is below, all that stand beside it are written as 1e-2."""


@dataclass
class Configuration:
    """Runs of one configuration, alike but for the seed."""

    settings: dict[str, Setting]
    """The settings in which the configurations of this report differ."""
    runs: list[Run] = field(default_factory=list)
    scores: dict[int, float] = field(default_factory=dict)
    """Seed -> outcome: the final value of the metric of a finished run, the stand-in of one that
    diverged."""
    lost: set[int] = field(default_factory=set)
    """Seeds whose run diverged."""
    loss: float = math.inf
    """Mean final loss of the same evaluation, which decides between configurations of equal score.
    """
    repeated: list[Run] = field(default_factory=list)
    """Runs left out of `scores` because a later run has the same configuration and seed."""

    def of(self, keys: Iterable[str]) -> dict[str, Setting]:
        """Pick the settings of some keys, as far as it has them."""
        return {key: self.settings[key] for key in keys if key in self.settings}

    @property
    def counted(self) -> list[Run]:
        """The runs of each seed that count, finished or not."""
        return [run for run in self.runs if all(run is not other for other in self.repeated)]

    @property
    def mean(self) -> float:
        """Mean score; NaN without one."""
        return float(np.mean(list(self.scores.values()))) if self.scores else math.nan

    def cost(self, mode: str) -> float:
        """Return the mean score, less is better; infinite without one."""
        return (self.mean if mode == "min" else -self.mean) if self.scores else math.inf

    @property
    def sd(self) -> float:
        """Standard deviation over seeds; NaN below two."""
        return (
            float(np.std(list(self.scores.values()), ddof=1)) if len(self.scores) > 1 else math.nan
        )

    @property
    def finished(self) -> list[float]:
        """The scores of the runs that finished, without stand-ins."""
        return [score for seed, score in self.scores.items() if seed not in self.lost]

    @property
    def diverged(self) -> list[Run]:
        """Runs that diverged."""
        return [run for run in self.runs if run.diverged]

    @property
    def lr(self) -> float | None:
        """Peak learning rate."""
        return self.runs[0].lr


@dataclass(frozen=True)
class LrCurve:
    """Metric against learning rate of one contender."""

    points: dict[float, Configuration]
    """By rising lr the configuration with the best mean, if one has a score."""
    diverged: tuple[float, ...]
    """Learning rates at which some run diverged."""
    begun: tuple[float, ...]
    """Every learning rate, one whose runs have not come to an end among them."""
    best: Configuration | None

    @property
    def tried(self) -> tuple[float, ...]:
        """Every learning rate with an outcome: scored or diverged."""
        return tuple(sorted({*self.points, *self.diverged}))

    def beside(self) -> tuple[float | None, float | None]:
        """Find the learning rates below and above the best; None: it is the last."""
        best = self.begun[0] if self.best is None else self.best.lr or 0.0
        below, above = (
            [lr for lr in self.begun if lr < best],
            [lr for lr in self.begun if lr > best],
        )
        return (below[-1] if below else None, above[0] if above else None)


@dataclass(frozen=True)
class Contender:
    """What a verdict is about.

    One optimizer (or whatever is compared) with all configurations tried for it.
    """

    name: str
    """The settings that set it apart; unique in the report."""
    settings: dict[str, Setting]
    configurations: list[Configuration]
    configuration: Configuration
    """The one that stands for it."""
    lr_curve: LrCurve
    rank: int | None = None
    """1 is best, equal means share; None without an outcome."""
    versus: Comparison | None = None
    """Against the reference; None where nothing is compared."""


def _decisive_keys(runs: Sequence[Run]) -> set[str]:
    """Find keys that decide results of these runs, such as the metric of early stopping."""
    keys = set(DISTRIBUTED_DTYPES)
    for run in runs:
        keys |= set(
            conditional_keys(
                run.config.get("training.early_stopping_patience"),
                run.config.get("training.on_nonfinite"),
                run.config.get("branch_from"),
            )
        )
    return {f"{group}.{name}" for group, name in keys}


def differing_keys(runs: Sequence[Run]) -> list[str]:
    """Find the configuration keys that tell the runs apart.

    A key of a group counts where runs with the same choice in that group differ in it: what merely
    follows from
    `optimizer=lamb` is said by `optimizer.name`. Seeds, paths and logging never count, nor does a
    key that only repeats the seed.
    """
    found = []
    decisive = _decisive_keys(runs)
    for key in dict.fromkeys(key for run in runs for key in run.config):
        group = key.partition(".")[0]
        choice = [f"{group}.name"] if key not in (f"{group}.name", group) else []
        having = [run.config for run in runs if key in run.config]
        repeats_seed = key.endswith(".seed") and all(
            config[key] == config.get("seed") for config in having
        )
        is_beside = bool(_BESIDE_THE_POINT & {key, group}) and key not in decisive
        if not (is_beside or repeats_seed or is_implied(key, choice, runs)):
            found.append(key)
    first = [
        key
        for key in ("model.name", "data.name", "task.name", "optimizer.name", "lr")
        if key in found
    ]
    return first + [key for key in found if key not in first]


def pick_compared_keys(keys: Sequence[str], tuned: Collection[str] = ()) -> list[str]:
    """Pick the keys that separate contenders.

    The others were tuned, and each contender is shown at its best.

    Learning rate and the optimizer's own numbers are tuned, and what is said to be; where nothing
    else differs, they are what is compared.

    Example:
        >>> compared(["optimizer.name", "lr", "optimizer.weight_decay"])
        ['optimizer.name']
        >>> compared(["lr", "optimizer.weight_decay"]), compared(["lr"])
        (['optimizer.weight_decay'], ['lr'])
        >>> compared(["optimizer.name", "scheduler.warmup_ratio"], {"scheduler.warmup_ratio"})
        ['optimizer.name']
        >>> compared(["scheduler.warmup_ratio"], {"scheduler.warmup_ratio"})
        ['scheduler.warmup_ratio']
    """
    inner = [key for key in keys if key != "lr"]
    outer = [key for key in inner if key == "optimizer.name" or not key.startswith("optimizer.")]
    found = outer or inner or list(keys)
    return [key for key in found if key not in tuned] or found


def drop_implied_keys(keys: Sequence[str], runs: Sequence[Run]) -> list[str]:
    """Reduce keys to the fewest that still tell apart what all of them do.

    Where batch size, warm-up and evaluation interval were changed together, the batch size says it
    all. Of keys that follow from each other the one stays that was typed first.
    """
    typed = [
        override.lstrip("+").partition("=")[0] for run in runs[:1] for override in run.overrides
    ]

    kept, place = list(keys), {name: -at for at, name in enumerate(typed)}
    for key in sorted(
        keys, key=lambda key: place.get(key, place.get(key.removesuffix(".name"), -len(typed)))
    ):
        if any(is_implied(key, [other], runs) for other in kept if other != key):
            kept.remove(key)
    return kept


def is_implied(key: str, others: Sequence[str], runs: Iterable[Run]) -> bool:
    """Tell whether runs that agree in all of the others agree in the key too."""
    seen: dict[tuple[object, ...], object] = {}
    return all(
        seen.setdefault(run.settings(others), value := run.settings([key])) == value for run in runs
    )


def build_configurations(
    runs: Sequence[Run], keys: Sequence[str], metric: str, mode: str
) -> list[Configuration]:
    """Join runs that differ in nothing but the seed.

    Args:
        runs: Runs whose whole configuration is known.
        keys: What `differing` found.
        metric: What gives the score.
        mode: "min" or "max".

    Returns:
        In the order of their first run. If one configuration and seed occurs twice, the run that
        was updated last counts, a finished one before an unfinished one. A run that diverged has
        the score of `stand_in`.
    """
    scores = {id(run): score for run in runs if (score := run.score(metric)) is not None}
    worst = stand_in(scores.values(), (run.untrained(metric, mode) for run in runs), mode)
    short = {
        key: shorten_paths([run.setting(key) for run in runs if key in run.config]) for key in keys
    }
    alike: dict[tuple[object, ...], list[Run]] = defaultdict(list)
    for run in runs:
        alike[run.settings(keys)].append(run)
    configurations = []
    for members in alike.values():
        found = {key: members[0].setting(key) for key in keys if key in members[0].config}
        configuration = Configuration(
            {key: short[key].get(value, value) for key, value in found.items()}, members
        )
        ordered = sorted(
            members, key=lambda run: (run.finished, str(run.summary.get("updated_at", "")))
        )
        latest = {run.seed or 0: run for run in ordered}
        configuration.repeated = [run for run in ordered if run is not latest[run.seed or 0]]
        for seed, run in sorted(latest.items()):
            if (score := scores.get(id(run), worst if run.diverged else None)) is not None:
                configuration.scores[seed] = score
                configuration.lost |= {seed} if run.diverged else set()
        losses = [loss for run in members if (loss := run.last(loss_beside(metric))) is not None]
        configuration.loss = float(np.mean(losses)) if losses else math.inf
        configurations.append(configuration)
    return configurations


def build_contenders(
    configurations: Sequence[Configuration], keys: Sequence[str], mode: str
) -> list[Contender]:
    """Gather configurations into contenders, best first, and choose one for each.

    The chosen one has the best mean among those with the most seeds, of equal ones the lower loss.
    So a configuration that was run again with more seeds is preferred to one lucky run, and a
    stable one to one that diverged on some seeds.

    Args:
        configurations: All configurations.
        keys: What `compared` found.
        mode: "min" or "max".
    """
    groups: dict[tuple[object, ...], list[Configuration]] = defaultdict(list)
    for configuration in configurations:
        groups[tuple(normalise_setting(configuration.settings.get(key)) for key in keys)].append(
            configuration
        )
    chosen = [
        (
            min(
                own,
                key=lambda configuration: (
                    -len(configuration.scores),
                    configuration.cost(mode),
                    configuration.loss,
                ),
            ),
            own,
        )
        for own in groups.values()
    ]
    chosen.sort(key=lambda pair: pair[0].cost(mode))
    told = [best.of(keys) for best, _ in chosen]
    lrs = [to_number(settings.get("lr")) for settings in told]
    scientific = any(lr is not None and lr < MIXED for lr in lrs)
    names = [describe_settings(each, scientific=scientific) for each in told]
    names = [
        name or best.runs[0].optimizer or "all runs"
        for name, (best, _) in zip(names, chosen, strict=True)
    ]
    return [
        Contender(name, settings, own, best, _lr_curve(own, best, mode))
        for name, settings, (best, own) in zip(number_labels(names), told, chosen, strict=True)
    ]


def _lr_curve(configurations: Sequence[Configuration], chosen: Configuration, mode: str) -> LrCurve:
    """Find the lr curve of a contender over all its configurations.

    At each lr the configuration with the best mean counts.
    """
    known = sorted(
        (configuration for configuration in configurations if configuration.lr),
        key=lambda configuration: (
            configuration.lr or 0.0,
            bool(configuration.diverged),
            configuration.cost(mode),
        ),
    )
    diverged = {
        configuration.lr for configuration in known if configuration.lr and configuration.diverged
    }
    points: dict[float, Configuration] = {}
    for configuration in known:
        if configuration.finished and configuration.lr:
            points.setdefault(configuration.lr, configuration)
    stable = [configuration for lr, configuration in points.items() if lr not in diverged] or [
        *points.values()
    ]
    own = points.get(chosen.lr or 0.0) if chosen.scores else None
    best = own or min(stable, key=lambda configuration: configuration.cost(mode), default=None)
    return LrCurve(
        points,
        tuple(sorted(diverged)),
        tuple(sorted({configuration.lr for configuration in known if configuration.lr})),
        best,
    )


def find_contender(name: str, contenders: Sequence[Contender]) -> Contender:
    """Find the contender that is meant by a name: its own, or one of its settings.

    Raises:
        ConfigError: None or several fit; the message lists what there is.
    """
    fitting = [each for each in contenders if each.name == name]
    for each in contenders if not fitting else ():
        # Settings as they are shown, and as the runs have them.
        values = [
            *each.settings.values(),
            *(run.config.get(key) for key in each.settings for run in each.configuration.runs),
        ]
        if name in map(str, values):
            fitting.append(each)
    names = [each.name for each in (fitting or contenders)]
    if not fitting:
        raise ConfigError(
            f"baseline={name}: nothing compared here has this name. {did_you_mean(name, names)}"
        )
    if len(fitting) > 1:
        raise ConfigError(f"baseline={name}: fits several; say which: {', '.join(names)}")
    return fitting[0]


def number_labels(labels: Sequence[str]) -> list[str]:
    """Number labels where two would read the same.

    Example:
        >>> numbered(["a", "b", "a"])
        ['a', 'b', 'a #2']
    """
    before = [labels[:index].count(label) for index, label in enumerate(labels)]
    return [
        f"{label} #{count + 1}" if count else label
        for label, count in zip(labels, before, strict=True)
    ]


def describe_settings(settings: Mapping[str, Setting], *, scientific: bool = False) -> str:
    """Describe settings in one line of at most 80 characters.

    Args:
        settings: By key.
        scientific: Whether an lr of 0.01 is written as 1e-2, as beside a smaller one.

    Example:
        >>> describe({"optimizer.name": "lamb", "lr": 0.002, "optimizer.weight_decay": 0.1})
        'lamb lr 2e-3 weight_decay 0.1'
    """
    parts = []
    leaves = [key.rpartition(".")[2] for key in settings]
    for leaf, (key, value) in zip(leaves, settings.items(), strict=True):
        named = [] if leaf == "name" else [leaf if leaves.count(leaf) == 1 else key]
        if isinstance(value, float):
            parts += [*named, rate(value, scientific=scientific and leaf == "lr")]
        else:
            parts += [*named, str(value)]
    line = plain(" ".join(parts))
    return line if len(line) <= 80 else line[:79] + "…"
