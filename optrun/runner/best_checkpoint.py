"""Describe the best checkpoint, its metric, and the decision between equals."""

from __future__ import annotations

import math

from optrun.artifacts.objective import loss_beside
from optrun.base.formatting import number
from optrun.base.plain import PlainMapping, lookup


def describe_best(summary: PlainMapping) -> str:
    """Describe the best checkpoint: its step, its metric, and what decided a tie.

    Such as "best: step 60 by eval/accuracy 0.95 (max); tie of 2 evaluations, broken by the later
    step".

    Args:
        summary: Values of `summary.json`; `main_metric` and `metrics.best` are read.

    Returns:
        Empty if the run was never evaluated.
    """
    main = summary.get("main_metric") or {}
    best = lookup(summary, "metrics", "best", str(main.get("name")))
    if not best:
        return ""
    if math.isnan(best["value"]):
        return f"no best checkpoint: {main['name']} was NaN in every evaluation"
    message = (
        f"best: step {int(best['step']):,} by {main['name']} {number(best['value'])}"
        f" ({main['mode']})"
    )
    if best.get("tied", 1) == 1:
        return message
    loss = loss_beside(main["name"])
    tie_breaker = "the later step"
    if "loss" in best and loss != main["name"]:
        tie_breaker = f"the lower {loss} ({number(best['loss'])}), then by the later step"
    return f"{message}; tie of {int(best['tied'])} evaluations, broken by {tie_breaker}"
