"""What every dialect is played on.

Weights, gradients and groups, the same for the recorder and for the tests.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch

from optrun.certify.formulas import Hyperparameters
from optrun.certify.problem import Problem, make_problem

FILE = Path(__file__).parent / "dialects" / "recorded.json"
STEPS = 20
KEPT = (1, 2, 5, 12, 20)
LR = 0.01
BETAS = (0.9, 0.999)
EPS = 1e-6
DECAY = 0.1
LATE = "head.weight"
"""The one tensor that has no gradient at some steps."""
SHAPES = {
    "embed.weight": (4, 3),
    "block.weight": (3, 4),
    "block.scale": (2, 2),
    "block.zero": (3,),
    LATE: (2, 3),
    "block.bias": (4,),
    "norm.weight": (3,),
    "norm.bias": (3,),
}
UNDECAYED = ("block.bias", "norm.weight", "norm.bias")
"""A group of their own, at half the rate."""
PATTERNS = ["bias$", "^norm"]
"""These, as patterns."""


@cache
def drawn() -> Problem:
    """What the recorder gives the packages."""
    return make_problem(SHAPES, STEPS, seed=11)


@cache
def recorded() -> dict[str, Any]:
    return dict(json.loads(FILE.read_text(encoding="utf-8")))


@cache
def problem() -> Problem:
    """The same out of the file: no draw has to come out again as it did then."""

    def tensors(flat: dict[str, Any]) -> dict[str, Any]:
        return {
            name: None
            if values is None
            else torch.tensor(values, dtype=torch.float64).view(SHAPES[name])
            for name, values in flat.items()
        }

    document = recorded()
    grads = [tensors(of_step) for of_step in document["grads"]]
    return Problem(tensors(document["weights"]), grads, drawn().multipliers)


def groups(*, by_pattern: bool = False) -> list[dict[str, Any]]:
    """As `build_param_groups` would return them.

    Args:
        by_pattern: Leave it to the optimizer's own patterns who is not decayed.
    """

    def params(undecayed: bool) -> list[Any]:
        kept = [name for name in SHAPES if (name in UNDECAYED) == undecayed]
        return [
            (name, torch.nn.Parameter(torch.empty(SHAPES[name], device="meta"))) for name in kept
        ]

    return [
        {"params": params(False), "weight_decay": DECAY},
        {"params": params(True), "weight_decay": DECAY if by_pattern else 0.0, "lr_scale": 0.5},
    ]


SCALES = (1.0, 0.1, 3.0)
"""Of the base rate, by turns, where every tensor decays.

What `weight_decay_mode=corrected` is recorded on.
"""


def scaled_groups(key: str) -> list[dict[str, Any]]:
    """A group for each tensor, at its scale of the base rate.

    Args:
        key: "lr_scale", or "lr": the same rates, absolute.
    """
    return [
        {
            "params": [(name, torch.nn.Parameter(torch.empty(SHAPES[name], device="meta")))],
            key: numbers.peak if key == "lr" else numbers.peak / LR,
        }
        for name, numbers in scaled_numbers_at(1).items()
    ]


def scaled_numbers_at(step: int) -> dict[str, Hyperparameters]:
    """Of a step from 1, with the rates of `scaled_groups`."""
    peaks = {name: LR * SCALES[index % len(SCALES)] for index, name in enumerate(SHAPES)}
    return {
        name: Hyperparameters(peak * drawn().multipliers[step - 1], peak, DECAY, BETAS, EPS, step)
        for name, peak in peaks.items()
    }


def numbers_at(step: int) -> dict[str, Hyperparameters]:
    """Of a step from 1."""
    found = {}
    for name in SHAPES:
        peak = LR * (0.5 if name in UNDECAYED else 1.0)
        decay = 0.0 if name in UNDECAYED else DECAY
        found[name] = Hyperparameters(
            peak * drawn().multipliers[step - 1], peak, decay, BETAS, EPS, step
        )
    return found
