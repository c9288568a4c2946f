"""Embeddings as a person trains them.

Stopped and gone on, with an adapter, predicted, evaluated, exported.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from optrun.task.pooling import Pooling, choose_pooling
from tests.e2e.prediction_runs import read_rows, write_rows
from tests.resume.test_features import run_in_parts, same
from tests.running import TINY_BERT, optrun, records, sentence

ROWS = [
    {"anchor": sentence(n), "positive": sentence(n + 50), "negative": sentence(n + 90)}
    for n in range(40)
]
RUN = [
    *TINY_BERT,
    "lr=1e-2",
    "training.dataloader_num_workers=0",
    "task=embedding",
    "data=files",
    "data.train=train.jsonl",
    "data.max_length=16",
    "training.per_device_train_batch_size=4",
    "training.gradient_accumulation_steps=2",
    "training.max_steps=6",
    "training.logging_steps=1",
    "training.eval_steps=2",
    "checkpoint.save_steps=3",
    "checkpoint.keep_last=9",
    "model.config.hidden_dropout_prob=0.1",
]


def run(*words: str) -> int:
    """The run, some of its words replaced."""
    keys = {word.partition("=")[0] for word in words}
    return optrun(*(word for word in RUN if word.partition("=")[0] not in keys), *words)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_pictures: None) -> None:
    monkeypatch.chdir(tmp_path)
    write_rows(Path("train.jsonl"), ROWS)


def test_stopped_at_every_step_it_is_the_same_run() -> None:
    words = [word.replace("max_steps=6", "max_steps=4") for word in RUN]
    assert optrun(*words, "hydra.run.dir=whole") == 0
    assert run_in_parts(words) == 4
    same(4)


def test_a_step_is_one_batch_however_it_is_cut() -> None:
    """Its loss and its gradient do not depend on micro-batches."""
    alike = [
        "model.config.hidden_dropout_prob=0.0",
        "model.config.attention_probs_dropout_prob=0.0",
        "optimizer=sgd",
    ]
    for size, count in ((8, 1), (2, 4)):
        cut = [
            f"training.per_device_train_batch_size={size}",
            f"training.gradient_accumulation_steps={count}",
        ]
        assert run(*alike, *cut, f"hydra.run.dir=cut{count}") == 0
    names = ("train/loss", "train/grad_norm", "eval/loss", "eval/accuracy")
    one, four = (
        [[row.get(name) for name in names] for row in records(Path(f"cut{count}"))]
        for count in (1, 4)
    )
    assert len(one) == 6
    for first, second in zip(one, four, strict=True):
        assert first == [
            None if value is None else pytest.approx(value, rel=1e-5) for value in second
        ]


def test_it_is_explained_evaluated_predicted_and_exported(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert optrun("explain", *RUN) == 0
    assert run("task.pooling=last", "hydra.run.dir=run") == 0
    last = json.loads(Path("run/summary.json").read_text())
    assert last["main_metric"] == {"name": "eval/ndcg_at_10", "mode": "max"}
    capsys.readouterr()
    assert optrun("evaluate", "run/checkpoints/last") == 0
    for name in ("loss", "recall_at_1", "recall_at_10", "mrr_at_10", "ndcg_at_10", "accuracy"):
        assert (
            f"eval/{name}" in capsys.readouterr().out or f"eval/{name}" in last["metrics"]["last"]
        )
    assert optrun("export", "run/checkpoints/last", "out") == 0
    pooling, _ = choose_pooling("out", None, None, None)
    assert pooling == Pooling("last", True)
    write_rows(Path("one.jsonl"), [{"text": row["anchor"]} for row in ROWS])
    assert (
        optrun("predict", "run/checkpoints/last", "data.eval=one.jsonl", "out=vectors.jsonl") == 0
    )
    model, tokenizer = AutoModel.from_pretrained("out").eval(), AutoTokenizer.from_pretrained("out")

    def vectors(name: str) -> torch.Tensor:
        texts = [row[name] for row in ROWS]
        inputs = tokenizer(texts, padding=True, truncation=True, max_length=16, return_tensors="pt")
        with torch.no_grad():
            return pooling(model(**inputs), inputs["attention_mask"])

    found = torch.tensor([row["embedding"] for row in read_rows(Path("vectors.jsonl"))])
    assert torch.allclose(found, vectors("anchor"), atol=1e-6)


def test_an_adapter_on_a_folder_keeps_its_pooling() -> None:
    assert (
        run(
            "task.pooling=cls", "task.normalize=false", "training.max_steps=1", "hydra.run.dir=base"
        )
        == 0
    )
    write_rows(
        Path("scored.jsonl"),
        [
            {"sentence1": a["anchor"], "sentence2": a["positive"], "score": n % 6 / 5}
            for n, a in enumerate(ROWS)
        ],
    )
    words = [word for word in RUN if not word.startswith(("model", "data.train"))]
    tuned = [
        *words,
        "model=pretrained",
        "model.path=base/model",
        "adapter=lora",
        "data.train=scored.jsonl",
    ]
    assert optrun(*tuned, "task.loss=cosent", "hydra.run.dir=tuned") == 0
    assert "eval/spearman" in records(Path("tuned"))[-1]
    for folder in (Path("tuned/model"), Path("base/model")):
        assert choose_pooling(str(folder), None, None, None)[0] == Pooling("cls", False)
    assert optrun("export", "tuned/checkpoints/last", "merged", "merge=true") == 0
    assert choose_pooling("merged", None, None, None)[0] == Pooling("cls", False)


TEXTS = [row["anchor"] for row in ROWS]


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a base, a LoRA that was trained on pairs, both exports of it, and the
    vectors that optrun predicts.

    The factors moved far: left out, they are missed.
    """
    folder = tmp_path_factory.mktemp("tuned")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_rows(Path("train.jsonl"), ROWS)
        write_rows(Path("one.jsonl"), [{"text": text} for text in TEXTS])
        words = [word for word in RUN if not word.startswith(("model", "lr="))] + ["lr=5e-2"]
        base = str(folder / "base" / "model")
        assert run("training.max_steps=1", "hydra.run.dir=base") == 0
        assert (
            optrun(
                *words,
                "model=pretrained",
                f"model.path={base}",
                "adapter=lora",
                "hydra.run.dir=run",
            )
            == 0
        )
        assert optrun("export", "run/checkpoints/last", "alone") == 0
        assert optrun("export", "run/checkpoints/last", "merged", "merge=true") == 0
        assert (
            optrun("predict", "run/checkpoints/last", "data.eval=one.jsonl", "out=vectors.jsonl")
            == 0
        )
        assert optrun("predict", "base", "data.eval=one.jsonl", "out=before.jsonl") == 0
    return folder


def vectors_in(path: Path) -> torch.Tensor:
    return torch.tensor([row["embedding"] for row in read_rows(path)])


@pytest.mark.parametrize("export", ["alone", "merged"])
def test_an_export_of_a_lora_is_what_was_trained(tuned: Path, export: str) -> None:
    """The files that sentence-transformers reads stand in it.

    Transformers computes the vectors, by peft or without.
    """
    folder = tuned / export
    held = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    files = {"modules.json", "1_Pooling/config.json", "sentence_bert_config.json", "tokenizer.json"}
    assert held >= files | {"adapter_config.json" if export == "alone" else "config.json"}
    modules = json.loads((folder / "modules.json").read_text())
    assert [module["path"] for module in modules] == ["", "1_Pooling", "2_Normalize"]
    assert json.loads((folder / "1_Pooling" / "config.json").read_text())[
        "pooling_mode_mean_tokens"
    ]
    assert json.loads((folder / "sentence_bert_config.json").read_text())["max_seq_length"] == 16
    if export == "alone":
        said = json.loads((folder / "adapter_config.json").read_text())
        assert said["base_model_name_or_path"] == str(tuned / "base" / "model")
        assert said["task_type"] == "FEATURE_EXTRACTION"
    model, tokenizer = (
        AutoModel.from_pretrained(folder).eval(),
        AutoTokenizer.from_pretrained(folder),
    )
    inputs = tokenizer(TEXTS, padding=True, truncation=True, max_length=16, return_tensors="pt")
    with torch.no_grad():
        found = Pooling("mean", True)(model(**inputs), inputs["attention_mask"])
    predicted = vectors_in(tuned / "vectors.jsonl")
    assert torch.allclose(found, predicted, atol=1e-5)
    assert (predicted - vectors_in(tuned / "before.jsonl")).abs().max() > 0.01


@pytest.mark.parametrize("export", ["alone", "merged"])
def test_sentence_transformers_loads_it(tuned: Path, export: str) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = sentence_transformers.SentenceTransformer(str(tuned / export), device="cpu")
        found = model.encode(TEXTS, convert_to_tensor=True)
    assert model.max_seq_length == 16
    assert torch.allclose(found, vectors_in(tuned / "vectors.jsonl"), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [[], ["adapter=lora", "adapter.lora_dropout=0.1"]], ids=["whole", "lora"]
)
def test_a_killed_run_is_certified(words: list[str]) -> None:
    assert optrun("certify", "resume", *RUN, *words) == 0
