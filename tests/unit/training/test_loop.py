"""The order of events of training: what is evaluated, logged, saved, and when it ends."""

from __future__ import annotations

import math
import signal
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from optrun.base.errors import NonFiniteError, OptrunError, StoppedEarly
from optrun.config.schema.training import OnNonfinite
from optrun.training.callback import StopRequest, TrainingContext
from optrun.training.state import TrainState
from optrun.training.step import StepResult
from tests.unit.training.line_run import EPOCH, EXAMPLES, Run


def test_what_happens_in_which_order(tmp_path: Path) -> None:
    run = Run(tmp_path, "logging_steps=2", "eval_steps=2", save_steps=2)()
    assert run.events == [
        "begin",
        *("evaluation before training", "line 0"),
        "step 1",
        *("step 2", "evaluation", "heard of evaluation", "line 2", "saved 2"),
        "step 3",
        *("step 4", "evaluation", "heard of evaluation", "line 4", "saved 4 at the end"),
        "finished",
    ]
    before, middle, end = run.lines
    assert before == {"step": 0, "epoch": 0.0, "time": 0.0, "eval/loss": 1.0}
    assert run.state.before_training == {"eval/loss": 1.0}
    assert "unscheduled" not in end
    assert middle["epoch"] == round(2 / EPOCH, 6)
    # The mean over the two steps of a line, weighted by their examples; and what the schedule
    # watches.
    assert middle["train/loss"] > end["train/loss"]
    assert run.schedule.observed == [middle["eval/loss"], end["eval/loss"]]
    assert run.state.best["eval/loss"]["step"] in (2, 4)
    assert run.schedule.steps == 4


def scheduled(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines of a run without what its end alone asked for, and without what this process
    measures of itself.
    """
    found = []
    for line in lines:
        ignored = ("perf/", *line.get("unscheduled", ()))
        kept = {
            key: value
            for key, value in line.items()
            if not key.startswith(ignored) and key != "unscheduled"
        }
        if kept.keys() - {"step", "epoch", "time"}:
            found.append(kept)
    return found


def counted(state: TrainState) -> dict[str, Any]:
    """The counters of a run, without what this process measures of itself."""
    found = asdict(state)
    for last in (found["last"], found["without_end"].get("last", {})):
        for name in [name for name in last if name.startswith("perf/")]:
            del last[name]
    return found


@pytest.mark.parametrize("stop", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(
    "intervals", [("logging_steps=2", "eval_steps=2"), ("logging_steps=3", "eval_steps=4")]
)
def test_a_run_that_is_prolonged_is_the_longer_run(
    tmp_path: Path, stop: int, intervals: tuple[str, ...]
) -> None:
    """N steps, and on to M, are M steps, but for what the end of N alone asked for.

    Which is marked.
    """
    whole = Run(tmp_path, *intervals, steps=6)()
    first = Run(tmp_path, *intervals, steps=stop)()
    assert first.events[-1] == "finished"
    weight, counters = first.saves.kept[stop]
    second = Run(
        tmp_path, *intervals, steps=6, weight=weight, state=TrainState.from_dict(counters)
    )()
    assert counted(second.state) == counted(whole.state)
    assert second.model.w.item() == whole.model.w.item()
    assert scheduled([*first.lines, *second.lines]) == scheduled(whole.lines)


def test_what_the_end_alone_asks_for_is_marked(tmp_path: Path) -> None:
    run = Run(tmp_path, "logging_steps=2", "eval_steps=2", steps=3)()
    assert run.lines[-1]["unscheduled"] == ["train/", "lr/", "perf/", "eval/"]
    assert run.schedule.observed == [run.lines[1]["eval/loss"]]  # the schedule does not hear of it
    assert run.state.window_weight == 2  # the window of the line that will be due goes on
    assert run.state.without_end["last"]["eval/loss"] == run.lines[1]["eval/loss"]


class Counter:
    """Of the user's own: counts evaluations."""

    count = 0

    def on_evaluate(self, training: TrainingContext, metrics: Mapping[str, float]) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


@pytest.mark.parametrize(("steps", "kept"), [(3, 1), (4, 2)])
def test_a_callback_that_is_prolonged_has_not_counted_the_end_alone(
    tmp_path: Path, steps: int, kept: int
) -> None:
    counter = Counter()
    run = Run(tmp_path, "eval_steps=2", steps=steps, callbacks={"callbacks.counter": counter})()
    assert counter.count == 2
    assert run.hooks.state_dict() == {"callbacks.counter": {"count": kept}}


def test_a_pause_saves_and_says_where(tmp_path: Path) -> None:
    run = Run(tmp_path, stop_at=2)
    with pytest.raises(StoppedEarly, match="paused after step 2 of 4"):
        run()
    assert run.events[-2:] == ["saved 2 at the end", "interrupted"]


@pytest.mark.parametrize("saves", [True, False])
@pytest.mark.parametrize("hook", ["begin", "step", "log"])
def test_a_signal_ends_it_after_the_step_under_way(tmp_path: Path, hook: str, saves: bool) -> None:
    def then(heard: str, training: TrainingContext) -> None:
        if heard == hook and (training.global_step == 2 or hook == "begin"):
            run.handler.stop_signal = signal.SIGTERM

    run = Run(tmp_path, "logging_steps=1", then=then, saves=saves)
    with pytest.raises(StoppedEarly, match="SIGTERM") as ended:
        run()
    assert run.events[-1] == "interrupted"
    step = 0 if hook == "begin" else 2
    assert run.state.global_step == step
    if saves and step:
        assert run.events[-2] == "saved 2 at the end"
        assert f"optrun resume={tmp_path}" in str(ended.value)
    else:
        assert not run.saves.kept
        assert ("nothing was saved" if not saves else "before the first step") in str(ended.value)


def test_a_request_to_save_is_answered_once(tmp_path: Path) -> None:
    def then(heard: str, training: TrainingContext) -> None:
        if heard == "step" and training.global_step == 1:
            run.handler.save_requested = True
        if heard == "step" and training.global_step == 3:
            training.request_save()

    run = Run(tmp_path, then=then)
    run()
    assert list(run.saves.kept) == [1, 3, 4]


@pytest.mark.parametrize(("hook", "last"), [("begin", 1), ("step", 2), ("evaluate", 2), ("log", 3)])
def test_a_component_ends_it_well(tmp_path: Path, hook: str, last: int) -> None:
    """In a step or an evaluation with this step, in any other hook with the next.

    Once, by the first who asks.
    """

    def then(heard: str, training: TrainingContext) -> None:
        if heard == hook and training.global_step in (0 if hook == "begin" else 2, last):
            training.request_stop(f"enough at {training.global_step}")

    run = Run(tmp_path, "logging_steps=1", "eval_steps=2", then=then)()
    assert run.state.global_step == last
    assert run.events[-2:] == [f"saved {last} at the end", "finished"]
    assert run.hooks.training.stop == StopRequest(
        "recorder", f"enough at {0 if hook == 'begin' else 2}", last
    )
    assert "evaluation" in run.events


def test_a_request_of_an_earlier_start_counts(tmp_path: Path) -> None:
    run = Run(tmp_path, stop=StopRequest("callbacks.mine", "enough", 2))()
    assert run.state.global_step == 2
    assert run.events[-1] == "finished"


@pytest.mark.parametrize("loss", [1.0, math.nan])
def test_a_callback_reads_whether_a_step_was_applied(loss: float) -> None:
    assert StepResult(loss, 1, 1.0, [loss]).applied is (loss == 1)


class Broken:
    """Of the user's own."""

    def __init__(self, hook: str) -> None:
        self.hook = hook

    def on_step(self, training: TrainingContext, result: StepResult) -> None:
        if self.hook == "on_step" and training.global_step == 2:
            raise KeyError("mine")

    def on_train_end(self, training: TrainingContext, status: str) -> None:
        if self.hook == "on_train_end":
            raise SystemExit(0)


def test_an_error_of_the_users_own_ends_the_step_saves_it_and_is_named(tmp_path: Path) -> None:
    run = Run(tmp_path, "logging_steps=1", callbacks={"callbacks.mine": Broken("on_step")})
    with pytest.raises(OptrunError, match=r"callbacks\.mine: on_step raised KeyError"):
        run()
    assert run.events[-3:] == ["line 2", "saved 2 at the end", "failed"]
    assert run.notes == ["step 2 is saved, before the run ends with an error"]


def test_an_error_at_the_end_is_no_good_end(tmp_path: Path) -> None:
    run = Run(tmp_path, callbacks={"callbacks.mine": Broken("on_train_end")})
    with pytest.raises(OptrunError, match="on_train_end raised SystemExit"):
        run()
    assert list(run.saves.kept) == [4]


def test_nothing_is_done_twice_at_the_end(tmp_path: Path) -> None:
    """A finished run that is started again neither steps nor evaluates, and is as it was."""
    done = Run(tmp_path)()
    again = Run(
        tmp_path, state=TrainState.from_dict(asdict(done.state)), weight=done.model.w.item()
    )()
    assert again.events == ["begin", "saved 4 at the end", "finished"]
    assert again.state == done.state


def test_a_step_that_was_stopped_before_its_evaluation_begins_with_it(tmp_path: Path) -> None:
    whole = Run(tmp_path, "eval_steps=2", "logging_steps=1")()

    def then(heard: str, training: TrainingContext) -> None:
        if heard == "step" and training.global_step == 2:
            raise KeyboardInterrupt  # between the update and what follows it

    first = Run(tmp_path, "eval_steps=2", "logging_steps=1", then=then)
    with pytest.raises(KeyboardInterrupt):
        first()
    assert first.state.unfinished
    second = Run(
        tmp_path,
        "eval_steps=2",
        "logging_steps=1",
        state=TrainState.from_dict(asdict(first.state)),
        weight=first.model.w.item(),
    )()
    assert second.events[1:4] == ["evaluation", "heard of evaluation", "line 2"]
    assert scheduled([*first.lines, *second.lines]) == scheduled(whole.lines)
    assert counted(second.state) == counted(whole.state)


def test_back_to_the_last_scheduled_checkpoint_and_past_the_bad_data(tmp_path: Path) -> None:
    """An example that is no number comes once an epoch.

    The steps since the checkpoint are passed over with it.
    """
    (tmp_path / "checkpoints").mkdir()
    rows = [*EXAMPLES[:-1], math.nan]
    words = ("on_nonfinite=rollback", "logging_steps=1", "max_rollbacks=5")
    run = Run(tmp_path, *words, steps=4, save_steps=2, examples=rows)()
    assert run.events[-1] == "finished"
    assert run.state.global_step == 4
    assert run.state.rollbacks >= 1
    assert run.state.passed_steps >= run.state.rollbacks
    assert "saved 0" in run.events  # somewhere to go back to
    back = next(event for event in run.events if event.startswith("back at "))
    after = run.events[run.events.index(back) + 1]
    assert (
        after == f"saved {back.removeprefix('back at ')}"
    )  # whoever is stopped now does not go back again
    assert math.isfinite(run.model.w.item())
    assert any("rolled back" in note or "back" in note for note in run.notes)


def test_a_number_that_is_none_stops_it_with_the_state_before_saved(tmp_path: Path) -> None:
    run = Run(tmp_path, "on_nonfinite=stop", examples=[*EXAMPLES[:-1], math.nan])
    with pytest.raises(NonFiniteError, match="Nothing was updated"):
        run()
    assert run.loop.setup.config.on_nonfinite is OnNonfinite.stop
    assert run.events[-1] == "failed"
    assert list(run.saves.kept) == [run.state.global_step]
    assert math.isfinite(run.model.w.item())
