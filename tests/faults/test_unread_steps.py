"""A step whose numbers are read while the next one runs is the step that waits for them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from optrun.artifacts.run_dir import RunDir, checkpoint_folders
from optrun.optimizer import guard as guard_of
from optrun.optimizer.base import NamedOptimizer
from optrun.training.step import TrainStep
from tests.faults.runs import Go, Straight
from tests.faults.test_numbers import marks, poisoned, poisoned_in_float16
from tests.running import records, state, tensors

__all__ = ["marks"]
STEPS = 9
WORDS = [
    "training.logging_steps=4",
    "training.eval_steps=null",
    f"training.max_steps={STEPS}",
    "checkpoint.save_steps=6",
]
CASES = {
    "stop": ["training.on_nonfinite=stop"],
    "skip": ["training.on_nonfinite=skip"],
    "rollback": ["training.on_nonfinite=rollback"],
    "skip, accumulated": ["training.on_nonfinite=skip", "training.gradient_accumulation_steps=3"],
    "stop, accumulated": ["training.on_nonfinite=stop", "training.gradient_accumulation_steps=3"],
    "rollback, lamb": ["training.on_nonfinite=rollback", "optimizer=lamb", "clip=global_norm"],
    "skip, schedule_free": ["training.on_nonfinite=skip", "optimizer=schedule_free"],
}


@contextmanager
def waiting(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inside, every step waits for its numbers."""
    with patch.context() as inside:
        inside.setattr(TrainStep, "reason_to_wait", lambda step: "the test says so")
        yield


@contextmanager
def flagged(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inside, torch's fused kernels leave a step out by themselves, as on another device."""

    def step(self: guard_of.Guard, numbers: torch.Tensor) -> None:
        assert isinstance(self.optimizer, NamedOptimizer)
        assert self.optimizer.skips_on_device()
        self.step_on_device(torch.isfinite(numbers).all().logical_not().float())

    with patch.context() as inside:
        inside.setattr(guard_of.Guard, "step", step)
        yield


def content(run: Path) -> dict[str, Any]:
    """Everything that does not depend on the clock."""
    steps = [int(folder.name[5:]) for folder in checkpoint_folders(RunDir(run))]
    return {
        "lines": records(run, before=True),
        "tensors": {step: tensors(run, step) for step in steps},
        "states": {step: state(run, step) for step in steps},
        "reports": {
            path.parent.name: json.loads(path.read_text())
            for path in run.glob("nonfinite/*/report.json")
        },
        "batches": {
            path.parent.name: path.read_bytes() for path in run.glob("nonfinite/*/*.safetensors")
        },
    }


def data_marks(go: Go, patch: pytest.MonkeyPatch, words: list[str]) -> list[str]:
    """What tells the data of each step apart."""
    with waiting(patch), poisoned(patch, set()) as seen:
        assert go(*words, "hydra.run.dir=marks")[0] == 0
    return seen


@pytest.mark.parametrize("case", CASES)
def test_a_bad_step_ends_as_one_that_waits(
    straight: Straight, go: Go, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """The third step, which nobody asks for, and the fourth, which has a line."""
    words = straight.words_with(*WORDS, *CASES[case])
    marks = data_marks(go, monkeypatch, words)
    for number, bad in enumerate(([2], [3], [2, 6], [1, 2])):
        poison = {marks[at] for at in bad}
        with poisoned(monkeypatch, poison):
            code, said = go(*words, f"hydra.run.dir=late{number}")
            with waiting(monkeypatch):
                other, waited = go(*words, f"hydra.run.dir=waits{number}")
        assert code == other
        assert (code == 3) == case.startswith("stop")
        assert "not finite" in said or "nan" in said
        assert said.count("Went back") == waited.count("Went back")
        assert content(Path(f"late{number}")) == content(Path(f"waits{number}"))


@pytest.mark.parametrize("policy", ["stop", "skip", "rollback"])
def test_a_flag_that_only_the_kernels_read(
    straight: Straight, go: Go, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """torch's fused AdamW leaves the step out, and the counters on the host are set back."""
    words = straight.words_with(*WORDS, "optimizer=adamw", f"training.on_nonfinite={policy}")
    marks = data_marks(go, monkeypatch, words)
    with poisoned(monkeypatch, {marks[2], marks[6]}):
        with flagged(monkeypatch):
            code, said = go(*words, "hydra.run.dir=flagged")
        with waiting(monkeypatch):
            assert go(*words, "hydra.run.dir=waits")[0] == code, said
    assert content(Path("flagged")) == content(Path("waits"))


@pytest.mark.parametrize(("what", "accumulation"), [("loss", 1), ("gradient", 1), ("gradient", 3)])
@pytest.mark.parametrize("policy", ["stop", "skip", "rollback"])
def test_float16_ends_as_one_that_waits(
    straight: Straight,
    go: Go,
    monkeypatch: pytest.MonkeyPatch,
    policy: str,
    what: str,
    accumulation: int,
) -> None:
    """The scale falls, is kept and rises as it would: it doubles after every second step."""
    init = torch.amp.GradScaler.__init__

    def doubled_soon(self: torch.amp.GradScaler, device: str, **options: Any) -> None:
        init(self, device, growth_interval=2, **options)

    monkeypatch.setattr(torch.amp.GradScaler, "__init__", doubled_soon)
    words = straight.words_with(*WORDS, "training.precision=fp16")
    words.append(f"training.on_nonfinite={policy}")
    words.append(f"training.gradient_accumulation_steps={accumulation}")
    marks = data_marks(go, monkeypatch, words)
    with poisoned_in_float16(monkeypatch, {marks[2], marks[5]}, what):
        code, said = go(*words, "hydra.run.dir=late")
        with waiting(monkeypatch):
            assert go(*words, "hydra.run.dir=waits")[0] == code, said
    assert content(Path("late")) == content(Path("waits"))
    scales = {each["scaler"]["scale"] for each in content(Path("late"))["states"].values()}
    assert scales != {2.0**16}
