"""The model, task and data of a run, with its length and its ranking."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from optrun.base.plain import PlainDict
from optrun.config.schema.training import TrainingConfig
from optrun.data.loader import Batch, BatchLoader, EpochPlan
from optrun.training.ranking import Ranking
from optrun.training.state import TrainState
from optrun.training.step import TrainStep

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Metrics(Protocol):
    """The metrics of a task over a split, computed batch by batch."""

    @property
    def mergeable(self) -> bool: ...
    def update(self, outputs: Any, batch: Batch) -> None: ...
    def partial(self) -> Any: ...
    def merge(self, partials: Sequence[Any]) -> None: ...
    def compute(self) -> dict[str, float]: ...


class Task(Protocol):
    """The part of a task that training uses."""

    name: str
    train: Any
    eval_sets: PlainDict
    sources: Sequence[str]
    measured: tuple[str, ...]

    @property
    def eval(self) -> Any: ...
    def forward(self, model: Any, batch: Batch) -> Any: ...
    def evaluation(self) -> Metrics: ...
    def count_tokens_and_examples(self, batch: Batch) -> tuple[int, int]: ...


@dataclass(kw_only=True)
class TrainingSetup:
    """The model, task and data of a run, with its length and its ranking."""

    model: PreTrainedModel
    """The module whose weights are saved; `train_step.model` may be compiled."""
    train_step: TrainStep
    task: Task
    plan: EpochPlan
    """Which examples each step sees."""
    train_loader: BatchLoader
    eval_loaders: dict[str, BatchLoader]
    """By the name of the evaluation set; that of a single one is empty."""
    config: TrainingConfig
    """How long and how often."""
    ranking: Ranking
    """Which checkpoint is best."""
    state: TrainState
    """Counters of the run."""
    total_steps: int
    """Optimizer steps in all."""
    evaluation_weights: Callable[[], AbstractContextManager[None]] = nullcontext
    """Context in which the model has the weights to evaluate, such as averaged ones."""
