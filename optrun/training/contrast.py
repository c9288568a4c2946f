"""A step whose loss compares all its examples.

In-batch negatives over every micro-batch and every rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from optrun.data.loader import ASIDE, Batch
from optrun.training.exchange import GlobalStep, in_order
from optrun.training.step import Numbered, TrainStep, zero_loss

_VECTORS = "vectors"


class Contrast(Protocol):
    """Vectors of examples, and a loss over the vectors of a whole step."""

    def represent(self, outputs: Any, batch: Batch) -> torch.Tensor:
        """Make vectors of shape (batch, texts, width)."""
        ...

    def compare(self, vectors: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Compute the loss, shape (), from vectors and the other tensors of a batch."""
        ...


@dataclass(eq=False, kw_only=True)
class ContrastStep(TrainStep):
    """A step whose loss compares all examples, over micro-batches and ranks.

    Each micro-batch runs twice: without gradient for its vectors, and again, with the same dropout,
    to carry the gradient of the step's loss by these vectors into the weights. Memory is that of
    one micro-batch. A step of one micro-batch runs once.

    Source: Gao, Zhang, Han & Callan 2021, arXiv:2101.06983, section 3.2: dL/dw = sum_i dL/dv_i
        dv_i/dw.
    """

    contrast: Contrast
    """The vectors and the loss."""

    def _shares(self, runs: list[Numbered], step: GlobalStep, position: int) -> list[torch.Tensor]:
        """Run every micro-batch for its vectors, then again for its gradient."""
        if len(step.facts) == 1:
            return super()._shares(runs, step, position)
        with torch.no_grad():
            vectors = [self._vectors(run, position) for run in runs]
        loss, gradients = self._compared(vectors, len(step.facts))
        for at, run in enumerate(runs, 1):
            with self.gradient_sync(at == len(runs)):
                self._carry_back(run, position, gradients.get(run[1]))
        return [loss * (step.weight_of(number) / step.total_weight) for _, number in runs]

    def _forward(self, run: Numbered, position: int) -> tuple[Any, Batch]:
        batch, number = run
        self._seed(position, number)
        moved = self.to_device(batch)
        return self.forward(self.model, moved), moved

    def _vectors(self, run: Numbered, position: int) -> Batch:
        """Compute the vectors of a micro-batch, and take along the other tensors of the loss."""
        with self.autocast():
            outputs, moved = self._forward(run, position)
            aside = {name: moved[name] for name in ASIDE if name in moved}
            return {_VECTORS: self.contrast.represent(outputs, moved), **aside}

    def _compared(
        self, batches: list[Batch], count: int
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Compare the vectors of all ranks, in the order of their micro-batches.

        Args:
            batches: Vectors and scores of this rank.
            count: Micro-batches of the step over all ranks.

        Returns:
            The loss of the step, shape (), and its gradient by the vectors of each micro-batch.
        """
        if self.world.size > 1:
            batches = [{name: values.cpu() for name, values in part.items()} for part in batches]
        parts = in_order(self.world.gather_objects(batches), count)
        step_batch = {
            name: torch.cat([part[name] for part in parts]).to(self.device) for name in parts[0]
        }
        vectors = step_batch.pop(_VECTORS).requires_grad_()
        with self.autocast():
            loss = self.contrast.compare(vectors, step_batch)
        (gradient,) = torch.autograd.grad(loss, vectors)
        pieces = gradient.split([len(part[_VECTORS]) for part in parts])
        return loss.detach().float(), dict(enumerate(pieces))

    def _carry_back(self, run: Numbered, position: int, gradient: torch.Tensor | None) -> None:
        """Run a micro-batch forward again, and backward from the gradient at its vectors.

        Args:
            run: The micro-batch with its number.
            position: Step from which random states are seeded.
            gradient: Of the loss by the vectors; None: the micro-batch counts nothing.
        """
        with self.autocast():
            outputs, moved = self._forward(run, position)
            if gradient is None:
                carried = zero_loss(outputs)
            else:
                carried = (self.contrast.represent(outputs, moved) * gradient).sum()
        # The reduction over ranks is a mean.
        self.scaler.scale(carried * self.world.size if self.world.size > 1 else carried).backward()
