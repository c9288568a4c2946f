"""Compare the configuration of a checkpoint with the one in force, key by key."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from optrun.artifacts.metadata import CheckpointMetadata
from optrun.base.errors import ConfigError
from optrun.config.original_cwd import is_path, path_keys, same_files
from optrun.config.saved import differences
from optrun.config.types import in_yaml

Changes = Mapping[str, tuple[object, object]]

_MATHEMATICS = ("distributed.param_dtype", "distributed.reduce_dtype")
_ROUNDING = ("distributed.", "training.nproc_per_node", "training.per_device_eval_batch_size")
_OF_RANKS = ("distributed.name", "training.nproc_per_node")
_EVALUATION = ("training.eval_steps",)
_HARMLESS = ("run_name", "lr_from", "matters", "tracking.", "checkpoint.")
_HARMLESS_TRAINING = {
    "training.logging_steps",
    "training.dataloader_num_workers",
    "training.dataloader_timeout",
    "training.max_seconds",
}
_BEST = ("checkpoint.metric", "checkpoint.mode")
_NONFINITE = (
    "training.on_nonfinite",
    "training.max_nonfinite_skips",
    "training.max_rollbacks",
    "checkpoint.save_steps",
    "checkpoint.allow_nonfinite",
)
_LENGTH = {
    "training.max_steps",
    "training.num_train_epochs",
    "training.early_stopping_patience",
    "training.early_stopping_threshold",
}
_PLAN = {
    "seed",
    "training.per_device_train_batch_size",
    "training.gradient_accumulation_steps",
    "training.global_batch_size",
    "training.group_by_length",
}

EFFECTS = {
    "harmless": "changes no number",
    "rounding": "changes numbers by rounding only",
    "evaluation": "changes when it is evaluated, and so a plateau schedule and early stopping",
    "best": "changes which checkpoint is best, and when early stopping ends training",
    "nonfinite": "changes what follows a step that is not finite, and where a rollback returns to",
    "length": "changes the length",
    "data": "changes which examples come next",
    "mathematics": "changes the weights from here on",
}


def effect_of_change(key: str) -> str:
    """Classify a changed key by its effect, a key of `EFFECTS`.

    Keys of `data` and `task` change the data; any other key that is not listed above counts as
    'mathematics'.

    Example:
        >>> effect_of_change("training.logging_steps"), effect_of_change("lr")
        ('harmless', 'mathematics')
    """
    for kind, keys in _BY_NAME.items():
        if key in keys:
            return kind
    if key.startswith(_HARMLESS):
        return "harmless"
    if key.startswith(_ROUNDING):
        return "rounding"
    if key.startswith(("data.", "task.")):
        return "data"
    return "mathematics"


_BY_NAME = {
    "mathematics": _MATHEMATICS,
    "best": _BEST,
    "nonfinite": _NONFINITE,
    "harmless": _HARMLESS_TRAINING,
    "evaluation": _EVALUATION,
    "length": _LENGTH,
    "data": _PLAN,
}


def is_harmless(key: str) -> bool:
    """Tell whether a key changes neither the computation nor the length of training.

    Rounding, and when metrics are evaluated, may change.
    """
    return effect_of_change(key) in ("harmless", "rounding", "evaluation", "nonfinite")


def may_change_data(changes: Changes) -> bool:
    """Tell whether a changed key selects other examples."""
    return any(key.startswith(("data.", "task.")) for key in changes)


def moves_layers(changes: Changes) -> bool:
    """Tell whether a changed key moves parameters between layers."""
    return any(
        key.startswith(("param_groups.", "model.", "adapter.", "task.name")) for key in changes
    )


def changes_since(
    saved: CheckpointMetadata, values: Mapping[str, object], started_from: Path | None
) -> dict[str, tuple[object, object]]:
    """Map each changed key to its value in the checkpoint and its value now.

    A relative path that is absolute now, and names the same files, is no change.

    Args:
        saved: Metadata of the checkpoint.
        values: The configuration in force, as resolved plain values.
        started_from: The folder in which the run was started; None: unknown.
    """
    changed = differences(saved.config, values)
    keys = path_keys(values)
    return {
        key: pair
        for key, pair in changed.items()
        if not is_path(key, keys) or not same_files(*pair, started_from)
    }


def refuse_change_without_effect(changes: Changes, done: int) -> None:
    """Refuse a change of training if every step is done.

    The change would have no effect on the results, so it must not be recorded with them.

    Args:
        changes: Configuration keys that changed since the last checkpoint.
        done: Number of steps done; all of them, or more.

    Raises:
        ConfigError: A changed key is not harmless, see `is_harmless`.
    """
    without_effect = []
    for key, (before, now) in changes.items():
        if not is_harmless(key):
            without_effect.append(f"{key}={in_yaml(now)} (was {in_yaml(before)})")
    if without_effect:
        raise ConfigError(
            f"{', '.join(without_effect)}: all {done} steps are done, so it would have no effect."
            f" To continue, add training.max_steps=N above {done}."
        )


def table(
    changes: Changes,
    title: str = "changed since this checkpoint was saved, and what each key affects:",
    *,
    derived: Mapping[str, str] = MappingProxyType({}),
    examples: tuple[int, int] | None = None,
) -> str:
    """Tabulate every changed key with both values and its effect; empty without changes.

    Args:
        changes: Configuration keys that changed since the checkpoint.
        title: Heading of the table.
        derived: Key -> effect, for keys that were derived, not typed.
        examples: Examples of a step, then and now. If they differ, a changed accumulation also
            changes the mathematics.

    Example:
        >>> print(table({"lr": (0.1, 0.2)}))
        changed since this checkpoint was saved, and what each key affects:
          lr  0.1 -> 0.2  changes the weights from here on
    """
    if not changes:
        return ""

    def effect(key: str) -> str:
        if examples is not None and examples[0] != examples[1] and key.startswith(_OF_RANKS):
            return f"{EFFECTS['data']}: {examples[0]} a step then, {examples[1]} now"
        return derived.get(key) or EFFECTS[effect_of_change(key)]

    rows = [
        (key, str(in_yaml(before)), str(in_yaml(now)), effect(key))
        for key, (before, now) in changes.items()
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [
        f"  {key:<{widths[0]}}  {before:>{widths[1]}} -> {now:<{widths[2]}}  {effect_of_key}"
        for key, before, now, effect_of_key in rows
    ]
    return "\n".join([title, *lines])
