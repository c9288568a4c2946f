"""Preferences as a user types them.

Resumed to the bit, judged and predicted against the same start, and refused.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from tests.faults.runs import cut
from tests.running import TINY_GPT, optrun, sentence, summary, tensors

SMALL = [
    *(word for word in TINY_GPT if not word.startswith(("data.", "task."))),
    "task=preference",
    "data=files",
    "data.train=pairs.jsonl",
    "data.max_length=64",
    "task.chat_template=chatml",
    "scheduler=constant",
    "training.logging_steps=2",
    "training.per_device_train_batch_size=2",
    "training.eval_steps=2",
    "checkpoint.save_steps=1",
    "checkpoint.keep_last=9",
]
NAMES = {
    "loss",
    "rewards/chosen",
    "rewards/rejected",
    "rewards/accuracies",
    "rewards/margins",
    "logps/chosen",
    "logps/rejected",
}


def write_pairs(folder: Path, rows: int = 24, name: str = "pairs.jsonl") -> Path:
    path = folder / name
    with path.open("w") as file:
        for row in range(rows):
            pair = {
                "prompt": [{"role": "user", "content": sentence(row)}],
                **{
                    side: [{"role": "assistant", "content": sentence(row + at)}]
                    for side, at in (("chosen", 3), ("rejected", 8))
                },
            }
            file.write(json.dumps(pair) + "\n")
    return path


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_pairs(tmp_path)
    return tmp_path


def lines(folder: str) -> list[dict[str, Any]]:
    """What was logged, without times and rates."""
    return [
        {name: value for name, value in record.items() if not name.startswith(("perf/", "time"))}
        for record in map(json.loads, (Path(folder) / "metrics.jsonl").read_text().splitlines())
    ]


@pytest.mark.usefixtures("no_pictures")
def test_a_run_goes_on_where_it_stopped_and_is_judged_alike(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert optrun(*SMALL, "training.max_steps=5", "hydra.run.dir=straight") == 0
    cut("straight", "cut", 3)
    monkeypatch.setenv(
        "OPTRUN_CACHE", str(place / "empty")
    )  # the reference is computed anew, and is the same
    assert optrun("resume=cut") == 0
    assert tensors(Path("cut"), 5) == tensors(Path("straight"), 5)
    first, *_, last = lines("straight")
    assert lines("cut")[-1] == last
    assert {f"{split}/{name}" for split in ("train", "eval") for name in NAMES} <= set(last)
    assert first["eval/loss"] == pytest.approx(math.log(2), abs=1e-4)
    assert last["eval/rewards/margins"] == pytest.approx(
        last["eval/rewards/chosen"] - last["eval/rewards/rejected"], abs=1e-6
    )
    capsys.readouterr()
    assert optrun("evaluate", "straight") == 0
    assert f"{last['eval/loss']:.4f}" in capsys.readouterr().out
    words = ["data.eval=pairs.jsonl", "out=answers.jsonl", "generation.max_new_tokens=4"]
    assert optrun("predict", "straight", *words) == 0
    answers = [json.loads(line) for line in Path("answers.jsonl").read_text().splitlines()]
    assert len(answers) == 24
    assert all(isinstance(row["generation"], str) for row in answers)
    capsys.readouterr()


@pytest.mark.usefixtures("no_pictures")
def test_an_adapter_is_measured_against_its_base(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "adapter=lora",
        "adapter.r=2",
        "training.max_steps=2",
        "lr=0.1",
        "data.eval=pairs.jsonl",
    ]
    assert optrun(*SMALL, *words, "hydra.run.dir=run") == 0
    first, last = lines("run")[0], lines("run")[-1]
    assert first["eval/loss"] == pytest.approx(math.log(2), abs=1e-4)
    assert abs(last["eval/rewards/margins"]) > 1e-3
    capsys.readouterr()
    assert optrun("evaluate", "run", "--json") == 0
    margins = json.loads(capsys.readouterr().out)["eval/rewards/margins"]
    assert margins == pytest.approx(last["eval/rewards/margins"], rel=1e-3, abs=1e-5)


@pytest.mark.usefixtures("no_pictures")
def test_an_adapter_goes_on_where_it_stopped(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [*SMALL, "adapter=lora", "adapter.r=2", "adapter.lora_dropout=0.1", "lr=0.1"]
    assert optrun(*words, "training.max_steps=4", "hydra.run.dir=straight") == 0
    cut("straight", "cut", 2)
    monkeypatch.setenv(
        "OPTRUN_CACHE", str(place / "empty")
    )  # the reference is that of the base again
    assert optrun("resume=cut") == 0
    assert tensors(Path("cut"), 4) == tensors(Path("straight"), 4)
    assert lines("cut")[-1] == lines("straight")[-1]


@pytest.mark.slow
@pytest.mark.parametrize("words", [[], ["adapter=lora", "adapter.r=2", "adapter.lora_dropout=0.1"]])
@pytest.mark.usefixtures("place")
def test_a_killed_run_is_certified(words: list[str]) -> None:
    assert optrun("certify", "resume", *SMALL, *words, "training.max_steps=6") == 0


@pytest.mark.usefixtures("no_pictures")
def test_another_start_is_refused(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = [word for word in SMALL if not word.startswith("model.")]
    assert optrun(*SMALL, "training.max_steps=1", "hydra.run.dir=lm") == 0
    shutil.copytree("lm/model", "start")
    pretrained = ["model=pretrained", "model.path=start", "training.max_steps=2"]
    assert optrun(*shape, *pretrained, "hydra.run.dir=run") == 0
    weights = Path("start/model.safetensors")
    save_file(
        {name: tensor * 1.01 for name, tensor in load_file(weights).items()},
        weights,
        {"format": "pt"},
    )
    capsys.readouterr()
    for words in (["resume=run", "training.max_steps=3"], ["evaluate", "run"]):
        assert optrun(*words) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert "not the weights that the run started from" in said
        assert "model.path=" in said
    assert summary(Path("run"))["global_step"] == 2


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        (["task=grpo"], ["generates answers while it trains", "task=preference"]),
        (["task=dpo"], ["task=preference task.loss_type=sigmoid"]),
        (
            ["task=preference", "data=files", "data.train=pairs.jsonl", "data.streaming=true"],
            ["data.streaming"],
        ),
        (["task=preference", "task.loss_type=sigmod"], ["sigmoid"]),
        (["task=preference", "task.beta=-1"], ["task.beta=-1"]),
        (
            ["task=preference", "training.label_smoothing_factor=0.1"],
            ["training.label_smoothing_factor"],
        ),
        (["adapter=qlora"], ["adapter=qlora", "model=pretrained"]),
        (
            ["adapter=qlora", "model=pretrained", "model.path=start", "training.device=cpu"],
            ["on a CPU", "adapter=lora"],
        ),
        (
            ["adapter=lora", "adapter.init_lora_weights=eva"],
            ["adapter.init_lora_weights=eva", "pissa", "corda"],
        ),
        (
            ["adapter=lora", "adapter.layers_to_transform=x"],
            ["adapter.layers_to_transform=x", "number of a layer"],
        ),
        (["adapter=lora", "adapter.target_parameters=[a]"], ["adapter.target_modules"]),
        (["loss_type=ipo"], ["task.loss_type"]),
    ],
)
def test_what_is_refused(
    place: Path, words: list[str], facts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert optrun(*words) == 2
    said = " ".join(capsys.readouterr().err.split())
    for fact in facts:
        assert fact in said
