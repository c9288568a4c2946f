"""What of Hydra's overrides says how the runs of a confirmation are run."""

from __future__ import annotations

PLACES = (
    "hydra/launcher",
    "hydra.sweeper.devices",
    "hydra.sweeper.max_batch_size",
    "hydra.sweeper.retry_failed",
    "hydra.sweeper.stall_seconds",
    "hydra.sweeper.timeout",
)
"""Keys, beside those of a launcher."""


def is_place(token: str) -> bool:
    """Tell whether an override says where and how runs are run.

    Example:
        >>> is_place("hydra.launcher.n_jobs=2"), is_place("hydra.sweeper.n_trials=8")
        (True, False)
    """
    key = token.lstrip("+~").partition("=")[0]
    return key in PLACES or key.startswith("hydra.launcher.")
