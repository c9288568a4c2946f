"""An Optuna study in its storage: open it, refuse another search in it, add late results."""

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
"""User attribute of a study with the values that all trials share: dotted key -> JSON text."""
LATE_RESULT_OF = "optrun:again"
"""User attribute of a late result: the number of the trial that had ended without one."""
_SHOWN = 3
"""Changed keys that a refusal names."""
_WAY_OUT = "Repeat the first command, or choose another hydra.sweep.dir."


def open_study(storage: BaseStorage, mode: str, contender: str, pruner: BasePruner) -> optuna.Study:
    """Open the Optuna study of a contender, or create it.

    Args:
        storage: An Optuna storage.
        mode: `min` or `max`; a study that exists keeps its own.
        contender: Name of the optimizer; empty: one study searches all optimizers.
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
    """Refuse to mix a study of one space with studies of one space per optimizer.

    Args:
        storage: An Optuna storage.
        where: Name and key of the storage in messages.
        per_optimizer: Whether each optimizer has its own search space now.

    Raises:
        ConfigError: The storage holds a search of the other kind.
    """
    names = set(optuna.get_all_study_names(storage))
    studies_of_optimizers = sorted(name for name in names if name.startswith(f"{_NAME}:"))
    if per_optimizer and _NAME in names:
        raise ConfigError(
            f"{where}: this study searched one space for all optimizers, but now search.NAME gives"
            f" each its own. {_WAY_OUT}"
        )
    if not per_optimizer and studies_of_optimizers:
        searched = ", ".join(name.replace(f"{_NAME}:", "search.") for name in studies_of_optimizers)
        raise ConfigError(
            f"{where}: this study searched {searched}, but now there is one space for all"
            f" optimizers. {_WAY_OUT}"
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
    """Refuse a search with other trials than the study began with, or begin the study.

    The searched keys, their choices and scales, and the values that all trials share may not
    change; the ends of a range may. A new study stores them as a user attribute.

    Args:
        study: The study.
        storage: Name and key of the storage in messages.
        space: Distributions by key.
        shared: Dotted key -> plain value, for values that all trials share.

    Raises:
        ConfigError: Something differs; the message names at most three keys, with both values.
    """
    now = {key: json.dumps(value, sort_keys=True, default=str) for key, value in shared.items()}
    for key, distribution in space.items():
        now[key.lstrip("+")] = describe_distribution(distribution)
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
            f"{storage}: this study began with another search: {shown}{more}. A study compares"
            f" trials that differ in the searched keys only. {_WAY_OUT}"
        )


def describe_distribution(distribution: BaseDistribution) -> str:
    """Write the choices of a distribution, or the type and scale of its range without its ends.

    Example:
        >>> describe_distribution(optuna.distributions.IntDistribution(1, 8, log=True))
        'tag(log, int(interval()))'
        >>> describe_distribution(optuna.distributions.CategoricalDistribution(["lamb", "adamw"]))
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
    """Add the value of a failed or pruned trial to the study as a new trial, at most once.

    Optuna takes no value for a trial that has ended. The new trial has the same parameters, and the
    number of the old one in its user attribute `LATE_RESULT_OF`. Nothing is added for a complete
    trial.

    Args:
        study: The study; no other process may change it meanwhile.
        trial: The ended trial.
        value: Value of the trial.
    """
    if trial.state == TrialState.COMPLETE:
        return
    trials = study.get_trials(deepcopy=False)
    if trial.number in {other.user_attrs.get(LATE_RESULT_OF) for other in trials}:
        return
    study.add_trial(
        optuna.trial.create_trial(
            value=value,
            params=trial.params,
            distributions=trial.distributions,
            user_attrs={LATE_RESULT_OF: trial.number},
        )
    )
