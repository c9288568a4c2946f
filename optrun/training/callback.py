"""The hooks of the training loop, and the context that is passed to each of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from optrun.artifacts.run_dir import RunDir
from optrun.base.plain import PlainMapping
from optrun.training.setup import Task, TrainingSetup
from optrun.training.step import StepResult

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass
class StopRequest:
    """A request to end training early."""

    by: str
    """Configuration key of the component, such as `callbacks.probe`."""
    reason: str
    step: int
    """Optimizer steps after which training ends."""


@dataclass(eq=False)
class TrainingContext:
    """The state of training for a hook, and the requests that a hook may make."""

    setup: TrainingSetup
    """The run: model, task, data and state."""
    run: RunDir
    note: Callable[[str], None]
    """Shows the user one line."""
    command: Callable[..., str]
    """Builds the command that continues the run, from overrides; with `mended=True` it allows that
    the code of plugins has changed."""
    stop: StopRequest | None = None
    """The first request to stop; after a resume the one in the checkpoint."""
    save_requested: bool = False
    """Whether a hook has requested a checkpoint after this step."""
    caller: str = ""
    """Configuration key of the component whose hook is running; empty between hooks."""
    final: bool = False
    """Whether the present evaluation or line exists only because the run ends here."""

    def __post_init__(self) -> None:
        """Set the folders, and whether the present step is finished."""
        self.run_dir = self.run.path
        """The run directory, to read from."""
        self.extra_dir = self.run.extra
        """The folder to write into; it exists before the first hook."""
        self.step_finished = not self.setup.state.unfinished
        """Whether the line of the present step is written; a request to stop then means the next
        step."""

    @property
    def model(self) -> PreTrainedModel:
        """The model, with its trained weights."""
        return self.setup.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer; in `on_step` the gradients of the step are still there."""
        return self.setup.train_step.optimizer

    @property
    def task(self) -> Task:
        """The task: examples of all splits, loss and metrics."""
        return self.setup.task

    @property
    def global_step(self) -> int:
        """Optimizer steps done."""
        return self.setup.state.global_step

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.setup.total_steps

    @property
    def epoch(self) -> float:
        """Passes over the training examples done."""
        return self.setup.state.position / self.setup.plan.steps_per_epoch

    def request_stop(self, reason: str) -> None:
        """End training early: the run is evaluated, saved, published and finished, exit code 0.

        Requested in `on_step` or `on_evaluate`, training ends with this step; in any other hook,
        with the next one. Later requests are ignored; so is a request when no step is left, or in
        an evaluation that exists only because the run ends here.

        Raises:
            TypeError: The reason is no str.
        """
        if not isinstance(reason, str):
            raise TypeError(f"request_stop: expected a text, got {type(reason).__name__}")
        if self.stop is not None or self.final:
            return
        reason = reason.encode(errors="backslashreplace").decode()  # it is written to files
        # The line of a step is written after `on_step` and `on_evaluate`. Before it, training ends
        # with this step, else with the next one.
        last_step = self.global_step
        if self.step_finished:
            last_step += 1
        if last_step < self.total_steps:  # else it ends there without a request
            self.stop = StopRequest(self.caller, reason, last_step)

    def request_save(self) -> None:
        """Save a checkpoint at the end of this step."""
        self.save_requested = True


class Callback:
    """A component of the training loop. A hook without a definition does nothing.

    A user's class need not derive from this one. If it has `state_dict` and `load_state_dict`, its
    state is saved in every checkpoint, and restored by a resume or rollback.
    """

    key = ""
    """Configuration key of the component, for messages."""
    accepts_late_results = False
    """Whether `on_step` may be called after the next step has begun; then no step waits for it."""

    def on_train_begin(self, training: TrainingContext) -> None:
        """Handle every start of the run, resumed ones too.

        The state of the checkpoint has been loaded.
        """

    def on_step(self, training: TrainingContext, result: StepResult) -> None:
        """Handle an optimizer step, also one left out because of non-finite numbers."""

    def on_evaluate(self, training: TrainingContext, metrics: Mapping[str, float]) -> None:
        """Handle an evaluation; names such as `eval/loss`."""

    def on_log(self, training: TrainingContext, record: PlainMapping) -> None:
        """Handle a line of `metrics.jsonl`.

        `step`, `epoch`, `time`, and flat names such as `train/loss`.
        """

    def on_save(self, training: TrainingContext, checkpoint: Path) -> None:
        """Handle a complete checkpoint on the disk; training may be some steps ahead."""

    def on_rollback(self, training: TrainingContext) -> None:
        """Handle a return to a checkpoint (`training.on_nonfinite=rollback`).

        States have been loaded.
        """

    def on_train_end(self, training: TrainingContext, status: str) -> None:
        """Handle the end of this start of the run: `finished`, `interrupted` or `failed`."""


HOOKS = tuple(name for name in vars(Callback) if name.startswith("on_"))
