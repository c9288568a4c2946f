"""Model and batches to metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch

from optrun.data.loader import Batch, BatchLoader
from optrun.training.failures import of_memory_in_evaluation


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


def evaluate_sets(
    model: Any,
    loaders: Mapping[str, BatchLoader],
    batch_size: int,
    metrics: Callable[[], Metrics],
    watch: Callable[[Iterator[Batch], int, int], Iterable[Batch]],
    *,
    to_device: Callable[[Batch], Batch],
    autocast: Callable[[], Any],
) -> dict[str, float]:
    """Run over every evaluation set.

    Args:
        model: Called with a batch's tensors by name.
        loaders: The sets by name; that of a single one is empty.
        batch_size: Examples of a batch.
        metrics: Makes empty metrics.
        watch: Stands between the batches of a set and the model; told how many batches there were before, and how many
            there are in all.
        to_device: Moves a batch to the model.
        autocast: The arithmetic of the forward pass.

    Returns:
        `eval/METRIC`, or `eval/SET/METRIC`, to values.
    """
    counts = {name: -(-len(loader.examples) // batch_size) for name, loader in loaders.items()}
    values: dict[str, float] = {}
    before = 0
    for name, loader in loaders.items():
        batches = watch(loader.evaluation(batch_size), before, sum(counts.values()))
        found = evaluate(model, batches, metrics(), to_device=to_device, autocast=autocast)
        prefix = f"eval/{name}/" if name else "eval/"
        values |= {f"{prefix}{metric}": value for metric, value in found.items()}
        before += counts[name]
    return values
