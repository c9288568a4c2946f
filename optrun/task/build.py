"""Build the task of a configuration, over one source or over a mixture."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from itertools import chain, zip_longest
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
    """Return the registered class of a task.

    Raises:
        ConfigError: The configuration belongs to no registered task.
    """
    name = kind_of("task", SCHEMAS, config)
    registered_class: type[Task] = registry.choices("task")[name].load()
    return registered_class


def predictor_class(config: TaskConfig) -> Any:
    """Return a task's class for predictions on the rows of a file.

    It is the task's attribute `predictor`: a class, or `MODULE:CLASS`, which is imported now.

    Raises:
        ConfigError: The task has none, or it cannot be imported.
    """
    task = task_class(config)
    predictor = task.predictor
    if predictor is None:
        raise ConfigError(
            f"task={config.name}: {task.__name__} has no predictor, so its runs predict no rows."
            " Load the model/ of the run with transformers.pipeline. In a plugin, give the class"
            ' predictor = "MODULE:CLASS", a subclass of optrun.plugin.Predictor.'
        )
    if not isinstance(predictor, str):
        return predictor
    module, _, class_name = predictor.partition(":")
    try:
        return getattr(importlib.import_module(module), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"task={config.name}: predictor={predictor!r} of {task.__name__}: {error}."
        ) from error


def build_task(
    config: TaskConfig, data: DataConfig, source: Source, tokenizer: object, *, seed: int
) -> Task:
    """Build a task, and read the examples of all splits of a source.

    Args:
        config: The task choice.
        data: Lengths and limits.
        source: Rows of all splits; gets a note about columns that nothing reads.
        tokenizer: Of the model; for a task on images the model's image preparation.
        seed: Picks the examples if `data.max_train_examples` limits them.

    Returns:
        The task. For a mixture the task of its first source, with the examples of all sources.

    Raises:
        ConfigError: Columns, labels or texts do not fit the task; the message names the source of
            a mixture.
    """
    registered_class = task_class(config)
    # 1. One source.
    if not isinstance(source, MixedSource):
        task = registered_class(config, data, source, tokenizer, seed=seed)
        source.notes += unread_columns(source, task.name)  # a note for columns not used
        return task

    # 2. A mixture: a task for each source, which become one.
    assert isinstance(data, MixtureConfig)
    tasks: dict[str, Task] = {}
    for name, one_source in source.sources.items():
        with name_source_in_errors(name):
            task = registered_class(config, data, one_source, tokenizer, seed=seed)
            task.notes += unread_columns(one_source, task.name)
            tasks[name] = task
    return _mix_tasks(tasks, data, seed=seed)


def _mix_tasks(tasks: Mapping[str, Task], data: MixtureConfig, *, seed: int) -> Task:
    """Give the task of the first source the examples and notes of all sources.

    Evaluation sets are called SOURCE, as in `eval/SOURCE/loss`, or by SOURCE and the name of the
    set; sets without an example are left out.

    Args:
        tasks: The task of each source; the first one is changed and returned.
        data: Has the weights of the sources.
        seed: Decides the order of the examples.

    Raises:
        ConfigError: Sources with different classes, or one without a training example.
    """
    # 1. Refuse sources that do not fit together.
    task = next(iter(tasks.values()))
    for name, source_task in tasks.items():
        if source_task.labels != task.labels:
            raise ConfigError(
                f"data.mixture.{name}: its labels are {', '.join(source_task.labels[:12])}; those"
                f" of {next(iter(tasks))} are {', '.join(task.labels[:12])}. Give the sources of"
                " a mixture the same labels."
            )
        if not len(source_task.train):
            raise ConfigError(f"data.mixture.{name}: it has no example to train on.")

    # 2. Mix the training examples.
    task.sources = list(tasks)
    task.join(list(tasks.values()))  # adopts settings of the others, or refuses a mixture
    task.train = MixedExamples(
        {name: source_task.train for name, source_task in tasks.items()},
        data.weights(),
        data.stopping_strategy,
        seed=seed,
    )

    # 3. Collect the evaluation sets and the notes.
    eval_sets = {}
    notes = []
    for name, source_task in tasks.items():
        notes += [f"{name}: {note}" for note in source_task.notes]
        for set_name, examples in source_task.eval_sets.items():
            if len(examples):
                eval_sets[mixed_eval_name(name, set_name)] = examples
    # Without any evaluation example: the empty set of the first source, so that there is one.
    task.eval_sets = eval_sets or {"": task.eval}
    task.notes = notes
    return task


def vocabulary(config: TaskConfig, source: Source) -> Iterator[str]:
    """Yield the texts for the training of a new tokenizer.

    The sources of a mixture take turns, with one text each, until all have ended.

    Raises:
        ConfigError: A column is missing.
    """
    task = task_class(config)
    if not isinstance(source, MixedSource):
        return task.vocabulary(source)
    # A round has one text of each source, None for a source that has ended.
    rounds = zip_longest(*map(task.vocabulary, source.sources.values()))
    return (text for text in chain.from_iterable(rounds) if text is not None)
