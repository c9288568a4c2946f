"""`${default_warmup:RATIO}` in a schedule's YAML: the default warm-up of a run.

A run gets it, as it gets its optimizer's `default_lr`. A scheduler from `build_scheduler` does not:
in Python the name and the keywords describe it completely.
"""

import re

from omegaconf import DictConfig, OmegaConf

_WRITTEN = re.compile(r"\$\{default_warmup:[^}]*\}")


def resolve(ratio: float, *, _parent_: DictConfig, _root_: DictConfig) -> float | None:
    """Resolve `${default_warmup:RATIO}`: the ratio, or None if the run gets no default warm-up.

    It gets none in four cases: the warm-up is given as `num_warmup_steps`; the schema of the
    optimizer says so (foreign optimizers may divide by lr, and the lr of step 0 is 0); a branch
    restarts its schedule; the run is too short for one step of warm-up.

    Args:
        ratio: Share of the run.
        _parent_: The scheduler's mapping, passed by OmegaConf.
        _root_: The configuration of the run, or the scheduler alone.
    """
    if _parent_.get("num_warmup_steps") is not None:
        return None
    if "optimizer" in _root_:
        schema = OmegaConf.get_type(_root_, "optimizer")
        if not getattr(schema, "DEFAULT_WARMUP", True):
            return None
    if getattr(_root_.get("branch_schedule"), "value", None) == "restart":
        return None
    steps = OmegaConf.select(_root_, "training.max_steps")
    if steps is not None and steps * ratio < 1:
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
