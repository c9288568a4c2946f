"""Tell where a branch starts, what it takes from its trunk, where its schedule stands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from optrun.base.plain import PlainMapping
from optrun.optimizer.inherited import inherit_state
from optrun.scheduler import Scheduler
from optrun.scheduler.build import schedule_in_words


@dataclass(frozen=True)
class TrunkState:
    """What a trunk's checkpoint says of itself; its tensors are not read."""

    folder: str
    step: int
    schedule_from: int
    """The step that the schedule of the branch counts from."""
    optimizer: PlainMapping
    """The description of the optimizer's state."""
    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    """Its tensors by name: dtype, as safetensors names it in torch, and shape."""


@dataclass(frozen=True)
class BranchFacts:
    """Where a branch leaves its trunk."""

    folder: str
    step: int
    optimizer_state: str
    """What becomes of the trunk's, in words."""
    schedule: str
    """Where the schedule stands, in words."""
    first_lr: float
    """The highest lr of the first step."""


def branch_facts(
    trunk: TrunkState, optimizer: Optimizer, scheduler: Scheduler, steps: int
) -> BranchFacts:
    """Find out what a branch takes over.

    Args:
        trunk: Where it starts.
        optimizer: Of the branch, on the meta device; it is given the trunk's state.
        scheduler: Of the branch, at step 0.
        steps: Of the schedule.
    """
    at = trunk.step - trunk.schedule_from
    lrs = [base * scheduler.multiplier(at, index) for index, base in enumerate(scheduler.base_lrs)]
    tensors = {
        # A count lies on the CPU, whatever the device.
        name: torch.zeros(
            shape, dtype=getattr(torch, dtype, torch.float32), device="meta" if shape else "cpu"
        )
        for name, (dtype, shape) in trunk.tensors.items()
    }
    _, state = inherit_state(optimizer, tensors, trunk.optimizer)
    words = schedule_in_words(
        scheduler.name, trunk.schedule_from, trunk.step, trunk.schedule_from + steps
    )
    return BranchFacts(trunk.folder, trunk.step, state, words, float(max(lrs)))
