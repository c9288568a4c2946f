"""Load a snapshot into model, optimizer and schedule, and check that it fits."""

from __future__ import annotations

from typing import Any

import torch

from optrun.artifacts import provenance
from optrun.artifacts import run_dir as names
from optrun.artifacts.checkpoint import Snapshot, read_local_parts, set_aside
from optrun.artifacts.identity import run_id_of
from optrun.artifacts.manifest import refuse_foreign
from optrun.artifacts.metadata import CheckpointMetadata
from optrun.artifacts.retention import step_of
from optrun.artifacts.run_dir import RunDir, checkpoint_folders
from optrun.base.errors import CheckpointError, ConfigError, NonFiniteError, OptrunError
from optrun.base.formatting import list_names, rate
from optrun.config.schema.checkpoint import OnOtherOptimizer
from optrun.distributed.shard import is_sharded, model_class
from optrun.distributed.world import World
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
_MOST_KEYS = 3
"""Most keys that a message names."""
_COMPUTING_LIBRARIES = ("python", "torch", "transformers", "tokenizers", "numpy")


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
    """Return the request to end training early that a checkpoint holds, if it still stands.

    Early stopping or a callback made it. Any change of training or of its length makes it obsolete.

    Args:
        metadata: Metadata of the checkpoint.
        changes: Keys that the user changed since.

    Returns:
        None if there is none, or if it is obsolete: then training goes on.
    """
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
    """Load weights, optimizer state, schedule and loss scale of a checkpoint to resume.

    Args:
        snapshot: A verified snapshot.
        model: The model, built from the configuration in force; changed in place.
        train_step: Optimizer and schedule, built from the same configuration; changed in place.
        changes: Differences between the checkpoint's configuration and the present one.
        on_other_optimizer: Whether to reset or refuse optimizer state that does not fit.

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
        if on_other_optimizer is not OnOtherOptimizer.reset:
            first = min(snapshot.optimizer, default="none")
            text = (
                f"the saved optimizer state does not fit: {error} First saved tensor: {first}."
                " checkpoint.on_other_optimizer=reset keeps the weights and starts the optimizer's"
                " state anew."
            )
            # Keys that can be the cause; "param" is for param_groups and parametrization.
            key_prefixes: tuple[str, ...] = ("optimizer.", "param", "model.", "adapter.")
            if "optimizer.name" in changes:
                key_prefixes = ("optimizer.name",)  # its options changed with it
            raise _unfit_error(text, changes, key_prefixes) from error
        notes.append(f"the optimizer's state starts anew, as asked: {error}")
    notes += restore_schedule(snapshot.metadata.scheduler, train_step)
    restore_scaler(snapshot, train_step)
    return notes


def restore_weights(snapshot: Snapshot, model: torch.nn.Module, changes: Changes) -> Snapshot:
    """Load the weights of a checkpoint into the model.

    Args:
        snapshot: A verified snapshot.
        model: The model, built from the configuration in force; changed in place.
        changes: Differences between the checkpoint's configuration and the one in force.

    Returns:
        The snapshot for what is loaded next. For a sharded model it holds only this rank's part of
        each tensor; otherwise it is the given one.

    Raises:
        ConfigError: A changed key made the weights unfit; the message names key and tensor.
        CheckpointError: They do not fit though nothing changed, or memory differs from the file.
    """
    if is_sharded(model):
        snapshot = read_local_parts(snapshot, model_tensors(model))
    _refuse_other_model(snapshot, model, changes)
    try:
        load_model_tensors(model, snapshot.model)
    except CheckpointError as error:
        raise _unfit_error(str(error), changes, ("model.", "adapter.", "task.", "data.")) from error
    return snapshot


def restore_scaler(snapshot: Snapshot, train_step: TrainStep) -> None:
    """Load the loss scale of fp16; other precisions have none."""
    if train_step.scaler.is_enabled() and snapshot.metadata.scaler:
        train_step.scaler.load_state_dict(snapshot.metadata.scaler)


def _refuse_other_model(snapshot: Snapshot, model: torch.nn.Module, changes: Changes) -> None:
    """Refuse a model of another class, or with weights of another dtype, than the checkpoint's.

    Tensors that only one side has are left to `load_model_tensors`.

    Raises:
        ConfigError: A changed key of `model` or `task` can be the cause; the message names it.
        CheckpointError: No changed key can be the cause.
    """
    before = snapshot.metadata.model_class
    now = model_class(model).__name__
    if before != now:
        text = f"the checkpoint holds a {before}, the configuration builds a {now}."
        raise _unfit_error(text, changes, ("model.", "task."))
    for name, tensor in model_tensors(model).items():
        saved = snapshot.model.get(name)
        if saved is not None and saved.dtype != tensor.dtype:
            raise _unfit_error(
                f"{name}: {saved.dtype} in the checkpoint, {tensor.dtype} in the model.",
                changes,
                ("model.",),
            )


def _unfit_error(text: str, changes: Changes, prefixes: tuple[str, ...]) -> OptrunError:
    """Build the error for a checkpoint with weights or states that do not fit.

    Args:
        text: What does not fit.
        changes: Keys that changed since the checkpoint was saved, with old and new value.
        prefixes: Beginnings of the keys that can cause it. A ConfigError names those that changed;
            if none did, the result is a CheckpointError.

    Example:
        >>> _unfit_error("2 layers.", {"model.n_layer": (2, 4), "lr": (0.1, 0.2)}, ("model.",))
        ConfigError('model.n_layer=4: 2 layers.')
    """
    causes = [f"{key}={now}" for key, (_, now) in changes.items() if key.startswith(prefixes)]
    if not causes:
        return CheckpointError(text)
    return ConfigError(f"{list_names(causes, _MOST_KEYS)}: {text}")


def restore_schedule(saved: Schedule, train_step: TrainStep) -> list[str]:
    """Load the state of the schedule; a schedule of another kind only takes over the step.

    If a plateau schedule watches another metric now, it forgets the best value, and the reductions
    of the lr that it made stay.

    Args:
        saved: State of the schedule in the checkpoint, by name.
        train_step: Has the schedule to load it into.

    Returns:
        Notes for the user: what was dropped, and whether the next learning rate changes.

    Raises:
        CheckpointError: The state of the schedule cannot be read.
    """
    scheduler = train_step.scheduler
    new_state = scheduler.state_dict()
    notes = []
    try:
        # 1. Another kind: the new schedule goes on at the same step.
        if saved["name"] != new_state["name"]:
            scheduler.load_state_dict({**new_state, "global_step": saved["global_step"]})
        # 2. A plateau schedule with another metric: values of two metrics cannot be compared, so it
        # forgets the best one, and how many evaluations were no better.
        elif _has_other_metric(saved, new_state):
            notes.append(
                f"the schedule {new_state['name']} watches {new_state['metric']} from here on: what"
                f" it saw of {saved['metric']} is forgotten, the reductions it made stay"
            )
            plateau = {**saved["plateau"], "best": None, "num_bad": 0}
            scheduler.load_state_dict({**saved, "plateau": plateau})
        # 3. The same schedule.
        else:
            scheduler.load_state_dict(saved)
        # One lr for each parameter group.
        saved_lrs = saved["last_lr"]
        lrs = scheduler.get_last_lr()
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{names.CHECKPOINT_STATE}: the schedule's state cannot be read: {error}"
        ) from error
    if saved_lrs != lrs:
        notes.append(
            f"learning rate of the next step: {rate(max(saved_lrs))} with the saved configuration,"
            f" {rate(max(lrs))} now"
        )
    return notes


def _has_other_metric(saved: Schedule, state: Schedule) -> bool:
    """Tell whether a plateau schedule watched another metric or direction in the checkpoint.

    False for any other schedule.

    Args:
        saved: State in the checkpoint. Without `mode`, as in checkpoints of older versions, it
            counts as another: it may have watched the other direction.
        state: State of the present schedule, which has the same name.
    """
    plateau = saved["plateau"]
    if plateau is None:
        return False
    before = (saved["metric"], plateau.get("mode"))
    return before != (state["metric"], state["plateau"]["mode"])


def environment(device: torch.device, ranks: int = 1, kernel: str = "torch") -> dict[str, object]:
    """Collect the versions, hardware and kernel; a bit-exact resume needs the same ones.

    Args:
        device: The device that trains.
        ranks: Number of ranks.
        kernel: Name of the implementation of the optimizer's step.
    """
    versions = provenance.versions()
    return {
        **{name: versions[name] for name in _COMPUTING_LIBRARIES},
        "device": device_name(device),
        "processor": provenance.processor(),
        "torch threads": torch.get_num_threads(),
        "ranks": ranks,
        "optimizer kernel": kernel,
    }


def warn_of_other_environment(metadata: CheckpointMetadata, now: dict[str, object]) -> str | None:
    """Return a warning if versions or hardware changed since the checkpoint; else None.

    Args:
        metadata: Metadata of the checkpoint. What its environment lacks is not compared; a missing
            number of ranks counts as 1.
        now: The present `environment`.

    Returns:
        Such as "warning: torch 2.9 then, 2.10 now: the run continues, but ...".
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
        f"warning: {'; '.join(differing)}: the run continues, but its numbers may differ in the"
        " last bits from those of an uninterrupted run."
    )


def restore_scheduled_checkpoint(
    run: RunDir, step: int, every: int | None, setup: TrainingSetup, world: World
) -> tuple[TrainState, CheckpointMetadata]:
    """Restore the newest usable scheduled checkpoint at or before a step, during a run.

    Args:
        run: The run directory; its lock is held. Later checkpoints are renamed.
        step: A step at which a checkpoint was scheduled.
        every: `checkpoint.save_steps`; checkpoints at other steps, such as one saved by a signal,
            are not used. None: only the given step is looked at.
        setup: The training setup in use; model, optimizer and random states are restored in place.
        world: The ranks; all of them call this.

    Returns:
        The counters and the metadata of the checkpoint.

    Raises:
        NonFiniteError: No such checkpoint exists.
        CheckpointError: The checkpoint does not fit.
    """
    snapshot = _read_scheduled(run, step, every, lazy=is_sharded(setup.model))
    setup.train_step.optimizer.zero_grad(set_to_none=True)
    # {}: within one start no key changes, so whatever does not fit is refused.
    restore_state(snapshot, setup.model, setup.train_step, {}, OnOtherOptimizer.refuse)
    RandomStates.unpack(snapshot.metadata.random, setup.train_step.device).restore()
    world.barrier()  # no rank reads any more, so rank 0 may rename
    for later in checkpoint_folders(run) if world.is_main else ():
        if step_of(later) > snapshot.global_step:
            set_aside(later, "superseded")
    state = train_state(snapshot.metadata)
    set_ranking_metric(state, setup.ranking)
    return state, snapshot.metadata


def _read_scheduled(run: RunDir, step: int, every: int | None, *, lazy: bool) -> Snapshot:
    """Read the newest usable checkpoint at `step` or a whole number of `every` steps before it.

    With step 40 and every 10 the steps 40, 30, 20, 10 and 0 are tried; with None only 40.

    Raises:
        NonFiniteError: There is none; the message has the fault of each that is damaged.
    """
    faults = []
    run_id = run_id_of(run)
    while step >= 0:
        folder = run.checkpoint(step)
        if folder.is_dir():
            try:
                refuse_foreign(folder, run_id)
                return read_checkpoint(folder, lazy=lazy)
            except CheckpointError as error:
                faults.append(str(error))
        if not every:
            break
        step -= every
    message = "training.on_nonfinite=rollback: there is no checkpoint to go back to."
    raise NonFiniteError(" ".join([message, *faults]))
