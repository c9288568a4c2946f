"""Answers of the model at each evaluation, kept in the run directory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING

from optrun.artifacts.run_dir import RunDir
from optrun.artifacts.samples import SampleLine, read_samples, write_samples
from optrun.task.base import Answer
from optrun.training.callback import Callback, TrainingContext
from optrun.training.metrics_log import Refused

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class SampleWriter(Callback):
    """Writes `samples.jsonl`, again for repeated steps.

    Args:
        run: The run directory.
        answers: Asks the model.
        refused: Called with what the disk said.
    """

    def __init__(
        self, run: RunDir, answers: Callable[[PreTrainedModel], Iterable[Answer]], refused: Refused
    ) -> None:
        self.path = run.samples
        self.answers = answers
        self.refused = refused
        self.failed = False

    def on_train_begin(self, training: TrainingContext) -> None:
        """Drop samples after the step of the resumed checkpoint."""
        lines = read_samples(self.path)
        earlier = [line for line in lines if line.step <= training.global_step]
        if len(earlier) < len(lines):
            self._write(earlier)

    def on_evaluate(self, training: TrainingContext, metrics: Mapping[str, float]) -> None:  # noqa: ARG002
        """Ask the model, with the evaluated weights."""
        samples = self._answers(training)
        if samples:
            before = [line for line in read_samples(self.path) if line.step < training.global_step]
            self._write([*before, *samples])

    def on_rollback(self, training: TrainingContext) -> None:
        """Drop samples after the step of the rollback."""
        self.on_train_begin(training)

    def _answers(self, training: TrainingContext) -> list[SampleLine]:
        if self.failed:
            return []
        try:
            with training.setup.evaluation_weights():
                return [
                    SampleLine(training.global_step, **asdict(answer))
                    for answer in self.answers(training.model)
                ]
        except Exception as error:  # whatever a model's generate raises: the run goes on without
            self.failed = True
            line = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            training.note(
                f"warning: task.samples: the model could not answer ({line}); no samples are"
                " written."
            )
            return []

    def _write(self, lines: list[SampleLine]) -> None:
        try:
            write_samples(self.path, lines)
        except OSError as error:
            self.refused(self.path, "these samples are not kept", error)
