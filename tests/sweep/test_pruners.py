"""Halving.

One rule for grids and searches, whether jobs wait at a rung or are judged by those before them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from optrun.base.errors import ConfigError
from optrun.config.schema.sweeper import Pruner
from optrun.config.store import open_hydra
from optrun.sweeper.halving import judge_together, survivors
from optrun.sweeper.jobs import Composer, build_jobs
from tests.sweep.stand_in import UNTRAINED, Listed, StandIn, loss, options, search_of, searched
from tests.sweep.test_contenders import ADAMW, SGD, studies

HALVED = {"pruner": Pruner.asha, "min_resource": 1, "n_trials": 12}


WAVE = {"n_trials": 6, "n_jobs": 6}


def test_the_same_values_have_the_same_survivors(tmp_path: Path) -> None:
    """By a grid, a search whose trials wait for each other, and one that compares each with those before it."""
    together = searched(tmp_path / "together", [ADAMW], rungs=Listed([1]), **WAVE)
    values = {job.name: loss(job.values) for job in together.jobs}
    kept = survivors(values, "min", 2)
    assert values.keys() - together.stopped == set(kept)

    compose = Composer(open_hydra(), "config")
    grid = StandIn(tmp_path / "grid", options(rungs=[1]))
    jobs = build_jobs(compose, [job.overrides for job in together.jobs])
    grid.add(jobs)
    grid.pursue(lambda: judge_together(grid, [(job,) for job in jobs]))  # type: ignore[arg-type]
    assert grid.stopped == together.stopped

    alone = searched(tmp_path / "alone", [ADAMW], pruner=Pruner.asha, min_resource=3, **WAVE)
    there = [dict(list(values.items())[: place + 1]) for place in range(len(values))]
    passed = {
        name
        for name, before in zip(values, there, strict=True)
        if name in survivors(before, "min", 2)
    }
    assert values.keys() - alone.stopped == passed != set(kept)


@pytest.mark.parametrize(
    "given",
    [{"rungs": Listed([1, 2]), "n_jobs": 4}, {"pruner": Pruner.asha, "min_resource": 1}],
    ids=["together", "alone"],
)
def test_a_kill_in_the_middle_of_a_rung_changes_nothing(
    given: dict[str, object], tmp_path: Path
) -> None:
    """Every job goes from rung to rung as if nothing had happened, wherever the process dies."""
    given = {**given, "n_trials": 8}
    whole = searched(tmp_path / "whole", [ADAMW, SGD], **given)
    ran: list[str] = []
    while len(found := searched(tmp_path / "cut", [ADAMW, SGD], dies_at=1, **given).ran):
        ran += found
    assert ran == whole.ran
    assert found == []
    studied = [studies(folder) for folder in (tmp_path / "whole", tmp_path / "cut")]
    told = [
        {
            name: [(trial.state, trial.intermediate_values, trial.value) for trial in trials]
            for name, trials in each.items()
        }
        for each in studied
    ]
    assert told[0] == told[1]


@pytest.mark.parametrize(
    "given", [{"rungs": Listed([1])}, {"pruner": Pruner.asha, "min_resource": 1}]
)
def test_a_diverged_trial_has_a_bad_value_at_a_rung(
    given: dict[str, object], tmp_path: Path
) -> None:
    own = ["search.adamw.lr=tag(log,interval(1e-4,1))"]
    searched(tmp_path, own, diverges_above=1e-2, **WAVE, **given)
    (trials,) = studies(tmp_path).values()
    diverged = [trial for trial in trials if trial.params["lr"] > 1e-2]
    assert diverged
    assert {(trial.state.name, trial.value) for trial in diverged} == {("COMPLETE", UNTRAINED)}
    assert {trial.intermediate_values[1] for trial in diverged} == {UNTRAINED}


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
    assert (driver.board.left, driver.board.count("failed")) == (0, 0)
    assert searched(tmp_path, [ADAMW, SGD], **given).ran == []


@pytest.mark.parametrize(
    "given",
    [HALVED, {"rungs": Listed([1]), "n_jobs": 4, "n_trials": 12}],
    ids=["alone", "together"],
)
def test_without_halving_the_stopped_are_brought_to_their_end(
    given: dict[str, Any], tmp_path: Path
) -> None:
    searched(tmp_path, [ADAMW, SGD], **given)
    assert {trial.state.name for trials in studies(tmp_path).values() for trial in trials} == {
        "COMPLETE",
        "PRUNED",
    }
    assert searched(tmp_path, [ADAMW, SGD], **given).ran == []
    for _ in range(2):
        driver = searched(tmp_path, [ADAMW, SGD], n_trials=12)
        assert driver.board.count("finished") == 12
        for trials in studies(tmp_path).values():
            assert sum(trial.state.name == "COMPLETE" for trial in trials) == 6
    assert driver.ran == []


def test_a_budget_of_steps_buys_more_trials_where_the_weak_are_stopped(tmp_path: Path) -> None:
    straight = searched(tmp_path / "straight", [ADAMW, SGD], n_steps=32, n_trials=40)
    halved = searched(tmp_path / "halved", [ADAMW, SGD], n_steps=32, **{**HALVED, "n_trials": 40})
    assert len(straight.jobs) == 8
    assert len(halved.jobs) > 8
    for name in ("adamw", "sgd"):
        jobs = [job.name for job in halved.jobs if job.name.startswith(name)]
        assert 12 < sum(map(halved.sweep.steps_done, jobs)) <= 16


@pytest.mark.parametrize(
    ("changed", "facts"),
    [
        ({"pruner": Pruner.asha}, ("pruner=asha", "hydra.sweeper.min_resource=STEPS")),
        ({"min_resource": 5}, ("min_resource=5", "no effect", "asha or hyperband")),
        ({"min_resource": 0, "pruner": Pruner.asha}, ("min_resource=0", "1 or more")),
        ({"min_resource": 5, "pruner": Pruner.asha, "rungs": [5]}, ("rungs=[5]", "pruner=asha")),
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
            ("min_resource=4", "fewer steps than the 4"),
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
