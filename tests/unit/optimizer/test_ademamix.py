"""AdEMAMix: the way of its two warm-ups.

Its steps are held against a recorded package, in `tests/reference`.
"""

from __future__ import annotations

import math

import pytest
import torch

from optrun.optimizer import AdEMAMix
from optrun.optimizer.ademamix import warm_alpha, warm_beta3
from tests.optimizer_cases import set_grads, toy


@pytest.mark.parametrize(
    ("beta1", "beta3"), [(0.9, 0.9999), (0.5, 0.6), (0.9, 0.5), (0.0, 0.99), (0.9, 0.0)]
)
def test_the_half_life_moves_in_a_straight_line(beta1: float, beta3: float) -> None:
    def half_life(beta: float) -> float:
        return math.log(0.5) / math.log(beta) if beta else 0.0

    found = [warm_beta3(step, beta1=beta1, beta3=beta3, warmup_steps=10) for step in range(1, 13)]
    for step, beta in enumerate(found, start=1):
        share = min(1.0, step / 10)
        wanted = (1 - share) * half_life(beta1) + share * half_life(beta3)
        assert half_life(beta) == pytest.approx(min(wanted, half_life(beta3)), rel=1e-9)
    assert found[-3:] == [beta3] * 3


def test_without_a_warm_up_both_are_there_at_once() -> None:
    for none in (None, 0):
        assert warm_alpha(1, alpha=5.0, warmup_steps=none) == 5.0
        assert warm_beta3(1, beta1=0.9, beta3=0.99, warmup_steps=none) == 0.99


def test_without_the_slow_moment_it_is_adamw() -> None:
    ours, theirs = toy(torch.float64), toy(torch.float64)
    mixed = AdEMAMix(ours.items(), lr=0.1, weight_decay=0.1, alpha=0.0)
    adamw = torch.optim.AdamW(theirs.values(), lr=0.1, weight_decay=0.1)
    for step in range(4):
        for params, optimizer in ((ours, mixed), (theirs, adamw)):
            set_grads(params, step)
            optimizer.step()
    for name, param in theirs.items():
        torch.testing.assert_close(ours[name], param, rtol=1e-12, atol=1e-12)
