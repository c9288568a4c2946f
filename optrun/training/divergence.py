"""Loss or gradients that are not finite: what `training.on_nonfinite` says is done."""

from __future__ import annotations

from collections.abc import Callable

from optrun.artifacts.run_dir import RunDir
from optrun.config.schema.training import OnNonfinite, TrainingConfig
from optrun.data.loader import Batch
from optrun.errors import NonFiniteError, StorageError
from optrun.training import nonfinite
from optrun.training.checkpointing import CheckpointManager
from optrun.training.setup import TrainingSetup
from optrun.training.state import RandomStates, TrainState
from optrun.training.step import StepResult


class Divergence:
    """Judges each step.

    Args:
        setup: What took it.
        run: Where a report goes.
        training: The policy and its bounds.
        state: Where the run stands.
        saving: Saves the last good state before an end.
        restore: Puts model, optimizer and random states back to a step, and returns the counters from there.
        note: Tells the user one sentence.
    """

    def __init__(
        self,
        setup: TrainingSetup,
        run: RunDir,
        training: TrainingConfig,
        state: TrainState,
        saving: CheckpointManager,
        restore: Callable[[int], TrainState],
        note: Callable[[str], None],
    ) -> None:
        self.setup = setup
        self.run = run
        self.training = training
        self.state = state
        self.saving = saving
        self.restore = restore
        self.note = note

    def judge(self, result: StepResult, micro_batches: list[Batch], before: RandomStates) -> nonfinite.Report | None:
        """Whether the step counts.

        Args:
            result: Of the step.
            micro_batches: Of the step.
            before: Random states from before it.

        Returns:
            None where it counts, perhaps with its update left out; the report where training has to go back.

        Raises:
            NonFiniteError: The policy is to stop, or it happened too often.
        """
        state, train_step = self.state, self.setup.train_step
        if result.finite or result.weight == 0:
            state.skipped_in_a_row = 0
            return None
        if result.overflow:
            state.skipped_steps += 1
            return None
        report = nonfinite.describe(self.setup, result, state, micro_batches)
        policy = self.training.on_nonfinite
        if policy is OnNonfinite.skip and not report.bad_weights:  # with such weights every step is like this one
            state.skipped_steps += 1
            state.skipped_in_a_row += 1
            if state.skipped_in_a_row <= self.training.max_nonfinite_skips:
                train_step.optimizer.zero_grad(set_to_none=True)
                train_step.scheduler.step()
                self.note(f"step {state.global_step + 1}: {report.sentence} The update was left out.")
                return None
            report.sentence += f" That was {state.skipped_in_a_row} times in a row (training.max_nonfinite_skips)."
        reported = self._report(report, micro_batches)
        if policy is OnNonfinite.rollback:
            if state.rollbacks < self.training.max_rollbacks:
                return report
            report.sentence += f" Training went back {state.rollbacks} times already (training.max_rollbacks)."
        saved = ""
        if self.saving.enabled and not report.bad_weights:
            # Weights and optimizer are still those from before this step.
            train_step.optimizer.zero_grad(set_to_none=True)
            self.saving.save_now(random=before)
            saved = f" The state before it is in {self.run.checkpoint(state.global_step)}."
        raise NonFiniteError(
            f"step {state.global_step + 1}: {report.sentence} Nothing was updated. {reported}{saved} "
            "Try a smaller lr, more warm-up, clip=global_norm or training.precision=fp32; "
            "training.on_nonfinite=skip or rollback goes on."
        )

    def _report(self, report: nonfinite.Report, micro_batches: list[Batch]) -> str:
        """Write it for whoever looks at the step later; the sentence says where it is.

        A disk that refuses it is told, no more: what is done about the step, and the good state, count for more.
        """
        try:
            folder = nonfinite.save(self.run, report, micro_batches)
        except StorageError as error:
            self.note(f"warning: {error}")
            return "The batch and a report could not be written."
        return f"The batch and a report are in {folder}."

    def roll_back(self, report: nonfinite.Report) -> str:
        """Back to the last scheduled checkpoint, with the data moved past the bad step.

        Which one that is, and which data follows, is a function of the configuration and the step alone: a run that was
        stopped and resumed in between takes the same way.

        Returns:
            The sentence that says so.
        """
        state, bad = self.state, self.state.global_step
        back = self.restore(self.saving.last_scheduled(bad))
        passed, rollbacks, seconds = state.passed_steps + bad - back.global_step + 1, state.rollbacks + 1, state.seconds
        vars(state).update(vars(back))
        state.passed_steps, state.rollbacks, state.seconds = passed, rollbacks, seconds
        return (
            f"step {bad + 1}: {report.sentence} Went back to step {state.global_step}; {bad - state.global_step + 1} "
            f"steps of data are passed over ({rollbacks} of at most {self.training.max_rollbacks})."
        )
