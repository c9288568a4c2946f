"""A loss that nothing can be learnt from is refused by what it is."""

from __future__ import annotations

import pytest
import torch

from optrun.base.errors import OptrunError
from optrun.training.step import _trainable


@pytest.mark.parametrize(
    ("loss", "shown"),
    [
        (torch.ones(6, requires_grad=True), "shape (6,)"),
        (torch.tensor(1.0), "requires_grad is False"),
        (1.0, "float"),
        (None, "NoneType"),
    ],
)
def test_a_loss_that_nothing_can_be_learnt_from(loss: object, shown: str) -> None:
    with pytest.raises(OptrunError) as refused:
        _trainable(loss)
    assert "the loss of the task is " in str(refused.value)
    assert shown in str(refused.value)


def test_one_that_can_be_learnt_from_is_taken_as_it_is() -> None:
    loss = torch.ones((), requires_grad=True)
    assert _trainable(loss) is loss
