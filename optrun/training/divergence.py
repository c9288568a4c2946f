"""Apply `training.on_nonfinite` to a loss or gradients that are not finite."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from optrun.artifacts.run_dir import RunDir
from optrun.base.errors import NonFiniteError, StorageError
from optrun.config.schema.training import OnNonfinite
from optrun.data.loader import Batch
from optrun.training import nonfinite
from optrun.training.checkpointing import CheckpointManager
from optrun.training.exchange import in_order
from optrun.training.nonfinite import NonfiniteStep
from optrun.training.setup import TrainingSetup
from optrun.training.state import RandomStates, TrainState
from optrun.training.step import StepResult


@dataclass(eq=False)
class Divergence:
    """Judges each step."""

    setup: TrainingSetup
    """What took it."""
    run: RunDir
    """Where a report goes."""
    checkpoints: CheckpointManager
    """Saves the last good state before an end."""
    restore: Callable[[int], TrainState]
    """Puts model, optimizer, random states and callbacks back to a step, and returns the
    counters from there.
    """
    note: Callable[[str], None]
    """Tells the user one line."""

    def judge(
        self, result: StepResult, micro_batches: list[Batch], before: RandomStates | None
    ) -> NonfiniteStep | None:
        """Decide whether the step counts.

        Args:
            result: Of the step.
            micro_batches: Of the step.
            before: Random states from before it; None: the step does not depend on them.

        Returns:
            None where it counts, perhaps with its update left out; what was found where training
            has to go back.

        Raises:
            NonFiniteError: The policy is to stop, or it happened too often.
        """
        state = self.setup.state
        train_step = self.setup.train_step
        config = self.setup.config
        if result.finite or result.weight == 0:
            state.skipped_in_a_row = 0
            return None
        if result.overflow:
            state.skipped_steps += 1
            return None
        world = train_step.world
        count = self.setup.plan.micro_batches(state.position)
        micro_batches = in_order(world.gather_objects(micro_batches), count)
        nonfinite_step = nonfinite.describe(self.setup, result, micro_batches)
        policy = config.on_nonfinite
        if (
            policy is OnNonfinite.skip and not nonfinite_step.bad_weights
        ):  # with such weights every step is like this one
            state.skipped_steps += 1
            state.skipped_in_a_row += 1
            if state.skipped_in_a_row <= config.max_nonfinite_skips:
                train_step.optimizer.zero_grad(set_to_none=True)
                train_step.scheduler.step()
                self.note(
                    f"step {state.global_step + 1}: {nonfinite_step.message}"
                    " The update was left out."
                )
                return None
            nonfinite_step.message += (
                f" That was {state.skipped_in_a_row} times in a row (training.max_nonfinite_skips)."
            )
        reported = self._report(nonfinite_step, micro_batches)
        if policy is OnNonfinite.rollback:
            if state.rollbacks < config.max_rollbacks:
                return nonfinite_step
            nonfinite_step.message += (
                f" Training went back {state.rollbacks} times already (training.max_rollbacks)."
            )
        saved = ""
        if self.checkpoints.enabled and not nonfinite_step.bad_weights:
            # Weights and optimizer are still those from before this step.
            train_step.optimizer.zero_grad(set_to_none=True)
            self.checkpoints.save_now(random=before)
            saved = f" The state before it is in {self.run.checkpoint(state.global_step)}."
        raise NonFiniteError(
            f"step {state.global_step + 1}: {nonfinite_step.message} Nothing was updated."
            f" {reported}{saved} Try a smaller lr, more warm-up, clip=global_norm or"
            " training.precision=fp32; training.on_nonfinite=skip or rollback goes on."
        )

    def _report(self, nonfinite_step: NonfiniteStep, micro_batches: list[Batch]) -> str:
        """Write it for whoever looks at the step later, and say where.

        A disk that refuses it is told, no more: what is done about the step, and the good state,
        count for more.
        """
        if not self.setup.train_step.world.is_main:
            return ""
        try:
            folder = nonfinite.save(self.run, nonfinite_step, micro_batches)
        except StorageError as error:
            self.note(f"warning: {error}")
            return "The batch and a report could not be written."
        return f"The batch and a report are in {folder}."

    def roll_back(self, nonfinite_step: NonfiniteStep) -> str:
        """Go back to the last scheduled checkpoint, with the data moved past the bad step.

        Overwrites weights, optimizer and training state; the seconds of training and the number of
        rollbacks go on. `judge` has checked `max_rollbacks`. The checkpoint and the data depend
        on the configuration and the step alone: a run that was stopped and resumed in between
        takes the same way.

        Returns:
            The message that says so.
        """
        state = self.setup.state
        bad = self.setup.state.global_step
        back = self.restore(self.checkpoints.last_scheduled(bad))
        back.go_on()
        passed = state.passed_steps + bad - back.global_step + 1
        rollbacks = state.rollbacks + 1
        seconds = state.seconds
        vars(state).update(vars(back))
        state.passed_steps = passed
        state.rollbacks = rollbacks
        state.seconds = seconds
        return (
            f"step {bad + 1}: {nonfinite_step.message} Went back to step {state.global_step};"
            f" {bad - state.global_step + 1} steps of data are passed over ({rollbacks} of at most"
            f" {self.setup.config.max_rollbacks})."
        )
