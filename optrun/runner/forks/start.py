"""Start a fork from the weights, generators and place in the data of its trunk.

The optimizer state is taken over if it fits.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

import torch

from optrun.artifacts.checkpoint import Snapshot
from optrun.artifacts.forks import Trunk
from optrun.artifacts.metadata import CheckpointMetadata
from optrun.artifacts.provenance import config_digest
from optrun.base.errors import ConfigError
from optrun.config.saved import plain, with_schemas
from optrun.config.schema.run import BranchSchedule
from optrun.optimizer.inherited_state import inherit_state
from optrun.runner.resume.config_diff import Changes
from optrun.runner.resume.data_position import Plan, step_plan
from optrun.runner.resume.restore import (
    restore_scaler,
    restore_schedule,
    restore_weights,
    train_state,
)
from optrun.scheduler.build import describe_fork_schedule
from optrun.training.state import TrainState
from optrun.training.step import TrainStep

_OWN = ("branch_from", "branch_schedule", "run_name")
"""Keys that belong to one run: no change against its trunk."""
_PLAN = (
    "data.",
    "training.per_device_train",
    "training.gradient_acc",
    "training.global_batch",
    "training.nproc_per_node",
)
"""Begin the keys that the steps of an epoch depend on."""


@dataclass
class StartedFork:
    """How a branch left its trunk."""

    folder: str
    """Path of the trunk's checkpoint."""
    digest: str
    run_id: str | None
    """Id of the trunk's run."""
    step: int
    schedule_from: int
    """The step that the schedule counts from."""
    trunk_config: str
    """Digest of the trunk's configuration without the seed; equal for trunks of one kind."""
    optimizer_state: str = ""
    """What became of the trunk's optimizer state, in words."""
    schedule: str = ""
    """Where the schedule stands, in words."""
    changes: Changes = field(default_factory=dict)
    """Keys whose values differ from the trunk's -> both values."""

    def summary(self) -> dict[str, object]:
        """Return the facts of the fork for `summary.json`."""
        return {**asdict(self), "changes": {key: list(pair) for key, pair in self.changes.items()}}

    def metadata(self) -> dict[str, object]:
        """Return the facts of the fork for its checkpoints."""
        fields_shown = ("folder", "digest", "run_id", "step", "schedule_from", "trunk_config")
        return {key: getattr(self, key) for key in fields_shown}

    def notes(self) -> list[str]:
        """List the notes for the user before the first step."""
        return [
            f"branch: {self.folder}, step {self.step:,}: its weights, generators and place in the"
            " data",
            f"optimizer state: {self.optimizer_state}",
            f"schedule: {self.schedule}",
        ]


def schedule_from(saved: CheckpointMetadata, schedule: BranchSchedule) -> int:
    """Return the step of the run at which the schedule has its step 0.

    Args:
        saved: Metadata of the trunk's checkpoint.
        schedule: Whether the schedule continues or restarts (`branch_schedule`).
    """
    if schedule is BranchSchedule.restart:
        return saved.global_step
    return int((saved.branch or {}).get("schedule_from", 0))


def begin_fork(
    trunk: Trunk,
    saved: CheckpointMetadata,
    now: CheckpointMetadata,
    changes: Changes,
    schedule: BranchSchedule,
) -> tuple[StartedFork, TrainState]:
    """Take over the counters of the trunk, if data and position are the same.

    The best metric of the trunk and its step are not taken over.

    Args:
        trunk: The trunk's checkpoint.
        saved: Metadata of the trunk's checkpoint.
        now: Metadata for the first checkpoint of the branch.
        changes: Differences between the two configurations.
        schedule: Whether the schedule continues or restarts (`branch_schedule`).

    Raises:
        ConfigError: The data, its order or the batch changed.
        CheckpointError: A newer version saved the counters.
    """
    metadata = {
        key: pair for key, pair in changes.items() if key not in _OWN and not _follows(key, changes)
    }
    _refuse_other_plan(saved.plan, now.plan, metadata, trunk)
    state = train_state(saved)
    state.best = {}
    state.last = {}
    state.before_training = {}
    state.without_end = {}
    state.ranking = {}
    state.ranking_losses = {}
    fork = StartedFork(
        str(trunk.folder),
        trunk.digest,
        saved.run_id,
        saved.global_step,
        schedule_from(saved, schedule),
        _kind(saved),
        changes=metadata,
    )
    return fork, state


def _kind(saved: CheckpointMetadata) -> str:
    """Digest the configuration of a trunk without its seed, and its own trunk's digest and step.

    Trunks that differ only in the seed have equal digests.
    """
    values = plain(with_schemas(saved.config, "the trunk"))
    compared = {key: value for key, value in values.items() if key not in ("seed", "branch_from")}
    before = saved.branch or {}
    return config_digest({**compared, "trunk": [before.get("trunk_config"), before.get("step")]})


def _follows(key: str, changes: Changes) -> bool:
    """Tell whether a key changed only because another choice of its group was made."""
    name = f"{key.partition('.')[0]}.name"
    return key != name and name in changes


def _refuse_other_plan(before: Plan, now: Plan, changes: Changes, trunk: Trunk) -> None:
    """Refuse another order or size of steps, which would move the branch in the data.

    Raises:
        ConfigError: The message names the changed keys and both values of what follows from them.
    """
    before = step_plan(before)
    now = step_plan(now)
    changed_keys = [key for key in now if key != "fingerprint" and before[key] != now[key]]
    changed_values = ", ".join(
        f"{key}={value}"
        for key, (_, value) in changes.items()
        if key == "seed" or key.startswith(_PLAN)
    )
    if before["fingerprint"].split("-")[0] != now["fingerprint"].split("-")[0]:
        raise ConfigError(
            f"{changed_values or 'the data'}: the training examples are not those of the trunk"
            f" {trunk.folder} (fingerprint {now['fingerprint']}, the trunk:"
            f" {before['fingerprint']}), so that its place in them means nothing. Restore them, or"
            " start a new run without branch_from."
        )
    if changed_keys:
        parts = ", ".join(f"{key}: {now[key]} (the trunk: {before[key]})" for key in changed_keys)
        raise ConfigError(
            f"{changed_values or 'distributed'}: {parts}: a branch takes the steps of its trunk"
            f" {trunk.folder}. Choose training.per_device_train_batch_size and"
            " training.gradient_accumulation_steps so that they agree."
        )


def restore_fork(
    fork: StartedFork, snapshot: Snapshot, model: torch.nn.Module, train_step: TrainStep, total: int
) -> list[str]:
    """Load the trunk's weights, and the optimizer state and schedule that continue.

    `fork.optimizer_state` and `fork.schedule` say in words what continues.

    Args:
        fork: Changed in place: what continued is recorded.
        snapshot: Verified snapshot of the trunk.
        model: The model, built from the configuration of the fork.
        train_step: Optimizer and schedule, built likewise.
        total: Steps of the whole run.

    Returns:
        Notes for the user.

    Raises:
        ConfigError: A change made the weights unfit.
        CheckpointError: As `restore_state`.
    """
    snapshot = restore_weights(snapshot, model, fork.changes)
    fork.optimizer_state = inherit_state(
        train_step.optimizer, snapshot.optimizer, snapshot.metadata.optimizer
    )
    notes = []
    if fork.schedule_from != fork.step:
        notes = restore_schedule(snapshot.metadata.scheduler, train_step)
    name = str(train_step.scheduler.state_dict()["name"])
    fork.schedule = describe_fork_schedule(name, fork.schedule_from, fork.step, total)
    restore_scaler(snapshot, train_step)
    return [*fork.notes(), *notes]
