"""Prepare data, tokenizer, task and model of a run."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from optrun.artifacts.run_dir import RunDir
from optrun.artifacts.saved_folder import folder_problems
from optrun.base.errors import ConfigError
from optrun.config.schema.adapter import QloraConfig
from optrun.config.schema.model import FromConfigConfig, ModelConfig
from optrun.config.schema.run import RunConfig
from optrun.data import hub_access as hub
from optrun.data.build import load_source
from optrun.data.images import need_pillow
from optrun.model.adapter import require_adapter
from optrun.model.attention import KEY as ATTENTION
from optrun.model.attention import (
    attention_of,
    describe_document_masking,
    needs_device,
    needs_one_row_batch,
    refuse_attention,
    refuse_attention_dropout,
)
from optrun.model.build import ModelSpec, build_model
from optrun.model.configuration import head_classes, refuse_unknown, router_loss_coef
from optrun.model.documents import refuse_mixed_documents
from optrun.model.images import load_image_preparation
from optrun.model.quantization import require_quantization
from optrun.model.tokenizer import (
    load_saved_tokenizer,
    load_tokenizer,
    train_tokenizer,
)
from optrun.param_groups.growth import Growth
from optrun.param_groups.parametrization import parametrize, scale_initial_weights
from optrun.runner.resume.checkpoint import OpenedCheckpoint
from optrun.runner.resume.data_position import vocabulary_digest
from optrun.task import Task, build_task
from optrun.task.build import task_class, vocabulary
from optrun.task.class_weights import class_weights
from optrun.task.data_facts import DataFacts, collect_data_facts
from optrun.training.device import pick_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass
class Prepared:
    """Tokenizer, data, task and model, built before optimizer and schedule."""

    task: Task
    tokenizer: Any
    model: PreTrainedModel
    notes: list[str]
    cut_from_train: bool
    """Whether the evaluation rows were held out from the training rows."""
    facts: DataFacts
    spec: ModelSpec
    """Requirements of task and tokenizer on the model."""
    sharded: bool
    """Whether the model will be sharded; its checks then run after that."""
    sizes: Mapping[str, Growth]
    """Growth of each parameter over the base of muP; empty under `parametrization=standard`."""


@dataclass
class TrainedArtifacts:
    """Facts of the training data beside the weights of a trained model."""

    tokenizer: Path | None = None
    """Folder of the tokenizer that was trained for the model; None: there is none."""
    classes: list[str] | None = None
    """Class names by class id; None: those of the training rows."""
    trains: bool = False
    """Whether the model will be trained, and not only evaluated."""


def artifacts_to_resume(opened: OpenedCheckpoint, model: ModelConfig) -> TrainedArtifacts:
    """Find the tokenizer to reuse in a resumed run or a branch.

    It is reused if the checkpoint was trained with it, its folder is undamaged, and the configured
    vocabulary has the same size. Otherwise the result names none, and a tokenizer is trained.

    Args:
        opened: The opened checkpoint; without a snapshot nothing is reused.
        model: The model configuration now.
    """
    saved = opened.saved
    artifacts = TrainedArtifacts(trains=True)
    if opened.folder is None or saved is None:
        return artifacts
    folder = RunDir(opened.folder.parent.parent).tokenizer
    saved_size = saved.config.get("model", {}).get("vocab_size")
    if getattr(model, "vocab_size", None) != saved_size:
        return artifacts
    if not (folder / "tokenizer.json").is_file() or folder_problems(folder):
        return artifacts
    with contextlib.suppress(ConfigError):
        if vocabulary_digest(load_saved_tokenizer(folder)) == saved.tokenizer:
            artifacts.tokenizer = folder
    return artifacts


def prepare(
    config: RunConfig,
    artifacts: TrainedArtifacts | None = None,
    *,
    meta: bool = False,
    sharded: bool = False,
) -> Prepared:
    """Prepare tokenizer, data, task and model, in this order.

    The model's name, keys and head are checked first.

    Args:
        config: The typed and checked configuration.
        artifacts: Facts of training to use instead of deriving them from the data; None: the run
            begins.
        meta: Build the model without memory for its weights, which come from another rank.
        sharded: The model will be sharded over ranks, and is checked only then.

    Raises:
        ConfigError: Data or model do not fit.
    """
    artifacts = artifacts or TrainedArtifacts(trains=True)
    require_adapter(config.adapter)
    if (
        isinstance(config.adapter, QloraConfig)
        and pick_device(config.training.device).type == "cpu"
    ):
        raise ConfigError(
            f"adapter={config.adapter.name}: a base in 4 bits needs a GPU, and this run is on a"
            " CPU. Choose adapter=lora."
        )
    require_quantization(config.model)
    refuse_attention(config.model, config.training.device, config.training.precision.value)
    kind = task_class(config.task)
    auto_class = config.task.AUTO_CLASS
    cached = hub.cache_warnings(
        getattr(part, key, None)
        for part, key in (
            (config.model, "path"),
            (config.model, "tokenizer"),
            (config.data, "path"),
        )
    )
    refuse_unknown(config.model, auto_class, getattr(config.parametrization, "base", {}))
    on_text = config.task.PROCESSOR == "AutoTokenizer"
    if not on_text:
        need_pillow()
    # Before any row is read, so that a wrong tokenizer costs no time.
    tokenizer: Any = (
        load_tokenizer(config.model, words=kind.reads_words)
        if on_text
        else load_image_preparation(config.model)
    )
    source = load_source(
        config.data,
        seed=config.seed,
        documents=config.task.joins_documents,
    )
    for part in (source, *getattr(source, "parts", {}).values()):
        part.classes = artifacts.classes
        part.head_classes = head_classes(config.model, auto_class)
    if tokenizer is None and artifacts.tokenizer is not None:
        tokenizer = load_saved_tokenizer(artifacts.tokenizer)
    if tokenizer is None:
        assert isinstance(config.model, FromConfigConfig)
        tokenizer = train_tokenizer(
            lambda: vocabulary(config.task, source),
            vocab_size=config.model.vocab_size,
            kind=kind.text_kind,
        )
    task = build_task(config.task, config.data, source, tokenizer, seed=config.seed)
    facts = collect_data_facts(task, source, tokenizer)
    task.label_smoothing = config.training.label_smoothing_factor
    if artifacts.trains:  # the training rows of an evaluation may be others
        weights = getattr(config.task, "class_weights", None)
        of_sets = facts.train.examples if config.task.of_sets else None
        task.class_weights = class_weights(weights, task.labels, facts.train.labels, of_sets)
    needs = task.needs()
    spec = ModelSpec.of_tokenizer(
        auto_class, needs.config, needs.max_length, tokenizer if on_text else None
    )
    model, notes, sizes = initial_model(config, spec, meta=meta)
    task.router_loss_coef = router_loss_coef(model)
    task.adapt(model)
    if artifacts.trains:
        refuse_attention_dropout(model)
    key = config.task.document_masking_key
    if key is not None:
        task.one_row = needs_one_row_batch(model)
        _refuse_sources_in_one_row(task, model)
        notes.append(describe_document_masking(model, key))
        if not meta and not sharded and not needs_device(model):
            refuse_mixed_documents(model, key)
    return Prepared(
        task,
        tokenizer,
        model,
        [*cached, *source.notes, *task.notes, *notes],
        source.cut_from_train,
        facts,
        spec,
        sharded,
        sizes,
    )


def initial_model(
    config: RunConfig, spec: ModelSpec, *, meta: bool = False
) -> tuple[PreTrainedModel, list[str], Mapping[str, Growth]]:
    """Build the model as it is before the first step; new weights come from the seed.

    Under muP, initial weights are scaled by how much larger each parameter is than in the base
    model (`parametrization.base`). That one is built for it, and thrown away.

    Args:
        config: The whole configuration.
        spec: Requirements of task and tokenizer on the model.
        meta: Build it on the meta device, without weights.

    Returns:
        The model, notes for the user, and the growth of each parameter over the base model, by
        name; empty without muP.
    """
    # `model` and `base` are configurations. Without muP `model` is the given one, and `base` None.
    parametrized = parametrize(config, lambda model: build_model(model, spec, meta=True)[0])
    torch.manual_seed(config.seed)
    model, notes = build_model(parametrized.model, spec, adapter=config.adapter, meta=meta)
    if parametrized.base is not None and not meta:
        # The base has the weights of a run of its own. What is drawn for it must not change what
        # is drawn later.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            scale_initial_weights(
                model, build_model(parametrized.base, spec)[0], parametrized.sizes
            )
    return model, notes, parametrized.sizes


def _refuse_sources_in_one_row(task: Task, model: PreTrainedModel) -> None:
    """Refuse a mixture if attention puts a batch into one row, and so hides its sources.

    The loss of each source is computed from the rows of its examples.

    Raises:
        ConfigError: The message names the key.
    """
    if task.one_row and task.sources:
        raise ConfigError(
            f"{ATTENTION}={attention_of(model)}: it joins a batch into one row, so the loss of each"
            f" source of data=mixture could not be computed. Choose {ATTENTION}=flex_attention or"
            " sdpa."
        )
