"""The order of events of training: step, evaluate, log, save, stop."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass

from optrun.base.errors import NonFiniteError, StoppedEarly, StorageError
from optrun.base.plain import PlainDict
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
from optrun.training.state import RandomStates, empty_window
from optrun.training.step import StepResult, UnreadStep


@dataclass(eq=False)
class Loop:
    """Trains from where the state stands to the last step.

    What is done with a step, a line of metrics, an evaluation or a checkpoint is up to the hooks.
    """

    setup: TrainingSetup
    """What is trained, and how far."""
    hooks: Hooks
    """Metrics log, display, trackers, summary, early stopping, the user's callbacks."""
    evaluator: Evaluator
    checkpoints: CheckpointManager
    divergence: Divergence
    """Judges each step's numbers."""
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
        self.state = self.setup.state
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
            self._settle,
        )
        self.batches = Batches(setup, self.signal_handler, self._before_fork)
        self.checkpoints.on_save = self.hooks.on_save
        self.reason_to_wait = setup.train_step.world.broadcast(
            setup.train_step.reason_to_wait() or self.hooks.reason_to_wait()
        )
        """Why the numbers of each step are read before its update; None: they are not. On several
        ranks that of rank 0, which has the callbacks."""
        self._unread: tuple[UnreadStep, list[Batch]] | None = None

    @property
    def end(self) -> int:
        """The last step of this start, as far as is known."""
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
                self.batches.naming_workers(),
                contextlib.ExitStack() as stack,
            ):
                stack.callback(
                    failures.kill_workers
                )  # one that is stuck would be waited for when Python ends
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
        """Train to the last step, with evaluations, saves and stops; then save."""
        state = self.state
        self.hooks.on_train_begin()
        if state.untouched:
            self._evaluate_before_training()
        if state.global_step < self.end:
            state.go_on()
        if self.setup.config.on_nonfinite is OnNonfinite.rollback and state.global_step == 0:
            self.checkpoints.save()  # somewhere to go back to
        if state.unfinished:
            self._finish_step()
        while state.global_step < self.end:
            self.saving.stop_if_asked(before_step=True)
            self._step()
            if state.global_step < self.end:
                self.saving.stop_if_asked()
        if self.checkpoints.enabled:
            self.checkpoints.save_now()
        stopped = self.training.stop is not None and state.global_step >= self.training.stop.step
        if state.global_step < self.setup.total_steps and not stopped:
            raise StoppedEarly(
                f"paused after step {self.end} of {self.setup.total_steps} as asked; everything is"
                " saved."
            )

    def _evaluate_before_training(self) -> None:
        """Write the first line.

        The evaluation before the first step, which no time of training is counted for.

        It decides nothing: early stopping, the schedule, samples and the ranking of checkpoints
        begin with training.
        `on_log` hears of it, `on_evaluate` does not.
        """
        metrics = self._evaluated(trained=False)
        self.progress.begin()
        if metrics:
            self.state.before_training = metrics
            self._log(metrics, [])

    # One step
    # ----------------------------------------------------------------------------------------------

    def _step(self) -> None:
        """Train one step.

        If nothing asks for its numbers, they are read while the next one runs: just before the
        update of that one, which must know whether this one counts.
        """
        state = self.state
        train_step = self.setup.train_step
        micro_batches = self._fetch()
        position = state.position + (self._unread is not None)
        step = train_step.exchange(
            micro_batches, self.saving.requests(), self.setup.plan.micro_batches(position)
        )
        self.training.save_requested |= step.requests.save
        if step.requests.stop:
            self.saving.stop(step.requests.stop)
        if self.reason_to_wait is not None or step.total_weight == 0:
            if self._settle():
                self._step_and_wait(micro_batches, step)
            return
        beat(Phase.training)
        try:
            with failures.of_memory(position - state.position + state.global_step, micro_batches):
                unread = train_step.compute(micro_batches, step, position)
        except (Exception, SystemExit):
            if train_step.world.size == 1:  # other ranks would have to take part
                self._settle()  # the step before comes first, also where it ends the run
            raise
        if not self._settle():
            return
        # Those of this step: the scheduler moves them on.
        state.lrs = learning_rates(train_step.optimizer.param_groups)
        train_step.update(unread)
        self._unread = (unread, micro_batches)
        if self._is_read_at(state.global_step + 1):
            # An evaluation or a save has no use for gradients; else the next step drops them.
            train_step.optimizer.zero_grad(set_to_none=True)
            self._settle()

    def _is_read_at(self, step: int) -> bool:
        """Tell whether something asks for the numbers of a step, or for the state after it."""
        config = self.setup.config
        checkpoints = self.checkpoints
        return (
            step >= self.end
            or step % config.logging_steps == 0
            or self.evaluator.due(step)
            or (checkpoints.enabled and checkpoints.scheduled(step))
            or self.training.save_requested
            or (self.signal_handler.save_requested and self.setup.train_step.world.size == 1)
        )

    def _settle(self) -> bool:
        """Read the numbers of the last started step, if they are still unread.

        If they are not finite, its update has changed nothing. The step is then taken once more,
        with the wait, so that its gradients are there to be described.

        Returns:
            Whether the gradients computed since are still those of the next step.
        """
        if self._unread is None:
            return True
        unread, micro_batches = self._unread
        self._unread = None
        train_step = self.setup.train_step
        if unread.is_applied:
            train_step.keep()
            self._count(train_step.read(unread), unread.step, micro_batches)
            return True
        train_step.take_back()
        self.batches.close()  # they are ahead of the step that is taken once more
        self._step_and_wait(micro_batches, unread.step)
        return False

    def _step_and_wait(self, micro_batches: list[Batch], step: GlobalStep) -> None:
        """Train one step, reading its numbers before its update."""
        state = self.state
        train_step = self.setup.train_step
        # Forward passes that are seeded one by one begin with the same numbers whatever the
        # generators held before.
        before = RandomStates(train_step.device) if train_step.seed is None else None
        # Those of this step: the scheduler moves them on.
        state.lrs = learning_rates(train_step.optimizer.param_groups)
        beat(Phase.training)
        with failures.of_memory(state.global_step, micro_batches):
            result = train_step(micro_batches, step, state.position)
        self._count(result, step, micro_batches, before, drop_gradients=True)

    def _count(
        self,
        result: StepResult,
        step: GlobalStep,
        micro_batches: list[Batch],
        before: RandomStates | None = None,
        *,
        drop_gradients: bool = False,
    ) -> None:
        """Count a step or go back, then evaluate, log and save if due.

        Args:
            result: Of the step.
            step: What all ranks know of it.
            micro_batches: Of the step, on this rank.
            before: Random states from before it; None: it does not depend on them.
            drop_gradients: Whether the gradients are still those of this step, which an evaluation
                or a save has no use for.
        """
        train_step = self.setup.train_step
        nonfinite = self.divergence.judge(result, micro_batches, before)
        if nonfinite is not None:
            self._roll_back(nonfinite)
            return
        self.progress.count(result, step.facts)
        train_step.updating = False
        self.state.unfinished = True
        self.hooks.on_step(result)
        self._agree_on_requests()
        if drop_gradients:
            train_step.optimizer.zero_grad(set_to_none=True)
        self._finish_step()
        if self.checkpoints.enabled and step.requests.written:
            self.checkpoints.poll(together=train_step.world.size > 1)

    def _fetch(self) -> list[Batch]:
        """Fetch the micro-batches of the next step, or stop if a signal asks for it."""
        try:
            return self.batches.fetch()
        except (Stopped, RuntimeError):
            # A signal to the whole group may end a worker that was just born before it sets such
            # signals aside.
            self.saving.stop_if_asked(before_step=True)
            raise

    def _agree_on_requests(self) -> None:
        """Give every rank the requests of the callbacks on rank 0."""
        world = self.setup.train_step.world
        if world.size > 1 and self.hooks.may_request:
            stop, save = world.broadcast((self.training.stop, self.training.save_requested))
            self.training.stop = stop
            self.training.save_requested = save

    def _before_fork(self) -> None:
        """Prepare to fork loader workers: no other thread may hold a lock at that moment."""
        if self.setup.train_loader.workers and self.checkpoints.enabled:
            self.checkpoints.wait()

    def _roll_back(self, nonfinite: NonfiniteStep) -> None:
        """Go back to the newest checkpoint before a non-finite step, and save there again."""
        self.checkpoints.wait()
        # the rank that writes has written what all go back to
        self.setup.train_step.world.barrier()
        self.batches.close()
        message = self.divergence.roll_back(nonfinite)
        self.hooks.on_rollback()
        # in place of that one: a run that is stopped now does not go back there again
        self.checkpoints.save()
        self.progress.reset()
        self.training.note(message)

    # What follows a step
    # ----------------------------------------------------------------------------------------

    def _finish_step(self) -> None:
        """Evaluate, log and save if due.

        A request by signal leaves an evaluation where it is; the resumed run begins with it. An
        evaluation or a line that only the end of the run asks for is marked: a prolonged run goes
        on as if it had not ended here.
        """
        state = self.state
        config = self.setup.config
        evaluation_due = self.evaluator.due(state.global_step)
        line_due = state.global_step % config.logging_steps == 0
        evaluate = evaluation_due or self._is_last()
        before = state.before_evaluation(due=evaluation_due) if evaluate else {}
        metrics = self._evaluate(due=evaluation_due) if evaluate else {}
        last = self._is_last()  # a hook may have asked for it
        record: dict[str, float] = {}
        unscheduled = []
        if (line_due or last) and state.window_weight:
            record = {**self.progress.metrics(), **self.checkpoints.metrics()}
            if not line_due:
                unscheduled += ["train/", "lr/", "perf/"]
        record.update(metrics)
        if metrics and not evaluation_due:
            unscheduled.append("eval/")
        window: PlainDict = {}
        if line_due or last:
            empty = empty_window()
            window = {name: getattr(state, name) for name in empty}
            vars(state).update(empty)
            self.progress.reset()
        if record:
            self._log(record, unscheduled)
        self.training.step_finished = True
        if unscheduled:
            before["last"] |= {
                name: value
                for name, value in record.items()
                if not name.startswith(tuple(unscheduled))
            }
            state.without_end = before
        if last and not line_due:
            vars(state).update(window)
        state.unfinished = False
        if self.hooks.failure is not None:
            raise self.hooks.failure
        self.saving.save_if_due(last=last, evaluated=evaluate)

    def _is_last(self) -> bool:
        return self.state.global_step >= self.end

    def _evaluate(self, *, due: bool) -> dict[str, float]:
        """Evaluate, and let the schedule and the hooks know.

        Args:
            due: False where only the end of the run asks for it.

        Raises:
            StoppedEarly: There was a request to stop before the end.
        """
        start = self.progress.clock()
        metrics = self._evaluated()
        self.progress.leave_out(self.progress.clock() - start)
        if not metrics:
            return {}
        remember_best(self.state, self.setup.ranking, metrics)
        watched = self.setup.train_step.scheduler.metric
        if due and watched is not None:
            self.setup.train_step.scheduler.observe(metrics[watched])
        if not due:
            self.hooks.begin_final()
        self.hooks.on_evaluate(metrics)
        self._agree_on_requests()
        return metrics

    def _evaluated(self, *, trained: bool = True) -> dict[str, float]:
        """Evaluate the model as it stands; nothing without evaluation rows.

        Args:
            trained: As for the evaluator.

        Raises:
            StoppedEarly: There was a request to stop before the end.
        """
        self._before_fork()
        try:
            return self.evaluator(trained=trained)
        except Stopped as stopped:
            self.saving.stop(stopped.signal or self.signal_handler.stop_signal or -1)

    def _log(self, metrics: Mapping[str, float], unscheduled: list[str]) -> None:
        """Pass metrics to all callbacks; those that are not scheduled for this step are marked."""
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
        due = {
            name: value for name, value in record.items() if not name.startswith(tuple(unscheduled))
        }
        if not due.keys() & metrics.keys():
            self.hooks.begin_final()
            due = record
        self.hooks.on_log(
            record, {name: value for name, value in due.items() if name != "unscheduled"}
        )
        self._agree_on_requests()
