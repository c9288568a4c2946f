"""The size of a micro-batch: from a person, or from the global batch and the ranks."""

from __future__ import annotations

from collections.abc import Sequence

from omegaconf import DictConfig

from optrun.config.schema.training import MOST_PER_DEVICE
from optrun.config.tokens import is_typed
from optrun.config.yaml_files import line_of, users_files

MICRO = "training.per_device_train_batch_size"


def leave_open(cfg: DictConfig, tokens: Sequence[str], *, settled: bool = False) -> None:
    """Leave the size of a micro-batch to the ranks.

    Only where a global batch is given and nobody gave the size.

    Args:
        cfg: Composed, without Hydra's node; the size becomes null in it.
        tokens: The overrides that it was composed with. What a recipe, or a choice, of the user's
            sets is given, too.
        settled: Whether it is of a run that began, whose size may follow from its ranks.
    """
    training = cfg.training
    if training.get("global_batch_size") is None or is_typed(MICRO, tokens):
        return
    if not settled and training.per_device_train_batch_size != MOST_PER_DEVICE:
        return
    if all(line_of(path, MICRO, name) is None for name, path in users_files().items()):
        training.per_device_train_batch_size = None
