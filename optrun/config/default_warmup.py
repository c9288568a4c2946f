"""`${default_warmup:RATIO}` in a schedule's YAML: the default warm-up of a run.

A run gets it as it gets its optimizer's `default_lr`. A scheduler that `build_scheduler` makes in
Python does not: its name and its keys are all that describes it.
"""

from __future__ import annotations

import re

from omegaconf import DictConfig, OmegaConf

_WRITTEN = re.compile(r"\$\{default_warmup:[^}]*\}")


def resolve(ratio: float, *, _parent_: DictConfig, _root_: DictConfig) -> float | None:
    """Return the ratio; None if none is wanted.

    That is beside `num_warmup_steps`, with optimizers of a library of which some divide by lr, for
    a schedule that a
    branch starts anew from trained weights, and in a run that is too short: the climb begins at 0,
    and a step that moves nothing would be much of it.
    """
    optimizer = OmegaConf.get_type(_root_, "optimizer") if "optimizer" in _root_ else None
    if not getattr(optimizer, "DEFAULT_WARMUP", True):
        return None
    begins_anew = getattr(_root_.get("branch_schedule"), "value", None) == "restart"
    steps = OmegaConf.select(_root_, "training.max_steps")
    short = steps is not None and steps * ratio < 1
    return (
        None
        if begins_anew or short or _parent_.get("num_warmup_steps") is not None
        else float(ratio)
    )


def outside_a_run(value: object) -> object:
    """Resolve `${default_warmup:...}` outside of a run, to None.

    Example:
        >>> outside_a_run("${default_warmup:0.05}"), outside_a_run(0.1), outside_a_run("${lr}")
        (None, 0.1, '${lr}')
    """
    return None if isinstance(value, str) and _WRITTEN.fullmatch(value) else value
