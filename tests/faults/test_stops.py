"""Stopped anywhere and resumed.

Every task, micro-batches, workers, precisions, and randomness of every kind.
"""

from __future__ import annotations

import itertools
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from optrun.artifacts.run_dir import RunDir
from optrun.task.causal_lm import CausalLm
from optrun.training.step import TrainStep
from tests.faults.runs import EXAMPLES, STEPS, Go, Straight, task_words
from tests.faults.test_signals import hurt
from tests.running import records, state, summary, tensors

Make = Callable[..., Straight]


@pytest.fixture
def make(go: Go, tmp_path: Path) -> Make:
    """An undisturbed run of a command line."""

    def build(given: list[str], steps: int) -> Straight:
        run = Straight(tmp_path, given, steps)
        code, said = go(*run.words, f"hydra.run.dir={run.path}")
        assert code == 0, said
        return run

    return build


GRID = [
    (task, accumulation, workers)
    for task in ("causal_lm", "masked_lm", "classification")
    for accumulation in (1, 2)
    for workers in (0, 2)
]
ALWAYS = [("causal_lm", 1, 0), ("masked_lm", 2, 0), ("classification", 1, 2)]


@pytest.mark.parametrize(
    ("task", "accumulation", "workers"),
    [pytest.param(*case, marks=() if case in ALWAYS else pytest.mark.slow) for case in GRID],
)
def test_exact_within_an_epoch_at_its_end_and_in_the_next(
    make: Make, go: Go, tmp_path: Path, task: str, accumulation: int, workers: int
) -> None:
    epoch = -(-5 // accumulation)
    words = [
        *task_words(tmp_path, task, epoch + 2),
        f"training.gradient_accumulation_steps={accumulation}",
        f"training.dataloader_num_workers={workers}",
    ]
    straight = make(words, epoch + 2)
    assert summary(straight.path)["data"]["train_examples"] == EXAMPLES
    for step in (epoch, epoch + 1) if workers else (2, epoch, epoch + 1):
        run = straight.cut(tmp_path / str(step), step)
        assert go(f"resume={step}")[0] == 0
        straight.same(run)


@pytest.mark.slow
@pytest.mark.parametrize("step", range(1, STEPS))
def test_exact_from_every_step(straight: Straight, go: Go, tmp_path: Path, step: int) -> None:
    run = straight.cut(tmp_path / "run", step)
    assert go("resume=run")[0] == 0
    straight.same(run)


@pytest.mark.slow
def test_ten_random_stops_of_one_run(
    make: Make, go: Go, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two saves, over the ends of epochs; the steps are counted right each time."""
    steps, chance = 30, random.Random(3)
    words = task_words(tmp_path, "masked_lm", steps)
    straight = make(words, steps)
    words = [word for word in words if not word.startswith("checkpoint.")]
    words += ["checkpoint.save_steps=7", "hydra.run.dir=run", "resume=auto"]
    for stop in sorted(chance.sample(range(1, steps), 10)):
        done = summary(Path("run"))["global_step"] if Path("run").exists() else 0
        with hurt(
            monkeypatch,
            TrainStep,
            "compute_gradients",
            stop - done,
            chance.choice([signal.SIGINT, signal.SIGTERM]),
        ):
            assert go(*words)[0] == 75
        assert summary(Path("run"))["global_step"] == stop
    assert go(*words)[0] == 0
    assert len(summary(Path("run"))["resumes"]) == 10
    straight.same(Path("run"))


def test_a_short_last_group_of_micro_batches(
    make: Make, go: Go, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five micro-batches in groups of three: stopped before and inside the group of two.

    No update is missing.
    """
    words = [*task_words(tmp_path, "classification", 4), "training.gradient_accumulation_steps=3"]
    straight = make(words, 4)
    assert [state(straight.path, step)["train"]["samples"] for step in range(1, 5)] == [
        12,
        18,
        30,
        36,
    ]
    run = straight.cut(tmp_path / "before", 1)
    assert go("resume=before")[0] == 0
    straight.same(run)
    with hurt(monkeypatch, TrainStep, "compute_gradients", 2, signal.SIGTERM):
        assert go(*words, "hydra.run.dir=inside")[0] == 75
    assert summary(Path("inside"))["global_step"] == 2
    assert go("resume=inside")[0] == 0
    straight.same(Path("inside"))


def test_another_number_of_workers_at_each_start(
    straight: Straight, go: Go, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = straight.words_with("training.dataloader_num_workers=2")
    with hurt(monkeypatch, TrainStep, "compute_gradients", 2, signal.SIGTERM):
        assert go(*words, "hydra.run.dir=run")[0] == 75
    with hurt(monkeypatch, TrainStep, "compute_gradients", 2, signal.SIGTERM):
        assert go("resume=run", "training.dataloader_num_workers=1")[0] == 75
    assert go("resume=run", "training.dataloader_num_workers=0")[0] == 0
    straight.same(Path("run"))


def test_randomness_of_every_global_generator_is_taken_up(
    straight: Straight, go: Go, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collator that draws from torch, numpy and random instead of the counter it is given."""
    original = CausalLm.collate

    def noisy(self: CausalLm, examples: Any) -> Any:
        batch = original(self, examples)
        for draw in (torch.rand(()).item(), np.random.rand(), random.random()):
            batch["input_ids"] = (batch["input_ids"] + int(40 * draw)) % 256
        return batch

    monkeypatch.setattr(CausalLm, "collate", noisy)
    noise = Straight(tmp_path, straight.words)
    assert go(*noise.words, f"hydra.run.dir={noise.path}")[0] == 0
    assert tensors(noise.path, STEPS) != tensors(straight.path, STEPS)
    run = noise.cut(tmp_path / "run", 2)
    assert go("resume=run")[0] == 0
    noise.same(run)


@pytest.mark.parametrize(("precision", "steps", "stops"), [("bf16", 4, [2]), ("fp16", 8, [3, 6])])
def test_narrow_arithmetic(
    make: Make,
    straight: Straight,
    go: Go,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    precision: str,
    steps: int,
    stops: list[int],
) -> None:
    """With float16 the loss scale, what it counts, and the updates that it left out are taken
    up as well.
    """
    original = torch.amp.GradScaler

    def scaler(device: str, enabled: bool) -> torch.amp.GradScaler:
        return original(device, init_scale=2.0**20, growth_interval=2, enabled=enabled)

    monkeypatch.setattr(torch.amp, "GradScaler", scaler)
    narrow = make(
        straight.words_with(f"training.precision={precision}", f"training.max_steps={steps}"), steps
    )
    if precision == "fp16":
        scales = [state(narrow.path, step)["scaler"]["scale"] for step in range(1, steps + 1)]
        assert any(one > other for one, other in itertools.pairwise(scales)), scales
        assert any(one < other for one, other in itertools.pairwise(scales)), scales
        assert 0 < state(narrow.path, steps)["train"]["skipped_steps"] < steps
    for step in stops:
        run = narrow.cut(tmp_path / str(step), step)
        assert go(f"resume={step}")[0] == 0
        narrow.same(run)


def test_before_the_first_step_and_after_the_last(
    straight: Straight, go: Go, tmp_path: Path
) -> None:
    """k = 0 starts over in place, k = N makes up for the end; a finished run is left as it is."""
    first, last = straight.cut(tmp_path / "first", 0), straight.cut(tmp_path / "last", STEPS)
    for run in (first, last):
        assert go(*straight.words, "resume=auto", f"hydra.run.dir={run.path}")[0] == 0
        straight.same(run)
    before = {
        path: path.read_bytes()
        for path in (last.metrics, last.config, last.model / "model.safetensors")
    }
    assert go("resume=last")[0] == 0
    assert {path: path.read_bytes() for path in before} == before
    assert records(last.path) == records(straight.path)
    assert RunDir(last.path).checkpoint(STEPS).is_dir()
