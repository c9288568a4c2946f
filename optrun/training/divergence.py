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
    """Decides what happens after a step with a NaN or infinite loss or gradient norm."""

    setup: TrainingSetup
    """The run; `judge` and `roll_back` change its state."""
    run: RunDir
    """Its directory gets the report of such a step."""
    checkpoints: CheckpointManager
    """Saves the last good state before the run ends."""
    restore: Callable[[int], TrainState]
    """Puts model, optimizer, random states and callbacks back to a step, and returns the
    counters from there.
    """
    note: Callable[[str], None]
    """Shows the user one line."""

    def judge(
        self, result: StepResult, micro_batches: list[Batch], before: RandomStates | None
    ) -> NonfiniteStep | None:
        """Decide whether a step counts; all ranks must call this.

        A skipped step counts: the gradients are dropped and the schedule moves on. Changes
        `skipped_steps` and `skipped_in_a_row` of the state.

        Args:
            result: Numbers of the step.
            micro_batches: Micro-batches of this rank.
            before: Random states from before the step, for the checkpoint that is saved if the run
                ends; None: the step does not depend on them.

        Returns:
            None if the step counts; the description of the step if `roll_back` must follow.

        Raises:
            NonFiniteError: `training.on_nonfinite=stop`, or too many skips in a row or rollbacks.
                The state before the step is saved first.
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
            " training.precision=fp32; training.on_nonfinite=skip or rollback continues."
        )

    def _report(self, nonfinite_step: NonfiniteStep, micro_batches: list[Batch]) -> str:
        """Write a report and the batch of the step to the disk, on rank 0 alone.

        Returns:
            A sentence on where they are; empty on other ranks. If the disk refuses, a note says
            why: the policy and the save of the good state matter more.
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
        """Restore the last scheduled checkpoint, and pass over the data up to the bad step.

        Overwrites weights, optimizer, random states and training state; `seconds`, `rollbacks` and
        the passed steps of data go on. Which checkpoint it is depends on the configuration and the
        step alone, so that a run that was stopped and resumed in between does the same.

        Returns:
            The message for the user.
        """
        state = self.setup.state
        steps_done = state.global_step
        restored = self.restore(self.checkpoints.last_scheduled(steps_done))
        restored.go_on()
        # The data of the undone steps and of the bad step are not used again.
        passed = steps_done - restored.global_step + 1
        restored.passed_steps = state.passed_steps + passed
        restored.rollbacks = state.rollbacks + 1
        restored.seconds = state.seconds
        vars(state).update(vars(restored))
        return (
            f"step {steps_done + 1}: {nonfinite_step.message} Went back to step"
            f" {state.global_step}; {passed} steps of data are passed over ({state.rollbacks} of at"
            f" most {self.setup.config.max_rollbacks})."
        )
