"""The gradient noise scale: how large a batch may grow before a larger one stops paying.

McCandlish et al. 2018, arXiv:1812.06162, appendix A.1: the gradients of a step's micro-batches,
which exist anyway, against that of the whole step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

DECAY = 0.99
"""Of the moving averages, a step: about the last hundred steps count."""


class NoiseScale:
    """Measures the gradient of each micro-batch as it arrives at the parameters, before it is added to the others.

    Args:
        params: What is trained.
    """

    def __init__(self, params: Iterable[Tensor]) -> None:
        self._found: list[Tensor] = []
        for param in params:
            param.register_hook(self._arrived)

    def _arrived(self, gradient: Tensor) -> None:
        values = gradient.coalesce().values() if gradient.is_sparse else gradient
        self._found.append(torch.linalg.vector_norm(values.detach(), dtype=torch.float32))

    def take(self, factor: float) -> Tensor:
        """Return the squared norm of a micro-batch's gradient since this was last asked.

        Shape (), float32.

        Args:
            factor: What its mean loss was multiplied with before the backward pass.
        """
        lengths, self._found = self._found, []
        return (
            (torch.linalg.vector_norm(torch.stack(lengths)) / factor) ** 2
            if lengths
            else torch.zeros(())
        )


def estimate(
    squares: Sequence[float], sizes: Sequence[int], whole: float
) -> tuple[float, float] | None:
    """Estimate noise and signal of one step, both without bias; of one step alone they say little.

    Args:
        squares: Squared gradient norm of each micro-batch.
        sizes: Examples of each.
        whole: Squared norm of the step's gradient, their mean weighted by size.

    Returns:
        tr(Sigma), the variance of the gradient of one example, and |G|^2, the squared norm of the
        true gradient: what solves E|G_b|^2 = |G|^2 + tr(Sigma) / b for the micro-batches and for
        the step. None of a single micro-batch.

    Source: equations A.2 and A.3, with the mean over micro-batches of unequal size.

    Example:
        >>> estimate([5.0, 5.0], [1, 1], 3.0)
        (4.0, 1.0)
    """
    if len(squares) < 2:
        return None
    small, inverse = sum(squares) / len(squares), sum(1 / size for size in sizes) / len(sizes)
    noise = (small - whole) / (inverse - 1 / sum(sizes))
    return noise, whole - noise / sum(sizes)


def averaged(before: Sequence[float], found: tuple[float, float]) -> list[float]:
    """Move the averages of noise and signal by one step.

    Args:
        before: Averages of noise and signal; empty before the first step.
        found: Of this step.

    Example:
        >>> averaged([], (4.0, 1.0)), averaged([4.0, 1.0], (5.0, 1.0))
        ([4.0, 1.0], [4.01, 1.0])
    """
    if not before:
        return list(found)
    return [DECAY * old + (1 - DECAY) * new for old, new in zip(before, found, strict=True)]


def noise_scale(averages: Sequence[float]) -> dict[str, float]:
    """Compute `perf/noise_scale`, in examples.

    Tr(Sigma) / |G|^2, a ratio of averages, not an average of ratios.

    Returns:
        Nothing while noise hides the signal, so that an average is not above 0.
    """
    return {"perf/noise_scale": averages[0] / averages[1]} if averages and min(averages) > 0 else {}
