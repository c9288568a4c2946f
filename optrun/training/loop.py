"""When to step, evaluate, log, save and stop."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager
from typing import Any, NoReturn

from optrun.base.errors import NonFiniteError, StoppedEarly, StorageError
from optrun.config.schema.training import OnNonfinite
from optrun.data.loader import Batch
from optrun.distributed.heartbeat import Phase, beat
from optrun.training import failures
from optrun.training.checkpointing import CheckpointManager
from optrun.training.device import peak_memory_bytes
from optrun.training.divergence import Divergence
from optrun.training.evaluate import Evaluator
from optrun.training.exchange import GlobalStep, Requests
from optrun.training.hooks import Hooks
from optrun.training.noise_scale import averaged, noise_scale
from optrun.training.nonfinite import NonfiniteStep
from optrun.training.ranking import remember_best
from optrun.training.rates import learning_rates, source_metrics
from optrun.training.replicas import refuse_parted
from optrun.training.setup import TrainingSetup
from optrun.training.signals import SignalHandler, Stopped
from optrun.training.state import RandomStates, digest_of_batches, empty_window
from optrun.training.step import StepResult
from optrun.training.throughput import Throughput


class Loop:
    """Trains from where the state stands to the last step.

    What is done with a step, a line of metrics, an evaluation or a checkpoint is up to the hooks.

    Args:
        setup: What is trained, and how far.
        hooks: Metrics log, display, trackers, summary, early stopping, the user's callbacks.
        evaluator: Evaluates the model as it stands.
        checkpoints: Saves.
        divergence: Judges each step's numbers.
        signal_handler: Requests by signal.
        stop_at: Pause after this many optimizer steps, evaluated and saved; None: go to the end.
        clock: Seconds, monotonic.
        samples_at_peak: Samples per second of devices that are never idle, for `perf/mfu`; None: not known.
        started: When the run was started, on that clock; None: now. The time budget counts from there.
    """

    def __init__(
        self,
        setup: TrainingSetup,
        hooks: Hooks,
        evaluator: Evaluator,
        checkpoints: CheckpointManager,
        divergence: Divergence,
        signal_handler: SignalHandler,
        *,
        stop_at: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        started: float | None = None,
        samples_at_peak: float | None = None,
    ) -> None:
        self.setup = setup
        self.state = setup.state
        self.hooks = hooks
        self.training = hooks.training
        self.evaluator = evaluator
        self.checkpoints = checkpoints
        self.divergence = divergence
        self.signal_handler = signal_handler
        self.planned_end = setup.total_steps if stop_at is None else min(setup.total_steps, stop_at)
        self.clock = clock
        self.device = setup.train_step.device
        self.world = setup.train_step.world
        self.throughput = Throughput(clock, samples_at_peak)
        self._started = clock() if started is None else started
        self._begun = clock()
        self._seconds_before = self.state.seconds
        self._first_step = self.state.global_step
        self._steps: Generator[list[Batch]] | None = None
        checkpoints.on_save = hooks.on_save

    @property
    def end(self) -> int:
        """The last step of this start, as far as is known."""
        stop = self.training.stop
        return self.planned_end if stop is None else min(self.planned_end, stop.step)

    def __call__(self) -> None:
        """Train to the end.

        Raises:
            NonFiniteError: Loss or gradient is NaN or inf and the policy is to stop, or it happened too often; or a
                weight is NaN or inf after an update.
            StoppedEarly: A signal, the time budget or `stop_at`; everything is saved.
            StorageError: A checkpoint could not be saved.
            OptrunError: A callback raised.
        """
        self._begun = self.clock()
        self.throughput.reset()
        self._seconds_before = self.state.seconds
        status = "failed"
        try:
            with contextlib.closing(self.checkpoints), self._naming_workers(), contextlib.ExitStack() as stack:
                stack.callback(failures.kill_workers)  # one that is stuck would be waited for when Python ends
                stack.callback(self._close_data)
                try:
                    self._train()
                except (StoppedEarly, NonFiniteError, StorageError):
                    raise
                except (Exception, SystemExit):
                    self._save_what_is_done()
                    raise
            status = "finished"
        except StoppedEarly:
            status = "interrupted"
            raise
        finally:
            self.hooks.on_train_end(status)

    def _save_what_is_done(self) -> None:
        """Save the steps of this start before it ends with an error, which is what counts whatever becomes of this."""
        step, done = self.state.global_step, self.state.global_step > self._first_step
        if not done or not self.checkpoints.enabled or self.setup.train_step.updating or self.world.size > 1:
            return  # other ranks would have to take part, and do not know
        try:
            self.checkpoints.save_now()
        except (Exception, SystemExit) as error:
            self.training.note(f"warning: step {step} could not be saved: {type(error).__name__}: {error}")
        else:
            self.training.note(f"step {step} is saved, before the run ends with an error")

    def _naming_workers(self) -> AbstractContextManager[None]:
        return failures.of_workers(lambda: self.state.global_step, self._next_examples)

    def _train(self) -> None:
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
            self._stop_if_asked(before_step=True)
            self._step()
            self._stop_if_asked()
        if self.checkpoints.enabled:
            self.checkpoints.save_now()
        stopped = self.training.stop is not None and state.global_step >= self.training.stop.step
        if state.global_step < self.setup.total_steps and not stopped:
            raise StoppedEarly(
                f"paused after step {self.end} of {self.setup.total_steps} as asked; everything is saved."
            )

    def _evaluate_before_training(self) -> None:
        """Write the first line: the evaluation before the first step, which no time of training is counted for.

        It decides nothing: early stopping, the schedule, samples and the ranking of checkpoints begin with training.
        `on_log` hears of it, `on_evaluate` does not.
        """
        metrics = self._evaluated(trained=False)
        self._begun = self.clock()
        self.throughput.reset()
        if metrics:
            self.state.before_training = metrics
            self._log(metrics, [])

    # One step ---------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        state, train_step = self.state, self.setup.train_step
        micro_batches = self._fetch()
        step = self._exchange(micro_batches)
        # Forward passes that are seeded one by one begin with the same numbers whatever the generators held before.
        before = RandomStates(self.device) if train_step.seed is None else None
        # Those of this step: the scheduler moves them on.
        state.lrs = learning_rates(train_step.optimizer.param_groups)
        beat(Phase.training)
        with failures.of_memory(state.global_step, micro_batches):
            result = train_step(micro_batches, step, state.position)
        nonfinite = self.divergence.judge(result, micro_batches, before)
        if nonfinite is not None:
            self._roll_back(nonfinite)
            return
        self._count(result, step)
        train_step.updating = False
        state.unfinished = True
        self.hooks.on_step(result)
        self._agree_on_requests()
        self._finish_step()
        if self.checkpoints.enabled and step.requests.written:
            self.checkpoints.poll(together=self.world.size > 1)

    def _exchange(self, micro_batches: list[Batch]) -> GlobalStep:
        """Tell the other ranks of this one's part of the step and of what it was asked for, and hear of theirs.

        Raises:
            StoppedEarly: One of them was asked to stop.
        """
        train_step, handler = self.setup.train_step, self.signal_handler
        requests = Requests()
        if self.world.size > 1:
            spent = self.world.is_main and self._time_is_spent() and self.state.global_step > self._first_step
            stop = handler.stop_signal or (-1 if spent else 0)
            requests = Requests(stop, handler.take_save_request(), written=not self.checkpoints.writing)
        step = train_step.exchange(micro_batches, requests, self.setup.plan.micro_batches(self.state.position))
        self.training.save_requested |= step.requests.save
        if step.requests.stop:
            self._stop(step.requests.stop)
        return step

    def _agree_on_requests(self) -> None:
        """Let every rank know what the callbacks, which only one rank has, ask for."""
        if self.world.size > 1 and self.hooks.may_request:
            stop, save = self.world.broadcast((self.training.stop, self.training.save_requested))
            self.training.stop, self.training.save_requested = stop, save

    def _fetch(self) -> list[Batch]:
        """Wait for the next step's batches; nothing is lost where a request to stop ends the wait."""
        loader = self.setup.train_loader
        beat(Phase.loading, self.state.global_step)
        try:
            # Of several ranks none leaves alone: they agree before the forward passes.
            with self.signal_handler.immediate() if self.world.size == 1 else contextlib.nullcontext():
                if self._steps is None:
                    self._before_fork()
                    world = self.world
                    self._steps = loader.training(self.setup.plan, self.state.position, world.rank, world.size)
                with failures.waiting_for_workers(loader.workers, self.setup.config.dataloader_timeout):
                    return next(self._steps)
        except Stopped:
            self._stop_if_asked(before_step=True)
            raise AssertionError("unreachable") from None
        except RuntimeError:
            # A signal to the whole group may end a worker that was just born before it sets such signals aside.
            self._stop_if_asked(before_step=True)
            raise

    def _next_examples(self) -> str:
        indices = [index for keys in next(self.setup.plan.steps(self.state.position)) for _, index in keys]
        return f"{', '.join(map(str, indices[:16]))}{', ...' if len(indices) > 16 else ''}"

    def _before_fork(self) -> None:
        """Prepare to fork loader workers: no other thread may hold a lock at that moment."""
        if self.setup.train_loader.workers and self.checkpoints.enabled:
            self.checkpoints.wait()

    def _close_data(self) -> None:
        if self._steps is not None:
            self._steps.close()  # ends the loader's workers
            self._steps = None

    def _count(self, result: StepResult, step: GlobalStep) -> None:
        state = self.state
        state.global_step += 1
        state.batches_digest = digest_of_batches(state.batches_digest, (fact.digest for fact in step.facts))
        for fact in step.facts:
            state.tokens += fact.tokens
            state.samples += fact.samples
            self.throughput.add(fact.tokens, fact.samples)
        if result.finite:
            state.window_loss += result.loss * result.weight
            state.window_weight += result.weight
            state.grad_norm = result.grad_norm
            state.window_grad_norm = max(state.window_grad_norm, result.grad_norm)
            state.noise = state.noise if result.noise is None else averaged(state.noise, result.noise)
            for name, sums in zip(self.setup.task.sources, result.by_source or (), strict=False):
                before = state.window_sources.get(name, [0.0, 0.0, 0.0])
                state.window_sources[name] = [one + other for one, other in zip(before, sums, strict=True)]
            for name, total in zip(self.setup.task.measured, result.measures or (), strict=False):
                state.window_measures[name] = state.window_measures.get(name, 0.0) + total
        state.seconds = self._seconds_before + self.clock() - self._begun

    def _roll_back(self, nonfinite: NonfiniteStep) -> None:
        self.checkpoints.wait()
        self.world.barrier()  # the rank that writes has written what all go back to
        self._close_data()
        message = self.divergence.roll_back(nonfinite)
        self.hooks.on_rollback()
        self.checkpoints.save()  # in place of that one: a run that is stopped now does not go back there again
        self.throughput.reset()
        self.training.note(message)

    # What follows a step ----------------------------------------------------------------------------------------

    def _finish_step(self) -> None:
        """Evaluate, log and save what is due.

        A request by signal leaves an evaluation where it is; the resumed run begins with it. What only the end of the
        run asks for is marked: should the run be prolonged, it goes on as if it had not ended here.
        """
        state, config = self.state, self.setup.config
        evaluation_due, line_due = self.evaluator.due(), state.global_step % config.logging_steps == 0
        evaluate = evaluation_due or self._is_last()
        kept = ("last",) if evaluation_due else ("last", "best", "ranking", "ranking_losses")
        before = {name: dict(getattr(state, name)) for name in kept} if evaluate else {}
        metrics = self._evaluate(due=evaluation_due) if evaluate else {}
        last = self._is_last()  # a hook may have asked for it
        record: dict[str, Any] = {}
        unscheduled = []
        if (line_due or last) and state.window_weight:
            record.update(self._training_metrics())
            if not line_due:
                unscheduled += ["train/", "lr/", "perf/"]
        record.update(metrics)
        if metrics and not evaluation_due:
            unscheduled.append("eval/")
        window = {name: getattr(state, name) for name in empty_window()}
        if line_due or last:
            vars(state).update(empty_window())
            self.throughput.reset()
        self._log(record, unscheduled)
        if unscheduled:
            scheduled = {name: value for name, value in record.items() if not name.startswith(tuple(unscheduled))}
            state.without_end = {**before, "last": {**before["last"], **scheduled}}
        if last and not line_due:
            vars(state).update(window)
        state.unfinished = False
        if self.hooks.failure is not None:
            raise self.hooks.failure
        self._save_if_due(last=last, evaluated=evaluate)

    def _is_last(self) -> bool:
        return self.state.global_step >= self.end

    def _evaluate(self, *, due: bool) -> dict[str, float]:
        """Evaluate, and let the schedule and the hooks know.

        Args:
            due: False where only the end of the run asks for it.

        Raises:
            StoppedEarly: There was a request to stop before the end.
        """
        begun = self.clock()
        metrics = self._evaluated()
        self.throughput.leave_out(self.clock() - begun)
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
            self._stop(stopped.signal or self.signal_handler.stop_signal or -1)

    def _training_metrics(self) -> dict[str, Any]:
        state = self.state
        values: dict[str, Any] = {
            "train/loss": state.window_loss / state.window_weight,
            "train/grad_norm": state.grad_norm,
            "train/grad_norm_max": max(state.window_grad_norm, state.grad_norm),
            **{f"train/{name}": total / state.window_weight for name, total in state.window_measures.items()},
            **source_metrics(state.window_sources),
            **state.lrs,
        }
        if state.skipped_steps:
            values["train/skipped_steps"] = state.skipped_steps
        if state.rollbacks:
            values["train/rollbacks"] = state.rollbacks
        values.update(self.throughput.rates())
        values.update(noise_scale(state.noise) if self.setup.config.noise_scale else {})
        values["perf/peak_memory_bytes"] = peak_memory_bytes(self.device)
        values.update(self.checkpoints.metrics())
        return values

    def _log(self, metrics: Mapping[str, Any], unscheduled: list[str]) -> None:
        state = self.state
        record = {
            "step": state.global_step,
            "epoch": round(self.training.epoch, 6),
            "time": round(state.seconds, 3),
            **metrics,
        }
        if unscheduled:
            record["unscheduled"] = unscheduled
        state.last.update(metrics)
        if metrics:
            due = {name: value for name, value in record.items() if not name.startswith(tuple(unscheduled))}
            if not due.keys() & metrics.keys():
                self.hooks.begin_final()
                due = record
            self.hooks.on_log(record, {name: value for name, value in due.items() if name != "unscheduled"})
            self._agree_on_requests()
        self.training.step_finished = True

    # Saving and stopping ----------------------------------------------------------------------------------------

    def _save_if_due(self, *, last: bool, evaluated: bool) -> None:
        if self.world.size == 1:  # several ranks agreed on it before the step
            self.training.save_requested |= self.signal_handler.take_save_request()
        asked, self.training.save_requested = self.training.save_requested, False
        checkpoints = self.checkpoints
        if not checkpoints.enabled:
            return
        due = last or asked or checkpoints.scheduled(self.state.global_step)
        if due or (evaluated and self.world.broadcast(self.world.is_main and checkpoints.among_best())):
            begun = self.clock()
            beat(Phase.saving, self.state.global_step)
            refuse_parted(self.setup.model, self.world, self.state.global_step)
            checkpoints.save()
            self.throughput.leave_out(self.clock() - begun)

    def _stop_if_asked(self, *, before_step: bool = False) -> None:
        """End here where a signal or the time budget says so.

        Args:
            before_step: Only a signal counts: each start of a run makes at least one step of progress.
        """
        if self.state.global_step >= self.end or self.world.size > 1:
            return  # several ranks agree on it before the next step's forward passes
        received = self.signal_handler.stop_signal
        if received is not None or (self._time_is_spent() and not before_step):
            self._stop(received or -1)

    def _time_is_spent(self) -> bool:
        budget = self.setup.config.max_seconds
        return budget is not None and self.clock() - self._started >= budget

    def _stop(self, request: int) -> NoReturn:
        """Save and end.

        Args:
            request: Number of the signal; -1: the time budget is spent.

        Raises:
            StoppedEarly: Always.
            StorageError: The save was refused.
        """
        step, total, run_dir = self.state.global_step, self.setup.total_steps, self.training.run_dir
        again = self.training.command(f"resume={run_dir}")
        why = (
            f"{signal.Signals(request).name} received"
            if request > 0
            else f"the time budget is spent (training.max_seconds={self.setup.config.max_seconds:g})"
        )
        if not self.checkpoints.enabled:
            raise StoppedEarly(
                f"{why} after step {step}; checkpoint=none: nothing was saved. Begin again at step 0 with: "
                + self.training.command("resume=auto", f"hydra.run.dir={run_dir}")
            )
        if step == 0:
            raise StoppedEarly(
                f"{why} before the first step: there is nothing to save yet. Start again with: {again} (or the same "
                "command with resume=auto)"
            )
        refuse_parted(self.setup.model, self.world, step)
        self.checkpoints.save_now()
        raise StoppedEarly(f"{why}: stopped after step {step} of {total}, everything is saved. Go on with: {again}")
