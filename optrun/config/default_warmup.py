"""`${default_warmup:RATIO}` in a schedule's YAML: the warm-up of a run that asks for none.

A run gets it as it gets its optimizer's `default_lr`. A scheduler that `build_scheduler` makes in Python does not: its
name and its keys are all that describes it.
"""

from __future__ import annotations

import re
from typing import Any

from omegaconf import DictConfig

_WRITTEN = re.compile(r"\$\{default_warmup:[^}]*\}")


def resolve(ratio: float, *, _parent_: DictConfig, _root_: DictConfig) -> float | None:
    """The ratio; None beside `num_warmup_steps`, and for a schedule that a branch starts anew from trained weights."""
    if _parent_.get("num_warmup_steps") is not None:
        return None
    begins_anew = getattr(_root_.get("branch_schedule"), "value", None) == "restart"
    return None if begins_anew else float(ratio)


def outside_a_run(value: Any) -> Any:
    """Read a value as it stands in a YAML of ours where there is no run.

    Example:
        >>> outside_a_run("${default_warmup:0.05}"), outside_a_run(0.1), outside_a_run("${lr}")
        (None, 0.1, '${lr}')
    """
    return None if isinstance(value, str) and _WRITTEN.fullmatch(value) else value
