"""The update of each package for one tensor in float64, written from the package's source.

These formulas share no line with `optrun.optimizer`, so that an equality between the two says
something. They are tested against recorded runs of the packages that can be installed
(`tests/reference/dialects`).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor


@dataclass
class Slot:
    """The state of one tensor between steps, in float64; `m` and `v` start at 0."""

    m: Tensor
    v: Tensor
    grad_count: int = 0
    """Steps in which the tensor had a gradient, the current one included."""


@dataclass(frozen=True)
class Hyperparameters:
    """The hyper-parameters of one tensor in one step."""

    lr: float
    peak: float
    """Highest lr of the schedule."""
    decay: float
    betas: tuple[float, float]
    eps: float
    step: int
    """Number of the optimizer's step, from 1."""
    decays: bool = True
    """Whether the tensor decays; False, too, if its coefficient is 0."""
    excluded: bool = False
    """Whether a list of names exempts the tensor from layer adaptation."""


Formula: TypeAlias = Callable[[Tensor, Tensor, Slot, Hyperparameters], Tensor]
"""(weights, gradient, state, hyper-parameters) -> new weights; updates the state in place.

In the formulas w are the weights, g the gradient, s the state, n the hyper-parameters, u the update
and t the step of the bias correction. t is the number of the optimizer's step (`n.step`), or for
some packages that of the tensor's gradients (`s.grad_count`).
"""


def _update_moments(g: Tensor, s: Slot, n: Hyperparameters) -> None:
    """Update both moments in the state by a gradient."""
    b1, b2 = n.betas
    s.m = b1 * s.m + (1 - b1) * g
    s.v = b2 * s.v + (1 - b2) * g * g


def _norm(x: Tensor) -> float:
    """Compute the L2 norm."""
    return math.sqrt(float((x * x).sum()))


def _trust_ratio(w: Tensor, u: Tensor, *, largest_norm: float = math.inf) -> float:
    """Return min(|w|, largest_norm) / |u|; 1 if one of the norms is 0."""
    weight_norm = min(_norm(w), largest_norm)
    update_norm = _norm(u)
    if weight_norm > 0 and update_norm > 0:
        return weight_norm / update_norm
    return 1.0


def _adam_update(s: Slot, n: Hyperparameters, t: int) -> Tensor:
    """Compute Adam's direction from the moments, bias-corrected for step t."""
    b1, b2 = n.betas
    m_hat = s.m / (1 - b1**t)
    v_hat = s.v / (1 - b2**t)
    return m_hat / (torch.sqrt(v_hat) + n.eps)


def _uncorrected_update(s: Slot, n: Hyperparameters) -> Tensor:
    """Compute Adam's direction from the moments without bias correction."""
    return s.m / (torch.sqrt(s.v) + n.eps)


def _lamb_step(
    w: Tensor,
    g: Tensor,
    s: Slot,
    n: Hyperparameters,
    t: int,
    *,
    adapts: bool = True,
) -> Tensor:
    """Return weights after LAMB's step; replaces the moments in `s`.

    With u = Adam's direction, corrected for step t, + decay w, these are w - lr |w| / |u| u if
    `adapts`, else w - lr u.
    """
    _update_moments(g, s, n)
    u = _adam_update(s, n, t) + n.decay * w
    ratio = _trust_ratio(w, u) if adapts else 1.0
    return w - n.lr * ratio * u


def lamb_timm(w: Tensor, g: Tensor, s: Slot, n: Hyperparameters) -> Tensor:
    """Compute timm 1.0's step, timm/optim/lamb.py, without its clip.

    LAMB; the ratio of a tensor without decay is 1. Also apex's step, csrc/multi_tensor_lamb.cu,
    with `adam_w_mode`.
    """
    return _lamb_step(w, g, s, n, n.step, adapts=n.decay != 0)


def lamb_nvlamb(w: Tensor, g: Tensor, s: Slot, n: Hyperparameters) -> Tensor:
    """Compute the step of apex with `use_nvlamb`, timm's `always_adapt`, and optax 0.2 `lamb`.

    Adam's scaling, decayed weights, trust ratio.
    """
    return _lamb_step(w, g, s, n, n.step)


def lamb_deepspeed(w: Tensor, g: Tensor, s: Slot, n: Hyperparameters) -> Tensor:
    """Compute DeepSpeed's step, csrc/lamb/fused_lamb_cuda_kernel.cu, `ADAM_MODE_1`.

    u = m / (sqrt(v) + eps) + decay w without bias correction, which scales lr instead. The trust
    ratio is bounded by 0.01 (min_coeff) and 10 (max_coeff).
    """
    _update_moments(g, s, n)
    b1, b2 = n.betas
    u = _uncorrected_update(s, n) + n.decay * w
    coeff = min(max(_trust_ratio(w, u), 0.01), 10.0)
    corrected_lr = n.lr * math.sqrt(1 - b2**s.grad_count) / (1 - b1**s.grad_count)
    return w - corrected_lr * coeff * u


def lamb_keras(w: Tensor, g: Tensor, s: Slot, n: Hyperparameters) -> Tensor:
    """Compute the step of Keras 3, keras/src/optimizers/lamb.py.

    The base class decays the weights before the norms are taken: w = w - lr decay w.
    """
    _update_moments(g, s, n)
    w = w - n.lr * n.decay * w
    u = _adam_update(s, n, n.step)
    return w - n.lr * _trust_ratio(w, u) * u


def lamb_pytorch_optimizer(w: Tensor, g: Tensor, s: Slot, n: Hyperparameters) -> Tensor:
    """Compute the step of pytorch_optimizer 4.1.

    Decoupled decay, then u = m / (sqrt(v) + eps) and a trust ratio min(|w|, 10) / (|u| + eps). lr
    is divided by 1 - b1^t, and v is not corrected.
    """
    _update_moments(g, s, n)
    w = w * (1 - n.lr * n.decay)
    u = _uncorrected_update(s, n)
    weight_norm = min(_norm(w), 10.0)
    update_norm = _norm(u)
    ratio = 1.0
    if weight_norm > 0 and update_norm > 0:
        ratio = weight_norm / (update_norm + n.eps)
    return w - n.lr / (1 - n.betas[0] ** n.step) * ratio * u


def lamb_torch_optimizer(w: Tensor, g: Tensor, s: Slot, n: Hyperparameters) -> Tensor:
    """Compute the step of torch_optimizer 0.3, lamb.py: |w| at most 10, no bias correction."""
    _update_moments(g, s, n)
    u = _uncorrected_update(s, n) + n.decay * w
    return w - n.lr * _trust_ratio(w, u, largest_norm=10.0) * u


def lamb_paddle(w: Tensor, g: Tensor, s: Slot, n: Hyperparameters) -> Tensor:
    """Compute the step of paddlepaddle 3.3 `Lamb`; a tensor without decay is not adapted."""
    return _lamb_step(w, g, s, n, s.grad_count, adapts=n.decay > 0)


def lamb_tensorflow(w: Tensor, g: Tensor, s: Slot, n: Hyperparameters) -> Tensor:
    """Compute the step of tf-models-official 2.20 `LAMB`.

    A list of names exempts from decay and adaptation alike.
    """
    return _lamb_step(w, g, s, n, n.step, adapts=not n.excluded)


def _adamax(w: Tensor, g: Tensor, s: Slot, n: Hyperparameters, maximum: Tensor) -> Tensor:
    """Return weights after Adamax's step; replaces the state in `s`.

    `maximum` is the new running maximum of |g|, with eps where the package adds it.
    """
    b1, _ = n.betas
    s.m = b1 * s.m + (1 - b1) * g
    s.v = maximum
    return w - n.lr / (1 - b1**s.grad_count) * s.m / s.v


def adamax_torch(w: Tensor, g: Tensor, s: Slot, n: Hyperparameters) -> Tensor:
    """Compute the step of torch/optim/adamax.py: coupled decay, eps beside |g|."""
    g = g + n.decay * w
    maximum = torch.maximum(n.betas[1] * s.v, g.abs() + n.eps)
    return _adamax(w, g, s, n, maximum)


def adamax_optax(w: Tensor, g: Tensor, s: Slot, n: Hyperparameters) -> Tensor:
    """Compute the step of optax 0.2 `adamaxw`: decoupled decay, eps beside |g|.

    `adamax` is the same without decay.
    """
    maximum = torch.maximum(n.betas[1] * s.v, g.abs() + n.eps)
    return _adamax(w, g, s, n, maximum) - n.lr * n.decay * w


def adamax_paddle(w: Tensor, g: Tensor, s: Slot, n: Hyperparameters) -> Tensor:
    """Compute the step of paddlepaddle 3.3 `Adamax`, `L2Decay`: eps beside the decayed maximum."""
    g = g + n.decay * w
    maximum = torch.maximum(n.betas[1] * s.v + n.eps, g.abs())
    return _adamax(w, g, s, n, maximum)


def adamax_keras(w: Tensor, g: Tensor, s: Slot, n: Hyperparameters) -> Tensor:
    """Compute the step of Keras 3, keras/src/optimizers/adamax.py.

    The base class decays the weights first. eps is added to the maximum where it divides.
    """
    b1, b2 = n.betas
    w = w - n.lr * n.decay * w
    s.m = b1 * s.m + (1 - b1) * g
    s.v = torch.maximum(b2 * s.v, g.abs())
    correction = 1 - b1**s.grad_count
    return w - n.lr * s.m / (correction * (s.v + n.eps))


def adamw_torch(w: Tensor, g: Tensor, s: Slot, n: Hyperparameters) -> Tensor:
    """Compute the step of torch/optim/adamw.py and optax `adamw`.

    The decay is multiplied with lr.
    """
    _update_moments(g, s, n)
    return w - n.lr * (_adam_update(s, n, s.grad_count) + n.decay * w)


def adamw_paper(w: Tensor, g: Tensor, s: Slot, n: Hyperparameters) -> Tensor:
    """Compute the step of Loshchilov & Hutter 2019, arXiv:1711.05101, Algorithm 2.

    The decay is multiplied with the schedule's multiplier, lr / peak. A peak of 0 changes nothing.
    """
    _update_moments(g, s, n)
    if not n.peak:
        return w
    multiplier = n.lr / n.peak
    update = n.peak * _adam_update(s, n, s.grad_count)
    return w - multiplier * (update + n.decay * w)


FORMULAS: Mapping[str, Mapping[str, Formula]] = {
    "lamb": {
        "timm": lamb_timm,
        "apex": lamb_timm,
        "nvlamb": lamb_nvlamb,
        "deepspeed": lamb_deepspeed,
        "optax": lamb_nvlamb,
        "keras": lamb_keras,
        "pytorch_optimizer": lamb_pytorch_optimizer,
        "torch_optimizer": lamb_torch_optimizer,
        "paddle": lamb_paddle,
        "tensorflow": lamb_tensorflow,
    },
    "adamax": {
        "paddle": adamax_paddle,
        "torch": adamax_torch,
        "optax": adamax_optax,
        "keras": adamax_keras,
    },
    "adamw": {"torch": adamw_torch, "optax": adamw_torch, "paper": adamw_paper},
}


@dataclass
class FormulaReference:
    """An optimizer that applies a formula to several tensors; replaces entries of `weights`."""

    formula: Formula
    weights: dict[str, Tensor]
    slots: dict[str, Slot] = field(init=False)

    def __post_init__(self) -> None:
        """Make the state of each tensor, with moments of 0."""
        self.slots = {
            name: Slot(torch.zeros_like(w), torch.zeros_like(w)) for name, w in self.weights.items()
        }

    def step(
        self,
        grads: Mapping[str, Tensor | None],
        hyperparameters: Mapping[str, Hyperparameters],
    ) -> None:
        """Step every tensor with a gradient; its entry of `weights` is replaced."""
        for name, grad in grads.items():
            if grad is None:
                continue
            slot = self.slots[name]
            slot.grad_count += 1
            weight = self.weights[name]
            self.weights[name] = self.formula(weight, grad, slot, hyperparameters[name])
