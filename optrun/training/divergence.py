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
from optrun.training.exchange import interleave_ranks
from optrun.training.nonfinite import NonfiniteStep
from optrun.training.setup import TrainingSetup
from optrun.training.state import RandomStates, TrainState
from optrun.training.step import StepResult


@dataclass(eq=False)
class Divergence:
    """Handles steps with a NaN or infinite loss or gradient norm by `training.on_nonfinite`."""

    setup: TrainingSetup
    """The run; `apply_policy` and `roll_back` change its state."""
    run: RunDir
    """The run directory, in which a report of the step is written."""
    checkpoints: CheckpointManager
    """Saves the last good state before the run ends."""
    restore: Callable[[int], TrainState]
    """Puts model, optimizer, random states and callbacks back to a step, and returns the
    counters from there.
    """
    note: Callable[[str], None]
    """Shows the user one line."""

    def apply_policy(
        self, result: StepResult, micro_batches: list[Batch], states_before: RandomStates | None
    ) -> NonfiniteStep | None:
        """Skip a non-finite step, ask for a rollback, or end the run; all ranks call this.

        A finite step passes; so does one whose fp16 loss scale was too high, which is counted as
        skipped. Changes `skipped_steps` and `skipped_in_a_row` of the state. Skipping drops the
        gradients and steps the schedule.

        Args:
            result: Loss and gradient norm of the step.
            micro_batches: Micro-batches of this rank.
            states_before: Random states from before the step, for the checkpoint that is saved if
                the run ends; None: the step does not depend on them.

        Returns:
            None: the step counts. A description of the step: the caller must call `roll_back`.

        Raises:
            NonFiniteError: `training.on_nonfinite=stop`, or too many skips in a row or rollbacks.
                The state before the step is saved first.
        """
        state = self.setup.state
        train_step = self.setup.train_step
        config = self.setup.config
        if result.finite or result.weight == 0:  # loss and norm are NaN without a target
            state.skipped_in_a_row = 0
            return None
        if result.overflow:
            state.skipped_steps += 1
            return None

        # 1. Describe the step, with the micro-batches of all ranks.
        gathered = train_step.world.gather_objects(micro_batches)
        count = self.setup.plan.micro_batches(state.position)
        micro_batches = interleave_ranks(gathered, count)
        nonfinite_step = nonfinite.describe(self.setup, result, micro_batches)
        policy = config.on_nonfinite

        # 2. Skip it: drop its gradients. Not if the weights are not finite, since no later step
        # would be finite either; nor if too many steps in a row were skipped. Then the run ends.
        if policy is OnNonfinite.skip and not nonfinite_step.bad_weights:
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

        # 3. Roll back, which is the caller's work; not too often. Then the run ends.
        if policy is OnNonfinite.rollback:
            if state.rollbacks < config.max_rollbacks:
                return nonfinite_step
            nonfinite_step.message += (
                f" Training went back {state.rollbacks} times already (training.max_rollbacks)."
            )

        # 4. End the run. Weights and optimizer are still those from before this step.
        saved = ""
        if self.checkpoints.enabled and not nonfinite_step.bad_weights:
            train_step.optimizer.zero_grad(set_to_none=True)
            self.checkpoints.save_now(random=states_before)
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
        """Restore the last scheduled checkpoint, and skip the data up to the bad step.

        Overwrites weights, optimizer, random states and training state, except `seconds`,
        `rollbacks` and the skipped steps of data. The checkpoint follows from the configuration and
        the step alone, so that a run that was stopped and resumed meanwhile restores the same one.

        Returns:
            The message for the user.
        """
        state = self.setup.state
        steps_done = state.global_step
        restored = self.restore(self.checkpoints.last_scheduled(steps_done))
        restored.drop_end_results()

        # The data of the undone steps and of the bad step are not used again: after 25 good steps
        # and a checkpoint of step 20 those of 6 steps are skipped.
        skipped_data = steps_done - restored.global_step + 1
        restored.passed_steps = state.passed_steps + skipped_data
        restored.rollbacks = state.rollbacks + 1
        restored.seconds = state.seconds
        vars(state).update(vars(restored))  # in place: other parts hold the same state
        return (
            f"step {steps_done + 1}: {nonfinite_step.message} Went back to step"
            f" {state.global_step}; {skipped_data} steps of data are passed over"
            f" ({state.rollbacks} of at most {self.setup.config.max_rollbacks})."
        )
