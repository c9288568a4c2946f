"""What a rung compares: values of one step, and only when every job has got there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from optrun.artifacts.metrics import read_metrics
from tests.running import records, summary, tensors
from tests.sweep.forked import STEPS, ForkServer, jobs, result, same, steps, sweep
from tests.sweep.test_search import SEARCH, trials


def eval_loss(job: Path, step: int) -> float:
    """Of one step, as logged."""
    at, values = read_metrics(job / "metrics.jsonl").series("eval/loss")
    return dict(zip(at, values, strict=True))[step]


def at_rung(job: Path, rung: int) -> float | None:
    """What the sweep holds the job's value there to be."""
    record = json.loads((job.parent / ".sweep" / "jobs" / f"{job.name}.json").read_text())
    value: float | None = record["rungs"][str(rung)]
    return value


def test_nobody_is_ranked_before_all_are_there(place: Path, undisturbed: Path) -> None:
    """Jobs whose time is up before the rung come back.

    The rung is as if they had never been away.
    """
    words = ["lr=1e-3,2e-3", "hydra.sweeper.rungs=[3]"]
    assert sweep(*words, "training.max_seconds=1e-9") == 75
    assert [row["status"] for row in result().values()] == ["interrupted"] * 2
    assert [steps(job) for job in jobs()] == [[1]] * 2
    assert sweep(*words) == 0
    assert sorted(row["status"] for row in result().values()) == ["finished", "stopped at a rung"]
    assert sorted(len(steps(job)) for job in jobs()) == [3, STEPS]
    survivor = max(jobs(), key=lambda job: len(steps(job)))
    assert same(survivor, undisturbed / survivor.name)


def test_a_rung_is_no_evaluation_to_early_stopping(place: Path) -> None:
    """It pauses a job between two evaluations.

    The survivor ends where it would have ended without rungs.
    """
    words = ["lr=1e-3,2e-3", "training.eval_steps=2"]
    words += ["training.early_stopping_patience=1", "training.early_stopping_threshold=100"]
    assert sweep(*words, folder="straight") == 0
    assert sweep(*words, "hydra.sweeper.rungs=[3]") == 0
    (survivor,) = [job for job in jobs() if len(steps(job)) == 4]
    straight = Path("straight", survivor.name)
    assert summary(survivor)["stopped"] == summary(straight)["stopped"]
    assert records(survivor) == records(straight)
    assert tensors(survivor, 4) == tensors(straight, 4)


def test_a_trial_whose_time_is_up_is_not_pruned(place: Path) -> None:
    words = [
        *SEARCH,
        "hydra.sweeper.n_trials=2",
        "hydra.sweeper.n_jobs=2",
        "hydra.sweeper.rungs=[2]",
    ]
    assert sweep(*words, "training.max_seconds=1e-9") == 75
    assert [trial.state.name for trial in trials()] == ["RUNNING"] * 2
    assert sweep(*words) == 0
    assert sorted(trial.state.name for trial in trials()) == ["COMPLETE", "PRUNED"]


@pytest.mark.parametrize(("rung", "known"), [(4, True), (3, False)])
def test_jobs_beyond_a_rung_compete_with_what_they_had_there(
    place: Path, undisturbed: Path, rung: int, known: bool
) -> None:
    """Jobs finished without rungs, against new ones.

    Evaluated at steps 4 and 8, so that at 3 nothing is known.
    """
    shutil.copytree(undisturbed, "sweep")
    before = jobs()
    assert sweep("lr=1e-3,2e-3,4e-3,8e-3", f"hydra.sweeper.rungs=[{rung}]") == 0
    asked = [Path("sweep", row["name"]) for row in result().values()]
    new = [job for job in asked if job not in before]
    assert ForkServer.launches[:1] == [2]
    competing = asked if known else new
    values = {job: eval_loss(job, rung) if known else at_rung(job, rung) for job in competing}
    kept = sorted(values, key=lambda job: values[job])[: len(competing) // 2]
    assert {job for job in new if len(steps(job)) == STEPS} == set(new) & set(kept)


def test_a_job_cut_beyond_a_rung_is_not_taken_for_its_later_value(place: Path) -> None:
    """One job rests at step 6; with a rung at 4 it returns at once."""
    words = ["lr=1e-3,2e-3", "scheduler=constant"]
    assert sweep(*words, "hydra.sweeper.rungs=[6]") == 0
    (cut,) = [job for job in jobs() if len(steps(job)) == 6]
    assert eval_loss(cut, 6) < eval_loss(cut, 4)
    assert sweep(*words, "hydra.sweeper.rungs=[4]") == 0
    assert at_rung(cut, 4) == eval_loss(cut, 4)
    assert at_rung(cut, 6) == eval_loss(cut, 6)
    assert len(steps(cut)) == 6
