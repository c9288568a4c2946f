"""Peaks of the gradient norm between two log lines are kept, over a resume as well."""

from __future__ import annotations

from pathlib import Path

import pytest

from optrun.training.state import TrainState
from tests.running import TINY_BERT, optrun, records, write_labelled

RUN = [
    *(word.replace("num_hidden_layers=2", "num_hidden_layers=1") for word in TINY_BERT),
    "task=sequence_classification",
    "data=files",
    "data.train=train.csv",
    "scheduler=constant",
    "lr=1e-2",
    "training.per_device_train_batch_size=2",
    "training.eval_steps=100",
]


def test_the_largest_since_the_last_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_labelled(tmp_path, rows=40)
    for name, steps, every in (("each", 8, 1), ("cut", 3, 4)):
        words = [
            f"hydra.run.dir={name}",
            f"training.max_steps={steps}",
            f"training.logging_steps={every}",
        ]
        assert optrun(*RUN, *words) == 0
    assert optrun("resume=cut", "training.max_steps=6") == 0
    assert optrun("resume=cut", "training.max_steps=8") == 0
    norms = {record["step"]: record["train/grad_norm"] for record in records(tmp_path / "each")}
    assert all(
        record["train/grad_norm_max"] == norms[record["step"]]
        for record in records(tmp_path / "each")
    )
    peaks = {record["step"]: record["train/grad_norm_max"] for record in records(tmp_path / "cut")}
    assert peaks[4] == max(norms[step] for step in (1, 2, 3, 4))
    assert peaks[8] == max(norms[step] for step in (5, 6, 7, 8))
    assert max(norms, key=norms.__getitem__) not in (4, 8), (
        "else there is no peak between two lines"
    )


def test_a_checkpoint_from_before_it_was_kept() -> None:
    values = TrainState(global_step=3, grad_norm=2.0).to_dict()
    del values["window_grad_norm"]
    assert TrainState.from_dict(values).window_grad_norm == 0.0
