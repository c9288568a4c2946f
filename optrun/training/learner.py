"""What is trained, and what it is trained and judged on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from optrun.data.loader import Feed, Plan
from optrun.training.step import Stepper


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
    evaluation_weights: Callable[[], AbstractContextManager[None]] = nullcontext
    """Puts the weights to judge into the model, where the optimizer trains others."""
