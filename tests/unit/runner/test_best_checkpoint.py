"""Which evaluation is the best, in one line."""

from __future__ import annotations

import math

from optrun.runner.best_checkpoint import describe_best


def test_a_metric_that_was_never_a_number_has_no_best() -> None:
    held = {"value": math.nan, "step": 4, "tied": 1, "loss": 0.6}
    told = describe_best(
        {
            "main_metric": {"name": "eval/mine", "mode": "max"},
            "metrics": {"best": {"eval/mine": held}},
        }
    )
    assert "step 4" not in told
    assert "eval/mine was NaN in every evaluation" in told
