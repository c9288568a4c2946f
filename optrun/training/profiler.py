"""`training.profile`.

A trace of some steps by `torch.profiler`, and a table of what takes their time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile

from optrun.artifacts.atomic import replace_text, storing
from optrun.base.errors import ConfigError
from optrun.training.callback import Callback, TrainingContext
from optrun.training.step import StepResult

SKIPPED = 2
"""Steps before the first that is profiled: they allocate, compile and fill caches."""
_ROWS = 40


class Profiler(Callback):
    """Profiles steps of one start of a run.

    Each by itself in the trace, evaluations between them left in.

    Args:
        steps: How many.
    """

    key = "training.profile"

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self._seen = 0
        self._first = 0
        self._profile: Any = None

    def on_train_begin(self, training: TrainingContext) -> None:
        """Refuse more steps than the run has. A resumed run with too few steps is not profiled.

        Raises:
            ConfigError: The run is too short.
        """
        steps_left = training.total_steps - training.global_step
        needed = self.steps + SKIPPED
        if steps_left >= needed:
            return
        if training.global_step == 0:
            raise ConfigError(
                f"training.profile={self.steps}: expected {max(1, steps_left - SKIPPED)} or fewer:"
                f" {SKIPPED} steps pass before the first that is profiled, and the run has"
                f" {steps_left}."
            )
        training.note(
            f"training.profile={self.steps}: nothing is profiled, {steps_left} steps are left."
        )
        self.steps = 0

    def on_step(self, training: TrainingContext, result: StepResult) -> None:  # noqa: ARG002
        """Start the profiler after the skipped steps, and stop it after the last wanted one."""
        self._seen += 1
        if self._seen == SKIPPED and self.steps:
            self._first = training.global_step + 1
            activities = [ProfilerActivity.CPU]
            if training.setup.train_step.device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            self._profile = profile(
                activities=activities, record_shapes=True, schedule=lambda _: ProfilerAction.RECORD
            )
            self._profile.start()
        elif self._profile is not None and self._seen < SKIPPED + self.steps:
            self._profile.step()
        elif self._profile is not None:
            self._write(training)

    def on_train_end(self, training: TrainingContext, status: str) -> None:  # noqa: ARG002
        """Write the trace of a run that ended early."""
        if self._profile is not None and self._seen > SKIPPED:
            self._write(training)
        elif self._profile is not None:
            self._profile.stop()
            self._profile = None

    def _write(self, training: TrainingContext) -> None:
        """Write the trace and the table of the profiled steps into the run's folder."""
        done = self._profile
        self._profile = None
        done.stop()
        last = self._first + self._seen - SKIPPED - 1
        trace = training.extra_dir / f"trace-steps-{self._first}-{last}.json"
        with storing(trace):
            training.extra_dir.mkdir(exist_ok=True)
            aside = trace.with_name(f".{trace.name}")
            done.export_chrome_trace(str(aside))
            aside.replace(trace)
            table = trace.with_suffix(".txt")
            replace_text(table, _table(done, training.setup.train_step.device))
        steps = f"step {last}" if self._first == last else f"steps {self._first} to {last}"
        training.note(
            f"profiled {steps}: {trace} (chrome://tracing or ui.perfetto.dev), {Path(table).name}"
        )


def _table(done: Any, device: torch.device) -> str:
    order = "self_cuda_time_total" if device.type == "cuda" else "self_cpu_time_total"
    return str(done.key_averages().table(sort_by=order, row_limit=_ROWS)) + "\n"
