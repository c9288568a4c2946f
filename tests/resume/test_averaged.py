"""An optimizer with weights of its own for evaluation.

What is judged, saved, published, and gone on from.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.running import TINY_GPT, optrun, records, state, tensors, write_text

RUN = [
    *(word.replace("n_layer=2", "n_layer=1") for word in TINY_GPT),
    "optimizer=schedule_free",
    "scheduler=constant",
    "scheduler.num_warmup_steps=2",
    "data=files",
    "training.per_device_train_batch_size=4",
    "training.logging_steps=4",
]


def test_a_stop_between_evaluation_and_training_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [*RUN, f"data.train={write_text(tmp_path, 120)}"]
    assert (
        optrun(*words, "training.eval_steps=8", "training.max_steps=8", "hydra.run.dir=straight")
        == 0
    )
    often = ["training.eval_steps=2", "checkpoint.save_steps=2", "training.max_steps=4"]
    assert optrun(*words, *often, "hydra.run.dir=stopped") == 0
    assert optrun("resume=stopped", "training.eval_steps=8", "training.max_steps=8") == 0
    ended = tensors(Path("straight"), 8)
    assert tensors(Path("stopped"), 8) == ended
    told = records(Path("straight"))[-1]
    assert records(Path("stopped"))[-1] == told
    assert state(Path("stopped"), 8)["optimizer"] == state(Path("straight"), 8)["optimizer"]
    # The average is what is judged, kept as the best, published and predicted with; it is not what
    # was trained.
    name = "transformer.h.0.mlp.c_fc.weight"
    assert (
        ended[f"model.safetensors:{name}"] != ended[f"optimizer.safetensors:{name}/training_weight"]
    )
    capsys.readouterr()
    assert optrun("evaluate", "straight/checkpoints/best", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["eval/loss"] == pytest.approx(told["eval/loss"], rel=1e-6)
    assert optrun("export", "straight", "exported") == 0
    saved = load_file("straight/checkpoints/step-00000008/model.safetensors")
    for folder in ("straight/model", "exported"):
        there = load_file(f"{folder}/model.safetensors")
        assert there
        assert all(torch.equal(there[key], saved[key]) for key in there)
