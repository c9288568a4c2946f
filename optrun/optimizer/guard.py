"""Skip an optimizer step if the loss or the gradient norm is not finite, without waiting for them.

A loop that reads the loss before each update lets the device idle meanwhile. A guarded step is
launched at once, and the loss is read while the next forward pass runs.
"""

from __future__ import annotations

import math
from typing import Any, Self

import torch
from torch.optim import Optimizer

from optrun.optimizer.base import NamedOptimizer


class Guard:
    """Step an optimizer unless a value is not finite.

    On a CPU the values are read, and the step is not taken at all. On another device the
    optimizer's kernels read a flag, as those of `torch.amp.GradScaler` do, and change neither
    weights nor state. The counters on the host count such a step until `take_back`.

    Args:
        optimizer: One whose `skips_on_device()` is true, or any whose parameters are on a CPU.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> weight.grad = torch.tensor([float("nan")])
        >>> Guard(torch.optim.SGD([weight])).step(weight.grad.norm())
        >>> weight.item()
        1.0
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._counters_before: Any = None

    @classmethod
    def of(cls, optimizer: Optimizer, device: torch.device) -> Self | None:
        """Return the guard of an optimizer on a device; None if it could not skip a step there.

        On a CPU any optimizer has one; elsewhere its kernels must read the flag `found_inf`.
        Without a guard the caller has to read the values before each step.
        """
        if device.type == "cpu":  # `step` reads the values there, without a flag
            return cls(optimizer)
        # Promises that a step with the flag changes no weight and no state tensor.
        if isinstance(optimizer, NamedOptimizer) and optimizer.skips_on_device():
            return cls(optimizer)
        return None

    def step(self, values: torch.Tensor) -> None:
        """Take a step, but change nothing if one of the values is not finite.

        On a CPU the optimizer is not stepped then. On another device its kernels read the flag
        `found_inf`, and nothing is copied to the host.

        Args:
            values: Numbers such as loss and gradient norm, on the device of the parameters.
        """
        if values.device.type == "cpu":
            if all(map(math.isfinite, values.detach().numpy().flat)):
                self.optimizer.step()
            return
        found_inf = torch.isfinite(values).all().logical_not().float()
        self.step_on_device(found_inf)

    def step_on_device(self, found_inf: torch.Tensor) -> None:
        """Remember the counters, and take a step; its kernels change nothing if a flag is set.

        Counters are the step counts and other numbers on the host, which change in any case.

        Args:
            found_inf: 1.0 if nothing may change, else 0.0; shape (), float32.
        """
        optimizer = self.optimizer
        assert isinstance(optimizer, NamedOptimizer)
        self._counters_before = optimizer.counters()
        optimizer.step_unless(found_inf)

    def take_back(self) -> None:
        """Restore the counters from before the last step, after it was skipped on the device.

        Does nothing on a CPU, where a skipped step is not counted.
        """
        if self._counters_before is not None:
            assert isinstance(self.optimizer, NamedOptimizer)
            self.optimizer.set_counters(self._counters_before)
