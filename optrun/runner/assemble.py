"""Build model, optimizer, schedule and state of a run, new or from a checkpoint."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from optrun.artifacts.metadata import CheckpointMetadata
from optrun.artifacts.provenance import config_digest
from optrun.base.errors import ConfigError, nearest
from optrun.base.plain import flat
from optrun.config.registry.origins import records, require
from optrun.config.request import Request
from optrun.config.schema.distributed import FsdpConfig
from optrun.config.schema.run import RunConfig, refuse_ended_fork
from optrun.data.loader import BatchLoader, EpochPlan, ExampleSource
from optrun.distributed.contract import refuse_different
from optrun.distributed.shard import distribute
from optrun.distributed.world import ALONE, World
from optrun.optimizer.build import build_optimizer
from optrun.optimizer.clip import build_clip
from optrun.optimizer.evaluation_weights import evaluation_weights
from optrun.optimizer.guard import Guard
from optrun.optimizer.kernels.report import kernel_of, refuse_different_kernels
from optrun.optimizer.sparse_gradients import refuse_sparse_gradients
from optrun.optimizer.transfer import build_run_groups
from optrun.param_groups import block_paths
from optrun.runner.adapter_base import adapter_facts, refuse_other_adapter
from optrun.runner.chunked import configure_chunked_loss
from optrun.runner.forks.start import StartedFork, begin_fork, restore_fork
from optrun.runner.model_device import check_sharded_model, move_to_device
from optrun.runner.model_loading import generation_values
from optrun.runner.prepare import Prepared
from optrun.runner.reference_log_probs import add_reference_log_probs
from optrun.runner.resume.checkpoint import OpenedCheckpoint
from optrun.runner.resume.config_diff import changes_since, moves_layers, table
from optrun.runner.resume.data_position import (
    describe_other_evaluation,
    plan_values,
    refuse_other_data,
    shift_data_position,
    vocabulary_digest,
)
from optrun.runner.resume.global_batch import (
    BatchSizes,
    decide_batch_sizes,
    describe_derived_micro_batch,
    requested_changes,
)
from optrun.runner.resume.restore import (
    environment,
    restore_state,
    stop_request,
    train_state,
    warn_of_other_environment,
)
from optrun.scheduler import build_scheduler
from optrun.scheduler.build import warmup_note
from optrun.task import Task
from optrun.training.callback import StopRequest
from optrun.training.contrast import Contrast, ContrastStep
from optrun.training.ranking import Ranking, best_mode, set_ranking_metric
from optrun.training.setup import TrainingSetup
from optrun.training.state import TrainState
from optrun.training.step import BySource, TrainStep

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass
class Start:
    """Where training begins: at step 0, at a checkpoint, or at the parent checkpoint."""

    state: TrainState = field(default_factory=TrainState)
    changes: dict[str, tuple[object, object]] = field(default_factory=dict)
    """Keys changed since the checkpoint was saved -> value then, value now."""
    notes: list[str | None] = field(default_factory=list)
    """Notes for the user; None and empty ones are left out later."""
    fork: StartedFork | None = None
    """How the run left its parent checkpoint; None: it is no branch."""
    stop: StopRequest | None = None
    """Request to stop of the checkpoint, if no key it depends on was changed; None: train to the
    last step."""


@dataclass
class Assembled:
    """Everything that training needs, in the state in which training begins."""

    setup: TrainingSetup
    request: Request
    """The request of the user, with the batch sizes that follow from the ranks."""
    constants: CheckpointMetadata
    """Metadata that all checkpoints of this start of the run share."""
    start: Start
    derived: Mapping[str, str]
    """Changed keys that follow from the number of ranks -> what the change means."""
    notes: list[str]

    @property
    def is_done(self) -> bool:
        """Whether no step is left, and the last one was evaluated and logged."""
        state = self.setup.state
        stop = self.start.stop
        end = self.setup.total_steps if stop is None else min(stop.step, self.setup.total_steps)
        return state.global_step >= end and not state.unfinished


def assemble(
    request: Request,
    prepared: Prepared,
    device: torch.device,
    opened: OpenedCheckpoint | None = None,
    world: World = ALONE,
) -> Assembled:
    """Build model, optimizer, schedule and state of a run, new or from a checkpoint.

    Args:
        request: Configuration and command line.
        prepared: Data and model; the model is moved to the device.
        device: Where to train.
        opened: The checkpoint to resume from, or the parent checkpoint to branch from. None, or no
            snapshot in it: from the start.
        world: The ranks that share the run.

    Raises:
        ConfigError: Options do not fit the task or the model.
        CheckpointError: The checkpoint does not fit what is to be trained.
    """
    opened = opened or OpenedCheckpoint()
    saved = opened.saved
    snapshot = opened.snapshot
    batch = decide_batch_sizes(request, saved, world.size, branches=opened.trunk is not None)
    config = batch.request.config
    task = prepared.task
    model = prepared.model
    move_to_device(model, config, device)
    chunked_note = configure_chunked_loss(task, model, config, world)
    plan = EpochPlan(
        examples=len(task.train),
        batch_size=batch.micro_batch_size,
        accumulation=batch.micro_batches,
        seed=config.seed,
        lengths=_example_lengths(config, task),
        arrangement=getattr(task.train, "arrangement", None),
    )
    task.expect_step(min(plan.examples, plan.batch_size * plan.accumulation))
    values = batch.request.values
    constants = CheckpointMetadata(
        global_step=0,
        config=dict(values),
        config_digest=config_digest(values),
        plan=plan_values(
            plan, f"{task.train.fingerprint()[:16]}-{task.eval_fingerprint()}", task.train
        ),
        tokenizer=vocabulary_digest(prepared.tokenizer),
        plugins=records(values),
        model_class=type(model).__name__,
        model_config=json.loads(model.config.to_json_string(use_diff=False)),
        generation_config=generation_values(model),
        adapter=world.call_on_main(lambda: adapter_facts(model)),
    )
    _refuse_different_ranks(constants, task, model, world)
    constants.reference = add_reference_log_probs(
        task, model, config, device, None if saved is None else saved.reference, world=world
    )
    start = (
        Start() if saved is None else _start_from_checkpoint(saved, opened, constants, plan, batch)
    )
    state = start.state
    fork = start.fork
    steps_of_epochs = (
        math.ceil(config.training.num_train_epochs * plan.steps_per_epoch) - state.data_shift
    )
    constants.total_steps = total = config.training.max_steps or max(1, steps_of_epochs)
    schedule_steps = total - int((constants.branch or {}).get("schedule_from", 0))
    if fork is not None:
        refuse_ended_fork(fork.folder, fork.step, total, length_key(config))
    ranking = choose_ranking(config, task)
    notes = [
        *start.notes,
        chunked_note,
        set_ranking_metric(state, ranking),
        describe_derived_micro_batch(request, batch, world.size),
    ]
    groups = [] if saved is None or moves_layers(start.changes) else _valid_groups(saved.optimizer)
    train_step = _build_train_step(config, prepared, device, schedule_steps, world, groups, notes)
    kernel = kernel_of(
        train_step.optimizer, device.type, sharded=isinstance(config.distributed, FsdpConfig)
    )
    refuse_different_kernels(world.gather_objects(kernel))
    constants.environment = environment(device, world.size, kernel)
    if saved is None:
        notes.append(config.default_lr_note())
    else:
        notes.append(warn_of_other_environment(saved, constants.environment))
    notes += [config.schedule_note(), warmup_note(config.scheduler, schedule_steps)]
    if train_step.scheduler.metric is not None:
        refuse_unknown_metric(task, "scheduler.metric", train_step.scheduler.metric)
    if not len(task.eval):
        _refuse_without_evaluation(config, train_step.scheduler.metric)
    if snapshot is not None and fork is not None:
        notes += restore_fork(fork, snapshot, model, train_step, total)
    elif snapshot is not None:
        notes += restore_state(
            snapshot, model, train_step, start.changes, config.checkpoint.on_other_optimizer
        )
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
    messages = [note for note in notes if note]
    return Assembled(setup, batch.request, constants, start, batch.derived, messages)


def _start_from_checkpoint(
    saved: CheckpointMetadata,
    opened: OpenedCheckpoint,
    constants: CheckpointMetadata,
    plan: EpochPlan,
    batch: BatchSizes,
) -> Start:
    """Build the start of a run from a checkpoint, to resume it or to branch from it.

    Only metadata is compared and taken over; tensors are loaded later.

    Args:
        saved: Metadata of the checkpoint.
        opened: The checkpoint, and whether it is the parent of a new branch.
        constants: Metadata for the next checkpoints; `branch` is set in place.
        plan: The plan of the data now.
        batch: The batch sizes now.

    Returns:
        Counters, changed keys and notes. A resumed run also gets its request to stop, if it still
        stands; a branch its record.

    Raises:
        ConfigError: The adapter, the data or the batch changed.
        CheckpointError: A newer version saved the counters.
    """
    # 1. What both refuse: another adapter; other examples that no changed key asks for, or other
    # tokens or classes. `changes` maps each changed key to its value then and now.
    config = batch.request.config
    refuse_other_adapter(saved, constants.adapter, config)
    changes = changes_since(saved, batch.request.values, opened.started_from)
    refuse_other_data(saved, constants, changes)
    # 2. A branch: the changes of the user are what it is for. `begin_fork` refuses other steps of
    # data; the counters it returns are the checkpoint's, without metrics.
    if opened.trunk is not None:
        fork, state = begin_fork(opened.trunk, saved, constants, changes, config.branch_schedule)
        constants.branch = fork.metadata()
        changes_note = table(fork.changes, "other than the trunk's:", derived=batch.derived)
        return Start(state, changes, [changes_note], fork)
    # 3. A resumed run: its own counters, at another place in the data if the plan changed, which is
    # set in `state`.
    constants.branch = saved.branch
    state = train_state(saved)
    fingerprint = constants.plan["fingerprint"]
    position_note = shift_data_position(saved.plan, state, plan, fingerprint)
    # Raises for a plugin that is missing or changed, unless `--allow-changed-plugins` was typed.
    plugin_notes = require(saved.plugins or (), "this run")
    changes_note = table(changes, derived=batch.derived, examples=batch.examples)
    other_evaluation = describe_other_evaluation(saved.plan["fingerprint"], fingerprint)
    # Notes are None or empty if there is nothing to tell.
    notes = [changes_note, position_note, other_evaluation, *plugin_notes]
    # The request to stop is dropped if the user changed anything that affects training.
    return Start(
        state, changes, notes, stop=stop_request(saved, requested_changes(changes, batch.derived))
    )


def _refuse_different_ranks(
    constants: CheckpointMetadata, task: Task, model: PreTrainedModel, world: World
) -> None:
    """Refuse ranks with different configurations, data or models, before the first step.

    Of data and plugins digests are compared, of the model its class, configuration and the shape of
    each parameter.

    Raises:
        ConfigError: The message names machine, rank, key and both values.
    """
    if world.size == 1:
        return
    facts = {
        **flat(constants.config),  # dotted keys
        "data.train (fingerprint of the examples)": task.train.fingerprint(),
        "data.eval (fingerprint of the examples)": task.eval_fingerprint(),
        "tokenizer": constants.tokenizer,
        "adapter": constants.adapter,
        "plan": constants.plan,
        **{f"model configuration {name}": value for name, value in constants.model_config.items()},
        "model": [
            constants.model_class,
            [[name, list(param.shape)] for name, param in model.named_parameters()],
        ],
        **{
            f"plugin {record.get('plugin')}": record.get("sha256")
            for record in constants.plugins or ()
        },
    }
    refuse_different(world, facts)


def length_key(config: RunConfig) -> str:
    """Return `key=value` of the length of a run: max_steps, else num_train_epochs."""
    key = "num_train_epochs" if config.training.max_steps is None else "max_steps"
    return f"training.{key}={getattr(config.training, key)}"


def _refuse_without_evaluation(config: RunConfig, schedule_metric: str | None) -> None:
    """Refuse keys that need an evaluation; called if there are no evaluation rows.

    Args:
        config: Has `checkpoint.metric` and `training.early_stopping_patience`.
        schedule_metric: The metric that a plateau schedule watches; None: it watches none.

    Raises:
        ConfigError: The message names the first such key.
    """
    for key, value, instead in (
        ("checkpoint.metric", config.checkpoint.metric, "leave it null"),
        (
            "training.early_stopping_patience",
            config.training.early_stopping_patience,
            "leave it null",
        ),
        ("scheduler.metric", schedule_metric, "choose a scheduler other than plateau"),
    ):
        if value is not None:
            raise ConfigError(
                f"{key}={value}: it needs an evaluation, and data.eval_fraction=0 leaves no rows"
                f" for one. Give evaluation rows (data.eval, data.eval_fraction), or {instead}."
            )


def refuse_unknown_metric(task: Task, key: str, metric: str) -> None:
    """Refuse a metric if the evaluation of the task does not compute it.

    Args:
        task: The task, with its evaluation sets.
        key: Configuration key of the metric, for the message.
        metric: Name with its prefix, such as `eval/loss`.

    Raises:
        ConfigError: The message names the key and lists the task's metrics.
    """
    metrics = [f"{prefix}{name}" for prefix in eval_prefixes(task) for name in task.metric_names()]
    if metric not in metrics:
        close = nearest(metric, metrics)
        hint = f"Did you mean {' or '.join(close)}? " if close else ""
        raise ConfigError(
            f"{key}={metric}: task={task.name} has no such metric. {hint}It has:"
            f" {', '.join(metrics)}."
        )


def choose_ranking(config: RunConfig, task: Task) -> Ranking:
    """Choose the metric for ranking checkpoints, and its better direction.

    The metric is `checkpoint.metric`, else the task's main metric; a name without a prefix means
    the first evaluation set: `accuracy` is `eval/accuracy`. The direction is `checkpoint.mode`,
    else that of the metric.

    Returns:
        Such as `Ranking("eval/accuracy", "max")`.

    Raises:
        ConfigError: The task does not compute the metric.
    """
    name = config.checkpoint.metric or task.main_metric
    metric = name if "/" in name else f"{eval_prefixes(task)[0]}{name}"
    refuse_unknown_metric(task, "checkpoint.metric", metric)
    if config.checkpoint.mode is not None:
        return Ranking(metric, config.checkpoint.mode.value)
    # The direction of the main metric if that is the chosen one, else the one that is registered
    # for the chosen metric.
    main = Ranking(f"eval/{task.main_metric}", task.mode)
    return Ranking(metric, best_mode(metric, main))


def _example_lengths(config: RunConfig, task: Task) -> np.ndarray | None:
    """Return the tokens of each training example; None unless `group_by_length`.

    Raises:
        ConfigError: The examples of the task have no length.
    """
    if not config.training.group_by_length:
        return None
    lengths: np.ndarray | None = getattr(task.train, "lengths", None)
    if lengths is None:
        raise ConfigError(
            f"training.group_by_length=true: the examples of task={task.name} have no length."
        )
    return lengths


def _build_train_step(
    config: RunConfig,
    prepared: Prepared,
    device: torch.device,
    total: int,
    world: World,
    started: Sequence[Mapping[str, object]],
    notes: list[str | None],
) -> TrainStep:
    """Build the optimizer, schedule and training step of a run, and distribute its model.

    Args:
        config: The configuration of the run.
        prepared: Data and model; the model is changed in place, and may be sharded.
        device: Device of the model.
        total: Optimizer steps of the schedule.
        world: The ranks.
        started: Parameter groups of the checkpoint to resume; parameters keep their layers.
        notes: Changed in place: notes on the parameter groups are added.

    Raises:
        ConfigError: Optimizer or schedule do not fit the model or the configuration.
    """
    model = prepared.model
    task = prepared.task
    if config.training.gradient_checkpointing:
        options = {"use_reentrant": False}
        if hasattr(model, "activation_checkpointing_enable"):  # its name from transformers 5.2x on
            model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
        else:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    model.train()
    placed: list[str] = []
    groups = build_run_groups(config, model, prepared.sizes, notes=placed, started=started)
    notes += placed
    refuse_sparse_gradients(model, config.distributed.name, device.type)
    forward, gradient_sync = distribute(
        model, config.distributed, world, device, block_paths(model)
    )
    if prepared.sharded:
        check_sharded_model(model, config)
    params = dict(model.named_parameters())  # the same, or the shards that took their place
    for group in groups:
        group["params"] = [(name, params[name]) for name, _ in group["params"]]
    optimizer = build_optimizer(config.optimizer, groups, lr=config.lr)
    scheduler = build_scheduler(optimizer, config.scheduler, num_training_steps=total)
    if config.training.compile:
        forward = cast("torch.nn.Module", torch.compile(forward))
    over_step = getattr(config.task, "over_step", False)
    kind: Callable[..., TrainStep] = (
        partial(ContrastStep, contrast=cast("Contrast", task)) if over_step else TrainStep
    )
    return kind(
        device,
        config.training.precision.value,
        model=forward,
        optimizer=optimizer,
        clip=build_clip(config.clip),
        scheduler=scheduler,
        weight=task.weight,
        loss=task.loss,
        seed=config.seed,
        count_tokens_and_examples=task.count_tokens_and_examples,
        world=world,
        gradient_sync=gradient_sync,
        by_source=BySource(task.loss_by_example, len(task.sources)) if task.sources else None,
        forward=task.forward,
        measure=task.measure if task.measured else None,
        measured=len(task.measured),
        guard=Guard.of(optimizer, device),
    )


def eval_prefixes(task: Task) -> list[str]:
    """List the metric prefixes of all evaluation sets, such as `eval/` or `eval/dev/`."""
    return [f"eval/{name}/" if name else "eval/" for name in task.eval_sets]


def build_loaders(
    config: RunConfig, task: Task, device: torch.device
) -> tuple[BatchLoader, dict[str, BatchLoader]]:
    """Build the batch loader of the training split, and one for each evaluation set by its name.

    `task.transform` is only called if the task overrides it; the inherited one changes nothing.

    Args:
        config: Has the seed and the number of worker processes.
        task: Has the examples, and makes batches of them.
        device: For a GPU the memory of batches is pinned.
    """
    # The function of the bound method; a task that overrides it has another one.
    overrides_transform = getattr(task.transform, "__func__", None) is not Task.transform

    def loader(examples: ExampleSource) -> BatchLoader:  # all but the examples is the same
        return BatchLoader(
            examples=examples,
            transform=task.transform if overrides_transform else None,
            collate=task.collate,
            seed=config.seed,
            workers=config.training.dataloader_num_workers,
            pin_memory=device.type == "cuda",
        )

    return loader(task.train), {name: loader(examples) for name, examples in task.eval_sets.items()}


def _valid_groups(optimizer: Mapping[str, object]) -> list[Mapping[str, object]]:
    """Return the parameter groups of a checkpoint's optimizer; empty if one is damaged.

    Damaged means that a value has a wrong type: `layer` and `role` are texts, `layer_id` an
    integer, `lr_ratio` a number; each may be None or missing. Loading the optimizer reports it
    later.

    Args:
        optimizer: The optimizer's state without tensors, as in `state.json`.
    """
    groups = optimizer.get("groups", [])
    if not isinstance(groups, list):
        return []
    kinds = {"layer": str, "layer_id": int, "lr_ratio": int | float, "role": str}
    for group in groups:
        if not isinstance(group, dict):
            return []
        for key, kind in kinds.items():
            if not isinstance(group.get(key), kind | None):  # None also if the key is missing
                return []
    return groups
