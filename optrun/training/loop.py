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
from optrun.training.signals import SignalHandler, Stopped
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
    stop_at: int | None = None
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
                self.batches.explain_worker_failures(),
                contextlib.ExitStack() as stack,
            ):
                # Python would wait for a stuck worker when it exits.
                stack.callback(failures.kill_workers)
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
        self.hooks.on_train_begin()
        if state.is_before_first_step:
            self._evaluate_before_training()
        if state.global_step < self.end:
            state.drop_end_results()
        if self.setup.config.on_nonfinite is OnNonfinite.rollback and state.global_step == 0:
            self.checkpoints.save()  # a checkpoint for a rollback of the first steps
        if state.unfinished:
            self._finish_step()
        while state.global_step < self.end:
            self.saving.stop_if_requested(before_step=True)
            self._step()
            if state.global_step < self.end:
                self.saving.stop_if_requested()
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
        metrics = self._evaluated(trained=False)
        self.progress.begin()
        if metrics:
            self.state.before_training = metrics
            self._log(metrics, [])

    # One step
    # ----------------------------------------------------------------------------------------------

    def _step(self) -> None:
        """Train one step; loss and gradient norm may stay unread until the next call.

        If nothing needs them now, they are read after forward and backward of the next step, just
        before its update, so that the device never waits for the host. If they then turn out not to
        be finite, the gradients of the next step are dropped.
        """
        state = self.state
        train_step = self.setup.train_step
        micro_batches = self._fetch()
        position = state.position + (self._pending is not None)
        step = train_step.exchange(
            micro_batches, self.saving.requests(), self.setup.plan.micro_batches(position)
        )
        self.training.save_requested |= step.requests.save
        if step.requests.stop:
            self.saving.stop(step.requests.stop)
        if self.reason_to_wait is not None or step.total_weight == 0:
            if self._finish_pending_step():
                self._step_and_wait(micro_batches, step)
            return
        # 1. Forward and backward, while the step before is still pending.
        beat(Phase.training)
        try:
            steps_done = position - state.position + state.global_step
            with failures.explain_out_of_memory(steps_done, micro_batches):
                pending = train_step.compute(micro_batches, step, position)
        except (Exception, SystemExit):
            if train_step.world.size == 1:  # other ranks would have to take part
                self._finish_pending_step()  # its error, if it has one, came first
            raise
        # 2. The result of the step before.
        if not self._finish_pending_step():
            return
        # 3. The update. The scheduler will change the learning rates, so they are noted before.
        state.lrs = learning_rates(train_step.optimizer.param_groups)
        train_step.start_update(pending)
        self._pending = (pending, micro_batches)
        if self._must_read_result_of(state.global_step + 1):
            # An evaluation or a save needs the memory of the gradients; else the next step drops
            # them.
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
            False if the step was repeated: gradients computed meanwhile must be dropped.
        """
        if self._pending is None:
            return True
        pending, micro_batches = self._pending
        self._pending = None
        train_step = self.setup.train_step
        if pending.is_finite:
            train_step.confirm_update()
            self._record_step(train_step.read_result(pending), pending.step, micro_batches)
            return True
        train_step.revert_update()
        # The loader is ahead of the step to repeat. That step has its micro-batches; the next fetch
        # restarts the loader after it, or where a rollback leads.
        self.batches.close()
        self._step_and_wait(micro_batches, pending.step)
        return False

    def _step_and_wait(self, micro_batches: list[Batch], step: GlobalStep) -> None:
        """Train one step, reading loss and gradient norm before the update."""
        state = self.state
        train_step = self.setup.train_step
        # With a seed every forward pass seeds the generators, whatever their states were.
        before = RandomStates(train_step.device) if train_step.seed is None else None
        # The scheduler will change the learning rates, so they are noted before.
        state.lrs = learning_rates(train_step.optimizer.param_groups)
        beat(Phase.training)
        with failures.explain_out_of_memory(state.global_step, micro_batches):
            result = train_step(micro_batches, step, state.position)
        self._record_step(result, step, micro_batches, before, drop_gradients=True)

    def _record_step(
        self,
        result: StepResult,
        step: GlobalStep,
        micro_batches: list[Batch],
        before: RandomStates | None = None,
        *,
        drop_gradients: bool = False,
    ) -> None:
        """Count a step, then evaluate, log and save if due; or roll back if it is not finite.

        Every rank must call this for the same step: they evaluate, save and roll back together.

        Args:
            result: Loss and gradient norm of the step, equal on all ranks.
            step: Tokens and samples of each micro-batch, and the requests, over all ranks.
            micro_batches: Micro-batches of the step on this rank.
            before: Random states from before the step; None: it does not depend on them.
            drop_gradients: Whether the gradients are those of this step, and not yet of the next
                one. They are dropped to free memory for an evaluation or a save.
        """
        train_step = self.setup.train_step
        nonfinite = self.divergence.apply_policy(result, micro_batches, before)
        if nonfinite is not None:
            self._roll_back(nonfinite)
            return
        self.progress.count(result, step.facts)
        # The weights and `global_step` agree again, so a checkpoint may be saved.
        train_step.has_uncounted_update = False
        # If this start ends before `_finish_step` is done, the next one begins with that.
        self.state.unfinished = True
        self.hooks.on_step(result)
        self._agree_on_requests()
        if drop_gradients:
            train_step.optimizer.zero_grad(set_to_none=True)
        self._finish_step()
        # Last, for a failed save may raise here: the step is recorded then. All ranks must see the
        # same result, so they poll only after the exchange before this step found that no rank was
        # still writing.
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
        self.checkpoints.wait()
        # Ranks read the checkpoint only when the rank that writes is done.
        self.setup.train_step.world.barrier()
        self.batches.close()
        message = self.divergence.roll_back(nonfinite)
        self.hooks.on_rollback()
        self.checkpoints.save()
        self.progress.reset()
        self.training.note(message)

    # What follows a step
    # ----------------------------------------------------------------------------------------

    def _finish_step(self) -> None:
        """Evaluate, log and save after a step, each if due; everything is due after the last step.

        The state also keeps the results without those that only the end of the run produced: if the
        run is prolonged later, it continues as if it had not ended here. A signal to stop ends an
        evaluation; the resumed run repeats it.
        """
        state = self.state
        # 1. Evaluate.
        evaluation_due = self.evaluator.due(state.global_step)
        line_due = state.global_step % self.setup.config.logging_steps == 0
        evaluate = evaluation_due or state.global_step >= self.end
        values_before_end = state.copy_before_end(due=evaluation_due) if evaluate else {}
        metrics = self._evaluate(due=evaluation_due) if evaluate else {}
        last = state.global_step >= self.end  # again: a hook may have requested to stop
        # 2. Log, and reset the counters of the line. `unscheduled`: prefixes of metrics that exist
        # only because the run ends here.
        record: dict[str, float] = {}
        counters_of_line: PlainDict = {}
        unscheduled = []
        if line_due or last:
            if state.window_weight:
                record = {**self.progress.metrics(), **self.checkpoints.metrics()}
                if not line_due:
                    unscheduled += ["train/", "lr/", "perf/"]
            counters_of_line = state.empty_window()
            self.progress.reset()
        record.update(metrics)
        if metrics and not evaluation_due:
            unscheduled.append("eval/")
        if record:
            self._log(record, unscheduled)
        self.training.step_finished = True
        # 3. Keep the values with which a prolonged run continues.
        if unscheduled:
            values_before_end["last"] |= _without_prefixes(record, unscheduled)
            state.without_end = values_before_end
        if last and not line_due:
            vars(state).update(counters_of_line)
        state.unfinished = False
        # 4. Save.
        if self.hooks.failure is not None:
            raise self.hooks.failure
        self.saving.save_if_due(last=last, evaluated=evaluate)

    def _evaluate(self, *, due: bool) -> dict[str, float]:
        """Evaluate, record the best values, and pass the metrics to schedule and hooks.

        Args:
            due: Whether the evaluation is scheduled. If it is not, and only the end of the run
                needs it, the schedule ignores it, and the states of hooks are frozen before.

        Raises:
            StoppedEarly: There was a request to stop before the end.
        """
        start = self.progress.clock()
        metrics = self._evaluated()
        self.progress.exclude_seconds(self.progress.clock() - start)
        if not metrics:
            return {}
        remember_best(self.state, self.setup.ranking, metrics)
        scheduler = self.setup.train_step.scheduler
        if due and scheduler.metric is not None:
            scheduler.observe(metrics[scheduler.metric])
        if not due:
            self.hooks.freeze_states()
        self.hooks.on_evaluate(metrics)
        self._agree_on_requests()
        return metrics

    def _evaluated(self, *, trained: bool = True) -> dict[str, float]:
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
            self.saving.stop(stopped.signal or self.signal_handler.stop_signal or -1)

    def _log(self, metrics: Mapping[str, float], unscheduled: list[str]) -> None:
        """Pass a line of metrics to the hooks.

        Args:
            metrics: Metrics of the present step.
            unscheduled: Prefixes of metrics that only the end of the run produced. They are named
                in the line, and callbacks get the line without them; if nothing else is left, they
                get the whole line, after their states were frozen.
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
        due = _without_prefixes(record, unscheduled)
        if not due.keys() & metrics.keys():
            self.hooks.freeze_states()
            due = record
        self.hooks.on_log(record, _without_prefixes(due, ["unscheduled"]))
        self._agree_on_requests()


def _without_prefixes(record: PlainMapping, prefixes: list[str]) -> PlainDict:
    """Return the entries of a record whose names begin with none of the prefixes."""
    return {name: value for name, value in record.items() if not name.startswith(tuple(prefixes))}
