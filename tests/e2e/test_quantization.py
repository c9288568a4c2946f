"""What a user does with model.quantization.

Explain, train, stop, resume, evaluate, predict, export, in each kind.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.test_sft import SMALL, write_chats
from tests.running import TINY_GPT, optrun, records, state, summary, tensors, write_text

pytest.importorskip("bitsandbytes")
pytestmark = pytest.mark.slow

CHATS = [
    *(word for word in SMALL if not word.startswith("model.")),
    "data.train=chats.jsonl",
    "task.packing=true",
]
BASE = ["model=pretrained", "model.path=base/model", "adapter=lora", "adapter.lora_dropout=0.1"]
STEPS = ["checkpoint.save_steps=2", "checkpoint.keep_last=9", "training.eval_steps=2"]
NF4 = [*CHATS, *BASE, *STEPS, "model.quantization=4bit"]
KINDS = {
    "nf4": NF4,
    "bfloat16": [
        *NF4,
        "model.dtype=bfloat16",
        "training.precision=bf16",
    ],
}
FOUR = "training.max_steps=4"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a base, chats, and runs with an adapter beside a quantised base."""
    folder = tmp_path_factory.mktemp("quantised")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_chats(folder)
        words = [word for word in TINY_GPT if not word.startswith(("data.", "task."))]
        words += [
            "task=sft",
            "data=files",
            "data.train=chats.jsonl",
            "data.max_length=64",
            "task.chat_template=chatml",
        ]
        words += [
            "task.sample_tokens=0",
            "training.max_steps=1",
            "checkpoint=none",
            "hydra.run.dir=base",
        ]
        assert optrun(*words) == 0
        for name, given in KINDS.items():
            assert optrun(*given, FOUR, f"hydra.run.dir={name}") == 0
        write_text(folder, 20)
    return folder


@pytest.fixture
def place(made: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(made)
    return made


@pytest.mark.parametrize("name", KINDS)
def test_a_resumed_run_is_the_uninterrupted_one(name: str, place: Path) -> None:
    assert optrun(*KINDS[name], "training.max_steps=2", f"hydra.run.dir={name}-stopped") == 0
    assert optrun(f"resume={name}-stopped", FOUR) == 0
    assert tensors(Path(f"{name}-stopped"), 4) == tensors(Path(name), 4)
    assert records(Path(f"{name}-stopped"))[-1] == records(Path(name))[-1]


@pytest.mark.parametrize("name", KINDS)
def test_a_checkpoint_holds_factors_and_what_they_stand_beside(name: str, place: Path) -> None:
    held = load_file(f"{name}/checkpoints/step-00000004/model.safetensors")
    assert all(".lora_" in key for key in held)
    assert {tensor.dtype for tensor in held.values()} == {torch.float32}
    facts = state(Path(name), 4)["adapter"]
    assert facts["quantization"] == "4bit"
    told = summary(Path(name))["model"]
    base = sum(tensor.numel() for tensor in load_file("base/model/model.safetensors").values())
    assert told["parameters"] == base + sum(tensor.numel() for tensor in held.values())


@pytest.mark.parametrize("name", KINDS)
def test_evaluate_and_predict_find_the_base_quantised(
    name: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    last = [record for record in records(Path(name)) if "eval/loss" in record][-1]
    capsys.readouterr()
    assert optrun("evaluate", name, "--json") == 0
    assert json.loads(capsys.readouterr().out)["eval/loss"] == last["eval/loss"]
    out = f"{name}.jsonl"
    assert (
        optrun(
            "predict", name, "data.eval=chats.jsonl", f"out={out}", "generation.max_new_tokens=3"
        )
        == 0
    )
    assert len(Path(out).read_text().splitlines()) == 24
    capsys.readouterr()
    assert optrun("evaluate", name, "model.quantization=null") == 2
    said = capsys.readouterr().err
    assert all(
        fact in said for fact in ("model.quantization=null", "Leave model.quantization as it was")
    ), said


@pytest.mark.parametrize("name", KINDS)
def test_exports(name: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An adapter beside the base as transformers quantises it, and one plain model.

    Both compute what was trained.
    """
    import peft
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    capsys.readouterr()
    assert optrun("export", name, f"{name}-adapter") == 0
    assert "BitsAndBytesConfig(load_in_" in capsys.readouterr().out
    assert optrun("export", name, f"{name}-merged", "merge=true") == 0
    assert "dequantised" in capsys.readouterr().out
    merged = AutoModelForCausalLM.from_pretrained(f"{name}-merged", dtype=torch.float32)
    assert not hasattr(merged.config, "quantization_config")
    given = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    dtype = torch.bfloat16 if name == "bfloat16" else torch.float32
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers', accelerate's and peft's own
        base = AutoModelForCausalLM.from_pretrained(
            "base/model", dtype=dtype, quantization_config=BitsAndBytesConfig(**given)
        )
        beside = peft.PeftModel.from_pretrained(base, f"{name}-adapter").eval()
    ids = torch.arange(3, 19)[None]
    with torch.no_grad():
        expected = beside(input_ids=ids).logits.float()
        found = merged.eval()(input_ids=ids).logits
    near = {"nf4": 1e-4, "bfloat16": 5e-2}[name]
    assert float((found - expected).abs().max()) < near * float(expected.std())


def test_it_is_explained(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = {}
    for bits in ("null", "4bit"):
        capsys.readouterr()
        assert optrun("explain", *CHATS, *BASE, f"model.quantization={bits}", "--json") == 0
        found[bits] = json.loads(capsys.readouterr().out)
    assert found["4bit"]["weight_bytes"] < found["null"]["weight_bytes"]
    assert found["4bit"]["frozen_parameters"] == found["null"]["frozen_parameters"]
    assert found["4bit"]["weight_dtype"] == "4 bits and float32"
    assert any(
        "model.quantization=4bit: 8 linear modules" in note for note in found["4bit"]["notes"]
    )
