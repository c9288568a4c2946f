"""Name to task, in one table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from optrun.config.kind import kind_of
from optrun.config.schema.data import DataConfig
from optrun.config.schema.task import SCHEMAS, TaskConfig
from optrun.data.source import Source
from optrun.task.base import Task
from optrun.task.causal_lm import CausalLm
from optrun.task.image_classification import ImageClassification
from optrun.task.masked_lm import MaskedLm
from optrun.task.seq2seq_lm import Seq2SeqLm
from optrun.task.sequence_classification import SequenceClassification
from optrun.task.token_classification import TokenClassification

TASKS: dict[str, Callable[..., Task]] = {
    "causal_lm": CausalLm,
    "masked_lm": MaskedLm,
    "sequence_classification": SequenceClassification,
    "token_classification": TokenClassification,
    "seq2seq_lm": Seq2SeqLm,
    "image_classification": ImageClassification,
}


def task_class(config: TaskConfig) -> Any:
    """The class of a task, before any data is read.

    Raises:
        ConfigError: A configuration that is no task's.
    """
    return TASKS[kind_of("task", SCHEMAS, config)]


def build_task(config: TaskConfig, data: DataConfig, source: Source, tokenizer: Any, *, seed: int) -> Task:
    """Read a source as a task's examples.

    Args:
        config: The task choice.
        data: Lengths and limits.
        source: Rows of both splits.
        tokenizer: Of the model; its image preparation where the task is about images.
        seed: Picks examples where they are limited.

    Raises:
        ConfigError: Columns, labels or texts that do not fit the task.
    """
    task: Task = task_class(config)(config, data, source, tokenizer, seed=seed)
    return task
