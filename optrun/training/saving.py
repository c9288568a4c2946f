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
    settle: Callable[[], object]
    """Reads the numbers of the last step, and counts the step."""

    def __post_init__(self) -> None:
        """Remember the step at which this start of the run begins."""
        self.state = self.setup.state
        self.world = self.setup.train_step.world
        self._first_step = self.state.global_step

    def requests(self) -> Requests:
        """Collect the requests to this rank, and clear its request to save.

        In one process they are empty: `save_if_due` and `stop_if_asked` read its signals instead.
        """
        if self.world.size == 1:
            return Requests()
        spent = (
            self.world.is_main
            and self._time_is_spent()
            and self.state.global_step > self._first_step
        )
        stop = self.signal_handler.stop_signal or (-1 if spent else 0)
        return Requests(
            stop, self.signal_handler.take_save_request(), written=not self.checkpoints.writing
        )

    def save_if_due(self, *, last: bool, evaluated: bool) -> None:
        """Save after a step if it is scheduled or requested, or among the best ones.

        Args:
            last: Whether it is the last step of this start, which is always saved.
            evaluated: Whether the step was evaluated, so that it may be among the best.

        Raises:
            OptrunError: Ranks have different weights.
            StorageError: As `CheckpointManager.save`.
        """
        if self.world.size == 1:  # several ranks agreed on it before the step
            self.training.save_requested |= self.signal_handler.take_save_request()
        is_requested = self.training.save_requested
        self.training.save_requested = False
        checkpoints = self.checkpoints
        step = self.state.global_step
        if not checkpoints.enabled:
            return
        due = last or is_requested or checkpoints.scheduled(step)
        if due or (
            evaluated and self.world.broadcast(self.world.is_main and checkpoints.among_best())
        ):
            start = self.progress.clock()
            beat(Phase.saving, step)
            refuse_different_weights(self.setup.model, self.world, step)
            checkpoints.save(last=last)
            self.progress.leave_out(self.progress.clock() - start)

    def save_what_is_done(self) -> None:
        """Save the finished steps of this start before the run ends with an error.

        Does nothing on several ranks, without a finished step, or in the middle of an update. A
        note says what was saved; an error of the save is noted, too, and not raised.

        Raises:
            NonFiniteError: The last step turns out to have non-finite numbers.
        """
        if self.world.size > 1:
            return  # other ranks would have to take part, and do not know of the error
        self.settle()
        step = self.state.global_step
        done = self.state.global_step > self._first_step
        if not done or not self.checkpoints.enabled or self.setup.train_step.updating:
            return
        try:
            self.checkpoints.save_now()
        except (Exception, SystemExit) as error:
            self.training.note(
                f"warning: step {step} could not be saved: {type(error).__name__}: {error}"
            )
        else:
            self.training.note(f"step {step} is saved, before the run ends with an error")

    def stop_if_asked(self, *, before_step: bool = False) -> None:
        """End the run if a signal asked for it or the time budget is spent; in one process only.

        Args:
            before_step: Whether only a signal counts, so that each start does at least one step.

        Raises:
            StoppedEarly: As `stop`.
        """
        if self.world.size > 1:
            return  # several ranks agree on it before the next step's forward passes
        received = self.signal_handler.stop_signal
        if received is not None or (self._time_is_spent() and not before_step):
            self.stop(received or -1)

    def _time_is_spent(self) -> bool:
        """Tell whether `training.max_seconds` have passed since the start; never if it is null."""
        budget = self.setup.config.max_seconds
        return budget is not None and self.progress.clock() - self.started >= budget

    def stop(self, request: int) -> NoReturn:
        """Save the last finished step, and end the run; nothing is saved with `checkpoint=none`.

        Args:
            request: Number of the signal; -1: the time budget is spent.

        Raises:
            StoppedEarly: Always, unless the save fails; with the command that continues the run.
            StorageError: The save was refused.
            OptrunError: Ranks have different weights.
        """
        self.settle()
        step = self.state.global_step
        total = self.setup.total_steps
        run_dir = self.training.run_dir
        again = self.training.command(f"resume={run_dir}")
        if request > 0:
            why = f"{signal.Signals(request).name} received"
        else:
            seconds = self.setup.config.max_seconds
            why = f"the time budget is spent (training.max_seconds={seconds:g})"
        if not self.checkpoints.enabled:
            raise StoppedEarly(
                f"{why} after step {step}; checkpoint=none: nothing was saved. Begin again at step"
                " 0 with: " + self.training.command("resume=auto", f"hydra.run.dir={run_dir}")
            )
        if step == 0:
            raise StoppedEarly(
                f"{why} before the first step: there is nothing to save yet. Start again with:"
                f" {again} (or the same command with resume=auto)"
            )
        refuse_different_weights(self.setup.model, self.world, step)
        self.checkpoints.save_now()
        raise StoppedEarly(
            f"{why} after step {step} of {total}: everything is saved. Go on with: {again}"
        )
