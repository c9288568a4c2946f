"""Runs of optrun on several gloo ranks, without the agent that starts them for a person."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.multiprocessing as mp
from rich.console import Console

from optrun.artifacts.run_dir import RunDir, checkpoint_folders
from optrun.base.errors import NonFiniteError, StoppedEarly
from optrun.config import store
from optrun.config.compose import compose_request
from optrun.config.request import CommandLine, Request
from optrun.distributed.world import ALONE, World
from optrun.runner import prepare
from optrun.runner.resume.checkpoint import ResumePoint
from optrun.runner.train import train
from optrun.training.display import make_display
from optrun.training.step import TrainStep
from tests import preloaded

SECONDS = 120


@dataclass(frozen=True)
class Start:
    """One start of a run."""

    run: Path
    overrides: list[str]
    stop_at: int | None = None
    double: bool = False
    """Weights and activations in float64."""
    poisoned: int | None = None
    """Position in the data at which the loss of the last rank is NaN."""
    within: Callable[[Path, World], AbstractContextManager[object]] | None = None
    """Stands around the start on each rank, told the run directory."""


def start_on(ranks: int, starts: list[Start], meet: Path) -> None:
    """Do these starts one after the other, all in the same processes.

    Args:
        ranks: How many there are; a single one is this process.
        starts: A run that is there already goes on.
        meet: An empty folder for the ranks to meet in.
    """
    alone = [] if ranks > 1 else ["distributed=none"]
    composed = [(start, request([*start.overrides, *alone])) for start in starts]
    if ranks == 1:
        _each(composed, ALONE)
    else:
        meet.mkdir()
        preloaded.server()
        mp.start_processes(
            _rank, args=(ranks, composed, str(meet)), nprocs=ranks, start_method="forkserver"
        )


def _rank(rank: int, ranks: int, starts: list[tuple[Start, Request]], meet: str) -> None:
    import torch.distributed as dist

    os.environ |= {
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    torch.set_num_threads(1)
    timeout = timedelta(seconds=SECONDS)
    dist.init_process_group(
        "gloo", init_method=f"file://{meet}/meet", rank=rank, world_size=ranks, timeout=timeout
    )
    world = World.join("gloo", timeout)
    _each(starts, world)
    world.barrier()
    dist.destroy_process_group()


def _each(starts: list[tuple[Start, Request]], world: World) -> None:
    for start, asked in starts:
        with (
            suppress(StoppedEarly, NonFiniteError),
            _poisoned(start.poisoned, world),
            _no_pictures(),
            _in_double() if start.double else nullcontext(),
            start.within(start.run, world) if start.within else nullcontext(),
        ):
            _start(start, asked, world)
        world.barrier()


@contextmanager
def _poisoned(at: int | None, world: World) -> Iterator[None]:
    """Inside, the loss of one rank is NaN at a position in the data."""
    call, backward = TrainStep.compute_gradients, TrainStep._backward
    here: list[int] = []

    def call_noted(self: TrainStep, batches: Any, step: Any = None, position: int = 0) -> Any:
        here[:] = [position]
        return call(self, batches, step, position)

    def backward_poisoned(self: TrainStep, batch: Any, share: float) -> torch.Tensor:
        bad = here == [at] and world.rank == world.size - 1
        return backward(self, batch, float("nan") if bad else share)

    with (
        patch.object(TrainStep, "compute_gradients", call_noted),
        patch.object(TrainStep, "_backward", backward_poisoned),
    ):
        yield


def _no_pictures() -> AbstractContextManager[object]:
    """Inside, runs draw no curves, which would take longer than they do."""
    return patch("optrun.runner.train.draw_curves", lambda path: None)


@contextmanager
def _in_double() -> Iterator[None]:
    """Inside, models are built in float64, which no configuration asks for."""
    build = prepare.build_model

    def build_double(*args: Any, **options: Any) -> tuple[Any, list[str]]:
        model, notes = build(*args, **options)
        return model.double(), notes

    with patch.object(prepare, "build_model", build_double):
        yield


def _start(start: Start, asked: Request, world: World) -> None:
    start.run.mkdir(parents=True, exist_ok=True)
    run = RunDir(start.run)
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        display = make_display(Console(file=nowhere))
        resume = ResumePoint(None) if checkpoint_folders(run) else None
        train(asked, run, display, resume, stop_at=start.stop_at, world=world)


def request(overrides: list[str]) -> Request:
    """What these overrides ask for; of a key given twice the last counts."""
    last = {token.split("=", 1)[0]: token for token in overrides}
    return compose_request(store.open_hydra(None), CommandLine(overrides=list(last.values())))


def rows(run: Path) -> dict[int, dict[str, Any]]:
    """The lines of `metrics.jsonl` by step."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return {row["step"]: row for row in map(json.loads, lines)}


def batches(run: Path) -> str:
    """Digest of all batches that a run has seen, in their order."""
    newest = max(checkpoint_folders(RunDir(run)), key=lambda folder: folder.name)
    return str(
        json.loads((newest / "state.json").read_text(encoding="utf-8"))["train"]["batches_digest"]
    )


def differences(one: Path, other: Path, names: tuple[str, ...]) -> dict[str, float]:
    """Greatest relative difference of each metric between two runs, over all steps.

    Args:
        one: A run directory.
        other: Another one, with the same steps.
        names: Of metrics, each of which is in both.
    """
    left, right = rows(one), rows(other)
    assert list(left) == list(right)
    found = {}
    for name in names:
        pairs = [(left[step][name], right[step][name]) for step in left if name in left[step]]
        assert pairs, name
        found[name] = max(abs(a - b) / max(abs(a), 1e-30) for a, b in pairs)
    return found
