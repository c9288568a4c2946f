"""Save checkpoints during training: copied at once, written in a thread, retried if refused."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch.distributed import ProcessGroup

from optrun.artifacts import retention
from optrun.artifacts.async_writer import AsyncWriter, Result, SaveRequest
from optrun.artifacts.checkpoint import Snapshot
from optrun.artifacts.run_dir import RunDir, checkpoint_folders, step_name
from optrun.base.errors import NonFiniteError, StorageError
from optrun.config.schema.checkpoint import CheckpointConfig, OnStorageError
from optrun.config.schema.training import OnNonfinite
from optrun.distributed.heartbeat import Phase, during
from optrun.training.setup import TrainingSetup
from optrun.training.state import RandomStates

log = logging.getLogger("optrun")
_MAX_STEPS_BETWEEN_TRIES = 1024
"""Most optimizer steps between two tries to save a refused checkpoint."""


@dataclass(eq=False, kw_only=True)
class CheckpointManager:
    """Saves checkpoints in a background thread, and reports the outcome.

    One checkpoint is written at a time. If the next one is due before the last one is written,
    training waits, so that none is left out.
    """

    run: RunDir
    """Where checkpoints are written."""
    config: CheckpointConfig
    """When to save and what to keep."""
    setup: TrainingSetup
    """The run, and the ranking of its checkpoints."""
    snapshot: Callable[[RandomStates, bool], Snapshot]
    """Copies model, optimizer and states, with these random states, into buffers that the next call
    reuses. The flag says that nothing changes before the snapshot is written: then CPU tensors are
    not copied."""
    sync: Callable[[], None]
    """Flushes the metrics; called beside training before a checkpoint commits."""
    note: Callable[[str], None]
    """Shows the user one line."""
    deletes_older: bool = True
    """Whether this rank deletes older checkpoints and updates `checkpoints/best` and `last`."""
    saving: ProcessGroup | None = None
    """Group of the ranks that write a sharded checkpoint together; None: this rank writes alone."""
    clock: Callable[[], float] = time.monotonic
    """Returns seconds."""
    on_save: Callable[[Path], None] = lambda checkpoint: None  # noqa: ARG005
    """Called with the folder of each checkpoint when it is complete."""
    _stall: float = 0.0
    """Seconds that training waited for saves since the last `metrics`."""
    _write_seconds: float | None = None
    """Seconds of the last save that ended since the last `metrics`."""
    _refused: SaveRequest | None = None
    """The save that the disk refused, to be tried again; None: there is none."""
    _failures: int = 0
    """Refusals in a row."""
    _retry_at: int = 0
    """Optimizer steps after which the refused save is tried again."""
    _submitted: int | None = None
    """The step of the last save that was started, whatever came of it."""

    def __post_init__(self) -> None:
        """Create the background writer; its thread starts with the first save."""
        self.state = self.setup.state
        self.ranking = self.setup.ranking
        self.keep_scheduled = self.setup.config.on_nonfinite is OnNonfinite.rollback
        """Whether the newest scheduled checkpoint is never deleted: a rollback returns to it."""
        older = retention.Retention(self.run, self.config.keep_last) if self.deletes_older else None
        self._writer = AsyncWriter(self.run, older, self.saving)

    @property
    def enabled(self) -> bool:
        """Whether checkpoints are saved; False for `checkpoint=none`."""
        return self.config.enabled

    @property
    def writing(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._writer.busy and not self._writer.ended

    def is_scheduled(self, step: int) -> bool:
        """Tell whether a step is a multiple of `checkpoint.save_steps`; never with null."""
        return self.config.save_steps is not None and step % self.config.save_steps == 0

    def last_scheduled(self, step: int) -> int:
        """Return the last scheduled step up to a step; 0 if `checkpoint.save_steps` is null."""
        if self.config.save_steps:
            return step - step % self.config.save_steps
        return 0

    def save(self, random: RandomStates | None = None, *, last: bool = False) -> None:
        """Copy the present state, and start to write it; waits for the previous save.

        A checkpoint that the disk refused before is given up, with a note. The time of the wait and
        of the copy counts as stall.

        Args:
            random: Random states to save in place of the present ones; None: the present ones.
            last: Whether no step follows before the state is written. Then it is not copied, which
                would need the same memory again.

        Raises:
            StorageError: The save before it failed, with `checkpoint.on_storage_error=stop`.
        """
        self.wait()
        with during(Phase.saving):
            start = self.clock()
            random = random or RandomStates(self.setup.train_step.device)
            # An earlier checkpoint may wait for its next try. There is no second buffer for it.
            if self._refused is not None:
                self.note(
                    f"{step_name(self._refused.snapshot.global_step)} was never saved; "
                    f"{step_name(self.state.global_step)} takes its place."
                )
                self._refused = None
            self._submitted = self.state.global_step
            self._writer.start(self._request(self.snapshot(random, last)))
            self._stall += self.clock() - start

    def _request(self, snapshot: Snapshot) -> SaveRequest:
        """Build the request to write a snapshot, with the steps of checkpoints to keep.

        Those are the best ones, and the newest scheduled one if a rollback may return to it.
        """
        keep = self._scheduled_on_disk()[:1] if self.keep_scheduled else []  # the newest
        ranked = self.ranking.ranked_steps(self.state)
        return SaveRequest(snapshot, ranked, self.config.keep_best, keep, self.sync)

    def is_among_best(self) -> bool:
        """Tell whether the present step would be one of the `keep_best` best of the saved steps.

        Example: steps 10, 20 and 30 have the metric 0.8, 0.9 and 0.7, higher is better, and 10 was
        not saved. With `keep_best=2` the present step 30 is among the best.
        """
        present = self.state.global_step
        # The last save may not have ended, so that it has no folder.
        saved_steps = {
            present,
            self._submitted,
            *map(retention.step_of, checkpoint_folders(self.run)),
        }
        # All evaluated steps, best first; of these the saved ones.
        ranked = [step for step in self.ranking.ranked_steps(self.state) if step in saved_steps]
        return present in ranked[: self.config.keep_best]

    def _scheduled_on_disk(self) -> list[int]:
        """List the scheduled steps with a checkpoint on the disk, newest first.

        Step 0 counts as one, also if `checkpoint.save_steps` is null, as in `last_scheduled`.
        """
        # `checkpoint_folders` lists the newest first.
        steps = [retention.step_of(folder) for folder in checkpoint_folders(self.run)]
        return [step for step in steps if step == 0 or self.is_scheduled(step)]

    def save_now(self, random: RandomStates | None = None) -> None:
        """Save the present state, and return when it is on the disk.

        If it was saved before, only waits for that save; if the disk refused it, tries again.

        Args:
            random: Random states to save in place of the present ones; None: the present ones.

        Raises:
            StorageError: The disk refused, also with `checkpoint.on_storage_error=continue`: there
                may be no later try.
        """
        # 1. Start a save, unless one of this step is running or complete. Nothing changes before it
        # is written (`last`), so the state is not copied.
        if self._submitted != self.state.global_step:
            self.save(random, last=True)
        elif self._refused is not None:
            self._writer.start(self._refused)
            self._refused = None

        # 2. Wait for it. None: it was complete, and its result was handled before.
        result = self._wait_for_result()
        if result is None:
            return

        # 3. Without a folder no checkpoint is complete: then an error ends the run. An error after
        # the checkpoint was complete is only noted.
        if result.error is not None and result.folder is None:
            raise result.error
        self._handle_result(result)

    def poll(self, *, together: bool = False) -> None:
        """Handle the end of a save, and retry a refused one if its step has come.

        Never waits: does nothing while a save is running.

        Args:
            together: Whether several ranks call this, after the saves of earlier steps have ended
                on all of them. A save of the present step may have ended on some ranks only, so it
                is left to the next call.

        Raises:
            StorageError: A save failed, with `checkpoint.on_storage_error=stop`.
        """
        if together and self._submitted == self.state.global_step:
            return
        # 1. A save that has ended. None: it is still running, or none was started.
        result = self._writer.result(wait=False)
        if result is not None:
            self._handle_result(result)

        # 2. A save to try again; with a new request, since the best steps may be others by now.
        if (
            self._refused is not None
            and not self._writer.busy
            and self.state.global_step >= self._retry_at
        ):
            self._writer.start(self._request(self._refused.snapshot))
            self._refused = None

    def wait(self) -> None:
        """Wait until nothing is being written, and handle the result of the save.

        Raises:
            StorageError: The save failed, with `checkpoint.on_storage_error=stop`.
        """
        result = self._wait_for_result()
        if result is not None:
            self._handle_result(result)

    def _wait_for_result(self) -> Result | None:
        """Wait for the save in progress, and return its result; None: nothing is being saved.

        The waiting time counts as stall.
        """
        start = self.clock()
        with during(Phase.saving):
            result = self._writer.result(wait=True)
        self._stall += self.clock() - start
        return result

    def close(self) -> None:
        """Wait for the last save at the end of the run; a note says if it failed."""
        result = self._wait_for_result()
        if result is not None and result.error is not None:
            self.note(str(result.error))

    def _handle_result(self, result: Result) -> None:
        """Handle the result of a save: call `on_save`, note, plan a retry, or raise its error.

        Training goes on after a refusal of the disk with `checkpoint.on_storage_error=continue`; if
        the checkpoint itself is complete; and if its weights are not finite and a rollback follows.

        Raises:
            BaseException: The error of the save in all other cases.
        """
        step = result.request.snapshot.global_step
        error = result.error

        # 1. It succeeded.
        if error is None:
            self._failures = 0
            self._write_seconds = result.seconds
            log.info("saved %s in %.3f s", result.folder, result.seconds)
            if result.folder is not None:
                self.on_save(result.folder)
            return

        # 2. It failed for another reason than the disk: a weight is not finite, before a rollback;
        # or an error of the program.
        if isinstance(error, NonFiniteError) and self.keep_scheduled:
            self.note(f"{error} Training goes back at the next step.")
            return
        if not isinstance(error, StorageError):
            raise error

        # 3. The disk refused something: to delete older checkpoints or to update `best`, after the
        # new one was complete; or the new one itself.
        if result.folder is not None:
            self.note(f"{step_name(step)} is saved; what comes after it was refused: {error}")
            return
        if self.config.on_storage_error is OnStorageError.stop:
            raise error
        self._plan_retry(result.request, error)

    def _plan_retry(self, request: SaveRequest, error: StorageError) -> None:
        """Keep a refused save for a later step, and note when it is tried again.

        The number of steps until then doubles with each failure, from 1 to 1024. The first save
        that succeeds resets it.
        """
        steps_to_wait = min(2**self._failures, _MAX_STEPS_BETWEEN_TRIES)
        self._failures += 1
        self._refused = request
        self._retry_at = self.state.global_step + steps_to_wait
        newest = retention.latest_complete(self.run)[0]
        self.note(
            f"warning: {error} Training continues without it; newest good checkpoint: "
            f"{newest.name if newest else 'none'}; next try after step {self._retry_at:,}. "
            "checkpoint.on_storage_error=stop would end the run here."
        )

    def metrics(self) -> dict[str, float]:
        """Return the seconds that saves took since the last call, by metric name.

        `perf/checkpoint_stall_seconds`: training waited for saves; left out if it did not.
        `perf/checkpoint_write_seconds`: the last save that ended; left out if none did.
        """
        values = {}
        if self._stall:
            values["perf/checkpoint_stall_seconds"] = self._stall
            self._stall = 0.0
        if self._write_seconds is not None:
            values["perf/checkpoint_write_seconds"] = self._write_seconds
            self._write_seconds = None
        return values


class NonWritingManager(CheckpointManager):
    """A manager for ranks on which another rank writes the checkpoints.

    It remembers which steps are saved, so that `save_now` and `is_among_best` decide as there.
    """

    def save(self, random: RandomStates | None = None, *, last: bool = False) -> None:  # noqa: ARG002
        """Mark the present step as saved."""
        self._submitted = self.state.global_step

    def save_now(self, random: RandomStates | None = None) -> None:
        """Mark the present step as saved."""
        self.save(random)

    def wait(self) -> None:
        """Do nothing: nothing is being written here."""

    def close(self) -> None:
        """Do nothing: nothing is being written here."""
