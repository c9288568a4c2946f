"""Samplers of a search, one for each trial: a random generator does not outlive the process.

Each is seeded by the study's seed and the trial's number, so a killed and continued study proposes
the same trials as an undisturbed one.
"""

from __future__ import annotations

import hashlib

import optuna
from optuna.distributions import BaseDistribution
from optuna.trial import FrozenTrial

from optrun.config.schema.sweeper import Sampler

Space = dict[str, BaseDistribution]
"""Distributions by key as on the command line."""

_FEWEST_FOR_TPE = 16
"""A study of fewer trials is a Sobol sequence: TPE would spend most of them on its random start."""


def build_sampler(
    name: Sampler,
    seed: int,
    number: int,
    n_trials: int,
    *,
    study: str = "",
    space: Space | None = None,
) -> optuna.samplers.BaseSampler:
    """Build the sampler of one trial.

    `auto` is a Sobol sequence for a study of fewer than 16 trials and for the first quarter of a
    larger one, at least 4 trials; then it is TPE.

    Args:
        name: Kind of sampler; `qmc` is a Sobol sequence.
        seed: Seed of the study.
        number: Number of the trial.
        n_trials: Number of trials of the study in the end.
        study: Name of the study, hashed into the seed.
        space: Distributions by key; a Sobol sequence covers them from the first trial on.
    """
    n_startup_trials = max(4, n_trials // 4)  # before TPE has enough to learn from
    sampler_seed = trial_seed(seed, number, study)
    if name is Sampler.auto:
        is_early = n_trials < _FEWEST_FOR_TPE or number < n_startup_trials
        name = Sampler.qmc if is_early else Sampler.tpe
    match name:
        case Sampler.qmc:
            # One sequence for all trials: the storage knows how far it has come. Its seed counts
            # only if scrambled.
            return _Sobol(space or {}, seed=trial_seed(seed, 0, study), scramble=True)
        case Sampler.tpe:
            return optuna.samplers.TPESampler(seed=sampler_seed, n_startup_trials=n_startup_trials)
    return optuna.samplers.RandomSampler(seed=sampler_seed)


class _Sobol(optuna.samplers.QMCSampler):
    """Optuna's Sobol sampler, given its space. Optuna's own first trials are random."""

    def __init__(self, space: Space, **options: int) -> None:
        super().__init__(**options)
        self._space = space

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> Space:  # noqa: ARG002
        """Return the space of the study."""
        return self._space


def trial_seed(seed: int, number: int, study: str) -> int:
    """Hash the seed of a study and the number of a trial to a seed in [0, 2^32).

    Example:
        >>> trial_seed(0, 1, "") == trial_seed(1, 0, ""), 0 <= trial_seed(-1, 0, "lamb") < 2**32
        (False, True)
    """
    text = f"{seed}/{number}"
    if study:
        text += f"/{study}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4])
