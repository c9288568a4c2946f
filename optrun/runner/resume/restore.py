"""Loads a snapshot into model, optimizer and schedule, and checks it there."""

from __future__ import annotations

from typing import Any

import torch

from optrun.artifacts import provenance
from optrun.artifacts import run_dir as names
from optrun.artifacts.checkpoint import Snapshot, set_aside, slices_of
from optrun.artifacts.identity import run_id_of
from optrun.artifacts.manifest import refuse_foreign
from optrun.artifacts.metadata import CheckpointMetadata
from optrun.artifacts.retention import step_of
from optrun.artifacts.run_dir import RunDir, checkpoint_folders
from optrun.base.errors import CheckpointError, ConfigError, NonFiniteError, OptrunError
from optrun.base.formatting import list_names, rate
from optrun.config.schema.checkpoint import OnOtherOptimizer
from optrun.distributed.shard import is_sharded, model_class
from optrun.distributed.world import ALONE, World
from optrun.model.weights import load_model_tensors, model_tensors
from optrun.optimizer.state import load_named_state
from optrun.runner.resume.config_diff import Changes, is_harmless
from optrun.runner.resume.state_file import read_checkpoint
from optrun.training.callback import StopRequest
from optrun.training.device import device_name
from optrun.training.ranking import set_ranking_metric
from optrun.training.setup import TrainingSetup
from optrun.training.state import RandomStates, TrainState
from optrun.training.step import TrainStep

Schedule = dict[str, Any]
"""`state_dict` of a schedule."""
_BLAMED = 3
"""Keys that a message names."""
_COMPUTING = ("python", "torch", "transformers", "tokenizers", "numpy")


def train_state(metadata: CheckpointMetadata) -> TrainState:
    """Read the counters (steps, examples, best metric) of a checkpoint.

    Raises:
        CheckpointError: A newer version saved the checkpoint.
    """
    try:
        return TrainState.from_dict(metadata.train)
    except ValueError as error:
        raise CheckpointError(f"{names.CHECKPOINT_STATE}: {error}") from error


def stop_request(metadata: CheckpointMetadata, changes: Changes) -> StopRequest | None:
    """Read the request to end training early, unless something it depends on changed."""
    if metadata.stop is None or not all(map(is_harmless, changes)):
        return None
    return StopRequest(**metadata.stop)


def restore_state(
    snapshot: Snapshot,
    model: torch.nn.Module,
    train_step: TrainStep,
    changes: Changes,
    on_other_optimizer: OnOtherOptimizer,
) -> list[str]:
    """Load weights, optimizer state, schedule and loss scale.

    Args:
        snapshot: A verified snapshot.
        model: The model, built from the configuration in force.
        train_step: Optimizer and schedule, built likewise.
        changes: Between the checkpoint's configuration and the one in force.
        on_other_optimizer: Whether to drop or refuse optimizer state that does not fit.

    Returns:
        Notes for the user.

    Raises:
        ConfigError: A changed key made weights or optimizer state unfit; the message names both.
        CheckpointError: They do not fit though nothing changed, or memory differs from the file.
    """
    snapshot = restore_weights(snapshot, model, changes)
    notes: list[str] = []
    try:
        load_named_state(train_step.optimizer, snapshot.optimizer, snapshot.metadata.optimizer)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        first = min(snapshot.optimizer, default="none")
        if on_other_optimizer is not OnOtherOptimizer.reset:
            hint = (
                "checkpoint.on_other_optimizer=reset keeps the weights and starts the optimizer's"
                " state anew."
            )
            text = (
                f"the saved optimizer state does not fit: {error} First saved tensor: {first}."
                f" {hint}"
            )
            name = "optimizer.name"
            sections = ("optimizer.", "param", "model.", "adapter.")
            # The other keys of another optimizer are its defaults.
            raise _unfit(text, changes, (name,) if name in changes else sections) from error
        notes.append(f"the optimizer's state starts anew, as asked: {error}")
    notes += restore_schedule(snapshot.metadata.scheduler, train_step)
    restore_scaler(snapshot, train_step)
    return notes


def restore_weights(snapshot: Snapshot, model: torch.nn.Module, changes: Changes) -> Snapshot:
    """Load the weights of a checkpoint into the model.

    Args:
        snapshot: A verified snapshot.
        model: The model, built from the configuration in force.
        changes: Differences between the checkpoint's configuration and the one in force.

    Returns:
        The snapshot, with this rank's part of its tensors.

    Raises:
        ConfigError: A changed key made the weights unfit; the message names key and tensor.
        CheckpointError: They do not fit though nothing changed, or memory differs from the file.
    """
    if is_sharded(model):
        snapshot = slices_of(snapshot, model_tensors(model))
    _refuse_other_model(snapshot, model, changes)
    try:
        load_model_tensors(model, snapshot.model)
    except CheckpointError as error:
        raise _unfit(str(error), changes, ("model.", "adapter.", "task.", "data.")) from error
    return snapshot


def restore_scaler(snapshot: Snapshot, train_step: TrainStep) -> None:
    """Load the loss scale, if the precision has one."""
    if train_step.scaler.is_enabled() and snapshot.metadata.scaler:
        train_step.scaler.load_state_dict(snapshot.metadata.scaler)


def _refuse_other_model(snapshot: Snapshot, model: torch.nn.Module, changes: Changes) -> None:
    """Refuse a model of another class, or weights of another dtype.

    Tensors that only one side has are left to `load_model_tensors`.

    Raises:
        ConfigError: Changed keys below `model` or `task` explain it; the message names them.
        CheckpointError: No key explains it.
    """
    before = snapshot.metadata.model_class
    now = model_class(model).__name__
    if before != now:
        text = f"the checkpoint holds a {before}, the configuration builds a {now}."
        raise _unfit(text, changes, ("model.", "task."))
    for name, tensor in model_tensors(model).items():
        saved = snapshot.model.get(name)
        if saved is not None and saved.dtype != tensor.dtype:
            raise _unfit(
                f"{name}: {saved.dtype} in the checkpoint, {tensor.dtype} in the model.",
                changes,
                ("model.",),
            )


def _unfit(text: str, changes: Changes, prefixes: tuple[str, ...]) -> OptrunError:
    """Build the refusal of a checkpoint that does not fit.

    Args:
        text: What does not fit.
        changes: Keys that changed since the checkpoint was saved, with old and new value.
        prefixes: Beginnings of the keys that can cause it. If such a key changed, it is blamed in a
            ConfigError, else it is a CheckpointError.
    """
    blamed = [f"{key}={now}" for key, (_, now) in changes.items() if key.startswith(prefixes)]
    if not blamed:
        return CheckpointError(text)
    return ConfigError(f"{list_names(blamed, _BLAMED)}: {text}")


def restore_schedule(saved: Schedule, train_step: TrainStep) -> list[str]:
    """Load the state of the schedule; a history of another metric is dropped.

    A schedule of another kind only takes over the step.

    Returns:
        Notes for the user.

    Raises:
        CheckpointError: The state of the schedule cannot be read.
    """
    scheduler = train_step.scheduler
    state = scheduler.state_dict()
    notes = []
    try:
        if saved["name"] != state["name"]:
            scheduler.load_state_dict({**state, "global_step": saved["global_step"]})
        else:
            forgotten, saved = _drop_other_metric(saved, state)
            notes += forgotten
            scheduler.load_state_dict(saved)
        before = saved["last_lr"]
        now = scheduler.get_last_lr()
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{names.CHECKPOINT_STATE}: the schedule's state cannot be read: {error}"
        ) from error
    if before != now:
        notes.append(
            f"learning rate of the next step: {rate(max(before))} with the saved configuration,"
            f" {rate(max(now))} now"
        )
    return notes


def _drop_other_metric(saved: Schedule, state: Schedule) -> tuple[list[str], Schedule]:
    """Drop a schedule's history of another metric or direction.

    Args:
        saved: Metadata of the checkpoint.
        state: State of the newly built schedule.

    Returns:
        Notes for the user if something was dropped, and the state to load.
    """
    seen = saved["plateau"]
    if seen is None or (saved["metric"], seen.get("mode")) == (
        state["metric"],
        state["plateau"]["mode"],
    ):
        return [], saved
    note = (
        f"the schedule {state['name']} watches {state['metric']} from here on: what it saw of"
        f" {saved['metric']} is forgotten, the reductions it made stay"
    )
    return [note], {**saved, "plateau": {**seen, "best": None, "num_bad": 0}}


def environment(device: torch.device, ranks: int = 1, kernel: str = "torch") -> dict[str, object]:
    """Collect the versions, hardware and kernel that bit-exact resume depends on."""
    versions = provenance.versions()
    return {
        **{name: versions[name] for name in _COMPUTING},
        "device": device_name(device),
        "processor": provenance.hardware("", 0)["processor"],
        "torch threads": torch.get_num_threads(),
        "ranks": ranks,
        "optimizer kernel": kernel,
    }


def warn_of_other_environment(metadata: CheckpointMetadata, now: dict[str, object]) -> str | None:
    """Return a warning if versions or hardware changed since the checkpoint; else None.

    Args:
        metadata: Metadata of the checkpoint; without an environment only the number of ranks, taken
            as 1, is compared.
        now: What `environment` returns for this start.
    """
    saved = {"ranks": 1, **(metadata.environment or {})}
    differing = [
        f"{key} {saved[key]} then, {value} now"
        for key, value in now.items()
        if saved.get(key, value) != value
    ]
    if not differing:
        return None
    return (
        f"warning: {'; '.join(differing)}: continuing works, bit-equality with an uninterrupted run"
        " is not promised."
    )


def go_back(
    run: RunDir, step: int, every: int | None, setup: TrainingSetup, world: World = ALONE
) -> tuple[TrainState, CheckpointMetadata]:
    """Restore the last scheduled checkpoint at or before a step, in the middle of a run.

    Args:
        run: The run directory; its lock is held. Later checkpoints are renamed.
        step: A step at which a checkpoint was scheduled.
        every: `checkpoint.save_steps`.
        setup: The training setup in use; restored in place.
        world: The ranks; all of them go back.

    Returns:
        The counters and the metadata of the checkpoint.

    Raises:
        NonFiniteError: No such checkpoint exists.
        CheckpointError: The checkpoint does not fit.
    """
    wrong = []
    run_id = run_id_of(run)
    while step >= 0:
        folder = run.checkpoint(step)
        if folder.is_dir():
            try:
                refuse_foreign(folder, run_id)
                snapshot = read_checkpoint(folder, lazy=is_sharded(setup.model))
                break
            except CheckpointError as error:
                wrong.append(str(error))
        step -= every or step + 1
    else:
        raise NonFiniteError(
            "training.on_nonfinite=rollback: there is no checkpoint to go back to."
            f" {' '.join(wrong)}".strip()
        )
    setup.train_step.optimizer.zero_grad(set_to_none=True)
    restore_state(snapshot, setup.model, setup.train_step, {}, OnOtherOptimizer.refuse)
    RandomStates.unpack(snapshot.metadata.random, setup.train_step.device).restore()
    world.barrier()  # every rank has read it
    for later in checkpoint_folders(run) if world.is_main else ():
        if step_of(later) > snapshot.global_step:
            set_aside(later, "superseded")
    state = train_state(snapshot.metadata)
    set_ranking_metric(state, setup.ranking)
    return state, snapshot.metadata
