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

    No warm-up is wanted beside `num_warmup_steps`, with foreign optimizers (some divide by lr), for
    a schedule restarted by a branch, and in a run shorter than the warm-up's first step, because
    the climb begins at 0 and its first step moves nothing.
    """
    if "optimizer" in _root_:
        schema = OmegaConf.get_type(_root_, "optimizer")
        if not getattr(schema, "DEFAULT_WARMUP", True):
            return None
    begins_anew = getattr(_root_.get("branch_schedule"), "value", None) == "restart"
    steps = OmegaConf.select(_root_, "training.max_steps")
    is_short = steps is not None and steps * ratio < 1
    if begins_anew or is_short or _parent_.get("num_warmup_steps") is not None:
        return None
    return float(ratio)


def outside_a_run(value: object) -> object:
    """Replace the text `${default_warmup:...}` by None; return any other value as it is.

    Example:
        >>> outside_a_run("${default_warmup:0.05}"), outside_a_run(0.1), outside_a_run("${lr}")
        (None, 0.1, '${lr}')
    """
    if isinstance(value, str) and _WRITTEN.fullmatch(value):
        return None
    return value
