"""Early stopping is that of transformers, evaluation by evaluation."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import EarlyStoppingCallback, Trainer, TrainerControl

from optrun.training.early_stopping import EarlyStopping
from optrun.training.ranking import Ranking


def theirs(values: list[float], mode: str, patience: int, threshold: float) -> list[int]:
    """Their counter after each evaluation.

    Trainer settles the best after its callbacks have seen the metrics.
    """
    args: Any = SimpleNamespace(
        metric_for_best_model="m", greater_is_better=mode == "max", save_strategy="no"
    )
    state: Any = SimpleNamespace(best_metric=None, global_step=0, is_world_process_zero=True)
    trainer: Any = SimpleNamespace(args=args, state=state, _get_output_dir=lambda trial: "")
    callback, counters = EarlyStoppingCallback(patience, threshold), []
    for value in values:
        callback.check_metric_value(args, state, TrainerControl(), value)
        Trainer._determine_best_metric(trainer, {"eval_m": value}, None)
        counters.append(callback.early_stopping_patience_counter)
    return counters


class Told:
    """Takes the place of the training context."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def request_stop(self, reason: str) -> None:
        self.reasons.append(reason)


def made(mode: str, patience: int, threshold: float) -> EarlyStopping:
    config: Any = SimpleNamespace(
        early_stopping_patience=patience, early_stopping_threshold=threshold
    )
    return EarlyStopping(config, Ranking("eval/m", mode))


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("threshold", [0.0, 0.25])
def test_it_counts_as_transformers_does(mode: str, threshold: float) -> None:
    chance = random.Random(0)
    pool = [0.0, 0.2, 0.25, 0.5, 0.75, 1.0, math.nan, math.inf, -math.inf]
    for _ in range(300):
        values = [chance.choice(pool) for _ in range(12)]
        ours, counters, told = made(mode, 3, threshold), [], Told()
        for number, value in enumerate(values):
            if number == 6:  # through a checkpoint
                again = made(mode, 3, threshold)
                again.load_state_dict(ours.state_dict())
                ours = again
            ours.on_evaluate(told, {"eval/m": value})  # type: ignore[arg-type]
            counters.append(ours.counter)
        expected = theirs(values, mode, 3, threshold)
        assert counters == expected, values
        assert len(told.reasons) == sum(counter >= 3 for counter in expected)


def test_small_gains_move_the_best_and_count_as_none() -> None:
    stopping, told = made("max", 2, 0.1), Told()
    for value in (0.5, 0.55, 0.62):  # 0.62 is 0.12 above the first, and 0.07 above the best
        stopping.on_evaluate(told, {"eval/m": value})  # type: ignore[arg-type]
    assert stopping.counter == 2
    assert stopping.best == 0.62
    assert "no improvement of eval/m by more than 0.1 in 2 evaluations" in told.reasons[0]


def test_what_was_counted_of_another_metric_is_forgotten() -> None:
    stopping = made("max", 2, 0.0)
    stopping.load_state_dict({"metric": "eval/m", "mode": "min", "best": 0.1, "counter": 1})
    assert (stopping.best, stopping.counter) == (None, 0)
