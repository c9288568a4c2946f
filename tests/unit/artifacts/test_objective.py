"""Which evaluation is the best: one rule for checkpoints, tables and pictures."""

from __future__ import annotations

import math

from optrun.artifacts.metrics import MetricsLog
from optrun.artifacts.objective import best_evaluation, rank_steps

NAN, INF = math.nan, math.inf


def test_equals_go_by_loss_and_then_by_the_later_step() -> None:
    values = {10: 0.5, 20: 1.0, 30: 1.0, 40: 1.0, 50: 1.0, 60: NAN}
    assert rank_steps(values, {20: 0.2, 30: 0.1, 40: 0.1, 50: NAN}, "max") == [40, 30, 20, 50, 10]
    assert rank_steps(values, {}, "max") == [50, 40, 30, 20, 10], (
        "a checkpoint of before knows no losses"
    )
    assert rank_steps({1: INF, 2: 1.0, 3: 1.0}, {2: 1.0, 3: 1.0}, "min") == [3, 2, 1]


def _log(name: str, values: dict[int, float], losses: dict[int, float] | None = None) -> MetricsLog:
    beside = f"{name.rpartition('/')[0]}/loss"
    steps = sorted({*values, *(losses or {})})
    lines = [
        {"step": step, name: values.get(step)} | ({beside: losses[step]} if losses else {})
        for step in steps
    ]
    return MetricsLog(
        [{key: value for key, value in line.items() if value is not None} for line in lines]
    )


def test_before_the_first_step_nothing_is_best() -> None:
    log = _log("eval/loss", {0: 0.1, 2: 0.7, 4: 0.6})
    assert best_evaluation(log, "eval/loss", "min") == 4
    assert best_evaluation(_log("eval/loss", {0: 0.1}), "eval/loss", "min") is None


def test_what_is_not_finite_is_never_best() -> None:
    log = _log("eval/loss", {1: NAN, 2: 2.0, 3: 1.0, 4: -INF})
    assert best_evaluation(log, "eval/loss", "min") == 3
    assert best_evaluation(log, "eval/loss", "max") == 2
    assert best_evaluation(_log("eval/loss", {1: NAN}), "eval/loss", "min") is None


def test_the_loss_of_the_same_set_decides() -> None:
    log = _log("eval/dev/f1", {20: 1.0, 40: 1.0}, {20: 0.02, 40: 0.03})
    assert best_evaluation(log, "eval/dev/f1", "max") == 20
