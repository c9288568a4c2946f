"""What a user does with adapter=lora: train, stop, resume, evaluate, export, branch.

And what is refused.
"""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.faults.runs import cut
from tests.running import (
    TINY_BERT,
    TINY_GPT,
    optrun,
    records,
    state,
    summary,
    tensors,
    write_labelled,
    write_text,
)

TASK = ["task=sequence_classification", "data=files", "data.train=train.csv", "data.max_length=32"]
BASE = ["model=pretrained", "model.path=encoder/model"]
FULL = [*TASK, *BASE, "checkpoint.save_steps=2", "checkpoint.keep_last=9", "scheduler=constant"]
FULL += ["training.eval_steps=2", "training.logging_steps=1"]
LORA = [*FULL, "adapter=lora", "adapter.lora_dropout=0.1"]
FOUR = "training.max_steps=4"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a base, another one, rows, and a run with an adapter."""
    folder = tmp_path_factory.mktemp("adapter")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_labelled(folder, 60)
        words = [*TINY_BERT, "task=masked_lm", "data=files", f"data.train={write_text(folder, 60)}"]
        words += ["data.max_length=32", "training.max_steps=1", "checkpoint=none"]
        assert optrun(*words, "hydra.run.dir=encoder") == 0
        weights = Path(shutil.copytree("encoder", "other"), "model", "model.safetensors")
        save_file(
            {name: tensor * 1.5 for name, tensor in load_file(weights).items()},
            weights,
            {"format": "pt"},
        )
        assert optrun(*LORA, FOUR, "hydra.run.dir=run") == 0
    return folder


@pytest.fixture
def place(made: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(made)
    return made


def logits(model: Any, folder: str) -> torch.Tensor:
    """Of some rows, by a model in evaluation mode."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    rows = tokenizer(["the quick brown fox", "seven wizards"], padding=True, return_tensors="pt")
    with torch.no_grad():
        found: torch.Tensor = model.eval()(**rows).logits
    return found


def test_checkpoints_hold_the_adapter_alone(place: Path) -> None:
    held = load_file("run/checkpoints/step-00000004/model.safetensors")
    assert all(".lora_" in name or ".modules_to_save.default." in name for name in held)
    facts = state(Path("run"), 4)["adapter"]
    assert set(facts["modules_to_save"]) == {
        "classifier",
        "bert.pooler.dense",
    }  # the base had neither
    assert "bert.encoder.layer.1.output.dense" in facts["target_modules"]
    assert set(state(Path("run"), 4)["trainable"]) == held.keys()
    told = summary(Path("run"))["model"]
    assert (
        told["trainable_parameters"]
        == sum(tensor.numel() for tensor in held.values())
        < told["parameters"] / 2
    )


def test_a_resumed_run_is_the_uninterrupted_one(place: Path) -> None:
    cut("run", "resumed", 2)
    assert optrun("resume=resumed") == 0
    assert tensors(Path("resumed"), 4) == tensors(Path("run"), 4)
    assert records(Path("resumed"))[-1] == records(Path("run"))[-1]


def test_an_evaluation_finds_the_frozen_base(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The base of the run's end is the one on the disk: else the loss would be another."""
    last = [record for record in records(Path("run")) if "eval/loss" in record][-1]
    capsys.readouterr()
    assert optrun("evaluate", "run", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["eval/loss"] == last["eval/loss"]
    assert optrun("evaluate", "run", "model.path=other/model") == 2
    said = capsys.readouterr().err
    assert all(
        fact in said
        for fact in ("model.path=other/model (it was model.path=encoder/model)", "digest")
    ), said


def test_exports_load_in_peft_and_in_transformers(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import peft

    assert optrun("export", "run", "adapter") == 0
    assert "peft.PeftModel.from_pretrained" in capsys.readouterr().out
    assert optrun("export", "run", "merged", "merge=true") == 0
    base = transformers.AutoModelForSequenceClassification.from_pretrained(
        "encoder/model", num_labels=2
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of names of transformers' that will be others
        model = peft.PeftModel.from_pretrained(base, "adapter")
    merged = transformers.AutoModelForSequenceClassification.from_pretrained("merged")
    torch.testing.assert_close(
        logits(merged, "merged"), logits(model, "adapter"), rtol=1e-5, atol=1e-6
    )
    assert merged.config.id2label == {0: "even", 1: "odd"}
    for folder in ("adapter", "run/model"):
        held = load_file(f"{folder}/adapter_model.safetensors")
        saved = load_file("run/checkpoints/step-00000004/model.safetensors")
        assert sorted(
            map(tuple, (tensor.flatten().tolist() for tensor in held.values()))
        ) == sorted(map(tuple, (tensor.flatten().tolist() for tensor in saved.values())))
        card = Path(folder, "README.md").read_text()
        assert all(
            line in card
            for line in ("library_name: peft", "PeftModel.from_pretrained(base, folder)")
        )
    assert (
        optrun(
            *TASK,
            "model=pretrained",
            "model.path=merged",
            "training.max_steps=1",
            "hydra.run.dir=next",
        )
        == 0
    )


def test_a_branch_goes_on_with_the_adapter(place: Path) -> None:
    words = ["branch_from=run/checkpoints/step-00000002", "lr=1e-3", FOUR, "hydra.run.dir=branch"]
    assert optrun(*words) == 0
    before, after = tensors(Path("run"), 2), tensors(Path("branch"), 4)
    assert before.keys() == after.keys()
    assert tensors(Path("branch"), 2) == before


def test_from_scratch_the_model_is_published_merged(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        *TINY_GPT,
        "data=files",
        f"data.train={place / 'corpus.txt'}",
        "adapter=lora",
        "training.max_steps=2",
    ]
    assert optrun(*words, "checkpoint.save_steps=2", "hydra.run.dir=gpt") == 0
    assert "the weights that adapter=lora freezes are random" in capsys.readouterr().out
    published = load_file("gpt/model/model.safetensors")
    assert not [name for name in published if "lora" in name]
    assert optrun("export", "gpt", "whole", "merge=true") == 0
    exported = load_file("whole/model.safetensors")
    assert all(torch.equal(exported[name], published[name]) for name in published)
    assert optrun("export", "gpt", "apart") == 2
    assert "merge=true" in capsys.readouterr().err


HALF = ["model.dtype=bfloat16", "training.precision=bf16"]


MASTERS = [*FULL, "optimizer=lamb", "optimizer.master_weights=true"]


@pytest.mark.parametrize(("name", "words"), [("factors", LORA), ("masters", MASTERS)])
def test_weights_of_16_bits(
    name: str, words: list[str], place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What trains is float32, factors or copies; a stopped run is the straight one.

    Others load what it made.
    """
    assert optrun(*words, *HALF, FOUR, f"hydra.run.dir={name}") == 0
    cut(name, f"{name}-stopped", 2)
    assert optrun(f"resume={name}-stopped") == 0
    folder = Path(name, "checkpoints", "step-00000004")
    for file in ("model.safetensors", "optimizer.safetensors"):
        other = load_file(Path(f"{name}-stopped") / folder.relative_to(name) / file)
        assert all(
            torch.equal(tensor, other[key]) for key, tensor in load_file(folder / file).items()
        )
    held = {tensor.dtype for tensor in load_file(folder / "model.safetensors").values()}
    assert held == {torch.float32 if name == "factors" else torch.bfloat16}
    assert {tensor.dtype for tensor in load_file(folder / "optimizer.safetensors").values()} == {
        torch.float32
    }
    capsys.readouterr()
    assert optrun("evaluate", name, "--json") == 0
    found = json.loads(capsys.readouterr().out)["eval/loss"]
    assert (
        found
        == [record for record in records(Path(name)) if "eval/loss" in record][-1]["eval/loss"]
    )
    assert (
        optrun("export", name, f"{name}-whole", *(["merge=true"] if name == "factors" else [])) == 0
    )
    assert torch.bfloat16 in {
        tensor.dtype for tensor in load_file(f"{name}-whole/model.safetensors").values()
    }


WRONG = [
    # words, pieces of the message
    (["adapter=lorra"], ["adapter=lorra", "lora"]),
    (["adapter.r=4"], ["adapter.r", "belongs to adapter=lora"]),
    (["adapter.rank_pattern.q=4"], ["adapter.rank_pattern", "belongs to adapter=lora"]),
    (["adapter=lora", "adapter.rank=4"], ["adapter.rank", "adapter=lora adapter.r=VALUE"]),
    (["lora_r=8"], ["lora_r", "adapter=lora adapter.r=VALUE"]),
    (["load_in_4bit=true"], ["load_in_4bit", "model.quantization=4bit"]),
    (["model.quantization=4bit"], ["model.quantization", "belongs to model=pretrained"]),
    (
        [*FULL, "model.quantization=4bit"],
        ["model.quantization=4bit", "null with adapter=none", "adapter=lora"],
    ),
    ([*LORA, "model.quantization=3bit"], ["model.quantization=3bit", "4bit, or null"]),
    (["load_in_8bit=true"], ["load_in_8bit", "model.quantization=4bit"]),
    (
        [*LORA, "model.bnb_4bit_use_double_quant=true"],
        ["bnb_4bit_use_double_quant", "Not offered", "model.quantization=4bit"],
    ),
    (["adapter=lora", "adapter.r=0"], ["adapter.r=0", "1 or more"]),
    (
        [*LORA, "model.quantization=4bit", "distributed=fsdp"],
        ["model.quantization=4bit", "null with distributed=fsdp"],
    ),
    (
        [*LORA, "adapter.target_modules=[qury]"],
        ["adapter.target_modules=['qury']", "Did you mean query?"],
    ),
    (
        [*LORA, "adapter.modules_to_save=[clasifier]"],
        ["adapter.modules_to_save", "clasifier", "mean classifier?"],
    ),
    (
        [*LORA, "adapter.modules_to_save=[]"],
        ["is not in the model's weights", "leave adapter.modules_to_save null"],
    ),
    ([*LORA, "optimizer=muon"], ["optimizer=muon", "factors of a LoRA", "nothing to step"]),
    ([*TASK, "model=pretrained", "model.path=run/model"], ["an adapter (peft)", "merge=true"]),
    (
        [*TASK, "model=pretrained", "model.path=run"],
        ["a run with an adapter", "optrun export run DIR merge=true"],
    ),
    (
        ["resume=run", "adapter=none", "training.max_steps=6"],
        ["adapter=none", "holds an adapter (lora)"],
    ),
    (
        ["resume=run", "adapter.r=4", "training.max_steps=6"],
        ["adapter.r=4", "lora_A", "shape (8, 32)"],
    ),
    (
        ["resume=run", "model.path=other/model", "training.max_steps=6"],
        ["model.path=other/model (it was", "digest"],
    ),
    (
        ["resume=full", "adapter=lora", "training.max_steps=6"],
        ["adapter=lora", "trained all weights", "optrun export"],
    ),
    (
        ["branch_from=full", "adapter=lora", "training.max_steps=6"],
        ["adapter=lora", "trained all weights"],
    ),
    (["model.dtype=float16"], ["model.dtype=float16", "float32, bfloat16"]),
    (["model.dtype=bfloat16"], ["training.precision=fp32", "bf16 with model.dtype=bfloat16"]),
    (
        HALF,
        [
            "model.dtype=bfloat16",
            "optimizer=adamw",
            "optimizer=lamb optimizer.master_weights=true",
            "adapter=lora",
        ],
    ),
    ([*HALF, "optimizer=lamb"], ["optimizer=lamb", "Give optimizer.master_weights=true"]),
    (
        [*HALF, "adapter=none", "distributed=fsdp"],
        ["distributed=fsdp", "distributed.param_dtype=bfloat16"],
    ),
    (["export", "full", "to", "merge=true"], ["merge=true", "has no adapter"]),
    (["export", "run", "to", "merge=yes"], ["merge=yes", "true or false"]),
    (["export", "run", "to", "merg=true"], ["merg=true", "Did you mean merge?"]),
]


@pytest.fixture(scope="module")
def full(made: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(made)
        assert optrun(*FULL, "training.max_steps=2", "hydra.run.dir=full") == 0


@pytest.mark.parametrize(("words", "facts"), WRONG, ids=lambda value: str(value)[-40:])
def test_wrong(
    words: list[str], facts: list[str], place: Path, full: None, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tensors(Path("run"), 4)
    capsys.readouterr()
    fresh = [] if words[0].startswith(("resume", "export")) else ["hydra.run.dir=wrong"]
    assert optrun(*words, *fresh) == 2
    said = capsys.readouterr().err
    assert said.count("optrun: ") >= 1
    assert all(fact in said for fact in facts), said
    assert tensors(Path("run"), 4) == before
    assert not Path("to").exists()


def test_explain_tells_what_trains(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*TASK, *BASE, "adapter=lora", "adapter.loraplus_lr_ratio=16", "param_groups=layerwise"]
    words.append("param_groups.decay_rate=0.5")
    assert optrun("explain", *words) == 0
    said = " ".join(capsys.readouterr().out.split())
    for fact in (
        "factors of rank 8",
        "classifier trains in full",
        "% ",
        "adapter.default_lr_factor=0.5",
        "B at 16 times",
    ):
        assert fact in said, said
    assert optrun("explain", *words, "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["lr"] == 1e-3
    peaks = {tensor["name"]: tensor["lr_peak"] for tensor in facts["tensors"]}
    query = "bert.encoder.layer.1.attention.self.query.lora_{}.default.weight"
    assert peaks[query.format("B")] == 16 * peaks[query.format("A")] == 16 * 5e-4
