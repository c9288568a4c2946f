"""Configuration groups: each choice by its name, with the dataclass that holds its values."""

from __future__ import annotations

import dataclasses
from typing import Any

from optrun.config.schema import (
    checkpoint,
    clip,
    data,
    model,
    optimizer,
    param_groups,
    scheduler,
    task,
    tracking,
    training,
)

GROUPS: dict[str, dict[str, type[Any]]] = {
    "task": dict(task.SCHEMAS),
    "data": dict(data.SCHEMAS),
    "model": dict(model.SCHEMAS),
    "param_groups": dict(param_groups.SCHEMAS),
    "optimizer": dict(optimizer.SCHEMAS),
    "scheduler": dict(scheduler.SCHEMAS),
    "clip": dict(clip.SCHEMAS),
    "training": dict(training.SCHEMAS),
    "checkpoint": dict(checkpoint.SCHEMAS),
    "tracking": dict(tracking.SCHEMAS),
}


def keys_of(group: str) -> set[str]:
    """The dotted keys that a group has under any of its choices."""
    return {f"{group}.{field.name}" for schema in GROUPS[group].values() for field in dataclasses.fields(schema)}


def choices_with(group: str, key: str) -> list[str]:
    """The choices of a group that have a key."""
    return sorted(
        choice
        for choice, schema in GROUPS[group].items()
        if any(field.name == key for field in dataclasses.fields(schema))
    )
