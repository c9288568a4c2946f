"""A task configuration to its task."""

from __future__ import annotations

from typing import Any

from optrun import registry
from optrun.config.kind import kind_of
from optrun.config.schema.data import DataConfig
from optrun.config.schema.task import SCHEMAS, TaskConfig
from optrun.data.source import Source
from optrun.task.base import Task


def task_class(config: TaskConfig) -> type[Task]:
    """The class of a task, before any data is read.

    Raises:
        ConfigError: A configuration that is no task's.
    """
    found: type[Task] = registry.choices("task")[kind_of("task", SCHEMAS, config)].load()
    return found


def build_task(config: TaskConfig, data: DataConfig, source: Source, tokenizer: Any, *, seed: int) -> Task:
    """Read a source as a task's examples.

    Args:
        config: The task choice.
        data: Lengths and limits.
        source: Rows of all splits.
        tokenizer: Of the model; its image preparation where the task is about images.
        seed: Picks examples where they are limited.

    Raises:
        ConfigError: Columns, labels or texts that do not fit the task.
    """
    return task_class(config)(config, data, source, tokenizer, seed=seed)
