"""Label smoothing is transformers', class weights are torch's, and neither depends on how a
batch is cut.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers.trainer_pt_utils import LabelSmoother

from optrun.base.errors import ConfigError
from optrun.data.source import Source
from optrun.task import Task
from optrun.task.class_weights import class_weights
from optrun.task.evaluation import IGNORED
from optrun.training.step import TrainStep

Make = Callable[..., Any]
TEXTS = {"text": ["the cat", "a mat", "Anna went", "Bob sat", "the mat sat"]}
CLASSES = {**TEXTS, "label": ["a", "b", "b", "c", "b"]}
WORDS = {
    "tokens": [["Anna", "went"], ["the", "cat", "sat"]],
    "tags": [["B-X", "O"], ["O", "O", "B-X"]],
}


def task_of(name: str, make_source: Callable[..., Source], make_task: Callable[..., Task]) -> Task:
    rows = {
        "causal_lm": TEXTS,
        "masked_lm": TEXTS,
        "seq2seq_lm": {**TEXTS, "target": TEXTS["text"][::-1]},
        "sequence_classification": CLASSES,
        "token_classification": WORDS,
    }[name]
    return make_task(name, make_source(rows, max_length=8))


@pytest.mark.parametrize(
    "name",
    ["causal_lm", "masked_lm", "seq2seq_lm", "sequence_classification", "token_classification"],
)
def test_label_smoothing_is_that_of_transformers(
    name: str, make_source: Make, make_task: Make
) -> None:
    task = task_of(name, make_source, make_task)
    task.label_smoothing = 0.1
    labels = torch.tensor([[1, 0, 2, IGNORED, 1], [2, IGNORED, 0, 1, IGNORED]])
    logits = torch.randn(2, 5, 3)
    if name == "sequence_classification":
        labels, logits = labels[:, 0], logits[:, 0]
    outputs = SimpleNamespace(loss=None, logits=logits)
    expected = LabelSmoother(0.1)({"logits": logits}, labels, shift_labels=name == "causal_lm")
    assert torch.allclose(task.loss(outputs, {"labels": labels}), expected, rtol=1e-6, atol=0)
    task.label_smoothing = 0.0
    outputs.loss = torch.tensor(7.0)
    assert task.loss(outputs, {"labels": labels}) is outputs.loss, "the model's own"


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_class_weights_are_those_of_torch(
    smoothing: float, make_source: Make, make_task: Make
) -> None:
    task = task_of("sequence_classification", make_source, make_task)
    task.class_weights, task.label_smoothing = torch.tensor([0.5, 1.0, 4.0]), smoothing
    labels, logits = torch.tensor([0, 2, 2, 1]), torch.randn(4, 3)
    expected = functional.cross_entropy(
        logits, labels, weight=task.class_weights, label_smoothing=smoothing
    )
    batch = {"labels": labels}
    assert torch.equal(task.loss(SimpleNamespace(loss=None, logits=logits), batch), expected)
    assert task.weight(batch) == 9.5


class Scores(torch.nn.Module):
    """A linear classifier that answers as a transformers model does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        logits = self.linear(x)
        return SimpleNamespace(logits=logits, loss=functional.cross_entropy(logits, labels))


@pytest.mark.parametrize("cuts", [[6], [3, 3], [1, 4, 1], [1] * 6])
def test_accumulation_is_weighted_by_the_weights_of_the_targets(
    cuts: list[int], make_source: Make, make_task: Make
) -> None:
    task = task_of("sequence_classification", make_source, make_task)
    task.class_weights = torch.tensor([0.0, 1.0, 5.0])
    x, labels = torch.randn(6, 4), torch.tensor([2, 1, 0, 2, 1, 0])
    torch.manual_seed(0)
    model = Scores()
    whole = functional.cross_entropy(model.linear(x), labels, weight=task.class_weights)
    (expected,) = torch.autograd.grad(whole, [model.linear.weight])
    seen = {}

    def clip(optimizer: torch.optim.Optimizer) -> torch.Tensor:
        seen["grad"] = model.linear.weight.grad.clone()  # type: ignore[union-attr]
        return torch.tensor(1.0)

    step = TrainStep(
        torch.device("cpu"),
        "fp32",
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        clip=clip,
        scheduler=SimpleNamespace(step=lambda: None),  # type: ignore[arg-type,unused-ignore]
        weight=task.weight,
        loss=task.loss,
    )
    parts = zip(x.split(cuts), labels.split(cuts), strict=True)
    result = step([{"x": features, "labels": targets} for features, targets in parts])
    assert result.loss == pytest.approx(whole.item(), rel=1e-6)
    assert result.weight == 12.0
    assert torch.allclose(seen["grad"], expected, rtol=1e-5, atol=1e-7)


def test_weights_as_they_may_be_given() -> None:
    labels, counts = ["a", "b", "c"], {"a": 1, "b": 6, "c": 5}
    assert class_weights(None, labels, counts) is None
    balanced = class_weights("balanced", labels, counts)
    assert balanced is not None
    assert balanced.tolist() == pytest.approx([4.0, 12 / 18, 0.8])  # compute_class_weight
    found = class_weights({"b": 3}, labels, counts)
    assert found is not None
    assert found.tolist() == [1.0, 3.0, 1.0]
    numbered = class_weights({1: 2.0}, ["0", "1"], {"0": 1, "1": 1})
    assert numbered is not None
    assert numbered.tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("given", "facts"),
    [
        ({"maybe": 2.0}, ["task.class_weights.maybe", "Did you mean may"]),
        ("balanced", ["balanced", "no training example", "may"]),
    ],
)
def test_weights_that_do_not_fit(given: Any, facts: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        class_weights(given, ["yes", "no", "may"], {"yes": 2, "no": 1, "may": 0})
    assert all(fact in str(refused.value) for fact in facts), refused.value
