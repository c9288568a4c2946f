"""Read a checkpoint, and refuse a `state.json` with values that no run saves."""

from __future__ import annotations

from pathlib import Path
from types import NoneType
from typing import get_args, get_origin, get_type_hints

import torch

from optrun.artifacts.checkpoint import Snapshot, load_checkpoint
from optrun.artifacts.metadata import ABSENT, CheckpointMetadata
from optrun.artifacts.run_dir import CHECKPOINT_STATE
from optrun.base.errors import CheckpointError
from optrun.config.registry.origins import unrecorded
from optrun.training.state import RandomStates


def read_checkpoint(folder: Path, *, lazy: bool = False) -> Snapshot:
    """Load a checkpoint of a run, and verify its checksums.

    Args:
        folder: The checkpoint.
        lazy: Leave the tensors in their files until they are used.

    Raises:
        CheckpointError: The checkpoint is damaged, or holds values that no run saves.
    """
    snapshot = load_checkpoint(folder, lazy=lazy)
    refuse_invalid_state(folder, snapshot.metadata)
    return snapshot


def refuse_invalid_state(folder: Path, metadata: CheckpointMetadata) -> None:
    """Refuse a checkpoint's state with a missing part or a part of a wrong type.

    Args:
        folder: The checkpoint, for the message.
        metadata: Content of its `state.json`.

    Raises:
        CheckpointError: The message names the first key with a value that no run saves.
    """
    fault = (
        _name_wrong_type(metadata)
        or _name_missing_plugin(metadata)
        or _describe_bad_random_states(metadata)
    )
    if fault is not None:
        raise CheckpointError(
            f"{folder / CHECKPOINT_STATE}: {fault}. Its checksums are right, but no run saved this."
        )


def _name_wrong_type(metadata: CheckpointMetadata) -> str | None:
    """Name the first key with a missing value or a wrong type; None if all are right.

    The types are those of the fields of `CheckpointMetadata`; of a list or mapping the items are
    not looked at.
    """
    for key, hint in get_type_hints(CheckpointMetadata).items():
        value = getattr(metadata, key)
        is_optional = NoneType in get_args(hint)  # such as `int | None`
        if value is ABSENT:
            return f"{key}: missing"
        if value is None and is_optional:
            continue
        kind = get_args(hint)[0] if is_optional else hint
        kind = get_origin(kind) or kind  # `dict` of `dict[str, object]`
        if not isinstance(value, kind):
            return f"{key}: {str(value)[:40]}, expected {kind.__name__}"
    return None


def _name_missing_plugin(metadata: CheckpointMetadata) -> str | None:
    """Name a plugin's choice in the configuration if there is no record of the plugin.

    Returns:
        None if every such choice has a record, with which the run can be resumed.
    """
    try:
        names = unrecorded(metadata.config, metadata.plugins or ())  # such as "optimizer=my_lion"
    except (TypeError, KeyError):
        return "plugins: no list of records"
    if names:
        return f"plugins: no record of {names[0]}, which its config chooses"
    return None


def _describe_bad_random_states(metadata: CheckpointMetadata) -> str | None:
    try:
        RandomStates.unpack(metadata.random, torch.device("cpu"))
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RuntimeError) as error:
        return f"random: no states of generators: {type(error).__name__}: {str(error)[:100]}"
    return None
