"""When to step, log, evaluate, save and stop."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

from optrun.artifacts.checkpoint import Snapshot
from optrun.artifacts.run_manifest import RunManifest
from optrun.config.schema.checkpoint import CheckpointConfig, OnStorageError
from optrun.config.schema.training import OnNonfinite, TrainingConfig
from optrun.data.loader import Batch
from optrun.errors import StoppedEarly, StorageError
from optrun.training import failures, nonfinite
from optrun.training.checkpointing import CheckpointManager, describe_values
from optrun.training.device import peak_memory_bytes
from optrun.training.display import Display
from optrun.training.divergence import Divergence
from optrun.training.evaluation import Evaluator
from optrun.training.metrics_log import MetricsLogger
from optrun.training.ranking import Ranking
from optrun.training.rates import learning_rates
from optrun.training.setup import TrainingSetup
from optrun.training.signals import SignalHandler, Stopped
from optrun.training.state import RandomStates, TrainState, digest_of_batches
from optrun.training.step import StepResult
from optrun.training.throughput import Throughput


class Loop:
    """Trains from where the state stands to the last step.

    Args:
        setup: Model, data and step.
        manifest: Of the run; its lock is held.
        training: How long and how often.
        saving: When to save and what to keep.
        ranking: Which checkpoint is best.
        total: Optimizer steps in all.
        state: Where the run stands.
        snapshot: Copies everything, given the random states to put into it.
        restore: Puts model, optimizer and random states back to a step, and returns the counters from there.
        display: Eyes.
        track: Takes each record to other trackers.
        summarise: Called when the summary should be brought up to date.
        signal_handler: Requests by signal.
        stop_at: Pause after this many optimizer steps, evaluated and saved; None: go to the end.
        clock: Seconds, monotonic.
        begun: When the run was started, on that clock; None: now. The time budget counts from there.
    """

    def __init__(
        self,
        *,
        setup: TrainingSetup,
        manifest: RunManifest,
        training: TrainingConfig,
        saving: CheckpointConfig,
        ranking: Ranking,
        total: int,
        state: TrainState,
        snapshot: Callable[[dict[str, Any]], Snapshot],
        restore: Callable[[int], TrainState],
        display: Display,
        track: Callable[[Mapping[str, Any]], None],
        summarise: Callable[[], None],
        signal_handler: SignalHandler,
        stop_at: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        begun: float | None = None,
    ) -> None:
        self.setup = setup
        self.run = run = manifest.run
        self.training = training
        self.total = total
        self.state = state
        self.display = display
        self.track = track
        self.summarise = summarise
        self.signal_handler = signal_handler
        self.end = total if stop_at is None else min(total, stop_at)
        self.clock = clock
        self.device = setup.train_step.device
        self.records = MetricsLogger(manifest, self._metrics_refused)
        self.on_storage_error = saving.on_storage_error
        self.saving = CheckpointManager(
            manifest=manifest,
            config=saving,
            ranking=ranking,
            state=state,
            snapshot=lambda random: snapshot((random or RandomStates(self.device)).packed()),
            sync=self.records.sync,
            note=display.note,
            clock=clock,
            keep_scheduled=training.on_nonfinite is OnNonfinite.rollback,
        )
        self.evaluation = Evaluator(setup, training, state, ranking, signal_handler, self._waiting, display.evaluating)
        self.divergence = Divergence(setup, run, training, state, self.saving, restore, display.note)
        self._started = clock() if begun is None else begun
        self._begun = clock()
        self._seconds_before = state.seconds
        self.window = Throughput(clock)
        self._steps: Iterator[list[Batch]] | None = None

    def __call__(self) -> None:
        """Train to the end.

        Raises:
            NonFiniteError: Loss or gradient is NaN or inf and the policy is to stop, or it happened too often; or a
                weight is NaN or inf after an update.
            StoppedEarly: A signal, the time budget or `stop_at`; everything is saved.
            StorageError: A checkpoint could not be saved.
        """
        self._begun = self.clock()
        self.window.empty()
        self._seconds_before = self.state.seconds
        self.display.start(self.state.global_step, self.total)
        of_workers = failures.of_workers(lambda: self.state.global_step, self._examples)
        with self.records, contextlib.closing(self.saving), of_workers:
            try:
                if self.training.on_nonfinite is OnNonfinite.rollback and self.state.global_step == 0:
                    self.saving.save()  # somewhere to go back to
                if self.state.unfinished:
                    self._finish_step()
                while self.state.global_step < self.end:
                    self._stop_if_asked(before_step=True)
                    self._one_step()
                    self._stop_if_asked()
                if self.saving.enabled:
                    self.saving.save_now()
            finally:
                self._close_data()
                failures.kill_workers()  # one that is stuck hears no other signal, and is waited for when Python ends
                self.display.stop()
        if self.state.global_step < self.total:
            raise StoppedEarly(f"paused after step {self.end} of {self.total} as asked; everything is saved.")

    # One step ---------------------------------------------------------------------------------------------------

    def _one_step(self) -> None:
        micro_batches = self._fetch()
        before = RandomStates(self.device)
        # Those of this step: the scheduler moves them on.
        self.state.lrs = learning_rates(self.setup.train_step.optimizer.param_groups)
        with failures.of_memory(self.state.global_step, micro_batches):
            result = self.setup.train_step(micro_batches)
        report = self.divergence.judge(result, micro_batches, before)
        if report is not None:
            self._roll_back(report)
            return
        self._count(result, micro_batches)
        self.state.unfinished = True
        self._finish_step()
        if self.saving.enabled:
            self.saving.poll()

    def _fetch(self) -> list[Batch]:
        """The next step's batches; nothing is lost where a request to stop ends the wait for them."""
        try:
            with self.signal_handler.immediate():
                if self._steps is None:
                    self._before_fork()
                    self._steps = self.setup.train_loader.training(self.setup.plan, self.state.position)
                with self._waiting():
                    return next(self._steps)
        except Stopped:
            self._stop_if_asked(before_step=True)
            raise AssertionError("unreachable") from None
        except RuntimeError:
            # A signal to the whole group may end a worker that was just born before it sets such signals aside.
            self._stop_if_asked(before_step=True)
            raise

    def _examples(self) -> str:
        """The examples of the next step."""
        numbers = [index for keys in next(self.setup.plan.steps(self.state.position)) for _, index in keys]
        return f"{', '.join(map(str, numbers[:16]))}{', ...' if len(numbers) > 16 else ''}"

    def _waiting(self) -> AbstractContextManager[None]:
        if not self.setup.train_loader.workers:  # then what goes wrong in the data is what it says it is
            return contextlib.nullcontext()
        return failures.waiting_for_workers(self.training.dataloader_timeout)

    def _before_fork(self) -> None:
        """Loader workers are forked from this process; no other thread may hold a lock at that moment."""
        if self.setup.train_loader.workers and self.saving.enabled:
            self.saving.wait()

    def _close_data(self) -> None:
        if self._steps is not None:
            self._steps.close()  # type: ignore[attr-defined]  # ends the loader's workers
            self._steps = None

    def _finish_step(self) -> None:
        """What follows an update: evaluation, the metrics line, the save.

        A request to stop leaves an evaluation where it is; the resumed run begins with it.
        """
        record: dict[str, Any] = {}
        unscheduled = []
        step, last = self.state.global_step, self.state.global_step == self.end
        due = step % self.training.logging_steps == 0
        due_eval = self.evaluation.due()
        evaluated: dict[str, float] = {}
        if due_eval or last:
            try:
                evaluated = self.evaluate()
            except Stopped:
                self._stop(step)
        if (due or last) and self.state.window_weight:
            record.update(self._training_values())
            if not due:
                unscheduled += ["train/", "lr/", "perf/"]
        record.update(evaluated)
        watched = self.setup.train_step.scheduler.metric
        if due_eval and evaluated and watched is not None:
            # Not at an end that was not due: a prolonged run has no evaluation there.
            self.setup.train_step.scheduler.observe(evaluated[watched])
        if last and evaluated and not due_eval:
            unscheduled.append("eval/")
        window = (self.state.window_loss, self.state.window_weight, self.state.window_grad_norm)
        if due or last:
            self.state.window_loss, self.state.window_weight, self.state.window_grad_norm = 0.0, 0, 0.0
            self.window.empty()
        self._write(record, unscheduled)
        if last and not due:
            # Should the run be prolonged, this window goes on as if it had not ended here.
            self.state.window_loss, self.state.window_weight, self.state.window_grad_norm = window
        self.state.unfinished = False
        self._save_if_due(last=last, evaluated=due_eval or last)

    def _roll_back(self, report: nonfinite.Report) -> None:
        self.saving.wait()
        self._close_data()
        said = self.divergence.roll_back(report)
        self.records.go_back(self.state.global_step)
        self.saving.save()  # in place of the one it went back to: a run that is stopped now does not go there again
        self.window.empty()
        self.display.note(said)

    def _count(self, result: StepResult, micro_batches: list[Batch]) -> None:
        state = self.state
        state.global_step += 1
        state.batches_digest = digest_of_batches(state.batches_digest, micro_batches)
        for batch in micro_batches:
            tokens, samples = self.setup.task.sizes(batch)
            state.tokens += tokens
            state.samples += samples
            self.window.add(tokens, samples)
        if result.finite:
            state.window_loss += result.loss * result.weight
            state.window_weight += result.weight
            state.grad_norm = result.grad_norm
            state.window_grad_norm = max(state.window_grad_norm, result.grad_norm)
        state.seconds = self._seconds_before + self.clock() - self._begun
        self.display.step(
            state.global_step, {"train/loss": result.loss, "train/grad_norm": result.grad_norm, **state.lrs}
        )

    # What is written --------------------------------------------------------------------------------------------

    def _training_values(self) -> dict[str, Any]:
        state = self.state
        values: dict[str, Any] = {
            "train/loss": state.window_loss / state.window_weight,
            "train/grad_norm": state.grad_norm,
            "train/grad_norm_max": max(state.window_grad_norm, state.grad_norm),
            **state.lrs,
        }
        if state.skipped_steps:
            values["train/skipped_steps"] = state.skipped_steps
        if state.rollbacks:
            values["train/rollbacks"] = state.rollbacks
        values.update(self.window.rates())
        values["perf/peak_memory_bytes"] = peak_memory_bytes(self.device)
        values.update(describe_values(self.saving))
        return values

    def _write(self, record: dict[str, Any], unscheduled: list[str]) -> None:
        if not record:
            return
        state = self.state
        epoch = state.position / self.setup.plan.steps_per_epoch
        whole = {"step": state.global_step, "epoch": round(epoch, 6), "time": round(state.seconds, 3), **record}
        if unscheduled:
            whole["unscheduled"] = unscheduled
        self.records.write(whole)
        for name, value in record.items():
            state.last[name] = value
        self.display.step(state.global_step, record)
        self.display.record(whole)
        self.track(whole)
        try:
            self.summarise()
        except OSError as error:
            self._summary_refused(error)

    def _metrics_refused(self, error: OSError) -> None:
        self._refused(f"{self.run.metrics}: {error.strerror or error}; the line is kept and written later.", error)

    def _summary_refused(self, error: OSError) -> None:
        self._refused(f"{self.run.summary}: {error.strerror or error}; it is written again later.", error)

    def _refused(self, sentence: str, error: OSError) -> None:
        if self.on_storage_error is OnStorageError.stop:
            raise StorageError(sentence) from error
        self.display.note(f"warning: {sentence}")

    # Evaluation, saving, stopping -------------------------------------------------------------------------------

    def evaluate(self) -> dict[str, float]:
        """Metrics of the evaluation split, with prefix; the time it takes is not that of training.

        Raises:
            Stopped: There was a request to stop before the end.
        """
        self._before_fork()
        begun = self.clock()
        values = self.evaluation()
        self.window.leave_out(self.clock() - begun)
        return values

    def _save_if_due(self, *, last: bool, evaluated: bool) -> None:
        saving, step = self.saving, self.state.global_step
        if not saving.enabled:
            return
        asked, self.signal_handler.save_requested = self.signal_handler.save_requested, False
        due = last or asked or saving.scheduled(step)
        due = due or (evaluated and saving.among_best())
        if due:
            begun = self.clock()
            saving.save()
            self.window.leave_out(self.clock() - begun)

    def _stop_if_asked(self, *, before_step: bool = False) -> None:
        """End here where a signal or the time budget says so.

        Args:
            before_step: Only a signal counts: each start of a run makes at least one step of progress.
        """
        if self.state.global_step >= self.end:
            return
        budget = self.training.max_seconds
        spent = budget is not None and not before_step and self.clock() - self._started >= budget
        if self.signal_handler.stop_requested or spent:
            self._stop(self.state.global_step)

    def _stop(self, step: int) -> None:
        """Save and end.

        Raises:
            StoppedEarly: Always.
            StorageError: The save was refused.
        """
        signal = self.signal_handler.stop_signal
        why = (
            f"{signal.name} received"
            if signal is not None
            else f"the time budget is spent (training.max_seconds={self.training.max_seconds:g})"
        )
        if not self.saving.enabled:
            raise StoppedEarly(
                f"{why} after step {step}; checkpoint=none: nothing was saved. Begin again at step 0 with: optrun "
                f"resume=auto hydra.run.dir={self.run.path}"
            )
        if step == 0:
            raise StoppedEarly(
                f"{why} before the first step: there is nothing to save yet. Start again with: {self._again()}"
            )
        self.saving.save_now()
        raise StoppedEarly(
            f"{why}: stopped after step {step} of {self.total}, everything is saved. Go on with: {self._again()}"
        )

    def _again(self) -> str:
        auto = " (or the same command with resume=auto)" if self.state.global_step == 0 else ""
        return f"optrun resume={self.run.path}{auto}"
