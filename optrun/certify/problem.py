"""Weights and gradients that tell optimizers apart.

Every term of an update shows in some tensor at some step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

LARGEST = 8
"""A longer side of a tensor is cut to this: what is compared are formulas, not sizes."""

WEIGHT_SCALES = (0.3, 30.0, 1e-4, 0.0)
"""Ordinary; a norm and a ratio that a bound cuts; likewise from below; a tensor that begins at 0.
"""

GRAD_SCALES = (1.0, 1e-3, 1e-6)
"""The last is where eps counts."""

MISSING = (3, 6)
"""Steps, from 0, at which every fifth tensor has no gradient."""

ZERO = 5
"""Step at which every third tensor has a gradient of 0."""


@dataclass(frozen=True)
class Problem:
    """What both sides are given.

    Attributes:
        weights: At the start, float64, by name.
        grads: One mapping a step; None: no gradient.
        multipliers: Of the learning rate, one a step; the first is 1, the highest.
    """

    weights: Mapping[str, Tensor]
    grads: Sequence[Mapping[str, Tensor | None]]
    multipliers: Sequence[float]


def make_problem(shapes: Mapping[str, Sequence[int]], steps: int, seed: int) -> Problem:
    """Draw weights and gradients.

    Args:
        shapes: Of each tensor by name, in order; sides are cut.
        steps: How many.
        seed: Of the draw.

    Example:
        >>> problem = make_problem({"weight": (64, 3), "bias": (3,)}, 4, 0)
        >>> problem.weights["weight"].shape, problem.multipliers
        (torch.Size([8, 3]), [1.0, 0.875, 0.75, 0.625])
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(shape: Sequence[int]) -> Tensor:
        return torch.randn(
            [min(side, LARGEST) for side in shape], generator=generator, dtype=torch.float64
        )

    weights = {
        name: WEIGHT_SCALES[index % len(WEIGHT_SCALES)] * draw(shape)
        for index, (name, shape) in enumerate(shapes.items())
    }
    grads: list[dict[str, Tensor | None]] = []
    for step in range(steps):
        found: dict[str, Tensor | None] = {}
        for index, (name, shape) in enumerate(shapes.items()):
            grad = GRAD_SCALES[(index + step // 4) % len(GRAD_SCALES)] * draw(shape)
            zero = step == ZERO and index % 3 == 0
            found[name] = None if step in MISSING and index % 5 == 4 else grad * 0 if zero else grad
        grads.append(found)
    return Problem(weights, grads, [1 - step / (2 * steps) for step in range(steps)])
