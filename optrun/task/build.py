"""A task configuration to its task."""

from __future__ import annotations

import importlib
from typing import Any

from optrun import registry
from optrun.config.kind import kind_of
from optrun.config.schema.data import DataConfig
from optrun.config.schema.task import SCHEMAS, TaskConfig
from optrun.data.source import Source
from optrun.errors import ConfigError
from optrun.task.base import Task


def task_class(config: TaskConfig) -> type[Task]:
    """The class of a task, before any data is read.

    Raises:
        ConfigError: A configuration that is no task's.
    """
    found: type[Task] = registry.choices("task")[kind_of("task", SCHEMAS, config)].load()
    return found


def predictor_class(config: TaskConfig) -> Any:
    """The class that predicts rows for a task: its `predictor`, an `optrun.prediction.base.Predictor`.

    Raises:
        ConfigError: It names none, or one that cannot be imported.
    """
    kind = task_class(config)
    named = kind.predictor
    if named is None:
        raise ConfigError(
            f"task={config.name}: {kind.__name__} has no predictor, so its runs predict no rows. Give the class one: "
            'predictor = "MODULE:CLASS", a subclass of optrun.prediction.base.Predictor.'
        )
    if not isinstance(named, str):
        return named
    module, _, attribute = named.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"task={config.name}: predictor={named!r} of {kind.__name__}: {error}.") from error


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
