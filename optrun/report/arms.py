"""Group runs by configuration: which settings differ, which runs differ in the seed alone, what is compared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from optrun.artifacts.provenance import NOT_IDENTITY, NOT_IDENTITY_OF_TRAINING
from optrun.errors import ConfigError, did_you_mean
from optrun.formatting import plain, rate
from optrun.report.collect import Run
from optrun.report.paths import shortened

_BESIDE_THE_POINT = {"seed", "hydra", *NOT_IDENTITY, *(f"training.{key}" for key in NOT_IDENTITY_OF_TRAINING)}
"""Keys and groups that say where and how a run is written, not what it computes."""


class Configured(Protocol):
    """What has a configuration: a run, or one that is planned."""

    @property
    def config(self) -> Mapping[str, Any]:
        """Keys with dots to values."""

    @property
    def overrides(self) -> Sequence[str]:
        """As typed."""

    def setting(self, key: str) -> Any:
        """What it is compared by; None where there is none."""


@dataclass
class Arm:
    """Runs of one configuration, alike but for the seed."""

    settings: dict[str, Any]
    """The settings in which the arms of this report differ."""
    runs: list[Run] = field(default_factory=list)
    scores: dict[int, float] = field(default_factory=dict)
    """Seed -> final value of the main metric, of finished runs that did not diverge."""
    repeated: list[Run] = field(default_factory=list)
    """Runs left out of `scores` because a later run has the same configuration and seed."""

    @property
    def label(self) -> str:
        """Describe the differing settings."""
        return describe(self.settings)

    @property
    def mean(self) -> float:
        """Mean score; NaN without one."""
        return float(np.mean(list(self.scores.values()))) if self.scores else float("nan")

    @property
    def sd(self) -> float:
        """Standard deviation over seeds; NaN below two."""
        return float(np.std(list(self.scores.values()), ddof=1)) if len(self.scores) > 1 else float("nan")

    @property
    def diverged(self) -> list[Run]:
        """Runs that diverged."""
        return [run for run in self.runs if run.diverged]

    @property
    def lr(self) -> float | None:
        """Peak learning rate."""
        return self.runs[0].lr


@dataclass
class Contender:
    """What a verdict is about: one optimizer (or whatever is compared) with all arms tried for it."""

    settings: dict[str, Any]
    arms: list[Arm]
    best: Arm
    """The arm that stands for it."""

    @property
    def label(self) -> str:
        """Describe the settings that set this contender apart."""
        return describe(self.settings) or self.best.runs[0].optimizer or "all runs"

    def values(self) -> set[str]:
        """Collect its settings as they are shown, and as its runs have them."""
        whole = {str(run.config.get(key)) for key in self.settings for run in self.best.runs}
        return whole | {str(value) for value in self.settings.values()}


def differing(runs: Sequence[Configured]) -> list[str]:
    """Find the configuration keys that tell the runs apart.

    A key of a group counts where runs with the same choice in that group differ in it: what merely follows from
    `optimizer=lamb` is said by `optimizer.name`. Seeds, paths and logging never count, nor does a key that only repeats
    the seed.
    """
    keys: dict[str, None] = {}
    for run in runs:
        keys.update(dict.fromkeys(run.config))
    found = []
    for key in keys:
        if _BESIDE_THE_POINT & {key, key.partition(".")[0]} or _repeats_seed(key, runs):
            continue
        group = key.partition(".")[0]
        values: dict[object, set[object]] = {}
        for run in runs:
            choice = run.config.get(f"{group}.name") if key not in (f"{group}.name", group) else None
            values.setdefault(choice, set()).add(comparable(run.setting(key)))
        if any(len(seen) > 1 for seen in values.values()):
            found.append(key)
    first = [key for key in ("model.name", "data.name", "task.name", "optimizer.name", "lr") if key in found]
    return first + [key for key in found if key not in first]


def compared(keys: Sequence[str]) -> list[str]:
    """Pick the keys that separate contenders; the others were tuned, and each contender is shown at its best.

    Learning rate and the optimizer's own numbers are tuned; where nothing else differs, they are what is compared.

    Example:
        >>> compared(["optimizer.name", "lr", "optimizer.weight_decay"])
        ['optimizer.name']
        >>> compared(["lr", "optimizer.weight_decay"]), compared(["lr"])
        (['optimizer.weight_decay'], ['lr'])
    """
    outer = [key for key in keys if key == "optimizer.name" or not (key == "lr" or key.startswith("optimizer."))]
    if outer:
        return outer
    inner = [key for key in keys if key != "lr"]
    return inner or list(keys)


def telling(keys: Sequence[str], runs: Sequence[Configured]) -> list[str]:
    """Reduce keys to the fewest that still tell apart what all of them do.

    Where batch size, warm-up and evaluation interval were changed together, the batch size says it all. Of keys that
    follow from each other the one stays that was typed first.
    """
    typed = [override.lstrip("+").partition("=")[0] for run in runs[:1] for override in run.overrides]

    def typed_at(key: str) -> int:
        names = (key, key.removesuffix(".name"))
        return min((typed.index(name) for name in names if name in typed), default=len(typed))

    kept = list(keys)
    for key in sorted(keys, key=typed_at, reverse=True):  # the last typed goes first
        if any(follows(key, [other], runs) for other in kept if other != key):
            kept.remove(key)
    return kept


def follows(key: str, others: Sequence[str], runs: Iterable[Configured]) -> bool:
    """Tell whether runs that agree in all of the others agree in the key too."""
    seen: dict[tuple[object, ...], object] = {}
    for run in runs:
        value = comparable(run.setting(key))
        if seen.setdefault(tuple(comparable(run.setting(other)) for other in others), value) != value:
            return False
    return True


def build_arms(runs: Sequence[Run], keys: Sequence[str], metric: str) -> list[Arm]:
    """Join runs that differ in nothing but the seed.

    Args:
        runs: Runs whose whole configuration is known.
        keys: What `differing` found.
        metric: What gives the score.

    Returns:
        Arms in order of their first run. Where one configuration and seed occurs twice, the run that was updated last
        counts, a finished one before an unfinished one.
    """
    arms: dict[tuple[object, ...], Arm] = {}
    short = {key: shortened([run.setting(key) for run in runs if key in run.config]) for key in keys}
    for run in runs:
        identity = tuple(comparable(run.setting(key)) for key in keys)
        found = {key: run.setting(key) for key in keys if key in run.config}
        settings = {key: short[key].get(value, value) for key, value in found.items()}
        arms.setdefault(identity, Arm(settings)).runs.append(run)
    for arm in arms.values():
        latest: dict[int, Run] = {}
        for run in sorted(arm.runs, key=lambda run: (run.finished, str(run.summary.get("updated_at", "")))):
            seed = run.seed if run.seed is not None else 0
            if seed in latest:
                arm.repeated.append(latest[seed])
            latest[seed] = run
        for seed, run in sorted(latest.items()):
            score = run.score(metric)
            if score is not None:
                arm.scores[seed] = score
    return list(arms.values())


def build_contenders(arms: Sequence[Arm], keys: Sequence[str], mode: str) -> list[Contender]:
    """Gather arms into contenders and choose the arm that stands for each, best contender first.

    The chosen arm has the best mean among those with no diverged run and the most seeds; so an arm that was run again
    with more seeds is preferred to one lucky run, and a stable arm to one that diverged on some seeds.

    Args:
        arms: All arms.
        keys: What `compared` found.
        mode: "min" or "max".
    """
    groups: dict[tuple[object, ...], list[Arm]] = {}
    for arm in arms:
        groups.setdefault(tuple(comparable(arm.settings.get(key)) for key in keys), []).append(arm)
    sign = 1.0 if mode == "min" else -1.0
    contenders = []
    for members in groups.values():
        best = min(members, key=lambda arm: order_of_choice(arm, mode))
        settings = {key: best.settings[key] for key in keys if key in best.settings}
        contenders.append(Contender(settings, members, best))
    return sorted(contenders, key=lambda each: (not each.best.scores, sign * each.best.mean if each.best.scores else 0))


def order_of_choice(arm: Arm, mode: str) -> tuple[bool, bool, int, float]:
    """Sort the arms of a contender: the first is the one that stands for it."""
    mean = (arm.mean if mode == "min" else -arm.mean) if arm.scores else 0.0
    return (not arm.scores, bool(arm.diverged), -len(arm.scores), mean)


def find_contender(name: str, contenders: Sequence[Contender]) -> Contender:
    """Find the contender that is meant by a name: its label, or one of its settings.

    Raises:
        ConfigError: None or several fit; the message lists what there is.
    """
    exact = [each for each in contenders if each.label == name]
    loose = [each for each in contenders if name in each.values()]
    fitting = exact or loose
    if len(fitting) == 1:
        return fitting[0]
    labels = [each.label for each in (fitting or contenders)]
    if fitting:
        raise ConfigError(f"baseline={name}: fits several; say which: {', '.join(labels)}")
    raise ConfigError(f"baseline={name}: nothing compared here has this name. {did_you_mean(name, labels)}")


def describe(settings: Mapping[str, Any], *, limit: int = 80) -> str:
    """Describe settings in one line.

    Example:
        >>> describe({"optimizer.name": "lamb", "lr": 0.002, "optimizer.weight_decay": 0.1})
        'lamb lr 2e-3 weight_decay 0.1'
    """
    parts = []
    leaves = [key.rpartition(".")[2] for key in settings]
    for key, value in settings.items():
        leaf = key.rpartition(".")[2]
        text = rate(value) if isinstance(value, float) else str(value)
        if leaf == "name":
            parts.append(text)
        else:
            parts.append(f"{leaf if leaves.count(leaf) == 1 else key} {text}")
    line = plain(" ".join(parts))
    return line if len(line) <= limit else line[: limit - 1] + "…"


def _repeats_seed(key: str, runs: Iterable[Configured]) -> bool:
    """Tell whether a key such as `data.seed` only follows the seed of the run."""
    return key.rpartition(".")[2] == "seed" and all(
        run.config.get(key) == run.config.get("seed") for run in runs if key in run.config
    )


def comparable(value: object) -> object:
    """Normalise a setting so that 1 and 1.0 are equal, True and 1 are not."""
    if isinstance(value, bool) or value is None:
        return str(value)
    return float(value) if isinstance(value, (int, float)) else value
