"""What a proof needs in the place of what the command line gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from optrun.base.errors import ConfigError
from optrun.config.overrides import is_hydra


def with_forced(overrides: Sequence[str], forced: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Put what a proof needs in the place of what was given; returns overrides, and a note for each that goes."""
    kept, replaced = [], []
    for token in overrides:
        key = token.split("=", 1)[0].lstrip("+")
        if key == "resume" or is_hydra(key):
            raise ConfigError(f"{token}: certify chooses where it runs and resumes by itself; leave it out.")
        if key.startswith("tracking."):
            replaced.append(f"{token}: nothing is tracked here")
        elif key == "training.num_train_epochs":
            replaced.append(f"{token}: certify takes training.max_steps={forced['training.max_steps']} (--steps)")
        elif key in forced or (key.startswith("scheduler.") and "scheduler" in forced):
            if token.partition("=")[2] != forced[key]:
                option = " (--steps)" if key == "training.max_steps" else ""
                replaced.append(f"{token}: certify takes {key}={forced[key]}{option}")
        else:
            kept.append(token)
    return [*kept, *(f"{key}={value}" for key, value in forced.items())], replaced
