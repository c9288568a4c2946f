"""The best of several evaluations, as the state of a run keeps it."""

from __future__ import annotations

import math

from optrun.training.ranking import Ranking, remember_best
from optrun.training.state import TrainState

ACCURACY = Ranking("eval/accuracy", "max")


def evaluated(state: TrainState, step: int, accuracy: float, loss: float | None) -> None:
    state.global_step = step
    found = {"eval/accuracy": accuracy} | ({} if loss is None else {"eval/loss": loss})
    remember_best(state, ACCURACY, found)


def test_what_is_remembered_is_what_is_ranked_first() -> None:
    state = TrainState()
    points = [(0.9, 0.5), (1.0, 0.02), (1.0, 0.01), (math.nan, 0.0), (1.0, 0.01), (1.0, 0.03)]
    for step, (accuracy, loss) in enumerate(points, start=1):
        evaluated(state, step, accuracy, loss)
        assert state.best["eval/accuracy"]["step"] == ACCURACY.ranked_steps(state)[0]
    assert state.best["eval/accuracy"] == {"value": 1.0, "step": 5, "tied": 4, "loss": 0.01}
    assert state.best["eval/loss"] == {"value": 0.0, "step": 4, "tied": 1, "loss": 0.0}
    assert ACCURACY.ranked_steps(state) == [5, 3, 2, 6, 1]


def test_without_a_loss_the_later_of_equals_is_best() -> None:
    state = TrainState()
    for step in (1, 2, 3):
        evaluated(state, step, 1.0, None)
    assert state.best["eval/accuracy"] == {"value": 1.0, "step": 3, "tied": 3}
    assert state.ranking_losses == {}


def test_a_prolonged_run_forgets_what_its_end_asked_for() -> None:
    state = TrainState(best={"eval/loss": {"value": 1.0, "step": 3}}, ranking={"3": 1.0})
    state.without_end = {"best": {}, "ranking": {}, "last": {"train/loss": 2.0}}
    state.drop_end_results()
    assert (state.best, state.ranking, state.last, state.without_end) == (
        {},
        {},
        {"train/loss": 2.0},
        {},
    )
