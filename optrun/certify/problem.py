"""Weights and gradients for which optimizers with different formulas differ.

Every term of an update has an effect on some tensor at some step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

LARGEST = 8
"""Largest side of a tensor; longer ones are cut, because formulas are compared and not sizes."""

WEIGHT_SCALES = (0.3, 30.0, 1e-4, 0.0)
"""Standard deviations of weights, tensor by tensor in turn: ordinary; large and small enough for
the bounds on norm and trust ratio; zero."""

GRAD_SCALES = (1.0, 1e-3, 1e-6)
"""Standard deviations of gradients, in turn; eps is not negligible beside the last one."""

STEPS_WITHOUT_GRADIENT = (3, 6)
"""Steps, from 0, at which every fifth tensor has no gradient."""

STEP_WITH_ZERO_GRADIENT = 5
"""Step, from 0, at which every third tensor has a gradient of 0."""


@dataclass(frozen=True)
class Problem:
    """The weights, gradients and schedule that both optimizers get.

    Attributes:
        weights: Initial weights by name, in float64.
        grads: Gradients by name, one mapping a step; None: no gradient.
        multipliers: Of the learning rate, one a step; the first is 1, the highest.
    """

    weights: Mapping[str, Tensor]
    grads: Sequence[Mapping[str, Tensor | None]]
    multipliers: Sequence[float]


def make_problem(shapes: Mapping[str, Sequence[int]], steps: int, seed: int) -> Problem:
    """Draw weights and gradients for a comparison, in float64.

    Their scales, missing gradients and zero gradients are those of the constants above. The
    multiplier of the lr falls linearly from 1 towards 0.5.

    Args:
        shapes: Shape of each tensor by name; sides are cut to `LARGEST`. The order matters.
        steps: Number of optimizer steps.
        seed: Seed of the random generator.

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

    weights: dict[str, Tensor] = {}
    for index, (name, shape) in enumerate(shapes.items()):
        weights[name] = WEIGHT_SCALES[index % len(WEIGHT_SCALES)] * draw(shape)
    grads: list[dict[str, Tensor | None]] = []
    for step in range(steps):
        step_grads: dict[str, Tensor | None] = {}
        for index, (name, shape) in enumerate(shapes.items()):
            # Each tensor gets another scale every four steps.
            grad = GRAD_SCALES[(index + step // 4) % len(GRAD_SCALES)] * draw(shape)
            is_missing = step in STEPS_WITHOUT_GRADIENT and index % 5 == 4
            is_zero = step == STEP_WITH_ZERO_GRADIENT and index % 3 == 0
            if is_zero:
                grad = grad * 0
            step_grads[name] = None if is_missing else grad
        grads.append(step_grads)
    multipliers = [1 - step / (2 * steps) for step in range(steps)]
    return Problem(weights, grads, multipliers)
