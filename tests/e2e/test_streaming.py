"""Training on a stream: the same run with any workers and after a resume, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from optrun.base.errors import ConfigError
from tests.faults.runs import cut
from tests.running import (
    TINY_BERT,
    TINY_GPT,
    composed,
    optrun,
    optrun_process,
    records,
    sentence,
    tensors,
)

EVERY = [
    "scheduler=constant",
    "training.logging_steps=1",
    "checkpoint.save_steps=6",
    "checkpoint.keep_last=9",
    "training.eval_steps=100",
]
STREAM = [
    "data=files",
    "data.train=part_*.jsonl",
    "data.eval=held.jsonl",
    "data.streaming=true",
    "data.shuffle_window=7",
    "training.per_device_train_batch_size=4",
]


def write(folder: Path) -> None:
    for name, begin in (("part_0", 0), ("part_1", 40), ("held", 80)):
        rows = (
            {"text": sentence(number), "label": "odd" if number % 2 else "even"}
            for number in range(begin, begin + 40)
        )
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize(
    "small", [TINY_GPT, [*TINY_BERT, "task=sequence_classification"]], ids=["blocks", "rows"]
)
def test_a_stream_goes_on_in_the_middle_of_an_epoch(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    small: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path)
    steps = 14  # more than an epoch
    assert (
        optrun(*STREAM, *small, *EVERY, f"training.max_steps={steps}", "hydra.run.dir=straight")
        == 0
    )
    cut("straight", "cut", 6)
    assert optrun("resume=cut") == 0
    assert tensors(Path("cut"), steps) == tensors(Path("straight"), steps)
    losses = [
        [record["train/loss"] for record in records(Path(run)) if "train/loss" in record]
        for run in ("straight", "cut")
    ]
    assert losses[0] == losses[1]
    capsys.readouterr()
    part = Path("part_1.jsonl")
    part.write_text(part.read_text().replace("fox", "dog"))
    assert optrun("resume=cut", "training.max_steps=20") == 2
    assert "part_1.jsonl changed" in " ".join(capsys.readouterr().err.split())


FILES = ("data=files", "data.train=a.jsonl", "data.streaming=true")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (FILES, "data.streaming=true: expected rows to evaluate on in files of their own"),
        (
            (*FILES, "data.eval=b", "data.max_train_examples=9"),
            "data.max_train_examples=9: expected null",
        ),
        (
            (*FILES, "data.eval=b", "data.shuffle_window=0"),
            "data.shuffle_window=0: expected a whole number, 1 or more",
        ),
        (
            (
                *FILES,
                "data.eval=b",
                "task=sequence_classification",
                "task.problem_type=multi_label_classification",
            ),
            (
                "task.problem_type=multi_label_classification: expected another with"
                " data.streaming=true"
            ),
        ),
        (
            (*FILES, "data.eval=b", "task=sft", "task.packing=true"),
            "task.packing=true: expected false with data.stream",
        ),
        (
            (
                "data=mixture",
                "data.mixture={a: {train: a.jsonl, eval: b.jsonl, streaming: true}}",
                "task=sft",
                "task.packing=true",
            ),
            r"task.packing=true: expected false with data.mixture.a.streaming=true",
        ),
    ],
)
def test_what_does_not_go_with_a_stream_is_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        composed(*words)


def test_a_task_that_reads_no_stream_is_refused() -> None:
    message = (
        "data.streaming=true: expected false with task=seq2seq_lm. Tasks that read streams:"
        " causal_lm, masked_lm, sequence_classification, sft"
    )
    with pytest.raises(ConfigError, match=message):
        composed(
            *FILES, "data.eval=b", "task=seq2seq_lm", "model=from_config", "model.model_type=t5"
        )


def test_a_bad_row_is_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path)
    part = Path("part_1.jsonl")
    part.write_text(part.read_text().replace('{"text"', "{text", 3))
    words = [*STREAM, *TINY_GPT, *EVERY, "training.max_steps=20", "hydra.run.dir=bad"]
    assert optrun(*words) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "part_1.jsonl: row 1 is not JSON" in said
    assert "Traceback" not in said


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "workers"), [("blocks", 0), ("rows", 4)])
def test_a_killed_stream_is_certified(tmp_path: Path, workers: int, kind: str) -> None:
    write(tmp_path)
    small = TINY_GPT if kind == "blocks" else [*TINY_BERT, "task=sequence_classification"]
    words = [*STREAM, *small, "training.max_steps=24", f"training.dataloader_num_workers={workers}"]
    done = optrun_process("certify", "resume", *words, cwd=tmp_path, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
