"""Configuration to finished run directory: the one module that knows how the parts fit."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from optrun.artifacts import checkpoint as checkpoints
from optrun.artifacts.checkpoint import Snapshot
from optrun.artifacts.lock import RunLock
from optrun.artifacts.metrics import take_up
from optrun.artifacts.provenance import config_digest
from optrun.artifacts.run_dir import RunDir
from optrun.clip import build_clip
from optrun.config.model import FromConfigConfig
from optrun.config.run import RunConfig
from optrun.data.loader import Feed, Plan
from optrun.data.source import load_source
from optrun.errors import CheckpointError, ConfigError, OptrunError, StoppedEarly, nearest
from optrun.model.build import ModelSpec, build_model, special_ids
from optrun.model.images import load_image_preparation
from optrun.model.tokenizer import load_tokenizer, train_tokenizer
from optrun.model.weights import load_model_tensors, model_tensors
from optrun.optimizer.build import build_optimizer
from optrun.optimizer.state import load_named_state, named_state
from optrun.param_groups import build_param_groups
from optrun.publish import publish
from optrun.report.curves import draw_curves
from optrun.scheduler import build_scheduler
from optrun.summary import Summary
from optrun.task import Task, build_task
from optrun.task.build import task_class
from optrun.tracking import build_tracker, require_tracker
from optrun.training.device import pick_device
from optrun.training.evaluate import evaluate
from optrun.training.interrupts import Interrupts
from optrun.training.loop import Learner, Loop, Ranking, best_mode
from optrun.training.progress import Display
from optrun.training.state import TrainState, restore_random_states
from optrun.training.step import Arithmetic, Stepper


@dataclass
class Invocation:
    """How this run was asked for."""

    argv: list[str]
    """Words after `optrun`."""
    config_name: str
    overrides: list[str]


@dataclass
class ResumePoint:
    """Where to go on."""

    checkpoint: Path | None
    """A checkpoint asked for by name; None: the newest that is whole."""
    changes: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """Dotted key to the value the run had and the one it has now."""


@dataclass
class Prepared:
    """Model and data, before anything that trains."""

    task: Task
    tokenizer: Any
    model: Any
    notes: list[str]


def prepare(config: RunConfig) -> Prepared:
    """Data, tokenizer, task, model, in this order.

    Raises:
        ConfigError: Anything in data or model that does not fit.
    """
    kind = task_class(config.task)
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
        auto_class=needs.auto_class,
        config=needs.config,
        max_length=needs.max_length,
        vocab_size=len(tokenizer) if on_text else None,
        special_ids=special_ids(tokenizer) if on_text else {},
    )
    torch.manual_seed(config.seed)
    model, notes = build_model(config.model, spec)
    return Prepared(task, tokenizer, model, [*source.notes, *task.notes, *notes])


def ranking_of(config: RunConfig, task: Task) -> Ranking:
    """Which metric says that a checkpoint is best.

    Raises:
        ConfigError: The task reports no such metric.
    """
    known = [f"eval/{name}" for name in task.metric_names()]
    wanted = config.checkpoint.metric
    metric = f"eval/{task.main_metric}" if wanted is None else wanted if "/" in wanted else f"eval/{wanted}"
    if metric not in known:
        close = nearest(metric, known)
        hint = f"Did you mean {' or '.join(close)}? " if close else ""
        raise ConfigError(
            f"checkpoint.metric={wanted}: task={task.name} has no such metric. {hint}It has: {', '.join(known)}."
        )
    if config.checkpoint.mode is not None:
        return Ranking(metric, config.checkpoint.mode.value)
    own = Ranking(f"eval/{task.main_metric}", task.mode)
    return Ranking(metric, best_mode(metric, own))


@dataclass
class Outcome:
    """How a run ended well."""

    run: RunDir
    summary: dict[str, Any]
    sample: tuple[str, str] | None = None
    """Prompt and continuation."""


def train(
    config: RunConfig,
    values: Mapping[str, Any],
    run: RunDir,
    invocation: Invocation,
    display: Display,
    resume: ResumePoint | None = None,
    *,
    stop_at: int | None = None,
) -> Outcome:
    """Train, evaluate, checkpoint, and write the run directory.

    Args:
        config: Typed and checked.
        values: The same, resolved and plain.
        run: Where to write; exists.
        invocation: The command line.
        display: Eyes.
        resume: Where to go on; None: from the start.
        stop_at: Pause after this many optimizer steps, evaluated and saved; the schedule stays that of the whole run.

    Raises:
        StoppedEarly: At `stop_at`, by a signal, or because the time is up.
        OptrunError: With the exit code that belongs to it; `summary.json` tells the same.
    """
    with RunLock(run.lock), Interrupts() as interrupts:
        summary = Summary(run, config, values, invocation.argv, invocation.config_name, invocation.overrides)
        if resume is not None:
            summary.take_up()
        try:
            with _status(summary):
                return _train(config, values, run, display, resume, summary, interrupts, stop_at)
        finally:
            if run.metrics.is_file():
                draw_curves(run.path)


@contextmanager
def _status(summary: Summary) -> Iterator[None]:
    """However it ends, the summary says how."""
    try:
        yield
    except StoppedEarly as error:
        summary.end("interrupted", str(error))
        raise
    except BaseException as error:
        if not (isinstance(error, ConfigError) and not summary.begun):
            summary.end("failed", str(error) or type(error).__name__)
        raise


def _train(
    config: RunConfig,
    values: Mapping[str, Any],
    run: RunDir,
    display: Display,
    resume: ResumePoint | None,
    summary: Summary,
    interrupts: Interrupts,
    stop_at: int | None,
) -> Outcome:
    require_tracker(config.tracking)
    device = pick_device(config.training.device)
    snapshot, said = (None, []) if resume is None else _open_checkpoint(run, resume)
    for sentence in said:
        display.note(sentence)
    prepared = prepare(config)
    task, model = prepared.task, prepared.model.to(device)
    plan = Plan(
        examples=len(task.train),
        batch_size=config.training.per_device_train_batch_size,
        accumulation=config.training.gradient_accumulation_steps,
        seed=config.seed,
    )
    total = config.training.max_steps or max(1, math.ceil(config.training.num_train_epochs * plan.steps_per_epoch))
    ranking = ranking_of(config, task)
    stepper = _stepper(config, model, task, device, total)
    learner = Learner(model, stepper, task, plan, *_feeds(config, task, device))
    fingerprint = f"{task.train.fingerprint()[:16]}-{task.eval.fingerprint()[:16]}"

    state = TrainState()
    if snapshot is not None:
        _refuse_other_data(snapshot, fingerprint)
        state = _restore(snapshot, model, stepper, device)
    else:
        checkpoints.clean_leftovers(run)
    _write_config(run, values)
    if prepared.tokenizer is not None:
        prepared.tokenizer.save_pretrained(str(run.path / "tokenizer"))
    summary.begin(
        model=model, task=task, total=total, ranking=ranking, state=state, device=device, fingerprint=fingerprint
    )
    summary.optimizer = stepper.optimizer
    if resume is not None:
        summary.resumed(state.global_step, resume.changes)
    for note in prepared.notes:
        display.note(note)
    if state.global_step >= total:
        display.note(f"all {total} steps are done already; nothing to train. training.max_steps=N prolongs the run.")
        summary.end("finished", "")
        return Outcome(run, summary.values)
    take_up(run.metrics, state.global_step)

    def take_snapshot(random: dict[str, Any]) -> Snapshot:
        tensors, meta = named_state(stepper.optimizer)
        return Snapshot(
            global_step=state.global_step,
            model=model_tensors(model),
            optimizer=tensors,
            state={
                "format": 1,
                "global_step": state.global_step,
                "total_steps": total,
                "epoch": plan.locate(state.global_step)[0],
                "step_in_epoch": plan.locate(state.global_step)[1],
                "train": state.to_dict(),
                "random": random,
                "scheduler": stepper.scheduler.state_dict(),
                "scaler": stepper.scaler.state_dict(),
                "optimizer": meta,
                "config": dict(values),
                "config_digest": config_digest(values),
                "data_fingerprint": fingerprint,
                "model_class": type(model).__name__,
                "model_config": json.loads(model.config.to_json_string(use_diff=False)),
                "parameters": [name for name, _ in model.named_parameters()],
            },
        )

    tracker = build_tracker(
        config.tracking,
        run.path,
        config.run_name,
        summary.flat_config(),
        start=state.global_step,
        complain=display.note,
    )
    loop = Loop(
        learner=learner,
        run=run,
        training=config.training,
        saving=config.checkpoint,
        ranking=ranking,
        total=total,
        state=state,
        snapshot=take_snapshot,
        display=display,
        track=tracker.log,
        summarise=summary.write,
        interrupts=interrupts,
        stop_at=stop_at,
    )
    if snapshot is not None:
        restore_random_states(snapshot.state["random"], device)
    else:
        torch.manual_seed(config.seed)
    status = "failed"
    try:
        loop()
        status = "finished"
    except StoppedEarly:
        status = "interrupted"
        raise
    finally:
        tracker.close(status)
    sample = _sample(config, task, prepared)
    publish(run, model, prepared.tokenizer, summary.values, dict(values), sample)
    summary.end("finished", "")
    return Outcome(run, summary.values, sample)


def _stepper(config: RunConfig, model: Any, task: Task, device: torch.device, total: int) -> Stepper:
    if config.training.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.config.use_cache = False
    model.train()
    weight_decay = getattr(config.optimizer, "weight_decay", None)
    groups = build_param_groups(model, config.param_groups, lr=config.lr, weight_decay=weight_decay)
    try:
        optimizer = build_optimizer(config.optimizer, groups, lr=config.lr)
        scheduler = build_scheduler(optimizer, config.scheduler, num_training_steps=total)
    except (TypeError, ValueError) as error:
        raise error if isinstance(error, OptrunError) else ConfigError(str(error)) from error
    forward = torch.compile(model) if config.training.compile else model
    return Stepper(
        forward,
        optimizer,
        build_clip(config.clip),
        scheduler,
        task.weight,
        device,
        config.training.precision.value,
    )


def _feeds(config: RunConfig, task: Task, device: torch.device) -> tuple[Feed, Feed]:
    def feed(examples: Any) -> Feed:
        return Feed(
            examples=examples,
            transform=task.transform,
            collate=task.collate,
            seed=config.seed,
            workers=config.training.dataloader_num_workers,
            pin_memory=device.type == "cuda",
        )

    return feed(task.train), feed(task.eval)


def _open_checkpoint(run: RunDir, resume: ResumePoint) -> tuple[Snapshot | None, list[str]]:
    """The snapshot to go on from, and what to tell the user about ones that were passed over."""
    checkpoints.clean_leftovers(run)
    if resume.checkpoint is not None:
        newer = [folder for folder in checkpoints.checkpoint_folders(run) if folder.name > resume.checkpoint.name]
        snapshot = checkpoints.load_checkpoint(resume.checkpoint)
        # They belong to a future that is now written anew.
        places = [checkpoints.set_aside(later, "superseded") for later in newer]
        return snapshot, [f"a newer checkpoint was renamed: {place.name}" for place in places]
    found = checkpoints.checkpoint_folders(run)
    folder, wrong = checkpoints.latest_whole(run)
    if folder is None and found:
        raise CheckpointError(f"{run.path}: no checkpoint is whole. " + " ".join(wrong))
    if folder is None:
        raise CheckpointError(f"{run.path}: this run has no checkpoint: it ended before its first save. Start it anew.")
    said = [f"{sentence} Passed over." for sentence in wrong]
    for damaged in found:
        if damaged.name > folder.name:
            checkpoints.set_aside(damaged)
    return checkpoints.load_checkpoint(folder), [*said, f"going on from {folder}"]


def _refuse_other_data(snapshot: Snapshot, fingerprint: str) -> None:
    before = snapshot.state.get("data_fingerprint")
    if before != fingerprint:
        raise ConfigError(
            f"the data is not what the run was started with (fingerprint {before} then, {fingerprint} now): rows, "
            "their order or their content changed. Restore it, or start a new run."
        )


def _restore(snapshot: Snapshot, model: Any, stepper: Stepper, device: torch.device) -> TrainState:
    load_model_tensors(model, snapshot.model)
    try:
        load_named_state(stepper.optimizer, snapshot.optimizer, snapshot.state["optimizer"])
    except (ValueError, KeyError) as error:
        raise CheckpointError(f"the optimizer state does not fit: {error}") from error
    stepper.scheduler.load_state_dict(snapshot.state["scheduler"])
    if stepper.scaler.is_enabled() and snapshot.state["scaler"]:
        stepper.scaler.load_state_dict(snapshot.state["scaler"])
    restore_random_states(snapshot.state["random"], device)
    return TrainState.from_dict(checkpoints.plain_numbers(snapshot.state["train"]))


def _write_config(run: RunDir, values: Mapping[str, Any]) -> None:
    from omegaconf import OmegaConf

    from optrun.artifacts.atomic import replace_text

    replace_text(run.config, OmegaConf.to_yaml(OmegaConf.create(dict(values))))


def _sample(config: RunConfig, task: Task, prepared: Prepared) -> tuple[str, str] | None:
    from optrun.task.causal_lm import CausalLm, continue_text

    if not isinstance(task, CausalLm) or task.prompt is None or task.sample_tokens == 0:
        return None
    return task.prompt, continue_text(
        prepared.model, prepared.tokenizer, task.prompt, task.sample_tokens, seed=config.seed
    )


def evaluate_checkpoint(config: RunConfig, checkpoint: Path) -> tuple[int, int, dict[str, float]]:
    """Metrics of a checkpoint on the evaluation split of a configuration.

    Args:
        config: Which data and task, and where to run.
        checkpoint: Whole.

    Returns:
        Optimizer steps done, evaluation examples, names with prefix `eval/` to values.

    Raises:
        ConfigError: Data that does not fit.
        CheckpointError: The checkpoint is damaged, or its weights do not fit the model.
    """
    device = pick_device(config.training.device)
    snapshot = checkpoints.load_checkpoint(checkpoint)
    prepared = prepare(config)
    load_model_tensors(prepared.model, snapshot.model)
    model = prepared.model.to(device)
    _, feed = _feeds(config, prepared.task, device)
    placed = Arithmetic(device, config.training.precision.value)
    found = evaluate(
        model,
        feed.evaluation(config.training.per_device_eval_batch_size),
        prepared.task.evaluation(),
        to_device=placed.to_device,
        autocast=placed.autocast,
    )
    return snapshot.global_step, len(prepared.task.eval), {f"eval/{name}": value for name, value in found.items()}
