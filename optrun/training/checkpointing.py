"""Checkpoints of a run in progress.

Copied at once, written beside training, retried where the disk refused.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from optrun.artifacts import retention
from optrun.artifacts.async_writer import AsyncWriter, Order, Result
from optrun.artifacts.checkpoint import Snapshot
from optrun.artifacts.run_dir import RunDir, checkpoint_folders, step_name
from optrun.base.errors import NonFiniteError, StorageError
from optrun.config.schema.checkpoint import CheckpointConfig, OnStorageError
from optrun.config.schema.training import OnNonfinite
from optrun.distributed.heartbeat import Phase, during
from optrun.training.setup import TrainingSetup
from optrun.training.state import RandomStates

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

log = logging.getLogger("optrun")
_LONGEST_WAIT = 1024
"""Steps between two tries, at most."""


@dataclass(eq=False, kw_only=True)
class CheckpointManager:
    """Saves checkpoints and reports the outcome.

    One checkpoint is written at a time. When the next is due before the last is written, training
    waits: nothing queues up, and no checkpoint that was due is left out.
    """

    run: RunDir
    """Where checkpoints are written."""
    config: CheckpointConfig
    """When to save and what to keep."""
    setup: TrainingSetup
    """What is saved, and which checkpoint is best."""
    snapshot: Callable[[RandomStates, bool], Snapshot]
    """Copies everything, with these random states; what it returns is not used again before the
    next call. If told True, nothing changes until it is written, and no copy is needed."""
    sync: Callable[[], None]
    """Flushes the metrics; called beside training before a checkpoint commits."""
    note: Callable[[str], None]
    """Tells the user one line."""
    deletes_older: bool = True
    """Whether this rank holds the run's lock, deletes older checkpoints and points at the best."""
    saving: ProcessGroup | None = None
    """Ranks that write a sharded checkpoint together; each does the same as the others at the same
    step."""
    clock: Callable[[], float] = time.monotonic
    """Seconds."""
    on_save: Callable[[Path], None] = lambda checkpoint: None  # noqa: ARG005
    """Called with each checkpoint that is on the disk."""
    _stall: float = 0.0
    _write_seconds: float | None = None
    _refused: Order | None = None
    _failures: int = 0
    _retry_at: int = 0
    _submitted: int | None = None

    def __post_init__(self) -> None:
        """Create the background writer."""
        self.state = self.setup.state
        self.ranking = self.setup.ranking
        self.keep_scheduled = self.setup.config.on_nonfinite is OnNonfinite.rollback
        """Whether the newest checkpoint at a multiple of `save_steps` stays whatever else is kept.
        """
        older = retention.Retention(self.run, self.config.keep_last) if self.deletes_older else None
        self._writer = AsyncWriter(self.run, older, self.saving)

    @property
    def enabled(self) -> bool:
        """Whether anything is saved at all."""
        return self.config.enabled

    @property
    def writing(self) -> bool:
        """Whether a checkpoint is on its way to the disk."""
        return self._writer.busy and not self._writer.ended

    def scheduled(self, step: int) -> bool:
        """Tell whether `save_steps` asks for a checkpoint after this step."""
        return self.config.save_steps is not None and step % self.config.save_steps == 0

    def last_scheduled(self, step: int) -> int:
        """Find the last scheduled checkpoint up to a step; 0 is the start."""
        if self.config.save_steps:
            return step - step % self.config.save_steps
        return 0

    def save(self, random: RandomStates | None = None, *, last: bool = False) -> None:
        """Take a copy now and write it beside training.

        Args:
            random: Random states to save in place of the present ones.
            last: No step follows before it is written: nothing needs to be copied, which would take
                room for it all.

        Raises:
            StorageError: The one before could not be saved, and `checkpoint.on_storage_error` says
                to stop.
        """
        self.wait()
        with during(Phase.saving):
            start = self.clock()
            random = random or RandomStates(self.setup.train_step.device)
            if self._refused is not None:
                self.note(
                    f"{step_name(self._refused.snapshot.global_step)} was never saved; "
                    f"{step_name(self.state.global_step)} takes its place."
                )
                self._refused = None
            self._submitted = self.state.global_step
            self._writer.start(self._order(self.snapshot(random, last)))
            self._stall += self.clock() - start

    def _order(self, snapshot: Snapshot) -> Order:
        keep = [step for step in self._scheduled_on_disk()[:1] if self.keep_scheduled]
        ranked = self.ranking.best(self.state)
        return Order(snapshot, ranked, self.config.keep_best, keep, self.sync)

    def among_best(self) -> bool:
        """Tell whether the present state is among the best saved ones."""
        present = self.state.global_step
        saved_steps = {
            present,
            self._submitted,
            *map(retention.step_of, checkpoint_folders(self.run)),
        }
        ranked = [step for step in self.ranking.best(self.state) if step in saved_steps]
        return present in ranked[: self.config.keep_best]

    def _scheduled_on_disk(self) -> list[int]:
        steps = [retention.step_of(folder) for folder in checkpoint_folders(self.run)]
        return [step for step in steps if step == 0 or self.scheduled(step)]

    def save_now(self, random: RandomStates | None = None) -> None:
        """Save the present state and return when it is on the disk.

        Where it is there already, nothing is done.

        Args:
            random: Random states to save in place of the present ones.

        Raises:
            StorageError: The disk refused, whatever the policy: there is no later.
        """
        if self._submitted != self.state.global_step:
            self.save(random, last=True)
        elif self._refused is not None:
            self._writer.start(self._refused)
            self._refused = None
        result = self._ended()
        if result is not None and result.error is not None and result.folder is None:
            raise result.error
        if result is not None:
            self._follow_up(result)

    def poll(self, *, together: bool = False) -> None:
        """Look whether a save has ended; try a refused one again when it is time.

        Args:
            together: Several ranks look, and the saves of earlier steps have ended on all of them.
                One of the present
                step may have ended on some: it is left for the next look, so that all give the same
                orders.

        Raises:
            StorageError: It failed, and `checkpoint.on_storage_error` says to stop.
        """
        if together and self._submitted == self.state.global_step:
            return
        result = self._writer.result(wait=False)
        if result is not None:
            self._follow_up(result)
        if (
            self._refused is not None
            and not self._writer.busy
            and self.state.global_step >= self._retry_at
        ):
            self._writer.start(self._order(self._refused.snapshot))
            self._refused = None

    def wait(self) -> None:
        """Wait until nothing is being written.

        Raises:
            StorageError: As `poll`.
        """
        result = self._ended()
        if result is not None:
            self._follow_up(result)

    def _ended(self) -> Result | None:
        """Wait for the save under way; training stands still meanwhile."""
        start = self.clock()
        with during(Phase.saving):
            result = self._writer.result(wait=True)
        self._stall += self.clock() - start
        return result

    def close(self) -> None:
        """Wait for the last save when the run ends for another reason.

        What went wrong with it is told.
        """
        result = self._ended()
        if result is not None and result.error is not None:
            self.note(str(result.error))

    def _follow_up(self, result: Result) -> None:
        """Report a finished save; raise its error, note it, or schedule another try."""
        step = result.order.snapshot.global_step
        error: BaseException | None = result.error
        if error is None:
            self._failures = 0
            self._write_seconds = result.seconds
            log.info("saved %s in %.3f s", result.folder, result.seconds)
            if result.folder is not None:
                self.on_save(result.folder)
            return
        if isinstance(error, StorageError) and result.folder is not None:
            self.note(f"{step_name(step)} is saved; what comes after it was refused: {error}")
            return
        if isinstance(error, NonFiniteError) and self.keep_scheduled:
            self.note(f"{error} Training goes back at the next step.")
            return
        if (
            not isinstance(error, StorageError)
            or self.config.on_storage_error is OnStorageError.stop
        ):
            raise error
        wait = min(2**self._failures, _LONGEST_WAIT)
        self._failures += 1
        self._refused = result.order
        self._retry_at = self.state.global_step + wait
        newest = retention.latest_whole(self.run)[0]
        self.note(
            f"warning: {error} Training goes on without it; newest good checkpoint: "
            f"{newest.name if newest else 'none'}; next try after step {self._retry_at:,}. "
            "checkpoint.on_storage_error=stop would end the run here."
        )

    def metrics(self) -> dict[str, float]:
        """Return the cost of saving since the last call, as metrics."""
        values = {}
        if self._stall:
            values["perf/checkpoint_stall_seconds"] = self._stall
            self._stall = 0.0
        if self._write_seconds is not None:
            values["perf/checkpoint_write_seconds"] = self._write_seconds
            self._write_seconds = None
        return values


class Bystander(CheckpointManager):
    """Stands in for the manager on a rank that does not write checkpoints.

    It keeps to the other's order of events.
    """

    writing = False

    def save(self, random: RandomStates | None = None, *, last: bool = False) -> None:  # noqa: ARG002
        """Note that this step is saved."""
        self._submitted = self.state.global_step

    def save_now(self, random: RandomStates | None = None) -> None:
        """Note that this step is saved."""
        self.save(random)

    def poll(self, *, together: bool = False) -> None:
        """Do nothing: nothing is being written here."""

    def wait(self) -> None:
        """Do nothing: nothing is being written here."""

    def close(self) -> None:
        """Do nothing: nothing is being written here."""
