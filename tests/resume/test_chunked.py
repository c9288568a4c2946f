"""A run whose losses are computed in chunks.

Beside the whole logits, stopped at each step, from before the key.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from optrun.model import chunked_loss
from optrun.runner import chunked
from tests.resume.test_features import run_in_parts, same
from tests.running import TINY_GPT, optrun, records, summary, write_text

RUN = [
    *(word.replace("n_layer=2", "n_layer=1") for word in TINY_GPT),
    "data=files",
    "data.train=corpus.txt",
    "training.per_device_train_batch_size=4",
    "training.max_steps=4",
    "training.gradient_accumulation_steps=2",
    "training.logging_steps=1",
    "training.eval_steps=2",
    "checkpoint.save_steps=2",
    "checkpoint.keep_last=9",
    "data.max_eval_examples=8",
]
ON = "training.chunked_loss=true"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(chunked_loss, "CHUNK", 5000)
    write_text(tmp_path, 150)


def test_stopped_at_every_step_it_is_the_same_run() -> None:
    assert optrun(*RUN, ON, "hydra.run.dir=whole") == 0
    assert run_in_parts([*RUN, ON]) == 4
    same(summary(Path("whole"))["global_step"])


def test_it_trains_as_with_all_logits(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert optrun(*RUN, "training.chunked_loss=false", "hydra.run.dir=plain") == 0
    assert "chunked_loss" not in capsys.readouterr().out
    monkeypatch.setattr(chunked, "LEAST", 0)
    assert optrun(*RUN, "hydra.run.dir=chunks") == 0
    assert "training.chunked_loss=auto" in capsys.readouterr().out
    plain, chunks = (records(Path(name)) for name in ("plain", "chunks"))
    for one, other in zip(plain, chunks, strict=True):
        for key in ("train/loss", "eval/loss", "eval/accuracy"):
            assert other.get(key, 0.0) == pytest.approx(one.get(key, 0.0), rel=1e-5)


def test_what_does_not_go_together_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert optrun("task=sequence_classification", ON) == 2
    said = capsys.readouterr().err
    for fact in ("training.chunked_loss=true", "task=sequence_classification", "masked_lm"):
        assert fact.lower() in said.lower()
