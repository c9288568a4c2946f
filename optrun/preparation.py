"""Data, tokenizer, task and model: what a run needs before anything trains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from optrun import hub
from optrun.config.model import FromConfigConfig
from optrun.config.run import RunConfig
from optrun.data.source import load_source
from optrun.model.build import ModelSpec, build_model, special_ids
from optrun.model.configuration import refuse_unknown
from optrun.model.images import load_image_preparation
from optrun.model.tokenizer import load_tokenizer, train_tokenizer
from optrun.task import Task, build_task
from optrun.task.build import task_class


@dataclass
class Prepared:
    """Model and data, before anything that trains."""

    task: Task
    tokenizer: Any
    model: Any
    notes: list[str]


def prepare(config: RunConfig) -> Prepared:
    """Data, tokenizer, task, model, in this order; the model's name, keys and head are looked at first.

    Raises:
        ConfigError: Anything in data or model that does not fit.
    """
    kind = task_class(config.task)
    cached = hub.from_cache(
        getattr(part, key, None)
        for part, key in ((config.model, "path"), (config.model, "tokenizer"), (config.data, "path"))
    )
    refuse_unknown(config.model, kind.auto_class)
    packing = bool(getattr(config.task, "packing", False))
    source = load_source(config.data, seed=config.seed, documents=packing)
    on_text = kind.text_kind != "none"
    if on_text:
        tokenizer = load_tokenizer(config.model, words=kind.reads_words)
    else:
        tokenizer = load_image_preparation(config.model)
    if tokenizer is None:
        assert isinstance(config.model, FromConfigConfig)
        tokenizer = train_tokenizer(
            lambda: kind.vocabulary(source), vocab_size=config.model.vocab_size, kind=kind.text_kind
        )
    task = build_task(config.task, config.data, source, tokenizer, seed=config.seed)
    needs = task.needs()
    spec = ModelSpec(
        auto_class=kind.auto_class,
        config=needs.config,
        max_length=needs.max_length,
        vocab_size=len(tokenizer) if on_text else None,
        special_ids=special_ids(tokenizer) if on_text else {},
    )
    torch.manual_seed(config.seed)
    model, notes = build_model(config.model, spec)
    return Prepared(task, tokenizer, model, [*cached, *source.notes, *task.notes, *notes])
