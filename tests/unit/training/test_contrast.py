"""A step is one batch for a loss that compares its rows, however it is cut into micro-batches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from optrun.data.loader import TEXTS, Batch
from optrun.task.contrastive import multiple_negatives_ranking
from optrun.training.contrast import ContrastStep
from optrun.training.state import seed_of_micro_batch, seed_random_states
from tests.reference.record_embeddings import vectors

CPU = torch.device("cpu")


class Vectors(torch.nn.Module):
    """A layer with dropout that answers as a transformers model does."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(8, 5).double()
        self.dropout = torch.nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(states=self.dropout(self.linear(x)))


class Rows:
    """The rows of the test, compared."""

    def represent(self, outputs: Any, batch: Batch) -> torch.Tensor:
        return outputs.states.reshape(*batch[TEXTS].shape, 5)

    def compare(self, given: torch.Tensor, batch: Batch) -> torch.Tensor:
        return multiple_negatives_ranking(given, batch[TEXTS], scale=20.0)


def batches(cuts: list[int]) -> list[Batch]:
    x, texts = vectors().double(), torch.arange(18).reshape(6, 3) % 15
    pairs = zip(x.split(cuts), texts.split(cuts), strict=True)
    return [{"x": part.flatten(0, 1), TEXTS: numbers} for part, numbers in pairs]


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("cuts", [[6], [3, 3], [1, 4, 1], [1] * 6])
def test_the_gradient_is_that_of_one_batch(cuts: list[int], dropout: float) -> None:
    """All micro-batches at once in memory, each with its dropout, are what is cached one by one."""
    model, rows = Vectors(dropout), Rows()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    nothing: Any = SimpleNamespace(step=lambda: None, metric=None)
    step = ContrastStep(
        CPU,
        "fp32",
        model=model,
        optimizer=optimizer,
        clip=lambda given: torch.tensor(0.0),
        scheduler=nothing,
        weight=lambda batch: len(batch[TEXTS]),
        loss=lambda outputs, batch: rows.compare(rows.represent(outputs, batch), batch),
        contrast=rows,
        forward=lambda model, batch: model(batch["x"]),
        seed=3,
    )
    result = step(batches(cuts), position=7)
    found = [param.grad.clone() for param in model.parameters() if param.grad is not None]
    model.zero_grad()
    whole = []
    for number, batch in enumerate(batches(cuts)):
        seed_random_states(seed_of_micro_batch(3, 7, number), CPU)
        whole.append(rows.represent(model(batch["x"]), batch))
    loss = rows.compare(
        torch.cat(whole), {TEXTS: torch.cat([batch[TEXTS] for batch in batches(cuts)])}
    )
    loss.backward()
    assert result.loss == pytest.approx(loss.item(), rel=1e-6)
    assert result.losses == pytest.approx([loss.item()] * len(cuts), rel=1e-6)
    for one, param in zip(found, model.parameters(), strict=True):
        assert param.grad is not None
        assert torch.allclose(one, param.grad, rtol=1e-10, atol=1e-12)
