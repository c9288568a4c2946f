"""Say which checkpoint is the best, by which metric, and what decided between equals."""

from __future__ import annotations

import math

from optrun.artifacts.objective import loss_beside
from optrun.base.formatting import number
from optrun.base.plain import PlainMapping, lookup


def best_told(summary: PlainMapping) -> str:
    """Say by which metric a checkpoint is the best, and what decided where several are equal.

    Empty: none is.
    """
    main = summary.get("main_metric") or {}
    held = lookup(summary, "metrics", "best", str(main.get("name")))
    if not held:
        return ""
    if math.isnan(held["value"]):
        return f"no evaluation is the best: {main['name']} was never a number"
    told = (
        f"best: step {int(held['step']):,} by {main['name']} {number(held['value'])}"
        f" ({main['mode']})"
    )
    if held.get("tied", 1) == 1:
        return told
    loss = loss_beside(main["name"])
    lower = (
        f"the lower {loss} ({number(held['loss'])}), then "
        if "loss" in held and loss != main["name"]
        else ""
    )
    return f"{told}, a tie of {int(held['tied'])} evaluations: {lower}the later step is taken"
