"""Optuna's pruners stop weak trials at rungs; the others go on from their checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import optuna
import pytest

from optrun.artifacts.metrics import read_metrics
from optrun.base.errors import ConfigError
from optrun.config.schema.sweeper import Pruner
from tests.running import records, summary, tensors
from tests.sweep.forked import STEPS, ForkServer, jobs, result, same, steps, sweep
from tests.sweep.stand_in import UNTRAINED, loss, options, search_of, searched
from tests.sweep.test_contenders import ADAMW, SGD, studies
from tests.sweep.test_search import trials as trials_of

HALVED = {"pruner": Pruner.asha, "min_resource": 1, "n_trials": 12}
ASHA = ["hydra/sweeper=optuna", "lr=tag(log,interval(1e-4,1e-1))", "hydra.sweeper.pruner=asha"]


def test_who_is_pruned_is_what_optuna_says(tmp_path: Path) -> None:
    driver = searched(tmp_path, [ADAMW], pruner=Pruner.asha, min_resource=1, n_trials=8)
    study = optuna.create_study(
        pruner=optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=2)
    )
    pruned = set()
    for job in driver.jobs:
        trial = study.ask()
        for rung in (1, 2):
            trial.report(loss(job.values), rung)
            if trial.should_prune():
                pruned.add(job.name)
                study.tell(trial, state=optuna.trial.TrialState.PRUNED)
                break
        else:
            study.tell(trial, loss(job.values))
    assert driver.stopped == pruned
    assert 0 < len(pruned) < 8


def test_a_kill_between_jobs_changes_nothing(tmp_path: Path) -> None:
    """Every job goes from rung to rung as if nothing had happened, wherever the process dies."""
    given = {"pruner": Pruner.asha, "min_resource": 1, "n_trials": 8}
    whole = searched(tmp_path / "whole", [ADAMW, SGD], **given)
    ran: list[str] = []
    while found := searched(tmp_path / "cut", [ADAMW, SGD], dies_at=1, **given).ran:
        ran += found
    assert ran == whole.ran
    studied = [studies(folder) for folder in (tmp_path / "whole", tmp_path / "cut")]
    told = [
        {
            name: [(trial.state, trial.intermediate_values, trial.value) for trial in trials]
            for name, trials in each.items()
        }
        for each in studied
    ]
    assert told[0] == told[1]


def test_a_diverged_trial_has_a_bad_value_at_a_rung(tmp_path: Path) -> None:
    own = ["search.adamw.lr=tag(log,interval(1e-4,1))"]
    given = {"pruner": Pruner.asha, "min_resource": 1, "n_trials": 6}
    searched(tmp_path, own, diverges_above=1e-2, **given)
    (trials,) = studies(tmp_path).values()
    diverged = [trial for trial in trials if trial.params["lr"] > 1e-2]
    assert diverged
    assert {(trial.state.name, trial.value) for trial in diverged} == {("COMPLETE", UNTRAINED)}


@pytest.mark.parametrize(("pruner", "n_jobs"), [(Pruner.asha, 3), (Pruner.hyperband, 1)])
def test_nobody_waits_and_nothing_is_lost(pruner: Pruner, n_jobs: int, tmp_path: Path) -> None:
    """Killed twice.

    No number twice, the budgets equal, each trial done or stopped, a stopped one at a rung.
    """
    given = {**HALVED, "pruner": pruner, "n_jobs": n_jobs}
    for dies_at in (4, 9, None):
        driver = searched(tmp_path, [ADAMW, SGD], dies_at=dies_at, **given)
    stopped = 0
    for trials in studies(tmp_path).values():
        assert [trial.number for trial in trials] == list(range(6))
        assert {trial.state.name for trial in trials} <= {"COMPLETE", "PRUNED"}
        assert trials[0].state.name == "COMPLETE", "the first is compared with nobody"
        assert all(set(trial.intermediate_values) <= {1, 2} for trial in trials)
        stopped += sum(trial.state.name == "PRUNED" for trial in trials)
    steps = [driver.sweep.steps_done(job.name) for job in driver.jobs]
    assert stopped == len(driver.stopped) == sum(of in (1, 2) for of in steps) > 0
    assert (driver.job_table.left, driver.job_table.count("failed")) == (0, 0)
    assert searched(tmp_path, [ADAMW, SGD], **given).ran == []


def test_what_was_pruned_stays_so_without_the_pruner(tmp_path: Path) -> None:
    driver = searched(tmp_path, [ADAMW, SGD], **HALVED)
    assert driver.stopped
    states = [trial.state.name for trials in studies(tmp_path).values() for trial in trials]
    assert set(states) == {"COMPLETE", "PRUNED"}
    assert searched(tmp_path, [ADAMW, SGD], n_trials=12).ran == []


@pytest.mark.parametrize(
    ("changed", "facts"),
    [
        ({"pruner": Pruner.asha}, ("pruner=asha", "hydra.sweeper.min_resource=STEPS")),
        ({"min_resource": 5}, ("min_resource=5", "no effect", "asha or hyperband")),
        ({"min_resource": 0, "pruner": Pruner.asha}, ("min_resource=0", "1 or more")),
        ({"reduction_factor": 1}, ("reduction_factor=1", "2 or more")),
    ],
)
def test_a_ladder_that_cannot_be_is_refused(
    changed: dict[str, object], facts: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as refused:
        options(**changed)
    for fact in facts:
        assert fact in str(refused.value)


@pytest.mark.parametrize(
    ("common", "changed", "facts"),
    [
        (
            (),
            {"min_resource": 4, "pruner": Pruner.asha},
            ("min_resource=4", "fewer than 4, the steps of a full trial"),
        ),
        (
            ("training.max_steps=null",),
            {"min_resource": 4, "pruner": Pruner.hyperband},
            ("pruner=hyperband", "training.max_steps", "asha"),
        ),
    ],
)
def test_a_first_rung_beyond_the_end_is_refused(
    common: tuple[str, ...], changed: dict[str, object], facts: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as refused:
        search_of((ADAMW,), common, tuple(changed.items()))
    for fact in facts:
        assert fact in str(refused.value)


def test_survivors_go_on_from_their_checkpoints(place: Path, undisturbed: Path) -> None:
    """A trial of two seeds that survives ends bit for bit as the runs that were never paused."""
    words = ["hydra/sweeper=optuna", "lr=1e-3,2e-3", "seed=0,1", "hydra.sweeper.n_trials=2"]
    words += ["hydra.sweeper.pruner=asha", "hydra.sweeper.min_resource=5"]
    assert sweep(*words) == 0
    rows = result().values()
    assert {row["status"] for row in rows} <= {"finished", "stopped at a rung"}
    finished = [Path("sweep", row["name"]) for row in rows if row["status"] == "finished"]
    assert len(finished) >= 2
    assert all(same(job, undisturbed / job.name) for job in finished)
    is_pruned = [job for job in jobs() if job not in finished]
    assert all(steps(job) == [1, 2, 3, 4, 5] for job in is_pruned)
    ForkServer.launches.clear()
    assert sweep(*words) == 0
    assert ForkServer.launches == []


def test_a_rung_is_no_evaluation_to_early_stopping(place: Path) -> None:
    """It pauses a job between two evaluations; the survivor ends where it would have ended."""
    words = ["hydra/sweeper=optuna", "lr=tag(log,interval(1e-4,1e-1))", "hydra.sweeper.n_trials=2"]
    words += ["training.eval_steps=2"]
    words += ["training.early_stopping_patience=1", "training.early_stopping_threshold=100"]
    assert sweep(*words, folder="straight") == 0
    assert sweep(*words, "hydra.sweeper.pruner=asha", "hydra.sweeper.min_resource=3") == 0
    survivors = [job for job in jobs() if len(steps(job)) == 4]
    assert survivors
    for survivor in survivors:
        straight = Path("straight", survivor.name)
        assert summary(survivor)["stopped"] == summary(straight)["stopped"]
        assert records(survivor) == records(straight)
        assert tensors(survivor, 4) == tensors(straight, 4)


def test_a_trial_whose_time_is_up_is_not_pruned(place: Path) -> None:
    words = [*ASHA, "hydra.sweeper.n_trials=2", "hydra.sweeper.n_jobs=2"]
    words += ["hydra.sweeper.min_resource=2", "training.max_steps=3", "checkpoint.save_steps=1"]
    assert sweep(*words, "training.max_seconds=1e-9") == 75
    assert [trial.state.name for trial in trials_of()] == ["RUNNING"] * 2
    assert sweep(*words) == 0
    states = {trial.state.name for trial in trials_of()}
    assert "COMPLETE" in states
    assert states <= {"COMPLETE", "PRUNED"}


def test_the_study_holds_the_value_at_a_rung(place: Path) -> None:
    """A rung at step 4, where the job is evaluated anyway."""
    words = ["hydra/sweeper=optuna", "lr=1e-3,2e-3", "hydra.sweeper.n_trials=1"]
    words += ["scheduler=constant"]
    assert sweep(*words, "hydra.sweeper.pruner=asha", "hydra.sweeper.min_resource=4") == 0
    (job,) = jobs()
    assert steps(job)[-1] == STEPS
    (trial,) = optuna.load_study(
        study_name="optrun",
        storage="sqlite:///sweep/study.db",
    ).get_trials()
    at, values = read_metrics(job / "metrics.jsonl").series("eval/loss")
    value = dict(zip(at, values, strict=True))[4]
    assert trial.intermediate_values == {4: value}
    record = json.loads(Path("sweep", ".sweep", "jobs", f"{job.name}.json").read_text())
    assert record["rungs"] == {"4": value}


def test_a_pruner_without_checkpoints_is_refused(place: Path) -> None:
    words = [*ASHA, "hydra.sweeper.n_trials=1", "hydra.sweeper.min_resource=3"]
    assert sweep(*words, "checkpoint=none", "checkpoint.save_steps=null") == 1
    assert "checkpoint=none" in next(iter(result().values()))["message"]
