"""The main job from the command line.

Every file of a run directory, every verb on it, every task's real path.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from datasets import Dataset, DatasetDict
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from optrun.artifacts.checkpoint import problems
from tests.running import (
    TINY_BERT,
    TINY_GPT,
    optrun,
    optrun_process,
    records,
    sentence,
    summary,
    write_labelled,
    write_text,
)

FEW = ["training.max_steps=3", "training.logging_steps=1", "training.per_device_train_batch_size=4"]


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def language(folder: Path) -> list[str]:
    return [*TINY_GPT, "data=files", f"data.train={write_text(folder)}", *FEW]


def classes(folder: Path) -> list[str]:
    return [
        *TINY_BERT,
        "task=sequence_classification",
        "data=files",
        f"data.train={write_labelled(folder)}",
        *FEW,
    ]


@pytest.mark.parametrize(
    ("prompt", "sampled"), [("the quick brown fox " * 50, True), ("''", False)]
)
def test_a_prompt_of_any_length(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], prompt: str, sampled: bool
) -> None:
    """The end of one that is longer than the model's 16 positions is continued.

    An empty one is none.
    """
    words = [word for word in language(tmp_path) if word != "task.sample_tokens=0"]
    assert optrun(*words, f"task.prompt={prompt}", "hydra.run.dir=run") == 0
    said = capsys.readouterr().out
    assert ("what it learnt" in said) is sampled
    assert "warning" not in said
    assert ("## Sample" in Path("run/model/README.md").read_text()) is sampled


def test_a_sample_that_fails_does_not_keep_the_model_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object, **options: object) -> None:
        raise RuntimeError("probability tensor contains inf\nand more")

    monkeypatch.setattr("transformers.GenerationMixin.generate", broken)
    words = [word for word in language(tmp_path) if word != "task.sample_tokens=0"]
    assert optrun(*words, "task.prompt=the quick", "hydra.run.dir=run") == 0
    said = capsys.readouterr().out
    assert (
        "task.prompt could not be continued (RuntimeError: probability tensor contains inf); the"
        " model" in said
    )
    assert summary(Path("run"))["status"] == "finished"
    assert Path("run/model/model.safetensors").is_file()
    assert "## Sample" not in Path("run/model/README.md").read_text()


def test_the_run_directory_tells_its_story(
    tmp_path: Path, pictures: None, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        *language(tmp_path),
        "optimizer=lamb",
        "lr=2e-3",
        "task.prompt=the quick",
        "run_name=story",
    ]
    words = [word for word in words if word != "task.sample_tokens=0"]
    assert optrun(*words) == 0
    said = capsys.readouterr().out
    run = next(Path("outputs").glob("*/*"))
    assert "warning" not in said
    for piece in (
        "eval/loss",
        "what it learnt",
        f"optrun resume={run}",
        f"optrun evaluate {run}",
        "optrun export",
        "continuation",
    ):
        assert piece in said
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert (config["lr"], config["optimizer"]["name"]) == (2e-3, "lamb")
    assert (run / ".hydra" / "overrides.yaml").is_file()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert set(lines[0]) == {
        "step",
        "epoch",
        "time",
        "eval/loss",
        "eval/perplexity",
        "eval/accuracy",
    }
    assert {
        "epoch",
        "time",
        "train/loss",
        "train/grad_norm",
        "train/lr",
        "perf/tokens_per_second",
    } <= set(lines[1])
    assert {"eval/loss", "eval/perplexity"} <= set(lines[-1])
    told = summary(run)
    assert (told["status"], told["global_step"], told["run_name"]) == ("finished", 3, "story")
    assert told["metrics"]["best"]["eval/loss"]["step"] == 3
    assert told["command"].startswith("optrun ")
    assert {"torch", "transformers", "optrun"} <= set(told["versions"])
    assert (run / "curves.png").stat().st_size > 10_000
    place = run / "checkpoints" / "step-00000003"
    assert sorted(path.name for path in place.iterdir()) == [
        "manifest.json",
        "model.safetensors",
        "optimizer.safetensors",
        "state.json",
    ]
    assert (
        (run / "checkpoints" / "best").read_text()
        == (run / "checkpoints" / "last").read_text()
        == place.name + "\n"
    )
    assert problems(place) == []
    names = {name.rsplit("/", 1)[0] for name in load_file(place / "optimizer.safetensors")}
    assert "transformer.h.0.attn.c_attn.weight" in names
    card = (run / "model" / "README.md").read_text()
    assert card.startswith("---\n")
    assert "lamb" in card
    assert "## Sample" in card
    model = AutoModelForCausalLM.from_pretrained(run / "model")
    assert AutoTokenizer.from_pretrained(run / "model").decode([5])
    saved = load_file(place / "model.safetensors")["transformer.h.0.attn.c_attn.weight"]
    assert (model.state_dict()["transformer.h.0.attn.c_attn.weight"].numpy() == saved).all()


def test_the_verbs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        optrun(
            *classes(tmp_path),
            "checkpoint.save_steps=2",
            "training.eval_steps=1",
            "hydra.run.dir=run",
        )
        == 0
    )
    told = summary(Path("run"))["metrics"]["last"]
    capsys.readouterr()
    assert optrun("evaluate", "run", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    for name in ("eval/loss", "eval/accuracy", "eval/f1", "eval/mcc"):
        assert found[name] == pytest.approx(told[name], rel=1e-6)
    other = write_labelled(tmp_path, rows=9, name="other.csv")
    assert optrun("evaluate", "run/checkpoints/last", f"data.eval={other}", "--json") == 0
    assert json.loads(capsys.readouterr().out)["examples"] == 9
    capsys.readouterr()
    assert optrun("verify", "run") == 0
    assert "\u2026" not in capsys.readouterr().out, "names are whole, on 80 columns"
    assert optrun("report", "run") == 0
    assert Path("run/report.html").is_file()
    assert optrun("export", "run/checkpoints/best", "exported") == 0
    model = AutoModelForSequenceClassification.from_pretrained("exported")
    tokenizer = AutoTokenizer.from_pretrained("exported")
    assert model.config.id2label == {0: "even", 1: "odd"}
    with torch.no_grad():
        logits = model(**tokenizer("the quick fox", return_tensors="pt")).logits
    assert logits.shape == (1, 2)
    assert optrun("export", "run", "exported") == 2, "nothing is overwritten"
    early = min(Path("run/checkpoints").glob("step-*"))
    assert optrun("export", str(early), "early") == 0
    step = int(early.name.removeprefix("step-"))
    then = [
        record
        for record in records(Path("run"))
        if record["step"] <= step and "eval/loss" in record
    ][-1]
    card = Path("early/README.md").read_text()
    assert f"These are the weights of step {step} of " in card
    assert f"value: {round(then['eval/loss'], 6)}" in card
    assert then["eval/loss"] != told["eval/loss"]
    damaged = Path("run/checkpoints/step-00000003/model.safetensors")
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    capsys.readouterr()
    assert optrun("verify", "run") == 4
    assert "model.safetensors" in capsys.readouterr().err


def test_a_pretrained_model_from_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What one run exports, another fine-tunes, with a head of its own."""
    corpus = f"data.train={write_text(tmp_path)}"
    pretraining = [*TINY_BERT, "task=masked_lm", "data=files", "data.max_length=16", corpus, *FEW]
    assert optrun(*pretraining, "hydra.run.dir=mlm") == 0
    words = [
        "task=sequence_classification",
        "data=files",
        f"data.train={write_labelled(tmp_path)}",
        *FEW,
    ]
    words += ["data.max_length=32", "param_groups=layerwise", "param_groups.decay_rate=0.5"]
    capsys.readouterr()
    assert optrun("model=pretrained", "model.path=mlm/model", *words, "hydra.run.dir=run") == 0
    assert "classifier.weight" in capsys.readouterr().out, "new weights are named"
    logged = records(Path("run"))[0]
    rates = {name: value for name, value in logged.items() if name.startswith("lr/")}
    assert (
        rates["lr/head"]
        == pytest.approx(2 * rates["lr/layer_01"])
        == pytest.approx(4 * rates["lr/layer_00"])
    )


def test_a_run_is_taken_up_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its relative paths lead where they led; those of the new command line lead from here."""
    monkeypatch.chdir(tmp_path)
    write_labelled(tmp_path)
    words = [
        *TINY_BERT,
        "task=sequence_classification",
        "data=files",
        "hydra.run.dir=run",
        "training.max_steps=1",
    ]
    assert optrun(*words, "data.train=train.csv", "data.eval=[tra*.csv]") == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert optrun("resume=../run", "training.max_steps=2") == 0
    assert optrun("evaluate", "../run") == 0
    assert not list(Path().iterdir())
    (tmp_path / "elsewhere" / "train.csv").write_text("text,label\na cat,even\na dog,odd\n")
    capsys.readouterr()
    examples = []
    for word in ([], ["data.eval=train.csv"]):
        assert optrun("evaluate", "../run", "--json", *word) == 0
        examples.append(json.loads(capsys.readouterr().out)["examples"])
    assert examples == [60, 2]


def test_a_dataset_folder_through_datasets(tmp_path: Path) -> None:
    """The real code path of the hub, on a local folder."""
    (tmp_path / "set").mkdir()
    rows = {"text": [sentence(n) for n in range(30)], "label": [n % 3 for n in range(30)]}
    parts = DatasetDict(
        train=Dataset.from_dict(rows),
        validation=Dataset.from_dict({k: v[:9] for k, v in rows.items()}),
    )
    for name, part in parts.items():
        part.to_parquet(tmp_path / "set" / f"{name}.parquet")
    words = [*TINY_BERT, "task=sequence_classification", "data=hub", "data.path=set", *FEW]
    assert optrun(*words, "hydra.run.dir=run") == 0
    assert summary(Path("run"))["data"]["eval_examples"] == 9
    assert "eval/mcc" in summary(Path("run"))["metrics"]["last"]


def test_regression_on_pairs(tmp_path: Path) -> None:
    lines = [
        json.dumps({"a": sentence(n), "b": sentence(n + 1), "score": n / 7}) for n in range(24)
    ]
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    words = [
        *TINY_BERT,
        "task=sequence_classification",
        "task.problem_type=regression",
        "data=files",
        *FEW,
    ]
    words += [
        "data.train=pairs.jsonl",
        "data.text_column=a",
        "data.text_pair_column=b",
        "data.label_column=score",
    ]
    assert optrun(*words, "hydra.run.dir=run") == 0
    assert {"eval/mse", "eval/pearson", "eval/spearman"} <= set(
        summary(Path("run"))["metrics"]["last"]
    )


def test_micro_batches_are_one_batch(tmp_path: Path) -> None:
    """Weighted by tokens: rows of unequal length, dropout off."""
    words = [
        *TINY_GPT,
        "data=files",
        f"data.train={write_text(tmp_path, 80)}",
        "task.packing=false",
        "data.max_length=24",
    ]
    words = list({word.split("=")[0]: word for word in words}.values())
    words += [f"model.config.{name}=0" for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop")]
    words = list({word.split("=")[0]: word for word in words}.values())
    words += [
        "training.max_steps=4",
        "training.logging_steps=1",
        "optimizer=sgd",
        "lr=0.1",
        "scheduler=constant",
    ]
    shapes = [(12, 1), (4, 3)]
    for size, times in shapes:
        assert (
            optrun(
                *words,
                f"training.per_device_train_batch_size={size}",
                f"hydra.run.dir=b{size}",
                f"training.gradient_accumulation_steps={times}",
            )
            == 0
        )
    losses = [[record["train/loss"] for record in records(Path(f"b{size}"))] for size, _ in shapes]
    weights = [
        load_file(f"b{size}/checkpoints/step-00000004/model.safetensors") for size, _ in shapes
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    for name, tensor in weights[0].items():
        np.testing.assert_allclose(weights[1][name], tensor, rtol=1e-4, atol=2e-6, err_msg=name)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_precision(precision: str, tmp_path: Path) -> None:
    words = [*language(tmp_path), f"training.precision={precision}", "training.max_steps=6"]
    words = list({word.split("=")[0]: word for word in words}.values())
    assert optrun(*words, "hydra.run.dir=run") == 0
    losses = [record["train/loss"] for record in records(Path("run"))]
    assert losses[-1] < losses[0]
    kept = load_file("run/checkpoints/step-00000006/model.safetensors")
    assert {str(tensor.dtype) for tensor in kept.values()} == {"float32"}


def test_recomputed_activations_are_the_same_run(tmp_path: Path) -> None:
    words = language(tmp_path)
    assert optrun(*words, "hydra.run.dir=plain") == 0
    assert optrun(*words, "hydra.run.dir=recomputed", "training.gradient_checkpointing=true") == 0
    plain, other = (
        load_file(f"{name}/checkpoints/step-00000003/model.safetensors")
        for name in ("plain", "recomputed")
    )
    for name, tensor in plain.items():
        np.testing.assert_allclose(other[name], tensor, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_compile(tmp_path: Path) -> None:
    """In a process of its own: the compiler warns, and keeps what it made."""
    words = [word.replace("n_layer=2", "n_layer=1") for word in language(tmp_path)]
    words += ["training.compile=true", "hydra.run.dir=run"]
    done = optrun_process(*words, cwd=tmp_path, timeout=1200)  # the compiler's time is its own
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(records(tmp_path / "run")) == 3


def test_no_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert optrun(*language(tmp_path), "checkpoint=none", "hydra.run.dir=run") == 0
    assert "optrun resume" not in capsys.readouterr().out
    assert not list(Path("run/checkpoints").glob("step-*"))
    assert optrun("resume=run") in (2, 4)


def test_retention_keeps_the_best_and_the_newest(tmp_path: Path) -> None:
    words = [
        *language(tmp_path),
        "checkpoint.save_steps=1",
        "checkpoint.keep_last=2",
        "training.eval_steps=1",
        "lr=0.5",
    ]
    words = [*words, "scheduler=constant", "training.max_steps=6"]
    words = list({word.split("=")[0]: word for word in words}.values())
    assert optrun(*words, "hydra.run.dir=run") == 0
    best = summary(Path("run"))["metrics"]["best"]["eval/loss"]["step"]
    kept = {int(path.name[5:]) for path in Path("run/checkpoints").glob("step-*")}
    assert kept == {5, 6, best}
    assert Path("run/checkpoints/best").read_text().strip() == f"step-{best:08d}"


def test_as_a_program_in_a_pipe(tmp_path: Path) -> None:
    """No box and no colour, one line per record, as they come."""
    done = optrun_process(*language(tmp_path), "hydra.run.dir=run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split("  ")[0] for line in lines if line.startswith("step ")] == [
        f"step {n}/3" for n in range(4)
    ]
    assert "\x1b" not in done.stdout
    assert done.stderr == ""
