"""An optimizer step whose loss compares all its examples, over micro-batches and ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from optrun.data.loader import ASIDE, Batch
from optrun.training.exchange import GlobalStep, interleave_ranks
from optrun.training.step import NumberedBatch, TrainStep, zero_loss

_VECTORS = "vectors"


class Contrast(Protocol):
    """The part of a task that a `ContrastStep` uses."""

    def represent(self, outputs: Any, batch: Batch) -> torch.Tensor:
        """Compute the vectors of a batch, shape (batch, texts, width)."""
        ...

    def compare(self, vectors: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Compute the loss of the vectors of one or several joined batches, shape ()."""
        ...


@dataclass(eq=False, kw_only=True)
class ContrastStep(TrainStep):
    """A step whose loss compares all examples, over micro-batches and ranks (GradCache).

    Each micro-batch runs forward twice: without gradients for its vectors, and again, with the same
    dropout, to backpropagate the gradient of the step's loss by these vectors. Memory is that of
    one micro-batch. A step of a single micro-batch runs once.

    Source: Gao, Zhang, Han & Callan 2021, arXiv:2101.06983, section 3.2: dL/dw = sum_i dL/dv_i
        dv_i/dw.
    """

    contrast: Contrast
    """Computes the vectors and the loss."""

    def _backward_all(
        self, numbered_batches: list[NumberedBatch], step: GlobalStep, position: int
    ) -> list[torch.Tensor]:
        """Run every micro-batch forward for its vectors, then again for its gradient.

        Returns:
            The share of each micro-batch in the loss of the step, shape () each.
        """
        if len(step.facts) == 1:
            return super()._backward_all(numbered_batches, step, position)

        # 1. Vectors of every micro-batch, without gradients.
        with torch.no_grad():
            vectors = [self._compute_vectors(batch, position) for batch in numbered_batches]

        # 2. The loss over the vectors of all ranks, and its gradient by the vectors of each
        # micro-batch.
        loss, gradients = self._loss_and_gradients(vectors, len(step.facts))

        # 3. Every micro-batch again, backpropagating the gradient of its vectors; None for a
        # repeated one, whose number is beyond the last, and which weighs 0.
        for at, (batch, number) in enumerate(numbered_batches, 1):
            is_last = at == len(numbered_batches)
            with self.gradient_sync(is_last):
                self._backpropagate((batch, number), position, gradients.get(number))
        return [
            loss * (step.weight_of(number) / step.total_weight) for _, number in numbered_batches
        ]

    def _forward(self, numbered_batch: NumberedBatch, position: int) -> tuple[Any, Batch]:
        """Run a micro-batch forward with its own dropout; return outputs and the moved batch."""
        batch, number = numbered_batch
        self._seed(position, number)
        moved = self.to_device(batch)
        return self.forward(self.model, moved), moved

    def _compute_vectors(self, numbered_batch: NumberedBatch, position: int) -> Batch:
        """Compute the vectors of a micro-batch, with other tensors for the loss, such as scores."""
        with self.autocast():
            outputs, moved = self._forward(numbered_batch, position)
            other_tensors = {name: moved[name] for name in ASIDE if name in moved}
            return {_VECTORS: self.contrast.represent(outputs, moved), **other_tensors}

    def _loss_and_gradients(
        self, batches: list[Batch], count: int
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Compute the loss of the vectors of all ranks, in the order of their micro-batches.

        Args:
            batches: Vectors and other tensors of each micro-batch of this rank.
            count: Micro-batches of the step over all ranks.

        Returns:
            The loss of the step, shape (); and by number of each micro-batch, of all ranks, the
            gradient of the loss by its vectors, shape (batch, texts, width).
        """
        # 1. Join the batches of all ranks to one, without the repeated ones. Objects are pickled
        # on their way to other ranks, and a tensor of one rank's GPU is of no use on another.
        if self.world.size > 1:
            batches = [_to_cpu(batch) for batch in batches]
        gathered = interleave_ranks(self.world.gather_objects(batches), count)
        step_batch = {}
        for name in gathered[0]:
            step_batch[name] = torch.cat([batch[name] for batch in gathered]).to(self.device)

        # 2. The loss of that batch, and its gradient by the vectors alone.
        vectors = step_batch.pop(_VECTORS).requires_grad_()
        with self.autocast():
            loss = self.contrast.compare(vectors, step_batch)
        (gradient,) = torch.autograd.grad(loss, vectors)

        # 3. Divide the gradient among the micro-batches, by their examples.
        gradients = gradient.split([len(batch[_VECTORS]) for batch in gathered])
        return loss.detach().float(), dict(enumerate(gradients))

    def _backpropagate(
        self, numbered_batch: NumberedBatch, position: int, gradient: torch.Tensor | None
    ) -> None:
        """Run a micro-batch forward again, and backpropagate a gradient from its vectors.

        Args:
            numbered_batch: The micro-batch with its number.
            position: Steps of data used before, which seeds its dropout.
            gradient: Gradient of the loss by the vectors; None: the micro-batch is a repeated one,
                and adds nothing.
        """
        with self.autocast():
            outputs, moved = self._forward(numbered_batch, position)
            if gradient is None:
                loss = zero_loss(outputs)
            else:
                # Its gradient is gradient * d vectors / d weights: the chain rule.
                loss = (self.contrast.represent(outputs, moved) * gradient).sum()
        self._backward_over_ranks(loss)


def _to_cpu(batch: Batch) -> Batch:
    return {name: tensor.cpu() for name, tensor in batch.items()}
