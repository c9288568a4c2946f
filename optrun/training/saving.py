"""Save when it is due, and end a run early, at a signal or the time budget, with all saved."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from optrun.base.errors import StoppedEarly
from optrun.distributed.heartbeat import Phase, beat
from optrun.training.callback import TrainingContext
from optrun.training.checkpointing import CheckpointManager
from optrun.training.exchange import Requests
from optrun.training.progress import Progress
from optrun.training.replicas import refuse_different_weights
from optrun.training.setup import TrainingSetup
from optrun.training.signals import SignalHandler


@dataclass(eq=False)
class Saving:
    """Saves when it is due or requested, and ends the run at a signal or the time budget."""

    setup: TrainingSetup
    """The run."""
    training: TrainingContext
    """Has the requests of callbacks, and shows notes."""
    checkpoints: CheckpointManager
    signal_handler: SignalHandler
    """Requests by signal."""
    progress: Progress
    """Has the clock; the time of a save is left out of its rates."""
    started: float
    """Start of the run on that clock, from which the time budget counts."""
    finish_pending_step: Callable[[], object]
    """Reads loss and gradient norm of the last step, and counts the step."""

    def __post_init__(self) -> None:
        """Record the first step of this start of the run."""
        self.state = self.setup.state
        self.world = self.setup.train_step.world
        self._first_step = self.state.global_step

    def requests(self) -> Requests:
        """Collect the requests to this rank for the exchange of all ranks; clear the one to save.

        One process needs no exchange: they are empty, and `save_if_due` and `stop_if_requested`
        read its signals. The clock of rank 0 decides on the time budget, for at least one step.
        """
        if self.world.size == 1:
            return Requests()
        stop = self.signal_handler.stop_signal or 0  # 0: none; -1: the time budget
        has_done_a_step = self.state.global_step > self._first_step
        if not stop and self.world.is_main and has_done_a_step and self._time_is_spent():
            stop = -1
        save = self.signal_handler.take_save_request()
        return Requests(stop, save, is_writing_done=not self.checkpoints.writing)

    def save_if_due(self, *, last: bool, evaluated: bool) -> None:
        """Save a checkpoint if it is scheduled, requested, the last one or among the best.

        Every rank must call it. It waits for the save before, and returns while the files of this
        one are still written in the background. A request to save is cleared in any case; if saving
        is disabled, nothing else happens.

        Args:
            last: Whether it is the last step of this start, which is always saved.
            evaluated: Whether the step was evaluated, so that it may be among the best.

        Raises:
            OptrunError: Ranks have different weights.
            StorageError: As `CheckpointManager.save`.
        """
        # 1. Take the request of a signal or callback, which is cleared, also if nothing is saved.
        # (Several ranks exchanged that of a signal before the step.)
        if self.world.size == 1:
            self.training.save_requested |= self.signal_handler.take_save_request()
        is_requested = self.training.save_requested
        self.training.save_requested = False

        # 2. Decide. Whether the step is among the best is looked up on rank 0, which deletes old
        # checkpoints; the others get its answer.
        checkpoints = self.checkpoints
        step = self.state.global_step
        if not checkpoints.enabled:
            return
        due = last or is_requested or checkpoints.is_scheduled(step)
        if not due and evaluated:
            due = self.world.broadcast(self.world.is_main and checkpoints.is_among_best())

        # 3. Save; the time of it does not count in the rates.
        if due:
            start = self.progress.clock()
            beat(Phase.saving, step)
            refuse_different_weights(self.setup.model, self.world, step)
            checkpoints.save(last=last)  # copies the state, and returns before it is written
            self.progress.exclude_seconds(self.progress.clock() - start)

    def save_what_is_done(self) -> None:
        """Save the finished steps of this start before the run ends with an error.

        Does nothing on several ranks, without a finished step, or in the middle of an update. A
        note says what was saved; an error of the save is only noted.

        A pending step has started its update, and its loss and gradient norm are not read yet; it
        is finished, and counted, first. An update whose step is not counted yet
        (`TrainStep.has_uncounted_update`) is not saved: the weights would belong to no step.

        Raises:
            NonFiniteError: The last step turns out to have a non-finite loss or gradient norm.
        """
        # 1. Is there something to save? On several ranks the others would have to take part, and do
        # not know of the error.
        if self.world.size > 1:
            return
        self.finish_pending_step()  # may count one more step
        step = self.state.global_step
        if step == self._first_step or not self.checkpoints.enabled:
            return
        if self.setup.train_step.has_uncounted_update:
            return

        # 2. Save it. The error that ends the run matters more than one of the save.
        try:
            self.checkpoints.save_now()
        except (Exception, SystemExit) as error:
            self.training.note(
                f"warning: step {step} could not be saved: {type(error).__name__}: {error}"
            )
        else:
            self.training.note(f"step {step} is saved, before the run ends with an error")

    def stop_if_requested(self, *, before_step: bool = False) -> None:
        """End the run of one process if a signal asked for it or the time budget is spent.

        Args:
            before_step: Whether a step follows. Then only a signal counts, so that each start does
                at least one step.

        Raises:
            StoppedEarly: As `save_and_stop`.
        """
        if self.world.size > 1:
            return  # several ranks agree on it before the next step's forward passes
        received = self.signal_handler.stop_signal
        if received is not None or (self._time_is_spent() and not before_step):
            self.save_and_stop(received or -1)  # -1: the time budget

    def _time_is_spent(self) -> bool:
        """Tell whether `training.max_seconds` have passed since the start; never if it is null."""
        budget = self.setup.config.max_seconds
        return budget is not None and self.progress.clock() - self.started >= budget

    def save_and_stop(self, request: int) -> NoReturn:
        """Save the last finished step, and end the run.

        Before the first step there is nothing to save: a resume starts again. With
        `checkpoint=none` nothing is ever saved: the command in the message begins at step 0.

        Args:
            request: Number of the signal; -1: the time budget is spent.

        Raises:
            StoppedEarly: Always, unless the save fails; with the command that continues the run,
                or begins it again.
            StorageError: The save was refused.
            OptrunError: Ranks have different weights.
        """
        self.finish_pending_step()  # may count one more step
        step = self.state.global_step
        run_dir = self.training.run_dir
        resume_command = self.training.command(f"resume={run_dir}")
        # 1. Why.
        if request > 0:
            why = f"{signal.Signals(request).name} received"
        else:
            seconds = self.setup.config.max_seconds
            why = f"the time budget is spent (training.max_seconds={seconds:g})"

        # 2. There is nothing to save, or nothing may be saved.
        if not self.checkpoints.enabled:
            raise StoppedEarly(
                f"{why} after step {step}; checkpoint=none: nothing was saved. Begin again at step"
                " 0 with: " + self.training.command("resume=auto", f"hydra.run.dir={run_dir}")
            )
        if step == 0:
            raise StoppedEarly(
                f"{why} before the first step: there is nothing to save yet. Start again with:"
                f" {resume_command} (or the same command with resume=auto)"
            )

        # 3. Save.
        refuse_different_weights(self.setup.model, self.world, step)
        self.checkpoints.save_now()
        raise StoppedEarly(
            f"{why} after step {step} of {self.setup.total_steps}: everything is saved. Go on with:"
            f" {resume_command}"
        )
