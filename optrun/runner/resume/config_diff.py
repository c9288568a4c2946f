"""Compare the configuration of a checkpoint with the one in force, key by key."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from optrun.artifacts.metadata import CheckpointMetadata
from optrun.base.errors import ConfigError
from optrun.base.plain import is_inside_any
from optrun.config.original_cwd import path_keys, same_files
from optrun.config.saved import differences
from optrun.config.types import in_yaml

Changes = Mapping[str, tuple[object, object]]

_OF_RANKS = ("distributed.name", "training.nproc_per_node")
"""Keys that may change how many ranks add examples to a step."""

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
"""Kind of effect -> what a table of changes says of it."""


_EFFECT_OF = {
    # Whole groups, and keys at the top level.
    "tracking": "harmless",
    "checkpoint": "harmless",
    "run_name": "harmless",
    "lr_from": "harmless",
    "matters": "harmless",
    "distributed": "rounding",
    "data": "data",
    "task": "data",
    "seed": "data",
    # Keys that differ from their group.
    "checkpoint.metric": "best",
    "checkpoint.mode": "best",
    "checkpoint.save_steps": "nonfinite",
    "checkpoint.allow_nonfinite": "nonfinite",
    "distributed.param_dtype": "mathematics",
    "distributed.reduce_dtype": "mathematics",
    "training.logging_steps": "harmless",
    "training.dataloader_num_workers": "harmless",
    "training.dataloader_timeout": "harmless",
    "training.max_seconds": "harmless",
    "training.nproc_per_node": "rounding",
    "training.per_device_eval_batch_size": "rounding",
    "training.eval_steps": "evaluation",
    "training.on_nonfinite": "nonfinite",
    "training.max_nonfinite_skips": "nonfinite",
    "training.max_rollbacks": "nonfinite",
    "training.max_steps": "length",
    "training.num_train_epochs": "length",
    "training.early_stopping_patience": "length",
    "training.early_stopping_threshold": "length",
    "training.per_device_train_batch_size": "data",
    "training.gradient_accumulation_steps": "data",
    "training.global_batch_size": "data",
    "training.group_by_length": "data",
}
"""Key or group -> effect; a key counts before its group, and all others are `mathematics`."""


def effect_of_change(key: str) -> str:
    """Classify what a changed configuration key affects in a resumed run.

    Args:
        key: Dotted name.

    Returns:
        A key of `EFFECTS`; `mathematics` for a key that is not known to affect less.

    Example:
        >>> effect_of_change("checkpoint.keep_last"), effect_of_change("checkpoint.metric")
        ('harmless', 'best')
        >>> effect_of_change("data.train"), effect_of_change("lr")
        ('data', 'mathematics')
    """
    group = key.partition(".")[0]
    return _EFFECT_OF.get(key) or _EFFECT_OF.get(group, "mathematics")


def is_harmless(key: str) -> bool:
    """Tell whether a key changes neither the computation nor the length of training.

    Rounding, when metrics are evaluated, and what follows a non-finite step may change.
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

    A path that is written in another way now, and names the same files, is no change.

    Args:
        saved: Metadata of the checkpoint.
        values: The configuration in force, as resolved plain values.
        started_from: The folder in which the run was started, from which relative paths of the
            checkpoint count; None: unknown.

    Returns:
        Dotted key -> (before, now), such as {"lr": (0.1, 0.2)}; None stands for an absent key.
    """
    changed = differences(saved.config, values)
    keys = path_keys(values)  # keys whose values are paths, such as data.train
    return {
        key: pair
        for key, pair in changed.items()
        if not (is_inside_any(key, keys) and same_files(*pair, started_from))
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
        examples: Examples of a step, then and now. If they differ, changed ranks count as a change
            of the data, and both numbers are shown.

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
    # Pad the columns to equal widths; the effect, which is the last one, is not padded.
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [
        f"  {key:<{widths[0]}}  {before:>{widths[1]}} -> {now:<{widths[2]}}  {effect_of_key}"
        for key, before, now, effect_of_key in rows
    ]
    return "\n".join([title, *lines])
