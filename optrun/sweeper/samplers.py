"""Samplers of a search, made anew for every trial: their generators do not outlive the process.

Seeded by the study's seed and the trial's number, a study that was killed proposes what the undisturbed one would have.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import optuna

from optrun.base.errors import ConfigError
from optrun.config.schema.sweeper import Sampler

_SEEDING = "optrun:seeding"
_HASHED = "sha256"

_FEWEST_FOR_TPE = 16
"""A share below this is a Sobol sequence throughout: TPE would spend most of it on its random start."""

_OF_EACH_TRIAL: dict[Sampler, Callable[[int], Any]] = {
    Sampler.random: lambda seed: optuna.samplers.RandomSampler(seed=seed),
    Sampler.gp: lambda seed: optuna.samplers.GPSampler(seed=seed),
    Sampler.cmaes: lambda seed: optuna.samplers.CmaEsSampler(seed=seed),
}


def is_hashed(study: Any) -> bool:
    """Tell whether the trials of a study are seeded by a hash; a study without trials begins so.

    Studies of before were seeded by the sum of seed and number, so that neighbouring seeds proposed the same trials.
    They go on as they began.

    Args:
        study: Nobody else changes it meanwhile.

    Raises:
        ConfigError: A newer optrun seeds it in a way that is not known here.
    """
    kept = study.user_attrs.get(_SEEDING)
    if kept is None and not study.user_attrs and not study.get_trials(deepcopy=False):
        study.set_user_attr(_SEEDING, kept := _HASHED)
    if kept not in (None, _HASHED):
        raise ConfigError(f"hydra/sweeper=optuna: this study is seeded by {kept}, known to a newer optrun. Use that.")
    return kept is not None


def build_sampler(
    name: Sampler, seed: int, number: int, share: int, *, hashed: bool = True, study: str = "", space: Any = None
) -> Any:
    """Make the sampler that proposes one trial.

    Args:
        name: Which kind.
        seed: Of the study.
        number: Of the trial.
        share: Trials that the study is to have.
        hashed: Whether the study is seeded by a hash.
        study: Tells it from others of the same seed.
        space: Distributions by key; a Sobol sequence covers them from the first trial on.
    """
    start = max(4, share // 4)
    own = trial_seed(seed, number, study) if hashed else seed + number
    if name is Sampler.auto:
        name = Sampler.qmc if share < _FEWEST_FOR_TPE or number < start else Sampler.tpe
    if name is Sampler.qmc and hashed:
        # One sequence for all trials: the storage knows how far it has come. Its seed counts only if it is scrambled.
        return _Sobol(space or {}, seed=trial_seed(seed, 0, study), scramble=True)
    if name is Sampler.qmc:
        return optuna.samplers.QMCSampler(seed=seed)
    if name is Sampler.tpe:
        return optuna.samplers.TPESampler(seed=own, n_startup_trials=start)
    return _OF_EACH_TRIAL[name](own)


class _Sobol(optuna.samplers.QMCSampler):
    """Knows its space beforehand; Optuna's own proposes at random until a first trial has ended."""

    def __init__(self, space: dict[str, Any], **options: Any) -> None:
        super().__init__(**options)
        self._space = space

    def infer_relative_search_space(self, study: Any, trial: Any) -> dict[str, Any]:  # noqa: ARG002
        """Give the space of the study."""
        return self._space


def trial_seed(seed: int, number: int, study: str = "") -> int:
    """Hash the seed of a study and the number of a trial to a seed in [0, 2^32): no two studies share a row of them.

    Example:
        >>> trial_seed(0, 1) == trial_seed(1, 0), 0 <= trial_seed(-1, 0) < 2**32
        (False, True)
    """
    return int.from_bytes(hashlib.sha256(f"{seed}/{number}{study and '/'}{study}".encode()).digest()[:4])
