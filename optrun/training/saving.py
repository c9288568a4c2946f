"""When training saves, and how a start of it ends early with everything saved."""

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
    """Saves if due or asked for, and stops at a signal or at the end of the time budget."""

    setup: TrainingSetup
    """What is trained."""
    training: TrainingContext
    """What the components ask for, and whom to tell."""
    checkpoints: CheckpointManager
    signal_handler: SignalHandler
    """Requests by signal."""
    progress: Progress
    """Has the clock; the time of a save is none of training."""
    started: float
    """When the run was started, on that clock. The time budget counts from there."""
    settle: Callable[[], object]
    """Reads the numbers of the last step, and counts it."""

    def __post_init__(self) -> None:
        """Note where this start of the run begins."""
        self.state = self.setup.state
        self.world = self.setup.train_step.world
        self._first_step = self.state.global_step

    def requests(self) -> Requests:
        """Collect the requests to this rank.

        A process alone looks by itself at what it was asked.
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
        """Save after a step if that is due or asked for, or if it is among the best."""
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
        """Save the steps of this start before it ends with an error.

        Which is what counts whatever becomes of this.

        Raises:
            NonFiniteError: The last step ends the run.
        """
        if self.world.size > 1:
            return  # other ranks would have to take part, and do not know
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
        """End here if a signal or the time budget says so.

        Args:
            before_step: Only a signal counts: each start of a run makes at least one step of
                progress.
        """
        if self.world.size > 1:
            return  # several ranks agree on it before the next step's forward passes
        received = self.signal_handler.stop_signal
        if received is not None or (self._time_is_spent() and not before_step):
            self.stop(received or -1)

    def _time_is_spent(self) -> bool:
        budget = self.setup.config.max_seconds
        return budget is not None and self.progress.clock() - self.started >= budget

    def stop(self, request: int) -> NoReturn:
        """Save and end.

        Args:
            request: Number of the signal; -1: the time budget is spent.

        Raises:
            StoppedEarly: Always.
            StorageError: The save was refused.
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
