"""Who else writes an optimizer's learning rate: schedulers that leave no trace in it."""

from __future__ import annotations

import gc
from typing import Any

from torch.optim import Optimizer


def scheduler_over(optimizer: Optimizer) -> str | None:
    """Find a live scheduler that was built over an optimizer, whichever library it comes from.

    torch's schedulers wrap `step`, which is cheaper to ask; its ReduceLROnPlateau does not, nor do
    those of timm. They keep the optimizer as `optimizer`, so they are found among what refers to
    it: one or two walks over all objects, some hundred milliseconds, for a question that is asked
    at a `set_lr` and not at a step.

    Returns:
        Its class in words, such as "torch's ReduceLROnPlateau"; None where there is none.
    """
    holders: list[Any] = gc.get_referrers(optimizer)
    dicts = [
        holder
        for holder in holders
        if isinstance(holder, dict) and holder.get("optimizer") is optimizer
    ]
    if dicts:
        holders += gc.get_referrers(*dicts)
    for holder in holders:
        if _is_scheduler(type(holder)) and getattr(holder, "optimizer", None) is optimizer:
            return f"{type(holder).__module__.partition('.')[0]}'s {type(holder).__name__}"
    return None


def _is_scheduler(cls: type) -> bool:
    """Recognise a scheduler by the names of its bases.

    LRScheduler of torch, Scheduler of timm, and their like.
    """
    return any(
        base.__name__ == "Scheduler" or base.__name__.endswith("LRScheduler")
        for base in cls.__mro__
    )
