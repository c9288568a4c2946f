"""`training.profile`: a trace of some steps by `torch.profiler`, and a table of operator times."""

from __future__ import annotations

from torch.profiler import ProfilerActivity, profile, schedule

from optrun.artifacts.atomic import replace_text, storing
from optrun.base.errors import ConfigError
from optrun.training.callback import Callback, TrainingContext
from optrun.training.step import StepResult

SKIPPED = 2
"""Steps before the first profiled step: they allocate memory, compile kernels and fill caches."""
_ROWS = 40
"""Operators in the table, those that take most time first."""


class Profiler(Callback):
    """Profiles the steps after the first `SKIPPED` steps of this start of the run.

    Evaluations between these steps are part of the trace.

    Args:
        steps: Number of profiled steps.
    """

    key = "training.profile"

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self._profile: profile | None = None
        """None before training, after the last profiled step, and if nothing is profiled."""

    def on_train_begin(self, training: TrainingContext) -> None:
        """Start the profiler; a resumed run with too few steps left is not profiled, with a note.

        Raises:
            ConfigError: A new run has fewer than `SKIPPED` + `steps` steps.
        """
        steps_left = training.total_steps - training.global_step
        if steps_left < self.steps + SKIPPED:
            if training.global_step == 0:
                raise ConfigError(
                    f"training.profile={self.steps}: expected {max(1, steps_left - SKIPPED)} or"
                    f" fewer: {SKIPPED} steps pass before the first that is profiled, and the run"
                    f" has {steps_left}."
                )
            training.note(
                f"training.profile={self.steps}: nothing is profiled, {steps_left} steps are left."
            )
            return
        first = training.global_step + SKIPPED + 1
        activities = [ProfilerActivity.CPU]
        if training.setup.train_step.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(
            activities=activities,
            record_shapes=True,
            schedule=schedule(wait=SKIPPED - 1, warmup=1, active=self.steps, repeat=1),
            on_trace_ready=lambda finished: _write(finished, training, first),
        )
        self._profile.start()

    def on_step(self, training: TrainingContext, result: StepResult) -> None:  # noqa: ARG002
        """Count a step; after the last profiled step write the trace."""
        if self._profile is None:
            return
        self._profile.step()
        if self._profile.step_num == SKIPPED + self.steps:
            self._stop()

    def on_train_end(self, training: TrainingContext, status: str) -> None:  # noqa: ARG002
        """Write the trace of the steps so far if the run ends before the last profiled step."""
        if self._profile is not None:
            self._stop()

    def _stop(self) -> None:
        """Stop the profiler, which writes a trace that is not written yet."""
        assert self._profile is not None
        self._profile.stop()
        self._profile = None


def _write(finished: profile, training: TrainingContext, first: int) -> None:
    """Write the trace and the table into the run's folder `extra`, and note where they are.

    Args:
        finished: The profile; without a profiled step nothing is written.
        training: The run.
        first: Optimizer step of the first profiled step.
    """
    last = first + finished.step_num - SKIPPED - 1
    if last < first:
        return
    trace = training.extra_dir / f"trace-steps-{first}-{last}.json"
    order = "self_cpu_time_total"
    if training.setup.train_step.device.type == "cuda":
        order = "self_cuda_time_total"
    with storing(trace):
        training.extra_dir.mkdir(exist_ok=True)
        partial = trace.with_name(f".{trace.name}")
        finished.export_chrome_trace(str(partial))
        partial.replace(trace)
        table = trace.with_suffix(".txt")
        text = finished.key_averages().table(sort_by=order, row_limit=_ROWS)
        replace_text(table, f"{text}\n")
    steps = f"step {last}" if first == last else f"steps {first} to {last}"
    training.note(f"profiled {steps}: {trace} (chrome://tracing or ui.perfetto.dev), {table.name}")
