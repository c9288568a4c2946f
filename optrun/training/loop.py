"""When to step, log, evaluate, save and stop."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from optrun.artifacts import checkpoint as checkpoints
from optrun.artifacts.checkpoint import Snapshot
from optrun.artifacts.metrics import MetricsWriter
from optrun.artifacts.run_dir import RunDir
from optrun.config.checkpoint import CheckpointConfig
from optrun.config.training import OnNonfinite, TrainingConfig
from optrun.data.loader import Batch, Feed, Plan
from optrun.errors import NonFiniteError, StoppedEarly
from optrun.training import nonfinite
from optrun.training.device import peak_memory_bytes
from optrun.training.evaluate import evaluate
from optrun.training.interrupts import Interrupts
from optrun.training.progress import Display
from optrun.training.state import TrainState, random_states, restore_random_states
from optrun.training.step import Stepper, StepResult

log = logging.getLogger("optrun")


@dataclass
class Learner:
    """What is trained, and what it is trained and judged on."""

    model: Any
    """The module whose weights are saved."""
    stepper: Stepper
    task: Any
    plan: Plan
    train_feed: Feed
    eval_feed: Feed


@dataclass
class Ranking:
    """Which metric says that a checkpoint is best."""

    metric: str
    """With prefix, such as `eval/loss`."""
    mode: str
    """`min` or `max`."""

    def better(self, value: float, other: float) -> bool:
        """Whether `value` beats `other`; a NaN beats nothing."""
        if other != other:
            return value == value
        return value < other if self.mode == "min" else value > other

    def best(self, ranking: Mapping[str, float], count: int) -> list[int]:
        """The `count` best steps, best first; of equals the earlier."""
        sign = 1 if self.mode == "min" else -1
        finite = [(sign * value, int(step)) for step, value in ranking.items() if value == value]
        return [step for _, step in sorted(finite)[:count]]


class Loop:
    """Trains from where the state stands to the last step.

    Args:
        learner: Model, data and step.
        run: The run directory; its lock is held.
        training: How long and how often.
        saving: When to save and what to keep.
        ranking: Which checkpoint is best.
        total: Optimizer steps in all.
        state: Where the run stands.
        snapshot: Makes a snapshot of everything, given the random states to put into it.
        display: Eyes.
        track: Takes each record to other trackers.
        summarise: Called when the summary should be brought up to date.
        interrupts: Requests by signal.
        stop_at: Pause after this many optimizer steps, evaluated and saved; None: go to the end.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        *,
        learner: Learner,
        run: RunDir,
        training: TrainingConfig,
        saving: CheckpointConfig,
        ranking: Ranking,
        total: int,
        state: TrainState,
        snapshot: Callable[[dict[str, Any]], Snapshot],
        display: Display,
        track: Callable[[Mapping[str, Any]], None],
        summarise: Callable[[], None],
        interrupts: Interrupts,
        stop_at: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.learner = learner
        self.run = run
        self.training = training
        self.saving = saving
        self.ranking = ranking
        self.total = total
        self.state = state
        self.snapshot = snapshot
        self.display = display
        self.track = track
        self.summarise = summarise
        self.interrupts = interrupts
        self.end = total if stop_at is None else min(total, stop_at)
        self.clock = clock
        self.device = learner.stepper.device
        self._seconds_before = state.seconds
        self._begun = clock()
        self._window_begun = self._begun
        self._window_tokens = 0
        self._window_samples = 0
        self._stall = 0.0
        self._grad_norm = 0.0
        self._lrs: dict[str, float] = {}

    def __call__(self) -> None:
        """Train to the end.

        Raises:
            NonFiniteError: Loss or gradient is NaN or inf and the policy is to stop, or to skip and it was too often.
            StoppedEarly: A signal, the time budget or `stop_at`; everything is saved.
            StorageError: A checkpoint could not be saved.
        """
        self._begun = self._window_begun = self.clock()
        self._seconds_before = self.state.seconds
        steps = self.learner.train_feed.training(self.learner.plan, self.state.global_step)
        self.display.start(self.state.global_step, self.total)
        with MetricsWriter(self.run.metrics) as metrics:
            try:
                while self.state.global_step < self.end:
                    self._one_step(next(steps), metrics)
                    self._stop_if_asked()
            finally:
                steps.close()  # type: ignore[attr-defined]  # ends the loader's workers
                self.display.stop()
        if self.state.global_step < self.total:
            raise StoppedEarly(f"paused after step {self.end} of {self.total} as asked; everything is saved.")

    def _one_step(self, micro_batches: list[Batch], metrics: MetricsWriter) -> None:
        before = random_states(self.device)
        self._lrs = {**self._peak_lr(), **self._layer_lrs()}  # those of this step: the scheduler moves them on
        result = self.learner.stepper(micro_batches)
        self._judge(result, micro_batches, before)
        self._count(result, micro_batches)
        record: dict[str, Any] = {}
        unscheduled = []
        step, last = self.state.global_step, self.state.global_step == self.end
        due = step % self.training.logging_steps == 0
        if (due or last) and self.state.window_weight:
            record.update(self._training_values())
            if not due:
                unscheduled += ["train/", "lr/", "perf/"]
        window = (self.state.window_loss, self.state.window_weight)
        if due or last:
            self._empty_window()
        due_eval = self._evaluation_due(step)
        if due_eval or last:
            record.update(self.evaluate())
            if not due_eval:
                unscheduled.append("eval/")
        self._write(metrics, record, unscheduled)
        if last and not due:
            # Should the run be prolonged, this window goes on as if it had not ended here.
            self.state.window_loss, self.state.window_weight = window
        self._save_if_due(last=last, evaluated=due_eval or last, metrics=metrics)

    # What a step means ------------------------------------------------------------------------------------------

    def _judge(self, result: StepResult, micro_batches: list[Batch], before: dict[str, Any]) -> None:
        state = self.state
        if result.finite or result.weight == 0:
            state.skipped_in_a_row = 0
            return
        if self.learner.stepper.scaler_overflow(result):
            state.skipped_steps += 1
            return
        report = nonfinite.describe(self.learner, result, state.global_step, micro_batches)
        if self.training.on_nonfinite is OnNonfinite.skip:
            state.skipped_steps += 1
            state.skipped_in_a_row += 1
            if state.skipped_in_a_row <= self.training.max_nonfinite_skips:
                self.learner.stepper.optimizer.zero_grad(set_to_none=True)
                self.learner.stepper.scheduler.step()
                self.display.note(f"step {state.global_step + 1}: {report.sentence} The update was left out.")
                return
            report.sentence += f" That was {state.skipped_in_a_row} times in a row (training.max_nonfinite_skips)."
        folder = nonfinite.save(self.run, report, micro_batches)
        saved = ""
        if self.saving.enabled:
            # Weights and optimizer are still those from before this step.
            self.learner.stepper.optimizer.zero_grad(set_to_none=True)
            place = checkpoints.save_checkpoint(self.run, self.snapshot(before))
            saved = f" The state before it is in {place}."
        raise NonFiniteError(
            f"step {state.global_step + 1}: {report.sentence} Nothing was updated. The batch and a report are in "
            f"{folder}.{saved} Try a smaller lr, more warm-up, clip=global_norm or training.precision=fp32; "
            "training.on_nonfinite=skip goes on."
        )

    def _count(self, result: StepResult, micro_batches: list[Batch]) -> None:
        state = self.state
        state.global_step += 1
        for batch in micro_batches:
            tokens, samples = self.learner.task.sizes(batch)
            state.tokens += tokens
            state.samples += samples
            self._window_tokens += tokens
            self._window_samples += samples
        if result.finite:
            state.window_loss += result.loss * result.weight
            state.window_weight += result.weight
            self._grad_norm = result.grad_norm
        state.seconds = self._seconds_before + self.clock() - self._begun
        self.display.step(
            state.global_step, {"train/loss": result.loss, "train/grad_norm": result.grad_norm, **self._lrs}
        )

    # What is written --------------------------------------------------------------------------------------------

    def _peak_lr(self) -> dict[str, float]:
        groups = self.learner.stepper.optimizer.param_groups
        return {"train/lr": max(float(group["lr"]) for group in groups)}

    def _layer_lrs(self) -> dict[str, float]:
        groups = self.learner.stepper.optimizer.param_groups
        found: dict[str, float] = {}
        for group in groups:
            if group.get("layer"):
                name = f"lr/{metric_name(group)}"
                found[name] = max(found.get(name, 0.0), float(group["lr"]))
        return found if len(set(found.values())) > 1 else {}

    def _training_values(self) -> dict[str, Any]:
        state = self.state
        values: dict[str, Any] = {
            "train/loss": state.window_loss / state.window_weight,
            "train/grad_norm": self._grad_norm,
            **self._lrs,
        }
        if state.skipped_steps:
            values["train/skipped_steps"] = state.skipped_steps
        now = self.clock()
        elapsed = max(now - self._window_begun, 1e-9)
        if self._window_tokens:
            values["perf/tokens_per_second"] = self._window_tokens / elapsed
        values["perf/samples_per_second"] = self._window_samples / elapsed
        values["perf/peak_memory_bytes"] = peak_memory_bytes(self.device)
        if self._stall:
            values["perf/checkpoint_stall_seconds"] = self._stall
            self._stall = 0.0
        return values

    def _empty_window(self) -> None:
        self.state.window_loss, self.state.window_weight = 0.0, 0
        self._window_begun, self._window_tokens, self._window_samples = self.clock(), 0, 0

    def _write(self, metrics: MetricsWriter, record: dict[str, Any], unscheduled: list[str]) -> None:
        if not record:
            return
        state = self.state
        epoch = state.global_step / self.learner.plan.steps_per_epoch
        whole = {"step": state.global_step, "epoch": round(epoch, 6), "time": round(state.seconds, 3), **record}
        if unscheduled:
            whole["unscheduled"] = unscheduled
        metrics.write(whole)
        for name, value in record.items():
            state.last[name] = value
        self.display.step(state.global_step, record)
        self.display.record(whole)
        self.track(whole)
        self.summarise()

    # Evaluation and saving --------------------------------------------------------------------------------------

    def _evaluation_due(self, step: int) -> bool:
        every = self.training.eval_steps or self.learner.plan.steps_per_epoch
        return step % every == 0

    def evaluate(self) -> dict[str, float]:
        """Metrics of the evaluation split, with prefix; the model's random state is left as it was."""
        begun = self.clock()
        states = random_states(self.device)
        found = evaluate(
            self.learner.stepper.model,
            self.learner.eval_feed.evaluation(self.training.per_device_eval_batch_size),
            self.learner.task.evaluation(),
            to_device=self.learner.stepper.to_device,
            autocast=self.learner.stepper.autocast,
        )
        restore_random_states(states, self.device)
        values = {f"eval/{name}": value for name, value in found.items()}
        self._remember_best(values)
        self._window_begun += self.clock() - begun  # throughput is of training alone
        return values

    def _remember_best(self, values: Mapping[str, float]) -> None:
        state = self.state
        for name, value in values.items():
            held = state.best.get(name)
            direction = Ranking(name, best_mode(name, self.ranking))
            if held is None or direction.better(value, held["value"]):
                state.best[name] = {"value": value, "step": state.global_step}
        state.ranking[str(state.global_step)] = values[self.ranking.metric]

    def _save_if_due(self, *, last: bool, evaluated: bool, metrics: MetricsWriter) -> None:
        if not self.saving.enabled:
            return
        state, step = self.state, self.state.global_step
        asked, self.interrupts.save_requested = self.interrupts.save_requested, False
        due = last or asked or (self.saving.save_steps is not None and step % self.saving.save_steps == 0)
        if evaluated and self.saving.keep_best:
            due = due or step in self.ranking.best(state.ranking, self.saving.keep_best)
        if due:
            self.save(metrics)

    def save(self, metrics: MetricsWriter | None = None) -> None:
        """Save now, then delete what need not be kept.

        Raises:
            StorageError: The disk refused.
        """
        begun = self.clock()
        if metrics is not None:
            metrics.sync()
        state = self.state
        place = checkpoints.save_checkpoint(self.run, self.snapshot(random_states(self.device)))
        best = self.ranking.best(state.ranking, self.saving.keep_best)
        kept = [number for number in best if self.run.checkpoint(number).is_dir()]
        if kept:
            checkpoints.point_best(self.run, kept[0])
        checkpoints.retain(self.run, keep_last=self.saving.keep_last, best=best)
        spent = self.clock() - begun
        self._stall += spent
        self._window_begun += spent
        self.summarise()
        log.info("saved %s", place)

    def _stop_if_asked(self) -> None:
        if self.state.global_step >= self.end:
            return
        spent = self.clock() - self._begun
        budget = self.training.max_seconds
        if self.interrupts.stop_signal is not None:
            why = f"{self.interrupts.stop_signal.name} received"
        elif budget is not None and spent >= budget:
            why = f"the time budget is spent (training.max_seconds={budget:g})"
        else:
            return
        if not self.saving.enabled:
            raise StoppedEarly(f"{why} after step {self.state.global_step}; checkpoint=none: nothing was saved.")
        self.save()
        raise StoppedEarly(
            f"{why}: stopped after step {self.state.global_step} of {self.total}, everything is saved. "
            f"Go on with: optrun resume={self.run.path}"
        )


def best_mode(name: str, ranking: Ranking) -> str:
    """Which direction of a metric is better."""
    if name == ranking.metric:
        return ranking.mode
    return "min" if name.rsplit("/", 1)[-1] in ("loss", "perplexity", "mse", "mae") else "max"


def metric_name(group: Mapping[str, Any]) -> str:
    """The name of a group's layer in a metric: `layer_03`, `head`, `embeddings`.

    Example:
        >>> metric_name({"layer": "block 3", "layer_id": 4})
        'block_03'
    """
    words = str(group["layer"]).split()
    return "_".join(f"{int(word):02d}" if word.isdecimal() else word for word in words)
