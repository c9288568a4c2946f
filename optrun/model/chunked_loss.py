"""Losses and predictions of tokens from the last hidden states, without all logits at once.

The model runs as it is, but its output head hands the hidden states on, so that they come out as
the logits. Of those that have a target the logits are computed a few rows at a time, and again in
the backward pass, where the gradient of the head is added up in place.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import update_wrapper
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction, FunctionCtx, once_differentiable
from torch.nn import functional

from optrun.model.attention import plain_attention
from optrun.model.forward import lean_forward
from optrun.model.tokenizer import in_one_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CHUNK = 2**25
"""Logits that are there at once, as far as a row has no more."""
_IGNORED = -100
_WIDE = 50.0
_NEAR = 1e-5
_NEAR_IN_16_BITS = 3e-2


class TargetLosses(NamedTuple):
    """What comes of a batch with labels in place of logits; a tree to torch, as ranks need it."""

    loss: Tensor
    """Mean cross-entropy over the targets, shape ()."""
    even: Tensor
    """Mean cross-entropy with a target spread evenly over the vocabulary, shape (); for label
    smoothing."""
    losses: Tensor
    """Cross-entropy of each target, 0 where there is none; shape (batch, targets)."""
    predicted: Tensor
    """Most probable token in the place of each target; shape (batch, targets)."""

    def values(self) -> list[Tensor]:
        """List the tensors with gradients to every trained parameter."""
        return [self.losses]


class ChunkedForward:
    """Stands in the place of a model's forward pass; without labels it is that.

    Args:
        model: Its head is one linear map; see `why_whole`.
        shift: Whether a position predicts the label of the next one.
    """

    def __init__(self, model: PreTrainedModel, *, shift: bool) -> None:
        update_wrapper(self, model.forward)  # whose arguments `generate` looks at
        self.whole = model.forward
        self.shift = shift
        self.hands_on = False
        self.head = cast("nn.Linear", model.get_output_embeddings())
        vars(model)["forward"] = self
        vars(self.head)["forward"] = self._head

    def _head(self, states: Tensor) -> Tensor:
        if self.hands_on:
            return states
        return functional.linear(states, self.head.weight, self.head.bias)

    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
    def __call__(self, *args: object, labels: Tensor | None = None, **inputs: object) -> object:
        """Compute `TargetLosses` of a batch; without labels call the model as it is."""
        if labels is None:
            return self.whole(*args, **inputs)
        self.hands_on = True
        try:
            states = self.whole(*args, **inputs).logits
        finally:
            self.hands_on = False
        if self.shift:
            states = states[:, :-1]
            labels = labels[:, 1:]
        is_target = labels != _IGNORED
        kind = states.device.type
        dtype = states.dtype
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        with torch.autocast(kind, enabled=False):
            row_losses: tuple[Tensor, ...] = _RowLosses.apply(
                states[is_target].to(dtype), self.head.weight, self.head.bias, labels[is_target]
            )
        losses, even, predicted = row_losses
        return TargetLosses(
            losses.mean(),
            even.mean(),
            losses.new_zeros(is_target.shape).masked_scatter(is_target, losses),
            torch.zeros_like(labels).masked_scatter(is_target, predicted),
        )


class _RowLosses(torch.autograd.Function):
    """Compute `TargetLosses` of hidden states (rows, width) with a weight (vocabulary, width)."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, states: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(states, weight, bias, targets)  # type: ignore[arg-type]
        ctx.set_materialize_grads(False)
        exact = torch.promote_types(states.dtype, torch.float32)
        losses, even = (states.new_zeros(len(states), dtype=exact) for _ in range(2))
        predicted = torch.zeros_like(targets)
        for rows, logits in _logits(states, weight, bias):
            total = logits.logsumexp(1)
            losses[rows] = total - logits.gather(1, targets[rows, None])[:, 0]
            even[rows] = total - logits.mean(1)
            predicted[rows] = logits.argmax(1)
        ctx.mark_non_differentiable(predicted)
        return losses, even, predicted

    @staticmethod
    @once_differentiable
    def backward(
        ctx: BackwardCFunction, losses: Tensor | None, even: Tensor | None, _: object
    ) -> tuple[Tensor | None, ...]:
        """Compute dz = (a + b) p - a [target] - b / vocabulary for each row, p = softmax(z)."""
        states, weight, bias, targets = ctx.saved_tensors  # type: ignore[misc]
        zero = states.new_zeros(len(states), dtype=torch.promote_types(states.dtype, torch.float32))
        a, b = (zero if grad is None else grad for grad in (losses, even))
        of_states, of_weight, of_bias = (
            torch.zeros_like(tensor) if needs_grad else None
            for tensor, needs_grad in zip(
                (states, weight, bias), ctx.needs_input_grad, strict=False
            )
        )
        for rows, logits in _logits(states, weight, bias):
            grad = torch.softmax(logits, 1).mul_((a + b)[rows, None])
            grad.scatter_add_(1, targets[rows, None], -a[rows, None])
            if even is not None:
                grad.sub_(b[rows, None] / len(weight))
            if of_bias is not None:
                of_bias += grad.sum(0)
            grad = grad.to(states.dtype)
            if of_states is not None:
                of_states[rows] = grad @ weight.to(states.dtype)
            if of_weight is not None and of_weight.dtype is states.dtype:
                of_weight.addmm_(grad.T, states[rows])
            elif of_weight is not None:
                of_weight += grad.T @ states[rows]
        return of_states, of_weight, of_bias, None


def _logits(states: Tensor, weight: Tensor, bias: Tensor | None) -> Iterator[tuple[slice, Tensor]]:
    """Yield the logits of some rows at a time, in float32 at least."""
    weight = weight.to(states.dtype)
    bias = None if bias is None else bias.to(states.dtype)
    step = max(1, CHUNK // len(weight))
    for at in range(0, len(states), step):
        rows = slice(at, at + step)
        logits = functional.linear(states[rows], weight, bias)
        yield rows, logits.to(torch.promote_types(logits.dtype, torch.float32))


def why_whole(model: PreTrainedModel, *, shift: bool) -> str | None:
    """Say why the losses of a model cannot be computed from its last hidden states; None: they can.

    It is tried on four tokens. Logits may be the head's output times a constant; the model's own
    loss has to be the mean cross-entropy.

    Args:
        model: With its weights, on a device where it runs; everything is put back.
        shift: Whether a position predicts the label of the next one.
    """
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        return f"its output head is a {type(head).__name__}, and no plain linear map"
    ids = torch.arange(8, device=model.device).view(2, 4) % len(head.weight)
    near = _NEAR if model.dtype in (torch.float32, torch.float64) else _NEAR_IN_16_BITS
    training = model.training
    before = {**vars(model)}
    model.eval()
    try:
        with (
            torch.no_grad(),
            torch.random.fork_rng(devices=[]),
            plain_attention(model),
            lean_forward(model),
        ):
            vars(head)["forward"] = lambda states: (
                torch.linspace(-_WIDE, _WIDE, states.numel()).to(states).view_as(states)
            )
            head_output = head.forward(
                torch.empty(2, 4, head.in_features, device=model.device)
            ).double()
            model_logits = model(input_ids=ids).logits.double()
            del head.forward
            scale = float((model_logits * head_output).sum() / head_output.square().sum())
            if not torch.allclose(
                model_logits, scale * head_output, rtol=min(near, 1e-2), atol=1e-4
            ) or (scale != 1 and head.bias is not None):
                return "it changes the logits after its output head, as softcapping does"
            model_loss = float(model(input_ids=ids, labels=ids).loss)
            chunked = float(ChunkedForward(model, shift=shift)(input_ids=ids, labels=ids).loss)
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
        return f"it cannot be tried on four tokens: {in_one_line(error)}"
    finally:
        vars(head).pop("forward", None)
        vars(model).pop("forward", None)
        vars(model).update({name: value for name, value in before.items() if name == "forward"})
        model.train(training)
    if abs(model_loss - chunked) <= near * abs(model_loss):
        return None
    return "its own loss is not the mean cross-entropy of its logits"
