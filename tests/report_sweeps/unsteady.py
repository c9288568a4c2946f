"""An optimizer of a stored sweep.

The sign of the gradient, and no number at all from step 30 on with seeds 1 and 3.
"""

from dataclasses import dataclass
from typing import Any

import torch
from omegaconf import II

import optrun
from optrun.config.schema.optimizer_base import OptimizerConfig
from optrun.optimizer.base import NamedOptimizer


@dataclass(kw_only=True)
class UnsteadyConfig(OptimizerConfig):
    """Keys and values of `optimizer=unsteady`."""

    default_lr: float = 1e-3
    weight_decay: float = 0.0
    seed: int = II("seed")


@optrun.register_optimizer("unsteady", schema=UnsteadyConfig)
class Unsteady(NamedOptimizer):
    """A step of lr against the sign of the gradient."""

    STATE = ("steps",)

    def __init__(
        self, params: Any, lr: float = 1e-3, weight_decay: float = 0.0, seed: int = 0
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.seed = seed

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Take a step, or spoil every weight."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for param in (param for param in group["params"] if param.grad is not None):
                steps = self.state[param].setdefault("steps", torch.zeros(()))
                steps.add_(1)
                param.add_(param.grad.sign(), alpha=-group["lr"])
                if steps >= 30 and self.seed in (1, 3):
                    param.fill_(torch.nan)
        return loss
