"""Start a branch: a run with the weights and the data position of another run's checkpoint.

That checkpoint (`branch_from`) is its parent, `trunk` in code. The branch also takes over its
random states. The optimizer state is taken over if it fits.
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
from optrun.runner.resume.data_position import Plan, plan_of_steps
from optrun.runner.resume.restore import (
    restore_scaler,
    restore_schedule,
    restore_weights,
    train_state,
)
from optrun.scheduler.build import describe_fork_schedule
from optrun.training.state import TrainState
from optrun.training.step import TrainStep

_NOT_CHANGES = ("branch_from", "branch_schedule", "run_name")
"""Keys in which every branch may differ from its parent: they do not count as changes."""
_BEGINNINGS_OF_DATA_KEYS = (
    "data.",
    "training.per_device_train",
    "training.gradient_acc",
    "training.global_batch",
    "training.nproc_per_node",
)
"""Beginnings of the keys that decide the examples of each step."""


@dataclass
class StartedFork:
    """How a branch left its parent checkpoint."""

    folder: str
    """Path of the parent checkpoint."""
    digest: str
    run_id: str | None
    """Id of the parent checkpoint's run."""
    step: int
    schedule_from: int
    """The step that the schedule counts from."""
    trunk_config: str
    """Digest of the parent checkpoint's configuration without the seed; equal for parent
    checkpoints of one kind."""
    optimizer_state: str = ""
    """What became of the parent checkpoint's optimizer state, in words."""
    schedule: str = ""
    """Where the schedule stands, in words."""
    changes: Changes = field(default_factory=dict)
    """Keys whose values differ from the parent checkpoint's -> both values."""

    def summary(self) -> dict[str, object]:
        """Return the facts of the branch for `summary.json`."""
        return {**asdict(self), "changes": {key: list(pair) for key, pair in self.changes.items()}}

    def metadata(self) -> dict[str, object]:
        """Return the facts of the branch for its checkpoints."""
        fields_shown = ("folder", "digest", "run_id", "step", "schedule_from", "trunk_config")
        return {key: getattr(self, key) for key in fields_shown}

    def notes(self) -> list[str]:
        """List the notes for the user before the first step."""
        return [
            f"branch: starts from {self.folder}, step {self.step:,}: its weights, random states and"
            " position in the data",
            f"optimizer state: {self.optimizer_state}",
            f"schedule: {self.schedule}",
        ]


def schedule_from(saved: CheckpointMetadata, schedule: BranchSchedule) -> int:
    """Return the step of the run at which the schedule has its step 0.

    If it continues, that is 0, or where the parent checkpoint's own schedule has restarted.

    Args:
        saved: Metadata of the parent checkpoint.
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
    """Start a branch: take over the counters of the parent checkpoint, but none of its metrics.

    Nothing is loaded into the model or optimizer yet; `restore_fork` does that.

    Args:
        trunk: The parent checkpoint.
        saved: Metadata of the parent checkpoint.
        now: Metadata for the first checkpoint of the branch.
        changes: Differences between the two configurations.
        schedule: Whether the schedule continues or restarts (`branch_schedule`).

    Returns:
        The record of the branch, with the changes that a user made, and the counters to go on
        from.

    Raises:
        ConfigError: The data, its order or the batch changed, see `_refuse_other_plan`.
        CheckpointError: A newer version saved the counters, see `train_state`.
    """
    # 1. The changes that a user made. If the optimizer changed from adamw to lamb, its options
    # follow from that.
    user_changes = {
        key: pair
        for key, pair in changes.items()
        if key not in _NOT_CHANGES and not _follows_from_choice(key, changes)
    }
    # 2. The plan says which examples each step sees. It must be that of the parent, whose position
    # in the data is taken over: ConfigError otherwise.
    _refuse_other_plan(saved.plan, now.plan, user_changes, trunk)
    # 3. The counters.
    # Steps, epochs, examples and tokens stay. Metrics were those of another run: the best and last
    # values, those before training, those to go back to if a run is prolonged (`without_end`), and
    # the ranking of checkpoints.
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
        _digest_of_trunk(saved),
        changes=user_changes,
    )
    return fork, state


def _digest_of_trunk(saved: CheckpointMetadata) -> str:
    """Digest the configuration of a parent checkpoint without the seed.

    The digest covers the parent of the parent, too, by its own digest and step. Parents that differ
    only in the seed have equal digests.
    """
    values = plain(with_schemas(saved.config, "the trunk"))
    compared = {key: value for key, value in values.items() if key not in ("seed", "branch_from")}
    before = saved.branch or {}
    return config_digest({**compared, "trunk": [before.get("trunk_config"), before.get("step")]})


def _follows_from_choice(key: str, changes: Changes) -> bool:
    """Tell whether a key changed together with the choice of its group, such as `optimizer`.

    Example:
        >>> changes = {"optimizer.name": ("adamw", "lamb"), "optimizer.eps": (1e-8, 1e-6)}
        >>> _follows_from_choice("optimizer.eps", changes)
        True
        >>> _follows_from_choice("optimizer.name", changes)
        False
    """
    name = f"{key.partition('.')[0]}.name"
    return key != name and name in changes


def _refuse_other_plan(before: Plan, now: Plan, changes: Changes, trunk: Trunk) -> None:
    """Refuse a branch with other examples, order or size of steps than its parent checkpoint.

    The parent's position in the data would mean other examples.

    Args:
        before: `plan_values` of the parent checkpoint.
        now: `plan_values` of the branch.
        changes: Changed configuration keys, for the message.
        trunk: The parent checkpoint, for the message.

    Raises:
        ConfigError: The message names the changed keys, and what changed in the plan.
    """
    # Micro-batches and accumulation become examples per step: their division may differ.
    before = plan_of_steps(before)
    now = plan_of_steps(now)
    changed_keys = [key for key in now if key != "fingerprint" and before[key] != now[key]]
    changed_values = ", ".join(
        f"{key}={value}"
        for key, (_, value) in changes.items()
        if key == "seed" or key.startswith(_BEGINNINGS_OF_DATA_KEYS)
    )
    # A fingerprint is TRAINING-EVALUATION; other evaluation rows are allowed.
    if before["fingerprint"].split("-")[0] != now["fingerprint"].split("-")[0]:
        raise ConfigError(
            f"{changed_values or 'the data'}: the training examples are not those of the trunk"
            f" {trunk.folder} (fingerprint {now['fingerprint']}, the trunk:"
            f" {before['fingerprint']}), so its position in the data cannot be used. Restore the"
            " examples, or start a new run without branch_from."
        )
    if changed_keys:
        changed = ", ".join(f"{key}: {now[key]} (the trunk: {before[key]})" for key in changed_keys)
        raise ConfigError(
            f"{changed_values or 'distributed'}: {changed}: a branch takes the steps of its trunk"
            f" {trunk.folder}. Choose training.per_device_train_batch_size and"
            " training.gradient_accumulation_steps so that they agree."
        )


def restore_fork(
    fork: StartedFork, snapshot: Snapshot, model: torch.nn.Module, train_step: TrainStep, total: int
) -> list[str]:
    """Load the parent checkpoint's weights, optimizer state and schedule into a branch.

    The optimizer state only if it fits, the schedule only if it continues, and the loss scale.

    Args:
        fork: The record of the branch. `optimizer_state` and `schedule` are set in place, to
            sentences that say what was taken over.
        snapshot: Verified snapshot of the parent checkpoint.
        model: The model, built from the configuration of the branch; its weights are replaced.
        train_step: Optimizer and schedule, built from the same configuration; changed in place.
        total: Steps of the whole run.

    Returns:
        Notes for the user.

    Raises:
        ConfigError: A change made the weights unfit.
        CheckpointError: As `restore_state`.
    """
    snapshot = restore_weights(snapshot, model, fork.changes)
    # Loads the state if it fits, and returns a clause that says so.
    fork.optimizer_state = inherit_state(
        train_step.optimizer, snapshot.optimizer, snapshot.metadata.optimizer
    )
    notes = []
    if fork.schedule_from != fork.step:  # it does not restart here
        notes = restore_schedule(snapshot.metadata.scheduler, train_step)
    name = str(train_step.scheduler.state_dict()["name"])
    fork.schedule = describe_fork_schedule(name, fork.schedule_from, fork.step, total)
    restore_scaler(snapshot, train_step)
    return [*fork.notes(), *notes]
