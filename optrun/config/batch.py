"""The micro-batch size: given by the user, or derived from the global batch and the ranks."""

from collections.abc import Sequence

from omegaconf import DictConfig

from optrun.config.schema.training import MOST_PER_DEVICE
from optrun.config.tokens import is_typed
from optrun.config.yaml_files import line_of, users_files

MICRO = "training.per_device_train_batch_size"


def unset_derived_size(cfg: DictConfig, tokens: Sequence[str], *, resumes: bool = False) -> None:
    """Set the micro-batch size to null if it follows from the global batch and the ranks.

    It follows if `training.global_batch_size` is given, and neither the command line nor a file of
    the user gives `training.per_device_train_batch_size`. In a new run that must also have its
    default value, since a recipe of optrun may give it; in a resumed run any value may come from
    the former number of ranks.

    Args:
        cfg: A composed configuration without the node `hydra`; changed in place.
        tokens: The overrides of the command line.
        resumes: Whether the configuration is that of a run to resume.
    """
    training = cfg.training
    if training.get("global_batch_size") is None or is_typed(MICRO, tokens):
        return
    is_default = training.per_device_train_batch_size == MOST_PER_DEVICE
    if not is_default and not resumes:
        return
    is_in_file = any(line_of(path, MICRO, name) for name, path in users_files().items())
    if not is_in_file:
        training.per_device_train_batch_size = None
