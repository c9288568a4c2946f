"""A search with several objectives: what it is told of a trial, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import optuna
import pytest

from optrun.artifacts.metrics import MetricsLog
from optrun.artifacts.objective import Objective, objective_value
from optrun.base.errors import ConfigError
from optrun.config.schema.objective import read_objectives
from optrun.config.schema.sweeper import ConfirmConfig, Pruner, Sampler
from optrun.sweeper.jobs import Job
from optrun.sweeper.search import Search
from optrun.sweeper.storage import open_storage
from tests.sweep import stand_in
from tests.sweep.stand_in import Killed, Listed, StandIn, loss, options, search_of

OBJECTIVES = ("loss", "perf/tokens_per_second")
SPACE = ("lr=tag(log,interval(1e-4,1e-1))", "seed=0,1")


class Weighing(StandIn):
    """Jobs that are the faster, the larger their learning rate."""

    def refresh(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            run = self.sweep.run(job.name)
            lines = [
                {
                    "step": 2,
                    "eval/loss": loss(job.values),
                    "perf/tokens_per_second": 1e6 * job.values["lr"],
                },
                {
                    "step": 4,
                    "eval/loss": loss(job.values) + 1.0,
                    "perf/tokens_per_second": 1e6 * job.values["lr"],
                },
            ]
            if run.summary.exists():
                run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
            super().refresh([job])


def search(folder: Path, sampler: Sampler = Sampler.random, dies_at: int | None = None) -> Weighing:
    """Search once; the driver."""
    changed = {"objectives": list(OBJECTIVES), "sampler": sampler, "n_trials": 5}
    changed["storage"] = f"journal:{folder}/study.log"
    found: Search = search_of(
        (), SPACE, tuple((key, _frozen(value)) for key, value in changed.items())
    )
    driver = Weighing(folder, options(**changed), dies_at)
    found(driver)
    return driver


def _frozen(value: object) -> object:
    return Listed(value) if isinstance(value, list) else value


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
@pytest.mark.parametrize("sampler", [Sampler.random, Sampler.tpe, Sampler.qmc])
def test_a_study_is_told_every_objective_and_goes_on_where_it_was_killed(
    tmp_path: Path, sampler: Sampler
) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    search(whole, sampler)
    for dies_at in (3, 4):
        with pytest.raises(Killed):
            search(cut, sampler, dies_at)
    search(cut, sampler)
    told = {}
    for folder in (whole, cut):
        storage = open_storage(f"journal:{folder}/study.log", folder)
        study = optuna.load_study(study_name="optrun", storage=storage)
        assert [each.name for each in study.directions] == ["MINIMIZE", "MAXIMIZE"]
        told[folder] = [(trial.params, trial.values) for trial in study.trials]
        for trial in study.trials:
            lr = trial.params["lr"]
            values = {"lr": lr, "optimizer": {"name": "adamw"}}
            mean = (loss({**values, "seed": 0}) + loss({**values, "seed": 1})) / 2
            assert trial.values == pytest.approx([mean, 1e6 * lr])
    assert told[whole] == told[cut]


def test_a_study_keeps_its_objectives(tmp_path: Path) -> None:
    search(tmp_path)
    changed = {"storage": f"journal:{tmp_path}/study.log", "n_trials": 6}
    with pytest.raises(
        ConfigError, match=r"hydra.sweeper.objectives=.*eval/loss:min.* then, null now"
    ):
        search_of((), SPACE, tuple(changed.items()))(StandIn(tmp_path, options(**changed)))


def test_evaluations_are_those_of_the_best_checkpoint() -> None:
    log = MetricsLog(
        [
            {
                "step": 1,
                "eval/loss": 3.0,
                "eval/accuracy": 0.9,
                "perf/tokens_per_second": 1.0,
                "train/loss": 5.0,
            },
            {
                "step": 2,
                "eval/loss": 1.0,
                "eval/accuracy": 0.5,
                "perf/tokens_per_second": 100.0,
                "train/loss": 4.0,
            },
            {"step": 3, "eval/loss": 2.0, "eval/accuracy": 0.7, "perf/tokens_per_second": 3.0},
        ]
    )
    summary = {
        "main_metric": {"name": "eval/loss", "mode": "min"},
        "wall_seconds": 7.5,
        "model": {"parameters": 9},
    }
    expected = {
        "eval/loss": 1.0,
        "eval/accuracy": 0.5,
        "perf/tokens_per_second": 3.0,
        "train/loss": 4.0,
        "eval/f1": None,
        "wall_seconds": 7.5,
        "model.parameters": 9.0,
        "model.trainable_parameters": None,
    }
    assert {
        name: objective_value(Objective(name, "min"), log, summary) for name in expected
    } == expected


def test_directions_follow_from_the_name_or_are_said() -> None:
    given = [
        "loss",
        "eval/dev/accuracy",
        "perf/peak_memory_bytes",
        "model.parameters",
        "wall_seconds",
        "mine/x:max",
    ]
    assert [mode for _, mode in read_objectives(given, "objectives")] == [
        "min",
        "max",
        "min",
        "min",
        "min",
        "max",
    ]


@pytest.mark.parametrize(
    ("texts", "facts"),
    [
        (["loss"], ("checkpoint.metric", "two or more")),
        (["loss", "eval/loss:max"], ("eval/loss", "twice")),
        (["loss", "mine/x"], ("mine/x", "mine/x:min", "mine/x:max")),
        (["loss", "accuracy:mx"], ("accuracy:mx", "NAME:max", "max")),
        (["loss", "model.parametres"], ("model.parametres", "model.parameters")),
        (["loss", ""], ("expected NAME",)),
    ],
)
def test_what_is_no_objective_is_refused_by_name(texts: list[str], facts: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as refused:
        read_objectives(texts, "hydra.sweeper.objectives")
    for fact in ("hydra.sweeper.objectives", *facts):
        assert fact in str(refused.value)


@pytest.mark.parametrize(
    ("changed", "fact"),
    [
        ({"rungs": [2]}, "hydra.sweeper.rungs"),
        ({"pruner": Pruner.asha, "min_resource": 1}, "hydra.sweeper.pruner"),
        ({"sampler": Sampler.cmaes}, "hydra.sweeper.sampler=cmaes"),
        (
            {"confirm": ConfirmConfig(seeds="5-9", power=None, difference=None, baseline=None)},
            "hydra.sweeper.confirm",
        ),
    ],
)
def test_what_goes_for_one_number_is_refused_beside_several(
    changed: dict[str, object], fact: str
) -> None:
    with pytest.raises(ConfigError, match=fact):
        stand_in.options(objectives=list(OBJECTIVES), **changed)


def test_a_number_that_no_job_has_is_refused_by_name(tmp_path: Path) -> None:
    changed = {
        "objectives": Listed(["loss", "eval/accuracy"]),
        "storage": f"journal:{tmp_path}/study.log",
    }
    with pytest.raises(
        ConfigError, match=r"hydra.sweeper.objectives: eval/accuracy: .* has no such number"
    ):
        search_of((), SPACE, tuple(changed.items()))(Weighing(tmp_path, options(**changed)))
