"""The order of events of training: step, evaluate, log, save, stop."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass

from optrun.base.errors import NonFiniteError, StoppedEarly, StorageError
from optrun.base.plain import PlainDict, PlainMapping
from optrun.config.schema.training import OnNonfinite
from optrun.data.loader import Batch
from optrun.distributed.heartbeat import Phase, beat
from optrun.training import failures
from optrun.training.batches import Batches
from optrun.training.checkpointing import CheckpointManager
from optrun.training.divergence import Divergence
from optrun.training.evaluate import Evaluator
from optrun.training.exchange import GlobalStep
from optrun.training.hooks import Hooks
from optrun.training.nonfinite import NonfiniteStep
from optrun.training.progress import Progress, learning_rates
from optrun.training.ranking import remember_best
from optrun.training.saving import Saving
from optrun.training.setup import TrainingSetup
from optrun.training.signals import SignalHandler, Stopped, kill_workers
from optrun.training.state import RandomStates
from optrun.training.step import PendingStep, StepResult


@dataclass(eq=False)
class Loop:
    """Trains from the present step to the last one.

    The hooks decide what is done with a step, a line of metrics, an evaluation or a checkpoint.
    """

    setup: TrainingSetup
    """Model, data and length of the run."""
    hooks: Hooks
    """Metrics log, display, trackers, summary, early stopping, the user's callbacks."""
    evaluator: Evaluator
    checkpoints: CheckpointManager
    divergence: Divergence
    """Handles steps with a NaN or infinite loss or gradient."""
    signal_handler: SignalHandler
    """Requests by signal."""
    _: KW_ONLY
    stop_at: int | None
    """Pause after this many optimizer steps, evaluated and saved; None: go to the end."""
    clock: Callable[[], float] = time.monotonic
    """Seconds."""
    started: float | None = None
    """When the run was started, on that clock; None: now. The time budget counts from there."""

    def __post_init__(self) -> None:
        """Create the parts for fetching, counting and saving."""
        setup = self.setup
        self.state = setup.state
        self.training = self.hooks.training
        self.planned_end = (
            setup.total_steps if self.stop_at is None else min(setup.total_steps, self.stop_at)
        )
        self.progress = Progress(setup, self.clock)
        started = self.clock() if self.started is None else self.started
        self.saving = Saving(
            setup,
            self.training,
            self.checkpoints,
            self.signal_handler,
            self.progress,
            started,
            self._finish_pending_step,
        )
        self.batches = Batches(setup, self.signal_handler, self._before_fork)
        self.checkpoints.on_save = self.hooks.on_save
        self.reason_to_wait = setup.train_step.world.broadcast(
            setup.train_step.reason_to_wait() or self.hooks.reason_to_wait()
        )
        """Why loss and gradient norm of each step are read before its update; None: the update
        starts without them. On several ranks rank 0 decides, which has the callbacks."""
        self._pending: tuple[PendingStep, list[Batch]] | None = None
        """The started step whose loss and gradient norm are still unread, and its micro-batches."""

    @property
    def end(self) -> int:
        """The last step of this start; a request to stop may lower it."""
        stop = self.training.stop
        if stop is None:
            return self.planned_end
        return min(self.planned_end, stop.step)

    def __call__(self) -> None:
        """Train to the end.

        Raises:
            NonFiniteError: Loss or gradient is NaN or inf and the policy is to stop, or it happened
                too often; or a weight is NaN or inf after an update.
            StoppedEarly: A signal, the time budget or `stop_at`; everything is saved.
            StorageError: A checkpoint could not be saved.
            OptrunError: A callback raised.
        """
        self.progress.begin()
        status = "failed"
        try:
            with (
                contextlib.closing(self.checkpoints),
                failures.explain_worker_failure(
                    self.batches.steps_before, self.batches.next_examples
                ),
                contextlib.ExitStack() as stack,
            ):
                # Python would wait for a stuck worker when it exits.
                stack.callback(kill_workers)
                stack.callback(self.batches.close)
                try:
                    self._train()
                except (StoppedEarly, NonFiniteError, StorageError):
                    raise
                except (Exception, SystemExit):
                    self.saving.save_what_is_done()
                    raise
            status = "finished"
        except StoppedEarly:
            status = "interrupted"
            raise
        finally:
            self.hooks.on_train_end(status)

    def _train(self) -> None:
        """Train to the last step, with evaluations, saves and stops; then save the end.

        Raises:
            StoppedEarly: `stop_at` was reached before the last step of the run, among others.
        """
        state = self.state

        # 1. Before the first step of this start.
        self.hooks.on_train_begin()
        if state.is_before_first_step:  # of the whole run, and not evaluated yet
            self._evaluate_before_training()
        if state.global_step < self.end:  # the run had ended earlier, and is prolonged
            state.drop_end_results()
        if self.setup.config.on_nonfinite is OnNonfinite.rollback and state.global_step == 0:
            self.checkpoints.save()  # a checkpoint for a rollback of the first steps
        if state.unfinished:  # an earlier start was stopped between a step and its evaluation
            self._evaluate_log_and_save()

        # 2. The steps. A request to stop raises StoppedEarly. After the last step there is nothing
        # to stop; the last step is never left pending.
        while state.global_step < self.end:
            self.saving.stop_if_requested(before_step=True)
            self._step()
            if state.global_step < self.end:
                self.saving.stop_if_requested()

        # 3. The end: of the run, by a callback's request, or at `stop_at`, which alone is an error.
        if self.checkpoints.enabled:
            self.checkpoints.save_now()
        stop = self.training.stop
        is_stopped = stop is not None and state.global_step >= stop.step
        if state.global_step < self.setup.total_steps and not is_stopped:
            raise StoppedEarly(
                f"paused after step {self.end} of {self.setup.total_steps} as asked; everything is"
                " saved."
            )

    def _evaluate_before_training(self) -> None:
        """Evaluate before the first step, and write the first line of metrics.

        Early stopping, the schedule, samples and the ranking of checkpoints ignore this evaluation:
        `on_log` is called, `on_evaluate` is not. Its time is not counted as training.
        """
        metrics = self._evaluation_metrics(trained=False)
        self.progress.begin()  # the clock of training starts anew
        if metrics:
            self.state.before_training = metrics
            self._log(metrics, [])

    # One step
    # ----------------------------------------------------------------------------------------------

    def _step(self) -> None:
        """Train one step; loss and gradient norm may stay unread until the next call.

        A step is pending from the start of its update until they are read. Each call starts step n
        while step n - 1 is pending, so that the device never waits for the host:

        1. forward and backward of step n, on the weights after step n - 1;
        2. read loss and gradient norm of step n - 1; count, evaluate, log and save it;
        3. start the update of step n, which is pending from here on.

        If step n - 1 turns out not to be finite in 2, it is repeated, and the gradients of step n
        are dropped: the next call fetches the data of step n again. A step that must be read before
        its own update (`reason_to_wait`), or that has no target, is never pending.
        """
        state = self.state
        train_step = self.setup.train_step

        # 0. Fetch the data, and exchange facts and requests with the other ranks. The state counts
        # a step when its result is read, so a pending one is not in `state.position` yet.
        micro_batches = self._fetch()
        pending_steps = 0 if self._pending is None else 1
        position = state.position + pending_steps
        step = train_step.exchange(
            micro_batches, self.saving.requests(), self.setup.plan.micro_batches(position)
        )
        self.training.save_requested |= step.requests.save
        if step.requests.stop:
            self.saving.save_and_stop(step.requests.stop)  # raises, after the pending step

        # A step that is never pending. If the one before it was repeated, its data are dropped.
        if self.reason_to_wait is not None or step.total_weight == 0:
            was_repeated = self._finish_pending_step()
            if not was_repeated:
                self._step_and_wait(micro_batches, step)
            return

        # 1. Forward and backward, up to clipping.
        beat(Phase.training)
        try:
            steps_done = state.global_step + pending_steps
            with failures.explain_out_of_memory(steps_done, micro_batches):
                pending = train_step.compute_gradients(micro_batches, step, position)
        except (Exception, SystemExit):
            if train_step.world.size == 1:  # other ranks would have to take part
                self._finish_pending_step()  # its error, if it has one, came first
            raise

        # 2. The result of the step before. The new gradients are worthless if it was repeated.
        was_repeated = self._finish_pending_step()
        if was_repeated:
            return

        # 3. The update, which the device leaves out if loss or norm is not finite. The scheduler
        # changes the learning rates when the result is read, so they are noted before.
        state.lrs = learning_rates(train_step.optimizer.param_groups)
        train_step.start_update(pending)
        self._pending = (pending, micro_batches)
        if self._must_read_result_of(state.global_step + 1):
            # Do not leave it pending. An evaluation or a save needs the memory of the gradients,
            # which the next step would drop otherwise; and now none come after it to be dropped.
            train_step.optimizer.zero_grad(set_to_none=True)
            self._finish_pending_step()

    def _must_read_result_of(self, step: int) -> bool:
        """Tell whether a step's result, or the state after it, is needed before the next step."""
        checkpoints = self.checkpoints
        return (
            step >= self.end
            or step % self.setup.config.logging_steps == 0
            or self.evaluator.due(step)
            or (checkpoints.enabled and checkpoints.is_scheduled(step))
            or self.training.save_requested
            or (self.signal_handler.save_requested and self.setup.train_step.world.size == 1)
        )

    def _finish_pending_step(self) -> bool:
        """Read loss and gradient norm of the pending step, if there is one, and record the step.

        If they are not finite, the update changed no weight and no state tensor: it read on the
        device that they are not. Then the host's counters are reverted, and the step is repeated,
        reading loss and norm before its update, so that its gradients can be described.

        Returns:
            Whether the step was repeated: then the caller must drop the micro-batches that were
            fetched, and the gradients that were computed, after it.
        """
        if self._pending is None:
            return False
        pending, micro_batches = self._pending
        self._pending = None
        train_step = self.setup.train_step

        # 1. The usual case: the update is valid.
        if pending.is_finite:  # waits for the device
            train_step.confirm_update()  # steps the schedule
            self._record_step(train_step.read_result(pending), pending.step, micro_batches)
            return False

        # 2. Repeat the step. The loader is ahead of it; its micro-batches are here. The next fetch
        # restarts the loader after it, or where a rollback leads.
        train_step.revert_update()
        self.batches.close()
        self._step_and_wait(micro_batches, pending.step)
        return True

    def _step_and_wait(self, micro_batches: list[Batch], step: GlobalStep) -> None:
        """Train one step, reading loss and gradient norm before the update; then record it."""
        state = self.state
        train_step = self.setup.train_step
        # With a seed every forward pass seeds the generators, so their states need not be kept.
        states_before = RandomStates(train_step.device) if train_step.seed is None else None
        # The scheduler will change the learning rates, so they are noted before.
        state.lrs = learning_rates(train_step.optimizer.param_groups)
        beat(Phase.training)
        with failures.explain_out_of_memory(state.global_step, micro_batches):
            result = train_step(micro_batches, step, state.position)
        self._record_step(result, step, micro_batches, states_before, drop_gradients=True)

    def _record_step(
        self,
        result: StepResult,
        step: GlobalStep,
        micro_batches: list[Batch],
        states_before: RandomStates | None = None,
        *,
        drop_gradients: bool = False,
    ) -> None:
        """Count a step, then evaluate, log and save if due; or roll back if it is not finite.

        What happens to a step that is not finite is decided by `training.on_nonfinite`: it is
        counted as one without an update, or undone with others by a rollback, or ends the run.
        Every rank must call this for the same step: they evaluate, save and roll back together.

        Args:
            result: Loss and gradient norm of the step, equal on all ranks.
            step: Tokens and samples of each micro-batch, and the requests, over all ranks.
            micro_batches: Micro-batches of the step on this rank.
            states_before: Random states from before the step; None: it does not depend on them.
            drop_gradients: Whether the gradients are those of this step, and not yet of the next
                one. They are dropped to free memory for an evaluation or a save.

        Raises:
            NonFiniteError: The step is not finite and ends the run.
            StoppedEarly: There was a request to stop during an evaluation.
            StorageError: A save failed, with `checkpoint.on_storage_error=stop`.
        """
        train_step = self.setup.train_step

        # 1. A step that is not finite may end the run here, by an error; a description of it comes
        # back if it is to be undone. None: the step is finite, or counts as one without an update.
        nonfinite = self.divergence.apply_policy(result, micro_batches, states_before)
        if nonfinite is not None:
            self._roll_back(nonfinite)
            return

        # 2. Count the step. From here on weights and `global_step` agree, so a checkpoint may be
        # saved. If this start ends before `_evaluate_log_and_save` is done, the next one begins
        # with that.
        self.progress.count(result, step.facts)
        train_step.has_uncounted_update = False
        self.state.unfinished = True

        # 3. Show it to the hooks, while its gradients are still there. They may request a save or a
        # stop.
        self.hooks.on_step(result)
        self._agree_on_requests()
        if drop_gradients:
            train_step.optimizer.zero_grad(set_to_none=True)

        # 4. Evaluate, log, and start to save.
        self._evaluate_log_and_save()

        # 5. Look whether an earlier save has ended. Last, for a failed one may raise: the step is
        # recorded then. All ranks must see the same result, so they look only if the exchange
        # before this step found that no rank was still writing.
        if step.requests.is_writing_done:
            self.checkpoints.poll(together=train_step.world.size > 1)

    def _fetch(self) -> list[Batch]:
        """Fetch the micro-batches of the next step; a signal to stop ends the run instead."""
        try:
            return self.batches.fetch()
        except (Stopped, RuntimeError):
            # A signal to the whole process group may kill a new worker before it ignores signals.
            self.saving.stop_if_requested(before_step=True)
            raise

    def _agree_on_requests(self) -> None:
        """Give every rank the requests of the callbacks on rank 0."""
        world = self.setup.train_step.world
        training = self.training
        if world.size > 1 and self.hooks.may_request:
            requests = (training.stop, training.save_requested)
            training.stop, training.save_requested = world.broadcast(requests)

    def _before_fork(self) -> None:
        """Wait for the checkpoint writer: no thread may hold a lock while workers are forked."""
        if self.setup.train_loader.workers and self.checkpoints.enabled:
            self.checkpoints.wait()

    def _roll_back(self, nonfinite: NonfiniteStep) -> None:
        """Restore the last scheduled checkpoint before a non-finite step, and save it anew.

        The saved state skips the data of the bad step, so that a run stopped now and resumed does
        not meet it again.
        """
        # 1. Let the save in progress end: ranks read the checkpoint only when it is written.
        self.checkpoints.wait()
        self.setup.train_step.world.barrier()

        # 2. Go back; the next fetch restarts the loader at the new position.
        self.batches.close()
        message = self.divergence.roll_back(nonfinite)
        self.hooks.on_rollback()

        # 3. Save, and start a new interval of rates.
        self.checkpoints.save()
        self.progress.reset()
        self.training.note(message)

    # What follows a step
    # ----------------------------------------------------------------------------------------

    def _evaluate_log_and_save(self) -> None:
        """Evaluate, log and save after a step, each if due; everything is due after the last step.

        The state also keeps the results without those that only the end of the run produced: if the
        run is prolonged later, it continues as if it had not ended here. A signal to stop ends an
        evaluation; the resumed run repeats it.

        Example: a run of 25 steps with `logging_steps` and `eval_steps` of 10. Step 25 is evaluated
        and logged although neither is due. Its line says `"unscheduled": ["train/", "lr/", "perf/",
        "eval/"]`; best and last values stay in `state.without_end` as they were after step 20; and
        the sums of the losses of steps 21 to 25 are kept for the line of step 30.

        Raises:
            Exception: The first error of a callback in this step, once the step is logged.
        """
        state = self.state
        evaluation_due = self.evaluator.due(state.global_step)
        line_due = state.global_step % self.setup.config.logging_steps == 0

        # 1. Evaluate, also at the end. Copy first what a prolonged run needs as it is now.
        evaluate = evaluation_due or state.global_step >= self.end
        values_before_end = state.copy_before_end(due=evaluation_due) if evaluate else {}
        metrics = self._evaluate(due=evaluation_due) if evaluate else {}
        last = state.global_step >= self.end  # again: a hook may have requested to stop

        # 2. Compute the metrics of training since the last line, and begin to count anew. There are
        # none if no step since then had a finite loss.
        record: dict[str, float] = {}
        counters_of_line: PlainDict = {}
        if line_due or last:
            if state.window_weight:
                record = {**self.progress.metrics(), **self.checkpoints.metrics()}
            counters_of_line = state.empty_window()
            self.progress.reset()

        # 3. Log both. `unscheduled` has the prefixes of metrics that exist only because the run
        # ends here.
        unscheduled = []
        if record and not line_due:
            unscheduled += ["train/", "lr/", "perf/"]
        if metrics and not evaluation_due:
            unscheduled.append("eval/")
        record.update(metrics)
        if record:
            self._log(record, unscheduled)
        self.training.step_finished = True

        # 4. Keep the values with which a prolonged run continues: those from before, and metrics
        # that were due. Its next line counts from the last line that was due.
        if unscheduled:
            values_before_end["last"] |= _without_prefixes(record, unscheduled)
            state.without_end = values_before_end
        if last and not line_due:
            vars(state).update(counters_of_line)  # puts back what step 2 emptied
        state.unfinished = False

        # 5. Save. An error of a callback ends the run, which saves this step then.
        if self.hooks.failure is not None:
            raise self.hooks.failure
        self.saving.save_if_due(last=last, evaluated=evaluate)

    def _evaluate(self, *, due: bool) -> dict[str, float]:
        """Evaluate, record the best values, and pass the metrics to schedule and hooks.

        Args:
            due: Whether the evaluation is scheduled. If it is not, and only the end of the run
                needs it, the schedule ignores it, and the states of hooks are frozen before.

        Returns:
            Metrics such as `eval/loss`; empty without evaluation rows.

        Raises:
            StoppedEarly: There was a request to stop before the end.
        """
        # 1. Compute the metrics; their time does not count as training.
        start = self.progress.clock()
        metrics = self._evaluation_metrics()
        self.progress.exclude_seconds(self.progress.clock() - start)
        if not metrics:
            return {}

        # 2. Pass them on: to the best values, to a schedule that watches a metric, to the hooks.
        remember_best(self.state, self.setup.ranking, metrics)
        scheduler = self.setup.train_step.scheduler
        if due and scheduler.metric is not None:
            scheduler.observe(metrics[scheduler.metric])
        if not due:  # checkpoints keep the states from before, for a run that is prolonged
            self.hooks.freeze_states()
        self.hooks.on_evaluate(metrics)
        self._agree_on_requests()
        return metrics

    def _evaluation_metrics(self, *, trained: bool = True) -> dict[str, float]:
        """Compute the evaluation metrics of the present weights; empty without evaluation rows.

        Args:
            trained: False before the first step, see `Evaluator`.

        Raises:
            StoppedEarly: There was a request to stop before the end.
        """
        self._before_fork()
        try:
            return self.evaluator(trained=trained)
        except Stopped as stopped:
            # The signal that another rank received, else that of this process; -1: the time budget.
            # It saves the step, and raises StoppedEarly.
            self.saving.save_and_stop(stopped.signal or self.signal_handler.stop_signal or -1)

    def _log(self, metrics: Mapping[str, float], unscheduled: list[str]) -> None:
        """Pass a line of metrics to the hooks, and record its metrics as the last ones.

        Args:
            metrics: Metrics of the present step.
            unscheduled: Prefixes of metrics that only the end of the run produced. They are named
                in the line, and callbacks get the line without them; if nothing else is left, they
                get the whole line, after their states were frozen.

        Example: metrics `{"train/loss": 2.0, "eval/loss": 3.0}` with `unscheduled=["eval/"]`.
        optrun's components get `{"step": 10, ..., "train/loss": 2.0, "eval/loss": 3.0,
        "unscheduled": ["eval/"]}`, the user's callbacks `{"step": 10, ..., "train/loss": 2.0}`.
        """
        state = self.state
        record: PlainDict = {
            "step": state.global_step,
            "epoch": round(self.training.epoch, 6),
            "time": round(state.seconds, 3),
            **metrics,
        }
        if unscheduled:
            record["unscheduled"] = unscheduled
        state.last.update(metrics)

        # Callbacks see what a run without an end here would show them.
        callback_record = _without_prefixes(record, unscheduled)
        has_metric = bool(callback_record.keys() & metrics.keys())
        if not has_metric:  # the whole line exists only because the run ends
            self.hooks.freeze_states()
            callback_record = record
        self.hooks.on_log(record, _without_prefixes(callback_record, ["unscheduled"]))
        self._agree_on_requests()


def _without_prefixes(record: PlainMapping, prefixes: list[str]) -> PlainDict:
    """Return the entries of a record whose names begin with none of the prefixes.

    Example:
        >>> _without_prefixes({"step": 1, "train/loss": 2.0, "eval/loss": 3.0}, ["eval/"])
        {'step': 1, 'train/loss': 2.0}
    """
    return {name: value for name, value in record.items() if not name.startswith(tuple(prefixes))}
