"""A driver whose jobs take no time, for what a search decides between them."""

from __future__ import annotations

import contextlib
import functools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

from optrun.config import overrides
from optrun.config.schema.sweeper import ConfirmConfig, OptunaConfig, Pruner, Sampler
from optrun.config.store import open_hydra
from optrun.sweeper.contenders import contenders_of
from optrun.sweeper.driver import PlannedJob
from optrun.sweeper.folder import SweepDir
from optrun.sweeper.jobs import Composer, Job, merged
from optrun.sweeper.search import Search
from optrun.sweeper.view import JobRow, JobTable

UNTRAINED = 7.5
"""The loss before the first step."""
SUITS = {"adamw": -3.0, "sgd": -1.0, "lamb": -2.0}
"""The best log10 of the learning rate of each optimizer.

The loss is the distance from it, and a little of the seed.
"""


class Killed(Exception):
    """The process of the sweep is gone."""


class Listed(list[Any]):
    """Hashable, for a cache of searches."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self))


class StandIn:
    """As `sweeper.driver.Driver`.

    Args:
        folder: Of the sweep.
        options: Of the sweeper.
        dies_at: After so many jobs the process is gone.
    """

    def __init__(self, folder: Path, options: OptunaConfig, dies_at: int | None = None) -> None:
        self.sweep = SweepDir(folder)
        self.sweep.prepare()
        self.options = options
        self.job_table = JobTable()
        self.stop = SimpleNamespace(requested=False)
        self.notes: list[str] = []
        self.view = SimpleNamespace(note=self.notes.append)
        self.dies_at = dies_at
        self.diverges_above = math.inf
        self.ran: list[str] = []

    @property
    def jobs(self) -> list[Job]:
        """All that are known."""
        return [row.job for row in self.job_table.rows.values()]

    @property
    def stopped(self) -> set[str]:
        """Names of the jobs whose trials were pruned."""
        return {name for name, row in self.job_table.rows.items() if row.is_pruned}

    def add(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            if job.name not in self.job_table.rows:
                row = self.job_table.rows[job.name] = JobRow(job, self.sweep.state(job.name))
                row.is_pruned = self.sweep.read_record(job.name).stopped_at is not None

    def refresh(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            self.job_table.row(job).state = self.sweep.state(job.name)

    def advance(self, jobs: Sequence[Job]) -> None:
        self.run_unfinished_jobs(lambda: [PlannedJob(job) for job in jobs])

    def run_unfinished_jobs(self, plan: Callable[[], Sequence[PlannedJob]]) -> None:
        """One job at a time, as the launcher `basic`."""
        while wanted := list(filter(self.is_unfinished, plan())):
            job, stop_at = wanted[0]
            if len(self.ran) == self.dies_at:
                raise Killed
            self.ran.append(job.name)
            total = job.values["training"]["max_steps"]
            self._write(job, min(stop_at or total, total), total)
            self.refresh([job])
            if stop_at is not None:
                record = self.sweep.read_record(job.name)
                record.rungs[str(stop_at)] = loss(job.values)
                self.sweep.write_record(job.name, record)

    def is_unfinished(self, planned_job: PlannedJob) -> bool:
        at_rung = (
            planned_job.stop_at is not None
            and str(planned_job.stop_at) in self.sweep.read_record(planned_job.job.name).rungs
        )
        return not (self.job_table.row(planned_job.job).state.ended or at_rung)

    def prune(self, jobs: Iterable[Job], rung: int) -> None:
        for row in map(self.job_table.row, jobs):
            if not (row.state.ended or row.is_pruned):
                row.is_pruned = True
                record = self.sweep.read_record(row.job.name)
                record.stopped_at = rung
                self.sweep.write_record(row.job.name, record)

    def _write(self, job: Job, step: int, total: int) -> None:
        run = self.sweep.run_dir(job.name)
        run.path.mkdir(exist_ok=True)
        value_before_training = f'{{"step": 0, "eval/loss": {UNTRAINED}}}\n'
        run.metrics.write_text(
            value_before_training + "".join(f'{{"step": {at}}}\n' for at in range(1, step + 1))
        )
        diverged = job.values["lr"] > self.diverges_above
        summary = {
            "format": 1,
            "status": "failed" if diverged else "finished" if step == total else "interrupted",
            "exit_code": 3 if diverged else None,
            "global_step": step,
            "max_steps": total,
            "main_metric": {"name": "eval/loss", "mode": "min"},
            "metrics": {"best": {"eval/loss": {"value": loss(job.values)}}},
        }
        run.summary.write_text(json.dumps(summary))


def loss(values: Mapping[str, Any]) -> float:
    """Of a job."""
    return abs(math.log10(values["lr"]) - SUITS[values["optimizer"]["name"]]) + 0.01 * int(
        values["seed"]
    )


def options(**changed: Any) -> OptunaConfig:
    """Of the sweeper."""
    given: dict[str, Any] = {
        "name": "optuna",
        "params": {},
        "search": {},
        "timeout": None,
        "retry_failed": False,
        "max_batch_size": None,
        "devices": None,
        "n_trials": 6,
        "n_jobs": 1,
        "sampler": Sampler.random,
        "seed": 0,
        "pruner": Pruner.none,
        "min_resource": None,
        "reduction_factor": 2,
        "confirm": ConfirmConfig(seeds=None, power=None, difference=None, baseline=None),
    }
    return OptunaConfig(**{**given, **changed})


class Remembering(Composer):
    """Composes each job once: searches of one space begin with the same ones."""

    known: ClassVar[dict[tuple[str, ...], dict[str, object]]] = {}

    def __call__(self, tokens: Sequence[str]) -> dict[str, object]:
        if tuple(tokens) not in self.known:
            self.known[tuple(tokens)] = super().__call__(tokens)
        return self.known[tuple(tokens)]


@functools.cache
def _composer() -> Composer:
    return Remembering(open_hydra(), "config")


@functools.cache
def search_of(
    own: tuple[str, ...], common: tuple[str, ...], changed: tuple[tuple[str, Any], ...]
) -> Search:
    """A search, of which every start is the first: what it has open is opened anew."""
    check = functools.partial(overrides.parse_checked, _composer().hydra, "config", sweep=True)
    contenders = contenders_of(
        _composer().hydra, check, merged(["training.max_steps=4"], common), own
    )
    return Search(_composer().hydra, _composer(), options(**dict(changed)), contenders)


def searched(
    folder: Path,
    own: Sequence[str],
    *common: str,
    dies_at: int | None = None,
    diverges_above: float = math.inf,
    **changed: Any,
) -> StandIn:
    """Start a search, or go on with it, until it is done or its process is gone."""
    search = search_of(tuple(own), common, tuple(changed.items()))
    driver = StandIn(folder, search.options, dies_at)
    driver.diverges_above = diverges_above
    with contextlib.suppress(Killed):
        search(driver)  # type: ignore[arg-type]
    return driver
