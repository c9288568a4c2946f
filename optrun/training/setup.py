"""What is trained, and what it is trained and judged on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from optrun.data.loader import BatchLoader, EpochPlan
from optrun.training.step import TrainStep


@dataclass
class TrainingSetup:
    """What is trained, and what it is trained and judged on."""

    model: Any
    """The module whose weights are saved."""
    train_step: TrainStep
    task: Any
    plan: EpochPlan
    train_loader: BatchLoader
    eval_feed: BatchLoader
    evaluation_weights: Callable[[], AbstractContextManager[None]] = nullcontext
    """Puts the weights to judge into the model, where the optimizer trains others."""
