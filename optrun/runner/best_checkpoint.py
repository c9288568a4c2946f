"""Describe the best checkpoint, its metric, and the decision between equals."""

from __future__ import annotations

import math

from optrun.artifacts.objective import loss_beside
from optrun.base.formatting import number
from optrun.base.plain import PlainMapping, lookup


def describe_best(summary: PlainMapping) -> str:
    """Describe the metric of the best checkpoint, and what decided a tie.

    Empty if there is no best checkpoint.
    """
    main = summary.get("main_metric") or {}
    best = lookup(summary, "metrics", "best", str(main.get("name")))
    if not best:
        return ""
    if math.isnan(best["value"]):
        return f"no evaluation is the best: {main['name']} was never a number"
    message = (
        f"best: step {int(best['step']):,} by {main['name']} {number(best['value'])}"
        f" ({main['mode']})"
    )
    if best.get("tied", 1) == 1:
        return message
    loss = loss_beside(main["name"])
    lower = ""
    if "loss" in best and loss != main["name"]:
        lower = f"the lower {loss} ({number(best['loss'])}), then by "
    return f"{message}; tie of {int(best['tied'])} evaluations, broken by {lower}the later step"
