"""One optimizer step: micro-batches forward and backward, clip, check, step, schedule."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from optrun.data.loader import Batch

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class StepResult:
    """What one step saw."""

    loss: float
    """Mean over the step's tokens or examples."""
    weight: int
    """How many those are."""
    grad_norm: float
    """Global norm before clipping."""
    applied: bool
    """False where the update was left out: non-finite numbers, or the fp16 scaler lowered its scale."""
    losses: list[float]
    """Of each micro-batch."""
    overflow: bool = False
    """Only the fp16 scaler finding its scale."""

    @property
    def finite(self) -> bool:
        """Whether loss and gradient norm are numbers."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


class Precision:
    """Autocast dtype and device of a model's forward passes.

    Args:
        device: Where the model is.
        precision: `fp32`, `bf16` or `fp16`.
    """

    def __init__(self, device: torch.device, precision: str) -> None:
        self.device = device
        self.precision = precision

    def autocast(self) -> AbstractContextManager[object]:
        """`torch.autocast`, or nothing for fp32."""
        dtype = _AUTOCAST.get(self.precision)
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype=dtype)

    def to_device(self, batch: Batch) -> Batch:
        """Move a batch to the model."""
        return {name: tensor.to(self.device, non_blocking=True) for name, tensor in batch.items()}


class Scheduler(Protocol):
    """What a step and a checkpoint need of a schedule; `optrun.scheduler` builds it."""

    metric: str | None
    """Evaluation metric that it watches, such as `eval/loss`; None: it is a function of the step."""

    def step(self) -> None: ...
    def observe(self, metric: float) -> None: ...
    def get_last_lr(self) -> list[Any]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class TrainStep(Precision):
    """One optimizer step: micro-batches forward and backward, clip, check, update, schedule.

    Args:
        model: What is trained; called with a batch's tensors by name, returns `loss` and `logits`.
        optimizer: Over its parameters.
        clip: Clips all gradients, returns their global norm from before; shape ().
        scheduler: Stepped once after each update.
        weight: Tokens or examples that the mean loss of a batch is over.
        device: Where the model is.
        precision: `fp32`, `bf16` or `fp16`.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        clip: Callable[[torch.optim.Optimizer], torch.Tensor],
        scheduler: Scheduler,
        weight: Callable[[Batch], int],
        device: torch.device,
        precision: str,
    ) -> None:
        super().__init__(device, precision)
        self.model = model
        self.optimizer = optimizer
        self.clip = clip
        self.scheduler = scheduler
        self.weight = weight
        self.scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")

    def __call__(self, micro_batches: list[Batch]) -> StepResult:
        """Do one step.

        Each micro-batch's mean loss is weighted by its share of the step's tokens (or examples), so that k
        micro-batches give the gradient of one big batch. Nothing is updated where loss or gradient norm is not finite.

        Args:
            micro_batches: As collated, on the CPU.

        Returns:
            What was seen; the caller decides what a non-finite result means.
        """
        weights = [self.weight(batch) for batch in micro_batches]
        total = sum(weights)
        parts = []
        self.optimizer.zero_grad(set_to_none=True)
        for batch, weight in zip(micro_batches, weights, strict=True):
            if weight == 0:
                continue  # the mean over no target is 0/0
            with self.autocast():
                outputs = self.model(**self.to_device(batch))
                share = outputs.loss * (weight / total)
            self.scaler.scale(share).backward()
            parts.append(share.detach().float())
        if not parts:
            return StepResult(loss=math.nan, weight=0, grad_norm=math.nan, applied=False, losses=[])
        self.scaler.unscale_(self.optimizer)
        grad_norm = self.clip(self.optimizer).float()
        # One transfer for all numbers of the step.
        *shares, norm = torch.stack([*parts, grad_norm.to(parts[0].device)]).tolist()
        counted = [weight for weight in weights if weight]
        losses = [share * total / weight for share, weight in zip(shares, counted, strict=True)]
        result = StepResult(loss=sum(shares), weight=total, grad_norm=norm, applied=True, losses=losses)
        if result.finite:
            follows_loss = getattr(self.optimizer, "takes_loss", False)
            self.scaler.step(self.optimizer, *([lambda: result.loss] if follows_loss else []))
            self.scaler.update()
            self.scheduler.step()
            return result
        result.applied = False
        if self.scaler.is_enabled():
            result.overflow = self._lower_scale(result)
        if result.overflow:
            self.scheduler.step()
        return result

    def _lower_scale(self, result: StepResult) -> bool:
        """Whether a non-finite result is only the fp16 scaler finding its scale, which is then lower at the next step.

        It is not where the loss itself is not finite, nor below a scale of 1: what overflows there would unscaled,
        and a gradient that is NaN at any scale would otherwise be left out for ever. The scale is then kept, and the
        scaler made ready for the next step.
        """
        scale = self.scaler.get_scale()
        if not math.isfinite(result.loss) or scale < 1:
            self.scaler.update(scale)
            return False
        self.scaler.update()
        return self.scaler.get_scale() < scale  # else the gradients are finite, and only their norm is not
