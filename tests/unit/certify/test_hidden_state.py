"""What an optimizer keeps beside its state is named before a resume is certified."""

from __future__ import annotations

import pytest
import torch

from optrun.certify.hidden_state import hidden_attributes
from optrun.optimizer.build import build_optimizer
from tests.optimizer_cases import CASES


class Counting(torch.optim.SGD):
    """Counts its steps where no state dict sees it."""

    def __init__(self, params: object, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)  # type: ignore[arg-type]
        self.t = 0
        self.label = "constant"

    def step(self, closure: object = None) -> object:  # type: ignore[override]
        """Count, then step."""
        self.t += 1
        return super().step(closure)  # type: ignore[call-overload]


class Saving(Counting):
    """Saves its counter in a group."""

    def state_dict(self) -> dict[str, object]:
        """Carry the counter."""
        return {**super().state_dict(), "t": self.t}

    def load_state_dict(self, state_dict: dict[str, object]) -> None:  # type: ignore[override]
        """Take the counter back."""
        state = dict(state_dict)
        self.t = state.pop("t")  # type: ignore[assignment]
        super().load_state_dict(state)


def test_a_counter_that_nothing_saves_is_named() -> None:
    assert hidden_attributes(lambda params: Counting([param for _, param in params])) == [
        "Counting.t"
    ]


def test_a_counter_that_is_saved_is_not() -> None:
    assert hidden_attributes(lambda params: Saving([param for _, param in params])) == []


@pytest.mark.parametrize("name", sorted({case.name for case in CASES}))
def test_no_optimizer_of_optrun_keeps_anything_beside_its_state(name: str) -> None:
    try:
        found = hidden_attributes(
            lambda params: build_optimizer(name, [{"params": params}], lr=1e-3)
        )
    except (TypeError, ValueError) as error:
        pytest.skip(str(error))
    assert found == []
