"""Metrics that ranks have counted apart, merged, are those of one process."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from transformers.utils.generic import ModelOutput

from optrun.task.evaluation import (
    IGNORED,
    EvaluationMetrics,
    MeanLoss,
    MetricAccumulator,
    TokenMetrics,
)
from optrun.task.label_sets import LabelSetMetrics
from optrun.task.token_classification import WordMetrics

LABELS = ["O", "B-PER", "I-PER", "B-LOC"]


def predictions(outputs: Any, batch: dict[str, torch.Tensor]) -> tuple[np.ndarray, np.ndarray]:
    known = batch["labels"] != IGNORED
    return outputs.logits.argmax(-1)[known].numpy(), batch["labels"][known].numpy()


def in_order(made: np.ndarray, labels: np.ndarray, _: int) -> float:
    """One that sees the order of examples."""
    return float((made * np.arange(len(made)) + labels).sum())


MAKE = {
    "mean loss": lambda: MeanLoss(lambda batch: int((batch["labels"] != IGNORED).sum())),
    "tokens": lambda: TokenMetrics(shift=True),
    "words": lambda: WordMetrics(LABELS, whole_entities=True),
    "registered": lambda: EvaluationMetrics(
        TokenMetrics(shift=False), {"in_order": in_order}, predictions, 4
    ),
}


def batch_of(number: int) -> tuple[ModelOutput, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(number)
    labels = torch.randint(0, 4, (3, 6), generator=generator)
    labels[torch.rand(3, 6, generator=generator) < 0.3] = IGNORED
    if number == 2:
        labels[:] = IGNORED
    logits = torch.randn(3, 6, 4, generator=generator)
    return ModelOutput(loss=torch.rand((), generator=generator), logits=logits), {"labels": labels}


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("kind", MAKE)
def test_merged_is_as_counted_by_one(kind: str, ranks: int) -> None:
    whole: MetricAccumulator = MAKE[kind]()
    parts: list[MetricAccumulator] = [MAKE[kind]() for _ in range(ranks)]
    for number in range(7):
        whole.update(*batch_of(number))
        parts[number % ranks].update(*batch_of(number))
    assert whole.mergeable
    partials = [part.partial() for part in parts]
    for part in parts:
        part.merge(partials)
        assert part.compute() == pytest.approx(whole.compute(), rel=1e-12)


@pytest.mark.parametrize(
    "make", [*MAKE.values(), lambda: LabelSetMetrics(LABELS)], ids=[*MAKE, "label sets"]
)
def test_a_set_without_a_target_has_no_loss(make: Any) -> None:
    """And not the best one there is."""
    assert math.isnan(make().compute()["loss"])


def test_metrics_without_a_way_to_merge_say_so() -> None:
    class Own(MetricAccumulator):
        names: list[str] = []  # noqa: RUF012

        def update(self, outputs: Any, batch: Any) -> None: ...
        def compute(self) -> dict[str, float]:
            return {}

    assert not Own().mergeable
    assert not EvaluationMetrics(Own(), {}, predictions, 0).mergeable
