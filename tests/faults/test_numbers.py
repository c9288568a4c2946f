"""Numbers that are none.

What is stopped, skipped, taken back, never saved and never resumed from.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from optrun.artifacts.checkpoint import load_checkpoint, save_checkpoint
from optrun.artifacts.manifest import problems
from optrun.artifacts.run_check import run_problems
from optrun.artifacts.run_dir import RunDir, checkpoint_folders
from optrun.report.runs import load_run
from optrun.training import nonfinite
from optrun.training.step import TrainStep
from tests.faults.checkpoints import edit_manifest
from tests.faults.runs import STEPS, Go, Straight
from tests.running import records, state, summary, tensors


@contextmanager
def poisoned(
    monkeypatch: pytest.MonkeyPatch, batches: set[str], how: str = "gradient"
) -> Iterator[list[str]]:
    """A step is poisoned by its data, so that it is the same step after a resume and not after
    the data has moved.
    """
    seen: list[str] = []
    original = TrainStep.compute_gradients

    def call(self: TrainStep, micro_batches: list[dict[str, torch.Tensor]], *where: Any) -> Any:
        mark = str(micro_batches[0]["input_ids"].sum().item())
        if seen[-1:] != [mark]:  # a step that is not finite is computed once more
            seen.append(mark)
        if mark not in batches:
            return original(self, micro_batches, *where)
        if how == "weight":
            result = original(self, micro_batches, *where)
            with torch.no_grad():
                next(iter(self.model.parameters())).view(-1)[0] = float("nan")
            return result
        clip = self.clip
        factor = float("nan") if how == "gradient" else float("inf")

        def spoil(optimizer: torch.optim.Optimizer) -> torch.Tensor:
            optimizer.param_groups[0]["params"][0].grad.mul_(factor)
            return clip(optimizer)

        self.clip = spoil
        try:
            return original(self, micro_batches, *where)
        finally:
            self.clip = clip

    with monkeypatch.context() as patch:
        patch.setattr(TrainStep, "compute_gradients", call)
        yield seen


@contextmanager
def poisoned_in_float16(
    monkeypatch: pytest.MonkeyPatch, batches: set[str], what: str
) -> Iterator[None]:
    """As above, before the scaler has seen the gradients.

    The loss, or a gradient that is NaN at every scale.
    """
    original = TrainStep.compute_gradients

    def call(self: TrainStep, micro_batches: list[dict[str, torch.Tensor]], *where: Any) -> Any:
        if str(micro_batches[0]["input_ids"].sum().item()) not in batches:
            return original(self, micro_batches, *where)
        parameter = next(iter(self.model.parameters()))
        spoilt = [parameter.register_hook(lambda gradient: gradient * float("nan"))]
        if what == "loss":
            spoilt.append(
                self.model.register_forward_hook(lambda model, given, made: _without_a_loss(made))
            )
        try:
            return original(self, micro_batches, *where)
        finally:
            for hook in spoilt:
                hook.remove()

    with monkeypatch.context() as patch:
        patch.setattr(TrainStep, "compute_gradients", call)
        yield


def step_by_step(go: Go, words: list[str]) -> int:
    """Stop a run after each step and go on to its end; how many starts that took."""
    code, _ = go(*words, "training.max_seconds=1e-9", "hydra.run.dir=parts")
    starts = 1
    while code == 75 and starts < 20:
        code, _ = go("resume=parts")
        starts += 1
    assert code == 0
    return starts


def _without_a_loss(outputs: Any) -> Any:
    outputs.loss = outputs.loss * float("nan")
    return outputs


@pytest.fixture(scope="module")
def marks(straight: Straight, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What tells each step's data apart, in order."""
    from tests.running import optrun

    patch = pytest.MonkeyPatch()
    with poisoned(patch, set()) as seen:
        place = tmp_path_factory.mktemp("marks") / "run"
        assert optrun(*straight.words_with("training.max_steps=12"), f"hydra.run.dir={place}") == 0
    assert len(set(seen)) == 12
    return seen


def test_stop_says_where_and_saves_the_good_state(
    straight: Straight, go: Go, monkeypatch: pytest.MonkeyPatch, marks: list[str]
) -> None:
    words = straight.words_with("checkpoint.save_steps=2")
    with poisoned(monkeypatch, {marks[3]}):
        code, said = go(*words, "hydra.run.dir=run")
    assert code == 3
    run = RunDir("run")
    assert "step 4: loss 5." in said
    assert "gradient norm nan" in said
    assert "Examples " in said
    report = json.loads((run.path / "nonfinite" / "step-00000004" / "report.json").read_text())
    assert report["gradients_not_finite"]
    assert (summary(run.path)["status"], summary(run.path)["exit_code"]) == ("failed", 3)
    assert load_run(run.path).diverged == "stopped at step 3 by numbers that are not finite"
    assert not problems(
        run.checkpoint(3)
    )  # the state before the bad step, although no save was due
    assert go("resume=run")[0] == 0  # without the poison: as if it had never been
    assert tensors(run.path, STEPS) == tensors(straight.path, STEPS)
    assert records(run.path) == records(straight.path)


def test_the_good_state_is_saved_also_where_the_report_cannot_be(
    straight: Straight, go: Go, monkeypatch: pytest.MonkeyPatch, marks: list[str]
) -> None:
    def full(path: Path, *given: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(nonfinite, "write_tensors", full)
    with poisoned(monkeypatch, {marks[3]}, "infinite"):
        code, said = go(*straight.words_with("checkpoint.save_steps=2"), "hydra.run.dir=run")
    assert code == 3
    assert "gradient norm inf" in said or "gradient norm nan" in said
    assert "step-00000004: cannot be written: No space left on device." in said
    assert "The batch and a report could not be written. The state before it is in" in said
    assert not problems(RunDir("run").checkpoint(3))


def test_skip_is_counted_bounded_and_exact_on_resume(
    straight: Straight, go: Go, monkeypatch: pytest.MonkeyPatch, marks: list[str]
) -> None:
    words = straight.words_with(
        "training.on_nonfinite=skip", "training.max_nonfinite_skips=2", "training.max_steps=5"
    )
    with poisoned(monkeypatch, {marks[0], marks[2], marks[3]}):
        assert go(*words, "hydra.run.dir=whole")[0] == 0
        assert step_by_step(go, words) == 5
    assert records(Path("whole")) == records(Path("parts"))
    assert tensors(Path("whole"), 5) == tensors(Path("parts"), 5)
    assert records(Path("whole"))[-1]["train/skipped_steps"] == 3
    assert summary(Path("whole"))["perf"]["skipped_steps"] == 3
    with poisoned(monkeypatch, set(marks[2:5])):
        code, said = go(*words, "hydra.run.dir=three")
    assert code == 3
    assert "3 times in a row" in said


@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_a_loss_that_is_no_number_in_float16(
    straight: Straight, go: Go, monkeypatch: pytest.MonkeyPatch, marks: list[str], policy: str
) -> None:
    """The policy is as in float32, the loss scale is kept, the scaler is ready for the next step.

    Exact on resume.
    """
    words = straight.words_with(
        "training.precision=fp16", f"training.on_nonfinite={policy}", "training.max_steps=4"
    )
    with poisoned_in_float16(monkeypatch, {marks[1]}, "loss"):
        code, said = go(*words, "hydra.run.dir=whole")
        assert code == 0, said
        assert step_by_step(go, words) >= 3  # going back is a stop, too
    assert "loss nan" in said
    assert {state(Path("whole"), step)["scaler"]["scale"] for step in (1, 3)} == {2.0**16}
    assert records(Path("whole")) == records(Path("parts"))
    assert tensors(Path("whole"), 3) == tensors(Path("parts"), 3)
    assert state(Path("whole"), 3)["scaler"] == state(Path("parts"), 3)["scaler"]


def test_a_gradient_that_is_no_number_at_any_scale_is_no_overflow(
    straight: Straight, go: Go, monkeypatch: pytest.MonkeyPatch, marks: list[str]
) -> None:
    """float16 looks for its scale down to 1; what is left then is for the policy."""
    original = torch.amp.GradScaler
    monkeypatch.setattr(
        torch.amp, "GradScaler", lambda device, enabled: original(device, 4.0, enabled=enabled)
    )
    words = straight.words_with("training.precision=fp16", "training.max_steps=7")
    with poisoned_in_float16(monkeypatch, set(marks), "gradient"):
        code, said = go(*words, "hydra.run.dir=stop")
        assert code == 3, said
        assert "step 4: loss 5." in said  # after 4, 2 and 1
        assert "The loss scale is 0.5 already; a lower one would not help" in said
        code, said = go(
            *words,
            "training.on_nonfinite=skip",
            "training.max_nonfinite_skips=2",
            "hydra.run.dir=skip",
        )
        assert code == 3
        assert "step 6: loss 5." in said
    assert state(Path("stop"), 3)["scaler"]["scale"] == 0.5
    assert go("resume=stop")[0] == 0  # without the poison it goes on at the scale it found


def test_rollback_passes_over_the_bad_data(
    straight: Straight, go: Go, monkeypatch: pytest.MonkeyPatch, marks: list[str]
) -> None:
    """Bad at step 4 of a run that saves every second.

    Back to 2, steps 3 and 4 of the data are left out.
    """
    words = straight.words_with(
        "training.on_nonfinite=rollback", "checkpoint.save_steps=2", "training.max_steps=4"
    )
    with poisoned(monkeypatch, {marks[3]}) as seen:
        code, said = go(*words, "hydra.run.dir=whole")
    assert code == 0
    assert seen == [*marks[:4], *marks[4:6]]
    assert "Went back to step 2; 2 steps of data are passed over (1 of at most 3)" in said
    lines = records(Path("whole"))
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert [line.get("train/rollbacks") for line in lines] == [None, None, 1, 1]
    # Stopped and resumed after every step, it goes the same way: back to 2 as well, not to what the
    # stops saved.
    with poisoned(monkeypatch, {marks[3]}):
        assert step_by_step(go, words) >= 4
    assert records(Path("parts")) == lines
    assert tensors(Path("whole"), 4) == tensors(Path("parts"), 4)
    assert state(Path("whole"), 4)["train"] == state(Path("parts"), 4)["train"]
    assert run_problems(RunDir("whole")) == run_problems(RunDir("parts")) == []


def test_rollback_before_the_first_scheduled_save_and_its_bound(
    straight: Straight, go: Go, monkeypatch: pytest.MonkeyPatch, marks: list[str]
) -> None:
    words = straight.words_with(
        "training.on_nonfinite=rollback", "checkpoint.save_steps=4", "training.max_rollbacks=2"
    )
    with poisoned(monkeypatch, {marks[1], marks[3]}) as seen:
        code, said = go(*words, "hydra.run.dir=run")
    assert code == 0
    assert seen == marks[:10]
    assert "Went back to step 0" in said
    with poisoned(monkeypatch, {marks[1], marks[2], marks[3]}):
        code, said = go(*words, "hydra.run.dir=bound")
    assert code == 3
    assert "went back 2 times already (training.max_rollbacks)" in said
    code, said = go(
        *[word for word in words if not word.startswith("checkpoint.")], "checkpoint=none"
    )
    assert code == 2
    assert "nothing to go back to with checkpoint=none" in said


def test_a_weight_that_is_no_number_is_never_saved(
    straight: Straight, go: Go, monkeypatch: pytest.MonkeyPatch, marks: list[str]
) -> None:
    with poisoned(monkeypatch, {marks[2]}, "weight"):
        code, said = go(*straight.words, "hydra.run.dir=run")
    assert code == 3
    assert "NaN" in said or "not finite" in said
    assert [folder.name for folder in checkpoint_folders(RunDir("run"))] == [
        "step-00000002",
        "step-00000001",
    ]
    # With skip too: leaving out updates mends no weight.
    with poisoned(monkeypatch, {marks[2]}, "weight"):
        words = straight.words_with(
            "training.on_nonfinite=skip", "checkpoint.save_steps=null", "checkpoint.keep_best=0"
        )
        code, said = go(*words, "hydra.run.dir=skip")
    assert code == 3
    assert "Weights were not finite before the step" in said


def test_rollback_mends_a_weight(
    straight: Straight, go: Go, monkeypatch: pytest.MonkeyPatch, marks: list[str]
) -> None:
    words = straight.words_with("training.on_nonfinite=rollback", "checkpoint.save_steps=2")
    with poisoned(monkeypatch, {marks[3]}, "weight") as seen:
        code, said = go(*words, "hydra.run.dir=run")
    assert code == 0
    assert "Went back to step 2" in said
    assert seen == [*marks[:5], *marks[5:9]]
    folder = RunDir("run").checkpoint(6)
    assert all(torch.isfinite(tensor).all() for tensor in load_checkpoint(folder).model.values())


def test_whole_but_not_finite_is_nothing_to_go_on_from(
    straight: Straight, go: Go, tmp_path: Path
) -> None:
    run = straight.cut(tmp_path / "run", 4)
    loaded = load_checkpoint(run.checkpoint(4))
    loaded.model[loaded.metadata.trainable[0]].view(-1)[0] = float("nan")
    run.checkpoint(4).rename(run.path / "aside")
    save_checkpoint(run, loaded)
    assert not problems(run.checkpoint(4))
    code, said = go(f"resume={run.checkpoint(4)}")
    assert code == 4
    assert "holds NaN or infinity" in said
    code, said = go("resume=run")
    assert code == 0
    assert "holds NaN or infinity" in said
    straight.same(run)


def test_a_manifest_of_a_newer_kind_is_refused(straight: Straight, go: Go, tmp_path: Path) -> None:
    run = straight.cut(tmp_path / "run", 4)
    edit_manifest(run.checkpoint(4), lambda manifest: manifest.update(format=9))
    code, said = go("resume=run")
    assert code == 4
    assert "format 9, and this optrun reads format 4" in said
    assert run.checkpoint(4).is_dir()
