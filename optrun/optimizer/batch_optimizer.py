"""Optimizers that step batches.

A formula over gathered tensors, by the loop or by what is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from optrun.base.options import Group, Numbers
from optrun.optimizer.base import NamedOptimizer
from optrun.optimizer.batches import Batch, gather
from optrun.optimizer.kernels.choice import Formula


class BatchOptimizer(NamedOptimizer):
    """A class says its formula, its state, and which numbers a tensor has."""

    FORMULA: ClassVar[Formula]
    MOMENTS: ClassVar[tuple[str, ...]] = ()
    """State tensors of the parameter's shape, zero at first; none: all of `STATE`."""

    _ratios: Sequence[tuple[list[str], Tensor]] = ()
    """What the formula returned in the last step, by the names of its tensors."""

    def _numbers(self, group: Group, name: str, param: Tensor) -> Numbers:
        """Return the numbers of one tensor, whose `step` was counted already.

        Its rate, and what decay leaves of it.
        """
        del name, param
        return {"lr": group["lr"], "keep": 1.0 - group["lr"] * group["weight_decay"]}

    def _sparse(self, group: Group) -> str:
        """Say what a sparse gradient is to a group, as for `gather`."""
        del group
        return "refuse"

    def _update(self, batch: Batch) -> Tensor | None:
        """Step a batch in place."""
        return self.FORMULA.step(batch)

    def kernel(self, group: Group, device: str, *, whole: bool = True) -> str:
        """Name the kernel that steps a group on a type of device; `whole`: no tensor is sharded."""
        return self.FORMULA.kernel(group, device, whole=whole)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; returns what `closure` returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        slots = self.MOMENTS or self.STATE
        found = []
        for batch in gather(self, slots=slots, per_tensor=self._numbers, sparse=self._sparse):
            found.append((batch.names, self._update(batch)))
            batch.done()
        self._ratios = [(names, ratios) for names, ratios in found if ratios is not None]
        return loss
