"""N steps, stop, N more steps = 2N steps.

Weights, optimizer state, random states and metrics lines, bit for bit.
"""

from __future__ import annotations

import functools
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from optrun.model import tokenizer
from optrun.param_groups import build
from optrun.training.step import TrainStep
from tests.faults.runs import words_with
from tests.running import (
    TINY_BERT,
    TINY_GPT,
    optrun,
    records,
    sentence,
    state,
    summary,
    tensors,
    write_labelled,
    write_text,
)

HALF, WHOLE = 4, 8
GPT = [word.replace("n_layer=2", "n_layer=1") for word in TINY_GPT]
BERT = [word.replace("num_hidden_layers=2", "num_hidden_layers=1") for word in TINY_BERT]


def causal_lm(folder: Path) -> list[str]:
    """Text of about 50 blocks, 7 steps an epoch with accumulation: step 4 lies inside the first."""
    return [
        *GPT,
        "data=files",
        f"data.train={write_text(folder, 80)}",
        "training.per_device_train_batch_size=4",
    ]


def classification(folder: Path) -> list[str]:
    """54 rows in 7 steps an epoch, the last one short; dropout 0.1."""
    return [
        *BERT,
        "task=sequence_classification",
        "data=files",
        f"data.train={write_labelled(folder)}",
        "training.per_device_train_batch_size=4",
    ]


def masked_lm(folder: Path) -> list[str]:
    """Masks drawn anew in each epoch."""
    return [
        *BERT,
        "task=masked_lm",
        "data=files",
        "data.max_length=16",
        f"data.train={write_text(folder, 60)}",
        "training.per_device_train_batch_size=4",
    ]


TASKS = {"causal_lm": causal_lm, "classification": classification, "masked_lm": masked_lm}
COMMON = [
    "scheduler=cosine",
    "scheduler.decay_steps=12",
    "training.gradient_accumulation_steps=2",
    "training.logging_steps=3",
    "training.eval_steps=5",
    f"training.max_steps={WHOLE}",
    "checkpoint.keep_last=9",
]


FEW = [
    "scheduler=cosine",
    "scheduler.decay_steps=20",
    "training.eval_steps=2",
    "training.logging_steps=1",
]
FEW += ["training.max_steps=4", "checkpoint.keep_last=9"]
"""Where what a run keeps is the point, and stopping in the middle of everything is not.
"""


def same(one: Path, other: Path, step: int = WHOLE) -> None:
    assert records(one) == records(other)
    assert tensors(one, step) == tensors(other, step)
    assert state(one, step) == state(other, step)


def stop_at(monkeypatch: pytest.MonkeyPatch, step: int, number: signal.Signals) -> None:
    """Send this process a signal while it computes a step."""
    done = [0]
    original = TrainStep.compute_gradients

    def call(self: TrainStep, batches: list[dict], *where: object) -> object:
        done[0] += 1
        if done[0] == step:
            os.kill(os.getpid(), number)
        return original(self, batches, *where)

    monkeypatch.setattr(TrainStep, "compute_gradients", call)


Straight = Callable[[str], tuple[list[str], Path]]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Straight:
    """By its task, the words of a run that nothing happens to, and where it lies.

    The data are loaded by no worker.
    """

    @functools.cache
    def run(task: str) -> tuple[list[str], Path]:
        folder = tmp_path_factory.mktemp(task)
        words = [*TASKS[task](folder), *COMMON]
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr("optrun.runner.train.draw_curves", lambda path: None)
            assert optrun(*words, f"hydra.run.dir={folder / 'straight'}") == 0
        return words, folder / "straight"

    return run


# The other three pairs: `faults/test_stops.py`.
@pytest.mark.parametrize(
    ("task", "workers"), [("causal_lm", 2), ("classification", 0), ("masked_lm", 2)]
)
def test_stop_by_signal(
    task: str, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, straight: Straight
) -> None:
    monkeypatch.chdir(tmp_path)
    words, undisturbed = straight(task)
    words = [*words, f"training.dataloader_num_workers={workers}"]
    with monkeypatch.context() as patch:
        stop_at(patch, HALF, signal.SIGTERM if workers else signal.SIGINT)
        assert optrun(*words, "hydra.run.dir=stopped") == 75
    stopped = summary(Path("stopped"))
    assert stopped["status"] == "interrupted"
    assert stopped["global_step"] == HALF
    assert optrun("resume=stopped") == 0
    assert summary(Path("stopped"))["status"] == "finished"
    same(undisturbed, Path("stopped"))


def test_stop_by_step_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, straight: Straight
) -> None:
    """The end of the shorter run, with its evaluation and its last log line, leaves no trace in
    the longer one.
    """
    monkeypatch.chdir(tmp_path)
    words, undisturbed = straight("causal_lm")
    assert optrun(*words_with(words, f"training.max_steps={HALF}"), "hydra.run.dir=stopped") == 0
    assert records(Path("stopped"))[-1]["step"] == HALF
    assert optrun("resume=stopped", f"training.max_steps={WHOLE}") == 0
    assert records(undisturbed) == records(Path("stopped"))
    assert tensors(undisturbed, WHOLE) == tensors(Path("stopped"), WHOLE)
    assert summary(Path("stopped"))["resumes"][0]["changes"] == {
        "training.max_steps": [HALF, WHOLE]
    }


def test_other_intervals_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, straight: Straight
) -> None:
    """Logging, evaluating and saving at other steps leaves the weights as they were."""
    monkeypatch.chdir(tmp_path)
    words, undisturbed = straight("causal_lm")
    others = ["training.eval_steps=1", "training.logging_steps=100", "checkpoint.save_steps=3"]
    assert optrun(*words_with(words, *others), "hydra.run.dir=other") == 0
    assert tensors(undisturbed, WHOLE) == tensors(Path("other"), WHOLE)


def test_new_lr_is_the_lr_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = [
        *causal_lm(tmp_path),
        "scheduler=constant",
        "training.max_steps=2",
        "training.logging_steps=1",
    ]
    assert optrun(*words, "hydra.run.dir=run", "lr=1e-3") == 0
    assert optrun("resume=run", "lr=5e-4", "training.max_steps=4") == 0
    assert [record["train/lr"] for record in records(Path("run"))] == [1e-3, 1e-3, 5e-4, 5e-4]
    assert summary(Path("run"))["resumes"][0]["changes"]["lr"] == [1e-3, 5e-4]


def test_a_run_keeps_the_layers_it_was_started_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An older version placed parameters elsewhere.

    Going on, the run has its learning rates all the same.
    """
    monkeypatch.chdir(tmp_path)
    norm = "transformer.ln_f.weight"
    older = {norm: (1, 1), "transformer.h.0.ln_1.weight": (2, 2)}
    words = [
        *causal_lm(tmp_path),
        "param_groups=layerwise",
        "training.max_steps=4",
        "training.logging_steps=1",
    ]
    with monkeypatch.context() as patch:
        patch.setattr(build, "describe_uses", lambda *_: (older, "an older version"))
        assert optrun(*words, "hydra.run.dir=straight") == 0
        assert optrun(*words, "hydra.run.dir=stopped", "training.max_seconds=1e-9") == 75
    capsys.readouterr()
    assert optrun("resume=stopped", "training.max_seconds=null") == 0
    said = " ".join("".join(capsys.readouterr()).split())
    for fact in (
        f"{norm} (embeddings)",
        "this run was started with",
        "a forward pass of GPT2LMHeadModel",
    ):
        assert fact in said
    assert tensors(Path("straight"), 4) == tensors(Path("stopped"), 4)
    assert records(Path("straight")) == records(Path("stopped"))
    assert optrun(*words, "hydra.run.dir=new") == 0
    assert tensors(Path("straight"), 4) != tensors(Path("new"), 4)


def test_a_run_and_its_branches_keep_their_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older optrun made tokens of what stands in the text once.

    From the same rows another tokenizer is trained.
    """
    monkeypatch.chdir(tmp_path)
    rows = [f"visit {n}: {sentence(n)},{'no' if n % 3 else 'yes'}" for n in range(100)]
    Path("rows.csv").write_text("\n".join(["text,label", *rows]) + "\n")
    words = ["task=sequence_classification", "data=files", "data.train=rows.csv", *BERT[:-1], *FEW]
    with monkeypatch.context() as older:
        older.setattr(tokenizer, "MIN_FREQUENCY", 0)
        assert optrun(*words, "hydra.run.dir=whole") == 0
        stop_at(older, 2, signal.SIGTERM)
        assert optrun(*words, "hydra.run.dir=cut") == 75
    assert optrun("branch_from=cut", "hydra.run.dir=branch") == 0
    assert optrun("resume=cut") == 0
    same(Path("cut"), Path("whole"), 4)
    assert tensors(Path("branch"), 4) == tensors(Path("whole"), 4)


def test_a_tokenizer_is_kept_with_other_rows_and_not_used_when_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The one that the rows give takes its place, or is refused where it is another one."""
    monkeypatch.chdir(tmp_path)
    words = [*causal_lm(tmp_path), "training.max_steps=2", "hydra.run.dir=run"]
    with monkeypatch.context() as older:
        older.setattr(tokenizer, "MIN_FREQUENCY", 60)
        assert optrun(*words) == 0
    saved = Path("run/tokenizer/tokenizer.json")
    whole = saved.read_text()
    saved.write_text(whole.replace('"merges"', '"merged"'))
    assert optrun("resume=run", "training.max_steps=4") == 2
    said = capsys.readouterr()
    for fact in ("RUN_DIR/tokenizer", "the tokenizer is another one", "Restore"):
        assert fact in said.err
    saved.write_text(whole)
    Path("other.txt").write_text(
        "zebras yawn " * 400
    )  # of which another vocabulary would be learnt
    assert optrun("resume=run", "training.max_steps=4", "data.train=other.txt") == 0
    assert json.loads(saved.read_text())["model"]["vocab"] == json.loads(whole)["model"]["vocab"]
