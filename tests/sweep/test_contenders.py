"""A space per optimizer: who is tried with what, on equal budgets, whatever ends the search in between."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from optrun.config.schema.sweeper import ConfirmConfig, OptunaConfig, Sampler
from optrun.config.store import open_hydra
from optrun.errors import ConfigError
from optrun.sweeper.contenders import contenders_of, search_overrides
from optrun.sweeper.driver import Driver
from optrun.sweeper.folder import JobState, SweepDir
from optrun.sweeper.jobs import Composer, Job
from optrun.sweeper.search import Search
from optrun.sweeper.view import Board
from tests.sweep.forked import optrun

COMMON = ["training.max_steps=4"]
OWN = ["search.adamw.lr=tag(log,interval(1e-4,1e-2))", "search.sgd.lr=tag(log,interval(1e-2,1))"]


class Killed(Exception):
    """The process of the sweep is gone."""


class StandIn:
    """As a driver whose jobs take no time; a value is the distance of log10(lr) from what suits the optimizer."""

    suits: Mapping[str, float] = {"adamw": -3.0, "sgd": -1.0, "lamb": -2.0}

    def __init__(self, folder: Path, options: OptunaConfig, dies_at: int | None = None) -> None:
        self.sweep = SweepDir(folder)
        self.sweep.prepare()
        self.options = options
        self.board = Board()
        self.stop = SimpleNamespace(requested=False)
        self.out_of_time: set[str] = set()
        self.notes: list[str] = []
        self.view = SimpleNamespace(note=self.notes.append)
        self.dies_at = dies_at
        self.ran: list[str] = []
        self.by_name: dict[str, Job] = {}

    def add(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            self.by_name[job.name] = job
            self.board.states.setdefault(job.name, self.sweep.state(job.name))

    def advance(self, jobs: Sequence[Job], stop_at: int | None = None) -> None:
        for job in jobs:
            if self.board.states[job.name].status == "finished":
                continue
            if self.dies_at is not None and len(self.ran) == self.dies_at:
                raise Killed
            self.ran.append(job.name)
            total = job.values["training"]["max_steps"]
            off = abs(__import__("math").log10(job.values["lr"]) - self.suits[job.values["optimizer"]["name"]])
            run = self.sweep.run(job.name)
            run.path.mkdir(parents=True, exist_ok=True)
            run.metrics.write_text("".join(f'{{"step": {step}}}\n' for step in range(1, total + 1)))
            best = {"value": off + 0.01 * job.values["seed"]}
            run.summary.write_text(
                __import__("json").dumps(
                    {
                        "format": 1,
                        "status": "finished",
                        "global_step": total,
                        "max_steps": total,
                        "main_metric": {"name": "eval/loss", "mode": "min"},
                        "metrics": {"best": {"eval/loss": best}},
                    }
                )
            )
            self.board.states[job.name] = self.sweep.state(job.name)


def options(**changed: Any) -> OptunaConfig:
    given = dict(
        name="optuna", params={}, search={}, confirm=ConfirmConfig(seeds=None, power=None, baseline=None),
        retry_failed=False, max_batch_size=None, devices=None, rungs=[], reduction_factor=2, n_trials=6, n_steps=None,
        n_jobs=1, sampler=Sampler.random, seed=0, storage=None,
    )  # fmt: skip
    return OptunaConfig(**{**given, **changed})
