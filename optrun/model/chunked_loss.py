"""Losses and predictions of tokens from the last hidden states, without all logits at once.

The model runs as it is, but its output head returns the hidden states, so that they come out as the
logits. Then logits are computed for a few targets at a time, and again in the backward pass, which
adds up the gradient of the head in place.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import update_wrapper
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction, FunctionCtx, once_differentiable
from torch.nn import functional

from optrun.base.errors import message_in_one_line
from optrun.model.attention import plain_attention
from optrun.model.configuration import router_loss_coef
from optrun.model.forward import evaluation_mode, without_cache_and_padding_check

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CHUNK = 2**25
"""Logits in memory at once; at least one row, however large the vocabulary."""
_IGNORED = -100
_LARGEST_LOGIT = 50.0
"""Logits up to this size show whether a model caps them."""
_TOLERANCE = 1e-5
_TOLERANCE_IN_16_BITS = 3e-2
"""Relative difference of two losses that count as equal."""
_LOGITS_TOLERANCE_IN_16_BITS = 1e-2
"""Relative difference of two logits that count as equal; in 32 bits that of losses."""


class TargetLosses(NamedTuple):
    """The output of a chunked forward pass with labels, in place of logits.

    A tuple, because DDP and FSDP find the tensors of an output in tuples.
    """

    loss: Tensor
    """Mean cross-entropy over the targets, shape (); never with a router loss, see
    `why_not_chunked`."""
    uniform_loss: Tensor
    """Mean cross-entropy with a uniform target over the vocabulary, shape (); for label
    smoothing."""
    losses: Tensor
    """Cross-entropy of each target, 0 where there is none; shape (batch, targets)."""
    predicted: Tensor
    """Most probable token where there is a target, 0 elsewhere; shape (batch, targets)."""

    def values(self) -> list[Tensor]:
        """List the tensors with gradients to every trained parameter."""
        return [self.losses]


class ChunkedForward:
    """Replaces the forward pass of a model; a call without labels computes the same as before.

    The constructor sets the `forward` of the model and of its output head.

    Args:
        model: One for which `why_not_chunked` returns None.
        shift: Whether a position predicts the label of the next one.
    """

    def __init__(self, model: PreTrainedModel, *, shift: bool) -> None:
        update_wrapper(self, model.forward)  # whose arguments `generate` looks at
        self.model_forward = model.forward
        self.shift = shift
        self.head_returns_states = False
        self.head = cast("nn.Linear", model.get_output_embeddings())
        vars(model)["forward"] = self
        vars(self.head)["forward"] = self._head

    def _head(self, states: Tensor) -> Tensor:
        if self.head_returns_states:
            return states
        return functional.linear(states, self.head.weight, self.head.bias)

    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
    def __call__(self, *args: object, labels: Tensor | None = None, **inputs: object) -> object:
        """Compute `TargetLosses` of a batch; without labels the model's own output.

        Args:
            args: Inputs of the model.
            labels: Token ids, -100 where there is no target; shape (batch, positions).
            inputs: Inputs of the model.
        """
        if labels is None:
            return self.model_forward(*args, **inputs)
        self.head_returns_states = True
        try:
            states = self.model_forward(*args, **inputs).logits
        finally:
            self.head_returns_states = False
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
        losses, uniform_losses, predicted = row_losses
        return TargetLosses(
            losses.mean(),
            uniform_losses.mean(),
            losses.new_zeros(is_target.shape).masked_scatter(is_target, losses),
            torch.zeros_like(labels).masked_scatter(is_target, predicted),
        )


class _RowLosses(torch.autograd.Function):
    """Loss, loss with a uniform target and prediction of each row, in chunks of rows.

    Inputs: hidden states (rows, width), weight (vocabulary, width), bias (vocabulary,) or None,
    target ids (rows,). Outputs: three tensors (rows,); both losses in float32 at least.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx, states: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(states, weight, bias, targets)  # type: ignore[arg-type]
        ctx.set_materialize_grads(False)
        exact = torch.promote_types(states.dtype, torch.float32)
        losses = states.new_zeros(len(states), dtype=exact)
        uniform_losses = torch.zeros_like(losses)
        predicted = torch.zeros_like(targets)
        for rows, logits in _logits(states, weight, bias):
            # Cross-entropy: log sum exp z - z[target], and its mean over all targets.
            log_sum = logits.logsumexp(1)
            losses[rows] = log_sum - logits.gather(1, targets[rows, None])[:, 0]
            uniform_losses[rows] = log_sum - logits.mean(1)
            predicted[rows] = logits.argmax(1)
        ctx.mark_non_differentiable(predicted)
        return losses, uniform_losses, predicted

    @staticmethod
    @once_differentiable
    def backward(
        ctx: BackwardCFunction, losses: Tensor | None, uniform_losses: Tensor | None, _: object
    ) -> tuple[Tensor | None, ...]:
        """Compute the gradients of states, weight and bias; None if it is not needed.

        For a row with logits z, p = softmax(z), and gradients a of its loss and b of its loss with
        a uniform target: dz = (a + b) p - a [target] - b / vocabulary. As z = states @ weight.T +
        bias, the gradients are dz @ weight, dz.T @ states, and the sum of dz over the rows.

        Args:
            ctx: Has the inputs of `forward`.
            losses: a, shape (rows,); None: 0.
            uniform_losses: b, shape (rows,); None: 0.
            _: The gradient of the predictions, which have none.
        """
        states, weight, bias, targets = ctx.saved_tensors  # type: ignore[misc]
        zero = states.new_zeros(len(states), dtype=torch.promote_types(states.dtype, torch.float32))
        a = zero if losses is None else losses
        b = zero if uniform_losses is None else uniform_losses
        needs_states, needs_weight, needs_bias, _ = cast("tuple[bool, ...]", ctx.needs_input_grad)
        states_grad = torch.zeros_like(states) if needs_states else None
        weight_grad = torch.zeros_like(weight) if needs_weight else None
        bias_grad = torch.zeros_like(bias) if needs_bias else None
        for rows, logits in _logits(states, weight, bias):
            # dz of these rows, in place: (a + b) p, then - a at the target, then - b / vocabulary.
            dz = torch.softmax(logits, 1).mul_((a + b)[rows, None])
            dz.scatter_add_(1, targets[rows, None], -a[rows, None])
            if uniform_losses is not None:
                dz.sub_(b[rows, None] / len(weight))
            # The sum over rows is taken in float32, before the rounding for the products.
            if bias_grad is not None:
                bias_grad += dz.sum(0)
            dz = dz.to(states.dtype)
            if states_grad is not None:
                states_grad[rows] = dz @ weight.to(states.dtype)
            if weight_grad is not None and weight_grad.dtype is states.dtype:
                weight_grad.addmm_(dz.T, states[rows])  # without memory for the product
            elif weight_grad is not None:
                weight_grad += dz.T @ states[rows]
        return states_grad, weight_grad, bias_grad, None  # targets have no gradient


def _logits(states: Tensor, weight: Tensor, bias: Tensor | None) -> Iterator[tuple[slice, Tensor]]:
    """Yield slices of rows with their logits, at most `CHUNK` logits at once.

    In float32 at least; a slice has at least one row.
    """
    weight = weight.to(states.dtype)
    bias = None if bias is None else bias.to(states.dtype)
    step = max(1, CHUNK // len(weight))
    for at in range(0, len(states), step):
        rows = slice(at, at + step)
        logits = functional.linear(states[rows], weight, bias)
        yield rows, logits.to(torch.promote_types(logits.dtype, torch.float32))


def why_not_chunked(model: PreTrainedModel, *, shift: bool) -> str | None:
    """Explain why `ChunkedForward` would not compute a model's own loss; None: it would.

    `ChunkedForward` computes cross-entropy from the hidden states, a few logits at a time. Both
    losses are compared on two rows of four tokens. The output head must be a plain linear layer,
    the logits its output times a constant (1 if it has a bias), and the loss their mean
    cross-entropy. A model with a router loss is refused: `TargetLosses` has none.

    Args:
        model: With its weights, on a device where it runs. Its mode and forward pass are restored.
        shift: Whether a position predicts the label of the next one.

    Returns:
        The reason, a clause about "it"; also if the model cannot run on the four tokens.
    """
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        return f"its output head is a {type(head).__name__}, not a plain linear layer"
    if router_loss_coef(model):  # may be too small for the comparison below
        return "its own loss is not only the cross-entropy: it adds a loss of its experts"
    # 1. Two rows of four tokens, and how close two losses of them must be: a loss in 16 bits sums
    #    many roundings. A logit is rounded once, by less than 1 % in bfloat16.
    ids = torch.arange(8, device=model.device).view(2, 4) % len(head.weight)
    is_exact = model.dtype in (torch.float32, torch.float64)
    tolerance = _TOLERANCE if is_exact else _TOLERANCE_IN_16_BITS
    logits_tolerance = _TOLERANCE if is_exact else _LOGITS_TOLERANCE_IN_16_BITS
    # 2. Run the model alone and with the chunked loss.
    try:
        with (
            evaluation_mode(model),
            torch.random.fork_rng(devices=[]),
            plain_attention(model),
            without_cache_and_padding_check(model),
            _restored_forward(model, head),
        ):
            # True also for the head's output times a constant, if the head has no bias.
            if not _returns_head_output(model, head, ids, logits_tolerance):
                return "it changes the logits after its output head, as softcapping does"
            model_loss = float(model(input_ids=ids, labels=ids).loss)
            chunked_loss = float(ChunkedForward(model, shift=shift)(input_ids=ids, labels=ids).loss)
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
        return f"it cannot be tried on four tokens: {message_in_one_line(error)}"
    # 3. Compare the losses.
    if abs(model_loss - chunked_loss) <= tolerance * abs(model_loss):
        return None
    return "its own loss is not the mean cross-entropy of its logits"


@contextmanager
def _restored_forward(model: nn.Module, head: nn.Module) -> Iterator[None]:
    """Restore the forward pass of a model and of its head at the end of this context.

    A replacement is an attribute of the instance, which hides the method of its class.
    """
    forward_before = vars(model).get("forward")
    try:
        yield
    finally:
        vars(head).pop("forward", None)
        vars(model).pop("forward", None)
        if forward_before is not None:
            vars(model)["forward"] = forward_before


def _returns_head_output(
    model: PreTrainedModel, head: nn.Linear, ids: Tensor, tolerance: float
) -> bool:
    """Tell whether a model's logits are the output of its head times a constant.

    The constant must be 1 if the head has a bias. The head is replaced for one forward pass: it
    returns fixed values from -50 to 50, so that a cap of the logits shows, as `tanh(z / 30) * 30`
    would be one.

    Args:
        model: In evaluation mode.
        head: Its output head.
        ids: Token ids for the pass; shape (batch, positions).
        tolerance: Relative difference of equal logits.
    """

    def fixed_output(states: Tensor) -> Tensor:
        values = torch.linspace(-_LARGEST_LOGIT, _LARGEST_LOGIT, states.numel())
        return values.to(states).view_as(states)

    # 1. Run the model with the replaced head, which returns as many values as it gets: the logits
    #    have the width of its input in place of the vocabulary.
    output = fixed_output(torch.empty(*ids.shape, head.in_features, device=ids.device)).double()
    vars(head)["forward"] = fixed_output
    logits = model(input_ids=ids).logits.double()
    del head.forward
    # 2. Find the constant c with the least squares of logits - c * output.
    scale = float((logits * output).sum() / output.square().sum())
    if scale != 1 and head.bias is not None:
        return False
    # 3. With it they must be equal, those near 0 but for 1e-4.
    return torch.allclose(logits, scale * output, rtol=tolerance, atol=1e-4)
