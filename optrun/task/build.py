"""A task configuration to its task."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any

from optrun.base.errors import ConfigError
from optrun.config import registry
from optrun.config.kind import kind_of
from optrun.config.schema.data import DataConfig, MixtureConfig, mixed_eval_name
from optrun.config.schema.task import SCHEMAS
from optrun.config.schema.task_base import TaskConfig
from optrun.data.build import name_source_in_errors
from optrun.data.columns import unread_columns
from optrun.data.mixture import MixedExamples, MixedSource
from optrun.data.source import Source
from optrun.task.base import Task


def task_class(config: TaskConfig) -> type[Task]:
    """Return the class of a task, before any data is read.

    Raises:
        ConfigError: A configuration that is no task's.
    """
    kind: type[Task] = registry.choices("task")[kind_of("task", SCHEMAS, config)].load()
    return kind


def predictor_class(config: TaskConfig) -> Any:
    """Return the predictor class of a task.

    Its `predictor`, an `optrun.plugin.Predictor`.

    Raises:
        ConfigError: It names none, or one that cannot be imported.
    """
    kind = task_class(config)
    reference = kind.predictor
    if reference is None:
        raise ConfigError(
            f"task={config.name}: {kind.__name__} has no predictor, so its runs predict no rows."
            " Load the model/ of the run with transformers.pipeline. In a plugin, give the class"
            ' predictor = "MODULE:CLASS", a subclass of optrun.plugin.Predictor.'
        )
    if not isinstance(reference, str):
        return reference
    module, _, attribute = reference.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"task={config.name}: predictor={reference!r} of {kind.__name__}: {error}."
        ) from error


def build_task(
    config: TaskConfig, data: DataConfig, source: Source, tokenizer: object, *, seed: int
) -> Task:
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
    kind = task_class(config)
    if not isinstance(source, MixedSource):
        task = kind(config, data, source, tokenizer, seed=seed)
        source.notes += unread_columns(source, task.name)
        return task
    assert isinstance(data, MixtureConfig)
    tasks: dict[str, Task] = {}
    for name, part in source.parts.items():
        with name_source_in_errors(name):
            tasks[name] = kind(config, data, part, tokenizer, seed=seed)
            tasks[name].notes += unread_columns(part, tasks[name].name)
    return _mixed(tasks, data, seed=seed)


def _mixed(tasks: Mapping[str, Task], data: MixtureConfig, *, seed: int) -> Task:
    """Make the task of the first source, with the examples of all.

    Raises:
        ConfigError: Sources with different classes, or one without an example.
    """
    task = next(iter(tasks.values()))
    for name, part in tasks.items():
        if part.labels != task.labels:
            raise ConfigError(
                f"data.mixture.{name}: its labels are {', '.join(part.labels[:12])}; those of"
                f" {next(iter(tasks))} are {', '.join(task.labels[:12])}. The sources of a mixture"
                " have the same labels."
            )
        if not len(part.train):
            raise ConfigError(f"data.mixture.{name}: there is no example in it to train on.")
    task.sources = list(tasks)
    task.join(list(tasks.values()))
    task.train = MixedExamples(
        {name: part_task.train for name, part_task in tasks.items()},
        data.weights(),
        data.stopping_strategy,
        seed=seed,
    )
    eval_sets = {}
    notes = []
    for name, part_task in tasks.items():
        notes += [f"{name}: {note}" for note in part_task.notes]
        for set_name, examples in part_task.eval_sets.items():
            if len(examples):
                eval_sets[mixed_eval_name(name, set_name)] = examples
    task.eval_sets = eval_sets or {"": task.eval}
    task.notes = notes
    return task


def vocabulary(config: TaskConfig, source: Source) -> Iterator[str]:
    """Yield the training texts for a new tokenizer, alternating between sources.

    Raises:
        ConfigError: A missing column.
    """
    kind = task_class(config)
    if not isinstance(source, MixedSource):
        return kind.vocabulary(source)
    rounds = zip_longest(*(kind.vocabulary(part) for part in source.parts.values()))
    return (text for texts in rounds for text in texts if text is not None)
