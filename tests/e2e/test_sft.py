"""Fine-tuning on chats as a user types it.

Packed, resumed to the bit, its answers kept, and what is refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.faults.runs import cut
from tests.running import TINY_GPT, optrun, optrun_process, records, sentence, summary, tensors

SMALL = [
    *(word for word in TINY_GPT if not word.startswith(("data.", "task."))),
    "task=sft",
    "data=files",
    "data.max_length=64",
    "task.chat_template=chatml",
    "task.assistant_only_loss=true",
    "task.sample_tokens=3",
    "scheduler=constant",
    "training.logging_steps=1",
    "training.per_device_train_batch_size=2",
]


def write_chats(folder: Path, rows: int = 24, name: str = "chats.jsonl") -> Path:
    path = folder / name
    with path.open("w") as file:
        for row in range(rows):
            turns = [
                {"role": role, "content": sentence(row + at)}
                for at, role in enumerate(("user", "assistant") * (1 + row % 2))
            ]
            file.write(json.dumps({"messages": turns}) + "\n")
    return path


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_chats(tmp_path)
    return tmp_path


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than cores
@pytest.mark.usefixtures("no_pictures")
def test_a_packed_run_goes_on_where_it_stopped(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        *SMALL,
        "data.train=chats.jsonl",
        "task.packing=true",
        "training.eval_steps=2",
        "checkpoint.save_steps=1",
    ]
    workers = "training.dataloader_num_workers=4"
    assert optrun(*words, "training.max_steps=4", "hydra.run.dir=straight") == 0
    cut("straight", "cut", 3)
    assert optrun("resume=cut", workers) == 0
    assert tensors(Path("cut"), 4) == tensors(Path("straight"), 4)
    assert [record["step"] for record in records(Path("cut"))] == [1, 2, 3, 4]
    assert {"eval/loss", "eval/accuracy", "eval/perplexity"} <= set(records(Path("straight"))[-1])
    assert "<|im_start|>assistant" in capsys.readouterr().out, "an answer after training"

    saved = AutoTokenizer.from_pretrained("straight/model")
    assert (
        saved.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
        == "<|im_start|>user\na<|im_end|>\n"
    )
    assert "apply_chat_template" in Path("straight/model/README.md").read_text()
    assert optrun("export", "straight", "there") == 0
    assert AutoTokenizer.from_pretrained("there").chat_template == saved.chat_template
    assert optrun("evaluate", "straight") == 0
    assert optrun("verify", "straight") == 0
    assert optrun("report", "straight") == 0


def test_a_stream_of_chats_goes_on_and_is_answered(place: Path) -> None:
    words = [
        *SMALL,
        "data.train=chats.jsonl",
        "data.eval=chats.jsonl",
        "task.overlong_rows=drop",
        "training.eval_steps=2",
        "checkpoint.save_steps=1",
    ]
    chats = Path("chats.jsonl").read_text().splitlines()
    long = json.dumps({"messages": [{"role": "user", "content": sentence(3) * 9}, BOT]})
    Path("some_long.jsonl").write_text("".join(f"{chat}\n{long}\n" for chat in chats))
    stream = [word for word in words if word != "data.train=chats.jsonl"]
    stream += ["data.train=some_long.jsonl", "data.streaming=true", "data.shuffle_window=8"]
    stream += ["model.tokenizer=tokenizer/tokenizer"]
    assert optrun(*words, "training.max_steps=1", "hydra.run.dir=tokenizer") == 0
    assert optrun(*stream, "training.max_steps=3", "hydra.run.dir=straight") == 0
    cut("straight", "cut", 2)
    assert optrun("resume=cut") == 0
    assert tensors(Path("cut"), 3) == tensors(Path("straight"), 3)

    asked = [{"messages": [{"role": "user", "content": sentence(row)}]} for row in range(3)]
    Path("asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    predict = [
        "predict",
        "straight",
        "training.per_device_eval_batch_size=1",
        "generation.max_new_tokens=3",
    ]
    assert optrun(*predict, "data.eval=asked.jsonl", "out=answers.jsonl") == 0
    answers = [json.loads(line) for line in Path("answers.jsonl").read_text().splitlines()]
    assert [line["messages"] for line in answers] == [row["messages"] for row in asked]
    assert optrun(*predict, "data.eval=chats.jsonl", "out=whole.jsonl") == 0
    assert len(Path("whole.jsonl").read_text().splitlines()) == 24


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 4])
def test_a_killed_stream_of_chats_with_an_adapter_is_certified(place: Path, workers: int) -> None:
    words = [*SMALL, "data.train=chats.jsonl", "data.eval=chats.jsonl"]
    assert optrun(*words, "training.max_steps=1", "hydra.run.dir=tokenizer") == 0
    words += [
        "adapter=lora",
        "data.streaming=true",
        "data.shuffle_window=8",
        "model.tokenizer=tokenizer/tokenizer",
    ]
    words += [
        f"training.dataloader_num_workers={workers}",
        "training.max_steps=8",
        "--steps",
        "8",
        "--kills",
        "2",
    ]
    done = optrun_process("certify", "resume", *words, cwd=place, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


def test_explain_marks_what_carries_loss(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert optrun("explain", *SMALL, "data.train=chats.jsonl", "training.max_steps=3") == 0
    said = capsys.readouterr().out
    assert "what carries loss" in said
    assert "<|im_start|>assistant\n" in said.replace("\n  ", "\n")
    assert "«" in said.partition("<|im_start|>assistant")[2]
    assert (
        optrun("explain", *SMALL, "data.train=chats.jsonl", "training.max_steps=3", "--json") == 0
    )
    assert "«" in json.loads(capsys.readouterr().out)["data"]["example"]


USER, BOT = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}
GOOD = [{"messages": [USER, BOT]}] * 6


@pytest.mark.parametrize(
    ("rows", "words", "facts"),
    [
        (
            [*GOOD, {"messages": [USER, {"role": "bot", "content": "Ho"}]}],
            [],
            ["data.train", "row 7", "'bot'"],
        ),
        ([*GOOD, {"messages": [USER]}], [], ["row 7", "no turn of the assistant"]),
        (
            [*GOOD, {"messages": [USER, {"role": "tool", "content": "Ho"}, BOT]}],
            ["task.chat_template=zephyr"],
            ["row 7", "zephyr", "tool"],
        ),
        (
            [*GOOD, {"messages": [{"role": "user", "content": sentence(3) * 9}, BOT]}],
            [],
            ["data.max_length=64", "row 7", "task.overlong_rows=drop"],
        ),
        (
            [{"prompt": "a", "completion": "b"}] * 6 + [{"prompt": "a", "completion": ""}],
            ["task.assistant_only_loss=false"],
            ["row 7", "empty completion"],
        ),
        (
            GOOD,
            ["task.chat_template=own.jinja"],
            ["own.jinja", "row 1", "cannot be written", "task.chat_template"],
        ),
        (GOOD, ["task.layout=alpaca"], ["task.layout=alpaca", "instruction"]),
        (GOOD, ["task.layout=chat"], ["task.layout", "chat"]),
        (GOOD, ["task.sample_tokens=-1"], ["task.sample_tokens=-1"]),
        (GOOD, ["task.max_length=64"], ["data.max_length"]),
        (
            GOOD,
            ["data.streaming=true", "task.packing=true", "model.tokenizer=there"],
            ["task.packing=true", "false with data.streaming=true"],
        ),
        ([{"text": "a"}] * 6, [], ["task=sft", "messages", "Columns: text"]),
        (
            GOOD,
            [
                "task.packing=true",
                "model=from_config",
                "model.model_type=bloom",
                "model.vocab_size=320",
                "model.config.hidden_size=16",
                "model.config.n_layer=1",
                "model.config.n_head=2",
            ],
            ["task.packing=true", "Bloom"],
        ),
    ],
)
def test_wrong(
    rows: list[Any],
    words: list[str],
    facts: list[str],
    place: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("own.jinja").write_text("{% for m in messages %}{{ m.content.nothing.there }}{% endfor %}")
    named = {word.partition("=")[0] for word in words}
    named |= {
        word.partition("=")[0]
        for word in SMALL
        if "model=from_config" in words and word.startswith("model.")
    }
    given = [word for word in SMALL if word.partition("=")[0] not in named]
    assert (
        optrun(*given, "data.train=rows.jsonl", "data.eval=rows.jsonl", "hydra.run.dir=run", *words)
        == 2
    )
    told = " ".join(capsys.readouterr().err.split())
    for fact in facts:
        assert fact in told
    assert told.count("optrun:") <= 1
    assert not (place / "run" / "metrics.jsonl").exists()


def test_the_recipe_learns_from_the_standard_library(place: Path) -> None:
    words = [
        "training.max_steps=2",
        "data.max_train_examples=40",
        "data.max_eval_examples=8",
        "task.sample_tokens=3",
    ]
    model = ["model.config.n_layer=1", "model.config.n_embd=32", "model.config.n_head=2"]
    assert optrun("-cn", "sft_tiny", *words, *model, "hydra.run.dir=run") == 0
    assert summary(Path("run"))["config_name"] == "sft_tiny"
