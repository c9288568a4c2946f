"""Builds everything that trains from data and model, standing where a checkpoint says."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from optrun.artifacts.checkpoint import Snapshot
from optrun.artifacts.metadata import CheckpointMetadata
from optrun.artifacts.provenance import config_digest
from optrun.artifacts.trunk import Trunk
from optrun.base.errors import ConfigError, OptrunError, nearest
from optrun.config.branch import refuse_ended
from optrun.config.registry.origins import records, require
from optrun.config.request import Request
from optrun.config.saved import flat
from optrun.config.schema.distributed import FsdpConfig
from optrun.config.schema.run import RunConfig
from optrun.data.loader import BatchLoader, EpochPlan, ExampleSource
from optrun.distributed.contract import refuse_different
from optrun.distributed.shard import distribute
from optrun.distributed.world import ALONE, World
from optrun.model.attention import needs_device
from optrun.model.documents import expect_apart
from optrun.optimizer.averaged import evaluation_weights
from optrun.optimizer.build import build_optimizer
from optrun.optimizer.clip import build_clip
from optrun.optimizer.kernels.report import kernel_of
from optrun.optimizer.kernels.report import refuse_different as refuse_different_kernels
from optrun.optimizer.sparse import refuse_sparse_gradients
from optrun.optimizer.transfer import transferred
from optrun.param_groups import block_paths, build_param_groups
from optrun.runner.adapter_base import adapter_facts, refuse_other_adapter
from optrun.runner.branch import Branch, begin_branch, restore_branch
from optrun.runner.prepare import Prepared
from optrun.runner.reference import settle_reference
from optrun.runner.resume.config_diff import changes_since, moves_layers, table
from optrun.runner.resume.data_position import move, plan_values, refuse_other_data, vocabulary_digest
from optrun.runner.resume.global_batch import asked_for, open_note, settle_batch
from optrun.runner.resume.restore import environment, other_environment, restore_state, stop_request, train_state
from optrun.scheduler import build_scheduler
from optrun.scheduler.build import warmup_note
from optrun.task import Task
from optrun.training.callback import StopRequest
from optrun.training.contrast import Contrast, ContrastStep
from optrun.training.noise_scale import NoiseScale
from optrun.training.ranking import Ranking, best_mode, rank_by
from optrun.training.setup import TrainingSetup
from optrun.training.state import TrainState
from optrun.training.step import BySource, Precision, TrainStep

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass
class Assembled:
    """Everything built, standing where training begins."""

    setup: TrainingSetup
    request: Request
    """As it was asked for, with the numbers that follow from the ranks."""
    constants: CheckpointMetadata
    """What every checkpoint of this start of the run says alike."""
    changes: dict[str, tuple[Any, Any]]
    derived: Mapping[str, str]
    """Those of them that follow from the ranks, with what that means."""
    notes: list[str]
    branch: Branch | None
    """How the run left its trunk, where it begins as a branch."""
    stop: StopRequest | None
    """Of the checkpoint, where nothing that matters was changed since; None: train to the last step."""

    @property
    def is_done(self) -> bool:
        """Whether no step is left, nor a part of one."""
        state = self.setup.state
        end = self.setup.total_steps if self.stop is None else min(self.stop.step, self.setup.total_steps)
        return state.global_step >= end and not state.unfinished


def assemble(
    request: Request,
    prepared: Prepared,
    snapshot: Snapshot | None,
    device: torch.device,
    started_from: Path | None = None,
    world: World = ALONE,
    trunk: Trunk | None = None,
) -> Assembled:
    """Build everything that trains, standing where the snapshot says.

    Args:
        request: Configuration and command line.
        prepared: Data and model; the model is moved to the device.
        snapshot: Of the checkpoint to go on from; None: from the start.
        device: Where to train.
        started_from: Folder that relative paths of the snapshot's configuration start from; None: the current one.
        world: The ranks that share the run.
        trunk: Where the snapshot lies, if it is of another run and a branch begins with it.

    Raises:
        ConfigError: Options that do not fit the task or the model.
        CheckpointError: The checkpoint does not fit what is to be trained.
    """
    saved = None if snapshot is None else snapshot.metadata
    asked, batch = request, settle_batch(request, saved, world.size, branches=trunk is not None)
    request = batch.request
    config, values = request.config, request.values
    task = prepared.task
    model = prepared.model
    sharded = isinstance(config.distributed, FsdpConfig)
    if sharded and config.task.keeps_apart is not None and needs_device(model):
        raise ConfigError(
            f"model.attn_implementation={config.model.attn_implementation}: with distributed=fsdp nobody tries whether "
            f"{config.task.keeps_apart} keeps documents apart by it. Take sdpa, or distributed=ddp."
        )
    if not sharded:
        model = model.to(device)
        if config.task.keeps_apart is not None and needs_device(model):  # others were tried on the CPU
            expect_apart(model, config.task.keeps_apart, Precision(device, config.training.precision.value).autocast())
    plan = EpochPlan(
        examples=len(task.train),
        batch_size=batch.micro_batch_size,
        accumulation=batch.micro_batches,
        seed=config.seed,
        lengths=_lengths(config, task),
        arrangement=getattr(task.train, "arrangement", None),
    )
    task.expect_step(min(plan.examples, plan.batch_size * plan.accumulation))
    fingerprint = f"{task.train.fingerprint()[:16]}-{task.eval_fingerprint()}"
    constants = CheckpointMetadata(
        global_step=0,
        config=dict(values),
        config_digest=config_digest(values),
        split_by=prepared.split_by,
        plan=plan_values(plan, fingerprint, task.train),
        tokenizer=vocabulary_digest(prepared.tokenizer),
        plugins=records(values),
        model_class=type(model).__name__,
        model_config=json.loads(model.config.to_json_string(use_diff=False)),
        adapter=adapter_facts(model),
    )
    _refuse_other_start(constants, task, model, world)
    reference = None if snapshot is None else snapshot.metadata.reference
    constants.reference = settle_reference(task, model, config, device, reference, world=world)
    if snapshot is not None:
        refuse_other_adapter(snapshot.metadata, constants.adapter, config)
    state = TrainState()
    notes: list[str] = []
    changes: dict[str, tuple[Any, Any]] = {}
    stop, branch = None, None
    if saved is not None and trunk is not None:
        changes = changes_since(saved, values, started_from)
        refuse_other_data(saved, constants, changes)
        branch, state = begin_branch(trunk, saved, constants, changes, config.branch_schedule)
        constants.branch = branch.metadata()
        notes = [note for note in [table(branch.changes, "other than the trunk's:", derived=batch.derived)] if note]
    elif saved is not None:
        changes = changes_since(saved, values, started_from)
        refuse_other_data(saved, constants, changes)
        state = train_state(saved)
        moved = move(saved.plan, state, plan, fingerprint)
        others = require(saved.plugins or (), "this run")
        listed = table(changes, derived=batch.derived, examples=batch.examples)
        notes = [note for note in (listed, moved, *others) if note]
        stop = stop_request(saved, asked_for(changes, batch.derived))
        constants.branch = saved.branch
    whole = math.ceil(config.training.num_train_epochs * plan.steps_per_epoch) - state.data_shift
    total = config.training.max_steps or max(1, whole)
    constants.total_steps = total
    schedule_steps = total - int((constants.branch or {}).get("schedule_from", 0))
    if branch is not None:
        refuse_ended(str(branch.trunk.folder), branch.step, total, length_key(config))
    ranking = ranking_of(config, task)
    if not len(task.eval):
        _refuse_without_evaluation(config)
    notes += [note for note in [rank_by(state, ranking), open_note(asked, batch, world.size)] if note is not None]
    started = [] if snapshot is None or moves_layers(changes) else _whole_groups(snapshot.metadata.optimizer)
    train_step, placed = _train_step(config, model, prepared, device, schedule_steps, world, started)
    notes += placed
    kernel = kernel_of(train_step.optimizer, device.type, whole=not sharded)
    refuse_different_kernels(world.gather_objects(kernel))
    constants.environment = environment(device, world.size, kernel)
    elsewhere = None if snapshot is None else other_environment(snapshot.metadata, constants.environment)
    notes += [note for note in [elsewhere] if note is not None]
    new = [config.default_lr_note(), config.factors_note()]
    begun = new if snapshot is None else config.older_power_notes()
    said = [*begun, config.schedule_note(), warmup_note(config.scheduler, schedule_steps)]
    notes += [note for note in said if note is not None]
    if train_step.scheduler.metric is not None:
        known_metric(task, "scheduler.metric", train_step.scheduler.metric)
        if not len(task.eval):
            raise _no_evaluation(f"scheduler.metric={train_step.scheduler.metric}", "take a schedule of the step")
    if snapshot is not None and branch is not None:
        notes += restore_branch(branch, snapshot, model, train_step, total)
    elif snapshot is not None:
        notes += restore_state(snapshot, model, train_step, changes, config.checkpoint.on_other_optimizer)
    train_loader, eval_loaders = build_loaders(config, task, device)
    setup = TrainingSetup(
        model=model,
        train_step=train_step,
        task=task,
        plan=plan,
        train_loader=train_loader,
        eval_loaders=eval_loaders,
        config=config.training,
        ranking=ranking,
        state=state,
        total_steps=total,
        evaluation_weights=partial(evaluation_weights, train_step.optimizer),
    )
    return Assembled(setup, request, constants, changes, batch.derived, notes, branch, stop)


def _refuse_other_start(constants: CheckpointMetadata, task: Task, model: PreTrainedModel, world: World) -> None:
    """Refuse ranks that would train something else: the last look before the first step.

    Raises:
        ConfigError: With machine and rank, key and both values.
    """
    if world.size == 1:
        return
    facts = {
        **flat(constants.config),
        "data.train (fingerprint of the examples)": task.train.fingerprint(),
        "data.eval (fingerprint of the examples)": task.eval_fingerprint(),
        "tokenizer": constants.tokenizer,
        "adapter": constants.adapter,
        "plan": constants.plan,
        **{f"model configuration {name}": value for name, value in constants.model_config.items()},
        "model": [constants.model_class, [[name, list(param.shape)] for name, param in model.named_parameters()]],
        **{f"plugin {record.get('plugin')}": record.get("sha256") for record in constants.plugins or ()},
    }
    refuse_different(world, facts)


def length_key(config: RunConfig) -> str:
    """Say which key decides how long a run is, with its value."""
    key = "num_train_epochs" if config.training.max_steps is None else "max_steps"
    return f"training.{key}={getattr(config.training, key)}"


def _refuse_without_evaluation(config: RunConfig) -> None:
    """Refuse what needs an evaluation where there is none.

    Raises:
        ConfigError: With the key.
    """
    if config.checkpoint.metric is not None:
        raise _no_evaluation(f"checkpoint.metric={config.checkpoint.metric}", "leave it null")
    patience = config.training.early_stopping_patience
    if patience is not None:
        raise _no_evaluation(f"training.early_stopping_patience={patience}", "leave it null")


def _no_evaluation(asked: str, instead: str) -> ConfigError:
    """Make the refusal of what needs an evaluation if there is none."""
    return ConfigError(
        f"{asked}: it needs an evaluation, and data.eval_fraction=0 leaves no rows for one. Give evaluation rows "
        f"(data.eval, data.eval_fraction), or {instead}."
    )


def known_metric(task: Task, key: str, metric: str) -> None:
    """Refuse a metric that the task does not report.

    Raises:
        ConfigError: With the key and the metrics there are.
    """
    known = [f"{prefix}{name}" for prefix in eval_prefixes(task) for name in task.metric_names()]
    if metric not in known:
        close = nearest(metric, known)
        hint = f"Did you mean {' or '.join(close)}? " if close else ""
        raise ConfigError(f"{key}={metric}: task={task.name} has no such metric. {hint}It has: {', '.join(known)}.")


def ranking_of(config: RunConfig, task: Task) -> Ranking:
    """Pick the metric that says which checkpoint is best: that of the first evaluation set, unless one is named.

    Raises:
        ConfigError: The task reports no such metric.
    """
    wanted = config.checkpoint.metric or task.main_metric
    metric = wanted if "/" in wanted else f"{eval_prefixes(task)[0]}{wanted}"
    known_metric(task, "checkpoint.metric", metric)
    if config.checkpoint.mode is not None:
        return Ranking(metric, config.checkpoint.mode.value)
    return Ranking(metric, best_mode(metric, Ranking(f"eval/{task.main_metric}", task.mode)))


def _lengths(config: RunConfig, task: Task) -> np.ndarray | None:
    """Count the tokens of each training example, where they decide the order."""
    if not config.training.group_by_length:
        return None
    lengths: np.ndarray | None = getattr(task.train, "lengths", None)
    if lengths is None:
        raise ConfigError(f"training.group_by_length=true: the examples of task={task.name} have no length.")
    return lengths


def _train_step(
    config: RunConfig,
    model: PreTrainedModel,
    prepared: Prepared,
    device: torch.device,
    total: int,
    world: World,
    started: Sequence[Mapping[str, Any]],
) -> tuple[TrainStep, list[str]]:
    """Make what steps, and notes on its placement; `started`: groups of the checkpoint to go on from."""
    task = prepared.task
    if config.training.gradient_checkpointing:
        options = {"use_reentrant": False}
        if hasattr(model, "activation_checkpointing_enable"):  # its name from transformers 5.2x on
            model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
        else:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    model.train()
    weight_decay = getattr(config.optimizer, "weight_decay", None)
    ratio = getattr(config.adapter, "loraplus_lr_ratio", None)
    notes: list[str] = []
    groups = build_param_groups(
        model,
        config.param_groups,
        lr=config.lr,
        weight_decay=weight_decay,
        loraplus_lr_ratio=ratio,
        started=started,
        notes=notes,
    )
    groups = transferred(groups, prepared.sizes, config.optimizer, config.parametrization, lr=config.lr, notes=notes)
    refuse_sparse_gradients(model, config.distributed.name, device.type)
    forward, gradient_sync = distribute(model, config.distributed, world, device, block_paths(model))
    params = dict(model.named_parameters())  # the same, or the shards that took their place
    for group in groups:
        group["params"] = [(name, params[name]) for name, _ in group["params"]]
    try:
        optimizer = build_optimizer(config.optimizer, groups, lr=config.lr)
        scheduler = build_scheduler(optimizer, config.scheduler, num_training_steps=total)
    except OptrunError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(str(error)) from error
    if config.training.compile:
        forward = cast("torch.nn.Module", torch.compile(forward))
    config.training.expect_micro_batches(world.size)
    trained = (param for param in params.values() if param.requires_grad)
    over_step = getattr(config.task, "over_step", False)
    if over_step and config.training.noise_scale:
        raise ConfigError(
            f"training.noise_scale=true: the loss of task={config.task.name} compares all examples of a step, so a "
            "micro-batch has no gradient of its own. Leave it out."
        )
    kind: Any = partial(ContrastStep, contrast=cast("Contrast", task)) if over_step else TrainStep
    train_step: TrainStep = kind(
        device,
        config.training.precision.value,
        model=forward,
        optimizer=optimizer,
        clip=build_clip(config.clip),
        scheduler=scheduler,
        weight=task.weight,
        loss=task.loss,
        seed=config.seed,
        sizes=task.sizes,
        world=world,
        gradient_sync=gradient_sync,
        by_source=BySource(task.loss_by_example, len(task.sources)) if task.sources else None,
        forward=task.forward,
        measure=task.measure if task.measured else None,
        measured=len(task.measured),
        noise_scale=NoiseScale(trained) if config.training.noise_scale else None,
    )
    return train_step, notes


def eval_prefixes(task: Task) -> list[str]:
    """List what the metrics of each evaluation set begin with, such as `eval/` or `eval/dev/`."""
    return [f"eval/{name}/" if name else "eval/" for name in task.eval_sets]


def build_loaders(config: RunConfig, task: Task, device: torch.device) -> tuple[BatchLoader, dict[str, BatchLoader]]:
    """Build the batch loaders of the training split and of each evaluation set."""
    changes = getattr(task.transform, "__func__", None) is not Task.transform  # that one changes nothing

    def loader(examples: ExampleSource) -> BatchLoader:
        return BatchLoader(
            examples=examples,
            transform=task.transform if changes else None,
            collate=task.collate,
            seed=config.seed,
            workers=config.training.dataloader_num_workers,
            pin_memory=device.type == "cuda",
        )

    return loader(task.train), {name: loader(examples) for name, examples in task.eval_sets.items()}


def _whole_groups(optimizer: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Take the groups of a checkpoint; none if their layers are damaged, which loading the optimizer names."""
    groups = optimizer.get("groups", [])
    kinds = {"layer": str, "layer_id": int | None, "lr_scale": int | float, "role": str}
    whole = isinstance(groups, list) and all(
        isinstance(group, dict) and all(isinstance(group.get(key, None), kind | None) for key, kind in kinds.items())
        for group in groups
    )
    return groups if whole else []
