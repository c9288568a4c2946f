"""Model and batches to metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from optrun.training.failures import of_memory_in_evaluation

Batch = dict[str, torch.Tensor]


class Metrics(Protocol):
    """What a task's evaluation offers."""

    def update(self, outputs: Any, batch: Batch) -> None: ...
    def compute(self) -> dict[str, float]: ...


def evaluate(
    model: Any,
    batches: Iterable[Batch],
    metrics: Metrics,
    *,
    to_device: Callable[[Batch], Batch],
    autocast: Callable[[], Any],
) -> dict[str, float]:
    """Run over all batches; the model's mode is put back.

    Args:
        model: Called with a batch's tensors by name.
        batches: The evaluation split.
        metrics: Empty; takes each batch in.
        to_device: Moves a batch to the model.
        autocast: The arithmetic of the forward pass.

    Returns:
        Names without prefix to values.

    Raises:
        OptrunError: Memory does not suffice.
    """
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            for batch in batches:
                with of_memory_in_evaluation(batch):
                    moved = to_device(batch)
                    with autocast():
                        outputs = model(**moved)
                    metrics.update(outputs, moved)
    finally:
        model.train(training)
    return metrics.compute()
