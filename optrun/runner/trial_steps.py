"""Two steps that are timed and thrown away: what a run would cost, before anything is written."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from optrun.config.schema.run import RunConfig
from optrun.data.randomness import generator
from optrun.runner.prepare import prepare
from optrun.training.device import pick_device
from optrun.training.step import Precision


@dataclass(frozen=True)
class Trial:
    """What was measured.

    Attributes:
        seconds: Of a training step; None: its task has a reference to be computed first.
        device: On which.
        lengths: Tokens of each training example; None: they have none, or it differs. Shape
            (examples,), int64.
        notes: What preparing them told.
    """

    seconds: float | None
    device: str
    lengths: np.ndarray | None
    notes: list[str]


def try_steps(config: RunConfig) -> Trial:
    """Prepare a run and time the second of two training steps, without the optimizer's update.

    Raises:
        ConfigError: Whatever a run would refuse of data and model.
    """
    prepared = prepare(config)
    task, precision = (
        prepared.task,
        Precision(pick_device(config.training.device), config.training.precision.value),
    )
    model = prepared.model.to(precision.device).train()
    size = min(config.training.step_over(1)[0], len(task.train))
    lengths = getattr(task.train, "lengths", None)
    if hasattr(task, "has_reference"):
        return Trial(None, precision.device.type, lengths, prepared.notes)
    seconds = 0.0
    for number in range(2):
        examples = [
            task.transform(task.train[at], generator(0, "trial", number, at)) for at in range(size)
        ]
        begun = time.perf_counter()
        with precision.autocast():
            batch = precision.to_device(task.collate(examples))
            loss = task.loss(task.forward(model, batch), batch)
        loss.backward()
        float(loss.detach())
        seconds = time.perf_counter() - begun
    return Trial(seconds, precision.device.type, lengths, prepared.notes)
