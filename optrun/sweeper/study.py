"""What a study of Optuna's is bound to.

Its space, the configuration that its trials share, and what judges them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import optuna
from optuna.distributions import BaseDistribution
from optuna.pruners import BasePruner
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState

from optrun.base.errors import ConfigError

_NAME = "optrun"
_SHARED = "optrun:configuration"
"""Names the attribute with what all trials share: dotted key -> text."""
AGAIN = "optrun:again"
"""Names the attribute of a late result: the number of the trial that had ended without one."""
_SHOWN = 3
"""Changed keys that a refusal names."""
_ELSEWHERE = "give what it began with, or choose another hydra.sweep.dir."


def open_study(storage: BaseStorage, mode: str, contender: str, pruner: BasePruner) -> optuna.Study:
    """Open the study of a contender, or create it.

    Args:
        storage: An Optuna storage.
        mode: `min` or `max`; a study that exists keeps its own.
        contender: Name of the optimizer; empty: one study searches all.
        pruner: Pruner of the study.
    """
    return optuna.create_study(
        storage=storage,
        study_name=f"{_NAME}:{contender}" if contender else _NAME,
        direction="minimize" if mode == "min" else "maximize",
        pruner=pruner,
        load_if_exists=True,
    )


def refuse_mixed(storage: BaseStorage, where: str, per_optimizer: bool) -> None:
    """Refuse to mix a search of one space with a search of a space per optimizer.

    Args:
        storage: An Optuna storage.
        where: Name and key of the storage in messages.
        per_optimizer: Whether optimizers have spaces of their own now.

    Raises:
        ConfigError: The storage holds a search of the other kind.
    """
    names = set(optuna.get_all_study_names(storage))
    own_spaces = sorted(name for name in names if name.startswith(f"{_NAME}:"))
    if per_optimizer and _NAME in names:
        raise ConfigError(
            f"{where}: this study searched one space for all, and now search.NAME gives optimizers"
            f" their own: {_ELSEWHERE}"
        )
    if not per_optimizer and own_spaces:
        searched = ", ".join(name.replace(f"{_NAME}:", "search.") for name in own_spaces)
        raise ConfigError(
            f"{where}: this study searched {searched}, and now one space for all: {_ELSEWHERE}"
        )


def has_all_params(trial: FrozenTrial, space: Mapping[str, BaseDistribution]) -> bool:
    """Tell whether a trial has all parameters of the space.

    A process killed during a proposal leaves an incomplete trial.
    """
    return set(trial.params) == set(space)


def refuse_other_search(
    study: optuna.Study,
    storage: str,
    space: Mapping[str, BaseDistribution],
    shared: Mapping[str, object],
) -> None:
    """Refuse a search whose trials could not be compared with those of the study.

    Its searched keys, their choices and scales, and the values that all trials share have to stay;
    the ends of a range may change.

    Args:
        study: Changed in place at its first start: what must stay is stored in it.
        storage: Name and key of the storage in messages.
        space: Distributions by key.
        shared: Dotted key -> plain value, for values that all trials share.

    Raises:
        ConfigError: Something differs; the message names at most `_SHOWN` keys, with both values.
    """
    now = {key: json.dumps(value, sort_keys=True, default=str) for key, value in shared.items()}
    for key, distribution in space.items():
        now[key.lstrip("+")] = described(distribution)
    then = study.user_attrs.get(_SHARED)
    if then is None:
        study.set_user_attr(_SHARED, now)
        return
    changes = [
        f"{key}={then.get(key, 'null')} then, {now.get(key, 'null')} now"
        for key in {**then, **now}
        if then.get(key) != now.get(key)
    ]
    if changes:
        shown = "; ".join(changes[:_SHOWN])
        more = f" and {len(changes) - _SHOWN} more" if len(changes) > _SHOWN else ""
        raise ConfigError(
            f"{storage}: another search than this study began with: {shown}{more}."
            f" A study compares trials that share all but what is searched: {_ELSEWHERE}"
        )


def described(distribution: BaseDistribution) -> str:
    """Write the choices, or the type and scale of a range, roughly as an override.

    Example:
        >>> described(optuna.distributions.IntDistribution(1, 8, log=True))
        'tag(log, int(interval()))'
        >>> described(optuna.distributions.CategoricalDistribution(["lamb", "adamw"]))
        'lamb,adamw'
    """
    if isinstance(distribution, optuna.distributions.CategoricalDistribution):
        return ",".join(map(str, distribution.choices))
    text = "interval()"
    if isinstance(distribution, optuna.distributions.IntDistribution):
        text = f"int({text})"
    if distribution.log:
        return f"tag(log, {text})"
    return text


def add_late_result(study: optuna.Study, trial: FrozenTrial, value: float) -> None:
    """Add the late result of a failed or pruned trial as a new trial, at most once.

    Optuna refuses a result for a trial that has ended. The new trial names the old one in its user
    attribute `AGAIN`.

    Args:
        study: The study; nobody else changes it meanwhile.
        trial: The ended trial; nothing is added if it is complete.
        value: Final score of its jobs.
    """
    if trial.state == TrialState.COMPLETE:
        return
    repeated = {other.user_attrs.get(AGAIN) for other in study.get_trials(deepcopy=False)}
    if trial.number in repeated:
        return
    study.add_trial(
        optuna.trial.create_trial(
            value=value,
            params=trial.params,
            distributions=trial.distributions,
            user_attrs={AGAIN: trial.number},
        )
    )
